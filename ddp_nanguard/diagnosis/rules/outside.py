"""Rules for values that no operator of the step made: a batch item, a weight, unwritten memory, a literal number."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ddp_nanguard.diagnosis.trace.events import Event, EventCategory, quick_kind
from ddp_nanguard.report.types import Phase, Site
from ddp_nanguard.report.wording import KIND_WORDS
from ddp_nanguard.tensors.batch import batch_arrays, batch_leaves, batch_tensors, nonfinite
from ddp_nanguard.tensors.containers import path_text

from . import report_rules as why
from .facts import Reason, TraceFacts, argument, at, place_of


def state_bad(facts: TraceFacts) -> Reason | None:
    """A parameter, buffer or optimizer state was non-finite before the step."""
    op = facts.first_nonfinite_op
    if op is None or is_another_fault(op, facts.origin):
        return why.state(facts)
    names = [] if is_mask(op) else [name for name in op.outside if name and not _is_other(name)]
    if not names:
        return None
    inputs = {o.name: o for o in op.inputs if o.name in names}
    counts = [
        f"{name}: {o.num_nan} NaN, {o.num_inf} +Inf, {o.num_neg_inf} -Inf of {o.numel}" for name, o in inputs.items()
    ]
    kind = op.kind if not inputs else next(iter(inputs.values())).kind or op.kind
    return why.bad_state(facts, names, KIND_WORDS[kind], tuple(counts))


def is_another_fault(op: Event, origin: Site | None) -> bool:
    """Whether an operator made a value of its own in a step in which the origin had been bad before that began."""
    was_bad = origin is not None and origin.phase is Phase.STATE and origin.input_kind is None
    return was_bad and not op.outside


def is_mask(op: Event) -> bool:
    """Whether only -inf came from outside, which is legal in a mask, and the operator made NaN or +Inf of it."""
    from_outside = [o.kind for o in op.inputs if o.name in op.outside or (o.name is None and o.kind)]
    return op.category is EventCategory.PRODUCED and all(kind in (None, "-inf") for kind in from_outside)


def _is_other(name: str) -> bool:
    return is_batch(name) or name.startswith("uninitialised memory")


def is_batch(name: str) -> bool:
    """Whether a name given to `StorageTracker` is a path in the batch."""
    return name == "batch" or name.startswith("batch[")


def bad_input(facts: TraceFacts) -> Reason | None:
    """The batch held a non-finite value, and the fault comes from it."""
    op, traced = facts.first_nonfinite_op, facts.traced
    if traced is None:
        return why.bad_input(facts)
    if op is None or is_mask(op):
        return None
    named = _items_as_given(facts, traced.batch)
    name = next((name for name in op.outside if name in named), None)
    if name is None:
        return None
    taken = f"first taken in by {at(op)}"
    return why.bad_item(name, named[name], traced.batch, traced.batch_size, taken)


def reads_bad_batch(facts: TraceFacts) -> bool:
    """Whether the first operator takes in an item of the batch that was bad when the loader gave it."""
    op, traced = facts.first_nonfinite_op, facts.traced
    if op is None or traced is None:
        return False
    named = _items_as_given(facts, traced.batch)
    return any(name in named for name in op.outside)


def _items_as_given(facts: TraceFacts, batch: Any) -> dict[str, Tensor]:
    """Arrays and tensors of the batch by path, without what the training step may have changed in place."""
    named = {name: torch.from_numpy(array) for name, array in batch_arrays(batch).items()}
    origin = facts.origin
    code = origin.inline_code if origin is not None and origin.phase is Phase.FORWARD else None
    # a bad tensor that is as the loader gave it would be the origin by itself; arrays are not looked at before
    return named if code is not None and code.layer is None else named | batch_tensors(batch)


def uninitialised(facts: TraceFacts) -> Reason | None:
    """Memory was read that no operator had written."""
    op = facts.first_nonfinite_op
    name = next((n for n in op.outside if n.startswith("uninitialised memory")), None) if op is not None else None
    if op is None or name is None:
        return None
    return Reason("uninitialised memory", f"{name} was read in {at(op)} before it was written")


def constant(facts: TraceFacts) -> Reason | None:
    """The code itself wrote a non-finite number, or one that the batch holds as a Python float."""
    op = facts.first_nonfinite_op
    if op is None or op.category is not EventCategory.CONSTANT:
        return None
    leaves = batch_leaves(facts.traced.batch) if facts.traced is not None else []
    bad = [path for path, leaf in leaves if isinstance(leaf, float) and not math.isfinite(leaf)]
    if bad:
        return Reason(
            "bad input",
            f"batch{path_text(bad[0])} holds {KIND_WORDS[op.kind]}",
            (f"written in {at(op)}",),
        )
    return Reason("constant", f"the code itself writes {KIND_WORDS[op.kind]} in {at(op)}")


def unnamed(facts: TraceFacts) -> Reason | None:
    """A tensor that the step only reads, such as the weight of a loss, is not finite."""
    op = facts.first_nonfinite_op
    if op is None or op.made is None or op.parents or op.outside != ("",) or is_mask(op):
        return None
    names = [each.name for each in op.made.function._schema.arguments]
    name = next((name for name in names if _is_bad(argument(op, name))), None)
    if name is None:
        return None
    mask, kind = nonfinite(argument(op, name)), quick_kind(argument(op, name)) or op.kind
    sentence = (
        f"{at(op)} takes in {KIND_WORDS[kind]} by its argument `{name}`{place_of(mask)}: a tensor that no operator "
        "of the step made and that is no parameter, buffer or batch item"
    )
    return Reason("constant", sentence, (f"{int(mask.sum())} of {mask.numel()} elements of {name}",))


def _is_bad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 0 and bool(nonfinite(value).any())
