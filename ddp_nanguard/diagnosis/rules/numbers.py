"""Rules for overflow, for reductions over nothing, and for softmax rows without any score."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ddp_nanguard.diagnosis.trace.events import Event, EventCategory, quick_kind
from ddp_nanguard.diagnosis.trace.operators import Operators, named_arguments, tensors_of
from ddp_nanguard.report.wording import listed

from .facts import Reason, TraceFacts, argument, at, at_hits, hits, operand, place_of
from .table import GROWS, SOFTMAX, VARIANCES

OPERATORS = Operators()


def masked_row(facts: TraceFacts) -> Reason | None:
    """A softmax over a row in which every score is -inf."""
    for event in facts.path:
        if event.made is None or event.kind != "nan":
            continue
        rows = _masked_rows(event)
        if rows:
            which = f": row{'s' if len(rows) > 1 else ''} {listed(rows, 3)}" if len(rows) < _num_rows(event) else ""
            sentence = f"every score of a softmax row is -inf in {at(event)}{which}"
            return Reason("masked row", sentence, _masked(rows, facts))
    return None


def _num_rows(event: Event) -> int:
    assert event.made is not None
    scores, dim = event.made.output, operand(event, 1)
    return scores.numel() // max(scores.shape[dim if isinstance(dim, int) else -1], 1)


def _masked(rows: list[Any], facts: TraceFacts) -> tuple[str, ...]:
    op = facts.first_nonfinite_op
    made = f"-inf made by {op.operator} at {op.line.place()}" if op is not None and op.line else ""
    told = f"rows without any score: {listed(rows, 5)}"
    return (told, made) if made and op is not None and op.kind == "-inf" else (told,)


def _masked_rows(event: Event) -> list[Any]:
    """Indices, without the softmax dim, of the rows that are all -inf before and NaN after."""
    scores, mask = operand(event, 0), hits(event)
    if not isinstance(scores, Tensor) or mask is None or scores.shape != mask.shape or not scores.dim():
        return []
    if event.base in SOFTMAX:
        dim = operand(event, 1)
    elif event.base == "sub" and _is_less_its_maximum(scores, operand(event, 1)):
        dim = -1
    else:
        return []
    rows = torch.isneginf(scores).all(dim, keepdim=True)
    if not isinstance(dim, int) or not bool((rows | ~mask).all()):
        return []
    found = rows.squeeze(dim).nonzero().tolist()
    return [index[0] if len(index) == 1 else tuple(index) for index in found]


def _is_less_its_maximum(scores: Tensor, subtracted: Any) -> bool:
    """Whether this is the subtraction of a hand-written softmax, ``x - x.amax(-1, keepdim=True)``."""
    if not isinstance(subtracted, Tensor) or scores.shape[-1] < 2:
        return False
    largest = scores.amax(-1, keepdim=True)
    return subtracted.shape == largest.shape and bool((subtracted == largest).all())


def empty_reduction(facts: TraceFacts) -> Reason | None:
    """A variance of one value, or a loss whose labels are all ignored; what is over nothing is in the table."""
    op = facts.first_nonfinite_op
    if op is None or op.made is None or op.kind != "nan":
        return None
    if op.base in VARIANCES:
        return _one_value(op)
    return _all_ignored(op) if op.base.startswith("nll_loss") else None


def _one_value(op: Event) -> Reason | None:
    assert op.made is not None
    value, output = op.made.args[0], op.made.output
    count = value.numel() // max(output.numel(), 1)
    correction = op.made.kwargs.get("correction", 1)
    if correction is None or count > correction:
        return None
    text = f"{op.base} over {count} value{'s' if count != 1 else ''} in {at(op)}"
    return Reason("empty reduction", text, (f"shape {tuple(value.shape)}, correction {correction}",))


def _all_ignored(op: Event) -> Reason | None:
    target, weight, ignored = (
        operand(op, 1),
        operand(op, 2),
        operand(op, 4),
    )
    if not isinstance(target, Tensor):
        return None
    if not target.numel():
        return Reason("empty reduction", f"the batch has no labels in {at(op)}: the mean is over nothing")
    if bool((target == ignored).all()):
        text = f"all labels are ignored in {at(op)}: the mean is over nothing"
        return Reason("empty reduction", text, (f"{target.numel()} labels, every one {ignored}",))
    if isinstance(weight, Tensor) and bool((weight[target[target != ignored]] == 0).all()):
        text = f"every label of the batch has weight 0 in {at(op)}: the mean is over nothing"
        return Reason("empty reduction", text)
    return None


# -- overflow ----------------------------------------------------------------------------------------------------------


def overflow(facts: TraceFacts) -> Reason | None:
    """Finite numbers whose result the dtype cannot hold; the operator is called again in wider dtypes."""
    op = facts.first_nonfinite_op
    if op is None or not is_overflow(op) or op.output is None:
        return None
    dtype = op.output.dtype
    answers = [(name, _again(op, wider)) for name, wider in _wider(dtype)]
    stays = next(((name, largest) for name, largest in answers if largest is not None), None)
    largest = max((abs(v) for o in op.inputs for v in (o.minimum, o.maximum) if v is not None), default=0.0)
    evidence = [f"largest number that went in: {largest:.4g}"]
    limit = f"{dtype} ends at {torch.finfo(getattr(torch, dtype)).max:.4g}"
    if stays is not None:
        evidence.append(f"in {stays[0]} the same operator stays finite: {stays[1]:.4g}; {limit}")
        verdict = f"it stays finite in {stays[0]}"
    else:
        verdict = "it overflows in float64 too"
        evidence.append(limit)
    mask = hits(op)
    place = place_of(mask) if mask is not None else ""
    return Reason("overflow", f"{dtype} overflow in {at(op)}{place}: {verdict}", tuple(evidence))


def is_overflow(event: Event) -> bool:
    """Whether finite inputs gave a number too large for the dtype; the operator is called again in float64."""
    if (
        event.made is None
        or event.category is not EventCategory.PRODUCED
        or any(o.kind is not None for o in event.inputs)
    ):
        return False
    wide = _again(event, torch.float64)
    dtype = event.made.output.dtype
    limit = torch.finfo(dtype).max
    largest = max((abs(v) for o in event.inputs for v in (o.minimum, o.maximum) if v is not None), default=0.0)
    if wide is None:
        return event.kind != "nan" and event.base in GROWS and largest > 1 and not _has_a_zero(event)
    if event.kind == "nan":  # inside a fused kernel, if anything
        return dtype.is_floating_point and largest >= math.sqrt(limit)
    # what is smaller in float64 overflowed on the way: in a square or a fourth power; else something became 0 there
    return wide > limit or largest >= limit**0.25


def _has_a_zero(event: Event) -> bool:
    """Whether somewhere the output is infinite for a divisor of 0, or a base of 0, and not for its size."""
    name = {"div": "other", "addcdiv": "tensor2", "pow": "self"}.get(event.base)
    mask = hits(event)
    found = at_hits(argument(event, name), mask) if name is not None and mask is not None else None
    return found is not None and bool((found == 0).any())


def _wider(dtype: str) -> list[tuple[str, torch.dtype]]:
    known = [("float32", torch.float32), ("float64", torch.float64)]
    narrow = getattr(torch, dtype, None)
    if dtype in ("float16", "bfloat16") or (isinstance(narrow, torch.dtype) and narrow.itemsize == 1):
        return known
    return known[1:]


def _again(event: Event, dtype: torch.dtype) -> float | None:
    """The largest absolute value of the output in ``dtype``; None where it is not finite or the call fails."""
    assert event.made is not None
    made = event.made
    args = [_cast(value, dtype) for value in made.args]
    kwargs = {key: dtype if isinstance(v, torch.dtype) else _cast(v, dtype) for key, v in made.kwargs.items()}
    try:
        output = made.function(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
    # all that it returns: of a determinant the sign is finite and its logarithm is not; an in-place operator leaves its
    # result in an argument
    if any(quick_kind(tensor) for tensor in tensors_of([output, *args, *kwargs.values()])):
        return None
    operator = OPERATORS[made.function]
    named = named_arguments(operator, tuple(args), kwargs) if operator is not None else []
    written = [value for name, value in named if operator is not None and name in operator.writes]
    outputs = list({id(tensor): tensor for tensor in tensors_of([written, output])}.values())
    result = outputs[made.position] if made.position < len(outputs) else None
    if result is None or result.dtype != dtype:
        return None
    return result.abs().max().item() if result.numel() else 0.0


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype, copy=True) if value.is_floating_point() else value.clone()
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return dtype
    return type(value)(_cast(item, dtype) for item in value) if type(value) in (list, tuple) else value
