"""Rules for a division by zero and for zero times infinity."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddp_nanguard.diagnosis.trace.divisor_sources import DivisorSource
from ddp_nanguard.diagnosis.trace.events import Event, EventPhase
from ddp_nanguard.report.wording import listed
from ddp_nanguard.tensors.containers import named_tensors_in, path_text

from .facts import Reason, TraceFacts, all_at_hits, at, hits, is_zero, operand

_DIVISIONS = {"div", "true_divide", "divide", "floor_divide", "remainder", "fmod"}
_PRODUCTS = {"mul", "mm", "bmm", "addmm", "matmul", "baddbmm", "dot", "mv", "linear"}


def division_by_zero(facts: TraceFacts) -> Reason | None:
    """A division whose divisor is exactly zero wherever its result is not finite.

    The sentence names the reduction that the divisor came from, and the classes that the batch lacks, where they are
    known.
    """
    op = facts.first_nonfinite_op
    if op is None or is_derivative(op) or not is_division_by_zero(op):
        return None
    divisor = operand(op, 0 if op.base == "reciprocal" else 1)
    what = "0/0" if op.kind == "nan" else "x/0"
    zero, absent = _zeros(divisor), None
    origin = _origin(facts, op, divisor)
    text = f"the divisor is 0{zero}"
    evidence = [f"{op.num_hit} of {op.output.numel} elements" if op.output is not None else ""]
    if origin is not None:
        text = f"the divisor, a {origin.operator}{_over(facts, origin)}, is 0{zero}"
        evidence.append(_origin_text(origin))
        absent = _absent(facts, divisor, origin)
    if absent is not None:
        text += f": {absent[0]}"
        evidence.append(absent[1])
    return Reason("division by zero", f"{what} in {at(op)}: {text}", tuple(e for e in evidence if e))


def is_derivative(event: Event) -> bool:
    """Whether autograd's own formula ran: in backward, with none of the user's code on the stack."""
    return event.phase is EventPhase.BACKWARD and not event.lines


def is_division_by_zero(event: Event) -> bool:
    """Whether every bad element of an operator's output has a zero divisor and a finite dividend.

    For "nan" the dividend must be zero, else non-zero; integer division and remainders take any finite one.
    """
    mask = hits(event)
    if mask is None or event.base not in {*_DIVISIONS, "reciprocal"}:
        return False
    if event.base == "reciprocal":
        return all_at_hits(operand(event, 0), mask, is_zero)
    over = is_zero if event.kind == "nan" else lambda value: torch.isfinite(value) & (value != 0)
    if event.base in {"remainder", "fmod", "floor_divide"}:
        over = torch.isfinite
    return all_at_hits(operand(event, 1), mask, is_zero) and all_at_hits(operand(event, 0), mask, over)


def _zeros(divisor: Any) -> str:
    """The indices at which the divisor is zero, in its own shape and without dims of length 1."""
    if not isinstance(divisor, Tensor) or divisor.numel() == 1:
        return ""
    where = (divisor == 0).nonzero().tolist()
    squeezed = [index[0] if len(index) == 1 else _without_ones(index, divisor.shape) for index in where]
    if len(where) == divisor.numel():
        return " everywhere"
    return f" at {'index' if len(where) == 1 else 'indices'} {listed(squeezed, 5)}"


def _without_ones(index: list[int], shape: torch.Size) -> Any:
    kept = [i for i, length in zip(index, shape, strict=True) if length > 1]
    return kept[0] if len(kept) == 1 else tuple(kept)


def _origin(facts: TraceFacts, op: Event, divisor: Any) -> DivisorSource | None:
    trace = facts.traced.trace if facts.traced is not None else None
    return trace.divisor_origins.get(op.order) if trace is not None and isinstance(divisor, Tensor) else None


def _over(facts: TraceFacts, origin: DivisorSource) -> str:
    size = facts.traced.batch_size if facts.traced is not None else None
    if origin.dims is None:
        return f" over all {_numel(origin.shape)} elements"
    if origin.dims == (0,) and origin.shape[0] == size:
        return " over the batch"
    return f" over dim {', '.join(map(str, origin.dims))}"


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _origin_text(origin: DivisorSource) -> str:
    line = origin.line
    where = f" at {line.place()}: {line.expression or line.text}" if line is not None else ""
    return f"{origin.operator} of a tensor of shape {origin.shape}{where}"


def _absent(facts: TraceFacts, divisor: Tensor, origin: DivisorSource) -> tuple[str, str] | None:
    """The text and the evidence if the divisor is zero exactly at the class numbers that the batch's labels lack."""
    traced = facts.traced
    zero = [index[0] for index in (divisor.reshape(-1) == 0).nonzero().tolist()]
    if traced is None or divisor.numel() < 2 or origin.dims != (0,) or not zero or len(zero) > 8:
        return None
    for path, tensor in named_tensors_in(traced.batch):
        if tensor.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8) or not tensor.numel():
            continue
        present = set(tensor.reshape(-1).tolist())
        if tensor.shape[0] != traced.batch_size or min(present) < 0 or max(present) >= divisor.numel():
            continue
        # Exactly the complement: integers that merely lack some of these numbers need not be labels.
        if not present & set(zero) and present == set(range(divisor.numel())) - set(zero):
            name = f"class {zero[0]} is" if len(zero) == 1 else f"classes {listed(zero, 5)} are"
            return f"{name} absent in this batch", f"batch{path_text(path)} has no {listed(zero, 5)}"
    return None


def zero_times_infinity(facts: TraceFacts) -> Reason | None:
    """A product in which one factor is zero and the other infinite wherever the result is NaN."""
    op = facts.first_nonfinite_op
    mask = hits(op) if op is not None else None
    if op is None or mask is None or op.kind != "nan" or op.base not in _PRODUCTS:
        return None
    one, other = operand(op, 0), operand(op, 1)
    for zero, infinite in ((one, other), (other, one)):
        if op.base == "mul" and all_at_hits(zero, mask, is_zero) and all_at_hits(infinite, mask, torch.isinf):
            return Reason("0*inf", f"0 times infinity in {at(op)}", (f"{op.num_hit} elements",))
    return None
