"""Values that no operator of the step made: a batch, a weight, memory that nobody wrote, a number of the code."""

from __future__ import annotations

import math

import torch

from ddp_nanguard import why
from ddp_nanguard.batch import batch_arrays, batch_leaves, batch_tensors
from ddp_nanguard.replay.events import Event
from ddp_nanguard.scan import path_text

from .facts import WORDS, Facts, Reason, at


def state_bad(facts: Facts) -> Reason | None:
    """A parameter, buffer or optimizer state was non-finite before the step."""
    birth = facts.birth
    if birth is None:
        return why.state(facts)
    names = [] if _is_mask(birth) else [name for name in birth.outside if name and not _is_other(name)]
    if not names:
        return None
    inputs = {o.name: o for o in birth.inputs if o.name in names}
    counts = [
        f"{name}: {o.num_nan} NaN, {o.num_inf} +Inf, {o.num_neg_inf} -Inf of {o.numel}" for name, o in inputs.items()
    ]
    kind = birth.kind if not inputs else next(iter(inputs.values())).kind or birth.kind
    return why.bad_state(facts, names, WORDS[kind], tuple(counts))


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
    if traced is None:
        return why.bad_input(facts)
    if birth is None or _is_mask(birth):
        return None
    names = [name for name in birth.outside if is_batch(name)]
    named = {name: torch.from_numpy(array) for name, array in batch_arrays(traced.batch).items()}
    named |= batch_tensors(traced.batch)
    name = next((name for name in names if name in named), None)
    if name is None:
        return None
    taken = f"first taken in by {at(birth)}"
    return why.bad_item(name, named[name], traced.batch, traced.batch_size, taken)


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
