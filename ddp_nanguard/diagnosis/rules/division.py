"""Rules for a division by zero and for zero times infinity."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddp_nanguard.diagnosis.trace.divisor_sources import DivisorSource, Reduction
from ddp_nanguard.diagnosis.trace.events import Event, EventPhase
from ddp_nanguard.report.wording import listed
from ddp_nanguard.tensors.containers import named_tensors_in, path_text

from .calls import is_division_by_zero, is_zero_times_infinity
from .facts import Reason, TraceFacts, at, code_text, operand

_NOUNS = {
    "nansum": "sum", "count_nonzero": "count", "bincount": "count", "var": "variance", "std": "standard deviation",
    "amax": "maximum", "max": "maximum", "amin": "minimum", "min": "minimum", "prod": "product",
}  # fmt: skip


def division_by_zero(facts: TraceFacts) -> Reason | None:
    """A division whose divisor is exactly zero wherever its result is not finite.

    The sentence names the reduction that the divisor came from, and the classes that the batch lacks, where they are
    known.
    """
    op = facts.first_nonfinite_op
    if op is None or is_derivative(op) or not is_division_by_zero(op):
        return None
    divisor = operand(op, 0 if op.base == "reciprocal" else 1)
    what = "0/0" if op.kind == "nan" and op.base not in {"remainder", "fmod", "reciprocal"} else "x/0"
    origin = _origin(facts, op, divisor)
    parts = origin.parts if origin is not None else ()
    reduction = next((part for part in parts if isinstance(part, Reduction)), None)
    text = f"the divisor{_described(facts, op, origin)} is 0{_zeros(divisor)}"
    evidence = [f"{op.num_hit} of {op.output.numel} elements" if op.output is not None else ""]
    evidence += [_origin_text(reduction)] if reduction is not None else []
    absent = _absent(facts, divisor, reduction) if reduction is not None and len(parts) == 1 else None
    if absent is not None:
        text += f": {absent[0]}"
        evidence.append(absent[1])
    elif origin is not None and _has_underflowed(origin, divisor):
        text += f": it underflowed in {origin.dtype}{_in_line(origin)}"
    return Reason("division by zero", f"{what} in {at(op)}: {text}", tuple(e for e in evidence if e))


def _described(facts: TraceFacts, op: Event, origin: DivisorSource | None) -> str:
    """What the divisor is, between commas: named memory, or what it was computed from; "" where that is not known."""
    is_number = not isinstance(operand(op, 0 if op.base == "reciprocal" else 1), Tensor)
    own = None if is_number or not op.inputs else op.inputs[-1].name
    if own:
        return f", {own},"
    if origin is None:
        return ""
    texts = [part if isinstance(part, str) else f"a {_noun(facts, part)}" for part in origin.parts]
    parts = list(dict.fromkeys(texts))
    if len(origin.parts) == 1 and isinstance(origin.parts[0], Reduction):
        return f", {parts[0]},"
    return f", computed from {' and '.join(parts)},"


def _noun(facts: TraceFacts, part: Reduction) -> str:
    return _NOUNS.get(part.operator, part.operator) + _over(facts, part)


def _has_underflowed(origin: DivisorSource, divisor: Any) -> bool:
    """Whether every zero of the divisor comes from an underflow."""
    marked = origin.underflowed
    if marked is None or not isinstance(divisor, Tensor) or marked.numel() != divisor.numel():
        return False
    zero = divisor.reshape(-1) == 0
    return bool((marked.reshape(-1).to(zero.device) | ~zero).all())


def _in_line(origin: DivisorSource) -> str:
    return f" in {code_text(origin.spot.line())}" if origin.spot is not None else ""


def is_derivative(event: Event) -> bool:
    """Whether autograd's own formula ran: in backward, with none of the user's code on the stack."""
    return event.phase is EventPhase.BACKWARD and not event.lines


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


def _over(facts: TraceFacts, origin: Reduction) -> str:
    size = facts.traced.batch_size if facts.traced is not None else None
    if origin.dims is None:
        return f" over all {_numel(origin.shape)} elements"
    if origin.dims == (0,) and origin.shape[0] == size:
        return " over the batch"
    return f" over dim {', '.join(map(str, origin.dims))}"


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _origin_text(origin: Reduction) -> str:
    line = origin.line
    where = f" at {line.place()}: {line.expression or line.text}" if line is not None else ""
    return f"{origin.operator} of a tensor of shape {origin.shape}{where}"


def _absent(facts: TraceFacts, divisor: Tensor, origin: Reduction) -> tuple[str, str] | None:
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
    if op is None or not is_zero_times_infinity(op):
        return None
    return Reason("0*inf", f"0 times infinity in {at(op)}", (f"{op.num_hit} elements",))
