"""Values that no operator of the step made: a batch, a weight, memory that nobody wrote, a number of the code."""

from __future__ import annotations

import math

import torch

from ddp_nanguard.diagnosis.trace.events import Event
from ddp_nanguard.report.wording import KIND_WORDS
from ddp_nanguard.tensors.batch import batch_arrays, batch_leaves, batch_tensors
from ddp_nanguard.tensors.containers import path_text

from . import report_rules as why
from .facts import Reason, TraceFacts, at


def state_bad(facts: TraceFacts) -> Reason | None:
    """A parameter, buffer or optimizer state was non-finite before the step."""
    first_nonfinite_op = facts.first_nonfinite_op
    if first_nonfinite_op is None:
        return why.state(facts)
    names = (
        []
        if _is_mask(first_nonfinite_op)
        else [name for name in first_nonfinite_op.outside if name and not _is_other(name)]
    )
    if not names:
        return None
    inputs = {o.name: o for o in first_nonfinite_op.inputs if o.name in names}
    counts = [
        f"{name}: {o.num_nan} NaN, {o.num_inf} +Inf, {o.num_neg_inf} -Inf of {o.numel}" for name, o in inputs.items()
    ]
    kind = first_nonfinite_op.kind if not inputs else next(iter(inputs.values())).kind or first_nonfinite_op.kind
    return why.bad_state(facts, names, KIND_WORDS[kind], tuple(counts))


def _is_mask(first_nonfinite_op: Event) -> bool:
    """Whether what came from outside is only -inf, which is legal, and the operator made more of it."""
    from_outside = [
        o.kind for o in first_nonfinite_op.inputs if o.name in first_nonfinite_op.outside or (o.name is None and o.kind)
    ]
    return first_nonfinite_op.category == "birth" and all(kind in (None, "-inf") for kind in from_outside)


def _is_other(name: str) -> bool:
    return is_batch(name) or name.startswith("uninitialised memory")


def is_batch(name: str) -> bool:
    """Whether a name of `StorageTracker` is a path in the batch."""
    return name == "batch" or name.startswith("batch[")


def bad_input(facts: TraceFacts) -> Reason | None:
    """The batch held a non-finite value that the fault comes from."""
    first_nonfinite_op, traced = facts.first_nonfinite_op, facts.traced
    if traced is None:
        return why.bad_input(facts)
    if first_nonfinite_op is None or _is_mask(first_nonfinite_op):
        return None
    names = [name for name in first_nonfinite_op.outside if is_batch(name)]
    named = {name: torch.from_numpy(array) for name, array in batch_arrays(traced.batch).items()}
    named |= batch_tensors(traced.batch)
    name = next((name for name in names if name in named), None)
    if name is None:
        return None
    taken = f"first taken in by {at(first_nonfinite_op)}"
    return why.bad_item(name, named[name], traced.batch, traced.batch_size, taken)


def uninitialised(facts: TraceFacts) -> Reason | None:
    """Memory that was never written was read."""
    first_nonfinite_op = facts.first_nonfinite_op
    name = (
        next((n for n in first_nonfinite_op.outside if n.startswith("uninitialised memory")), None)
        if first_nonfinite_op is not None
        else None
    )
    if first_nonfinite_op is None or name is None:
        return None
    return Reason("uninitialised memory", f"{name} was read in {at(first_nonfinite_op)} before it was written")


def constant(facts: TraceFacts) -> Reason | None:
    """The code itself writes a non-finite number there, or one that the batch holds."""
    first_nonfinite_op = facts.first_nonfinite_op
    if first_nonfinite_op is None or first_nonfinite_op.category != "constant":
        return None
    leaves = batch_leaves(facts.traced.batch) if facts.traced is not None else []
    bad = [path for path, leaf in leaves if isinstance(leaf, float) and not math.isfinite(leaf)]
    if bad:
        return Reason(
            "bad input",
            f"batch{path_text(bad[0])} holds {KIND_WORDS[first_nonfinite_op.kind]}",
            (f"written in {at(first_nonfinite_op)}",),
        )
    return Reason(
        "constant", f"the code itself writes {KIND_WORDS[first_nonfinite_op.kind]} in {at(first_nonfinite_op)}"
    )
