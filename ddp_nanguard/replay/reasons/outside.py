"""Values that no operator of the step made: a batch, a weight, memory that nobody wrote, a number of the code."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ddp_nanguard.replay.events import Event
from ddp_nanguard.replay.traced import batch_arrays, batch_leaves, batch_tensors
from ddp_nanguard.scan import path_text
from ddp_nanguard.site import Phase

from .facts import WORDS, Facts, Reason, at, listed


def state_bad(facts: Facts) -> Reason | None:
    """A parameter, buffer or optimizer state was non-finite before the step."""
    birth, report, origin = facts.birth, facts.report, facts.origin
    if birth is not None:
        names = [] if _is_mask(birth) else [name for name in birth.outside if name and not _is_other(name)]
        if not names:
            return None
        inputs = {o.name: o for o in birth.inputs if o.name in names}
        counts = [
            f"{name}: {o.num_nan} NaN, {o.num_inf} +Inf, {o.num_neg_inf} -Inf of {o.numel}"
            for name, o in inputs.items()
        ]
        kind = WORDS[birth.kind] if not inputs else WORDS[next(iter(inputs.values())).kind or birth.kind]
    elif origin is not None and origin.phase is Phase.STATE and origin.taken_in is None:
        names, kind, counts = [origin.slot], WORDS[origin.kind], []
    else:
        return None
    when = "before any training" if report is not None and report.step == 0 else "before the step"
    damaged = list(report.state) if report is not None else []
    evidence = [*counts, *([f"damaged: {listed(damaged, 8)}"] if damaged else [])]
    return Reason("state", f"{listed(names)} held {kind} {when}", tuple(evidence))


def _is_mask(birth: Event) -> bool:
    """Whether what came from outside is only -inf, which is legal, and the operator made more of it."""
    from_outside = [o.kind for o in birth.inputs if o.name in birth.outside or (o.name is None and o.kind)]
    return birth.category == "birth" and all(kind in (None, "-inf") for kind in from_outside)


def _is_other(name: str) -> bool:
    return is_batch(name) or name.startswith("uninitialised memory")


def is_batch(name: str) -> bool:
    """Whether a name of `Memory` is a path in the batch."""
    return name == "batch" or name.startswith("batch[")


def bad_input(facts: Facts) -> Reason | None:
    """The batch held a non-finite value that the fault comes from."""
    birth, traced = facts.birth, facts.traced
    if birth is None or traced is None or _is_mask(birth):
        return None
    names = [name for name in birth.outside if is_batch(name)]
    named = {name: torch.from_numpy(array) for name, array in batch_arrays(traced.batch).items()}
    named |= batch_tensors(traced.batch)
    tensor = next((named[name] for name in names if name in named), None)
    if tensor is None:
        return None
    bad = ~torch.isfinite(torch.view_as_real(tensor).sum(-1) if tensor.is_complex() else tensor)
    kind = "NaN" if bool(torch.isnan(tensor).any()) else "Inf"
    if not bool(bad.any()):
        return None  # changed in place since
    first = bad.nonzero()[0].tolist()
    rows = _rows(bad, traced.batch_size)
    place = f"{names[0]}[{', '.join(map(str, first))}]" if first else names[0]
    samples = f", sample{'s' if len(rows) > 1 else ''} {listed(rows)}" if rows else ""
    evidence = [f"{int(bad.sum())} of {bad.numel()} elements, first {place}", f"first taken in by {at(birth)}"]
    evidence += _ids(traced.batch, rows, names[0])
    return Reason("bad input", f"{names[0]} holds {kind}{samples}", tuple(evidence))


def _rows(bad: Tensor, size: int | None) -> list[int]:
    if not bad.dim() or bad.shape[0] != size:
        return []
    return [int(row) for row in bad.reshape(bad.shape[0], -1).any(1).nonzero().reshape(-1).tolist()]


def _ids(batch: Any, rows: list[int], name: str) -> list[str]:
    """What else the batch says about the samples: strings and whole numbers, one per sample."""
    if not rows:
        return []
    found = []
    for path, values in _columns(batch, ()):
        text = f"batch{path_text(path)}"
        if text != name and len(values) > max(rows):
            found.append(f"{text} of these samples: {listed([values[row] for row in rows])}")
    return found[:4]


def _columns(value: Any, path: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], list[Any]]]:
    if isinstance(value, Tensor):
        is_whole = value.dim() == 1 and not value.is_floating_point() and not value.is_complex()
        return [(path, value.tolist())] if is_whole else []
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, (str, int)) for item in value):
        return [(path, list(value))]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return [column for key, item in items for column in _columns(item, (*path, key))]


def uninitialised(facts: Facts) -> Reason | None:
    """Memory that was never written was read."""
    birth = facts.birth
    name = next((n for n in birth.outside if n.startswith("uninitialised memory")), None) if birth is not None else None
    if birth is None or name is None:
        return None
    return Reason("uninitialised memory", f"{name} was read in {at(birth)} before it was written")


def constant(facts: Facts) -> Reason | None:
    """The code itself writes a non-finite number there, or one that the batch holds."""
    birth = facts.birth
    if birth is None or birth.category != "constant":
        return None
    leaves = batch_leaves(facts.traced.batch) if facts.traced is not None else []
    bad = [path for path, leaf in leaves if isinstance(leaf, float) and not math.isfinite(leaf)]
    if bad:
        return Reason("bad input", f"batch{path_text(bad[0])} holds {WORDS[birth.kind]}", (f"written in {at(birth)}",))
    return Reason("constant", f"the code itself writes {WORDS[birth.kind]} in {at(birth)}")
