"""What the values of one call say: the tests of the operator table, each on copies of the arguments that it was given.

A test gives None where its evidence does not hold for every element that is hit, else the text that ends the sentence:
where, and what was seen there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ddp_nanguard.diagnosis.trace.events import Event
from ddp_nanguard.report.wording import listed

from .facts import all_at_hits, argument, at_hits, hits, is_zero, operand, place_of

Values = Callable[[Tensor], Tensor]
Test = Callable[[Event, Tensor], str | None]

DIVISIONS = ("div", "true_divide", "divide", "floor_divide", "remainder", "fmod", "reciprocal")


# -- element by element ------------------------------------------------------------------------------------------------


def every(**tests: Values) -> Test:
    """Whether each named argument passes its test wherever the output is hit."""

    def holds(event: Event, mask: Tensor) -> str | None:
        passed = all(all_at_hits(argument(event, name), mask, test) for name, test in tests.items())
        return place_of(mask) if passed else None

    return holds


def is_pole(value: Tensor) -> Tensor:
    """Marks 0 and the negative integers, where the gamma function and its like have no value."""
    return (value <= 0) & (value == value.floor())


def pole_of_mvlgamma(event: Event, mask: Tensor) -> str | None:
    """A sum of ``lgamma(x - i / 2)`` for i from 0 to p - 1, one of which has no value."""
    order = argument(event, "p")

    def is_pole_of_one(value: Tensor) -> Tensor:
        return torch.stack([is_pole(value - i / 2) for i in range(order)]).any(0)

    return every(self=is_pole_of_one)(event, mask) if isinstance(order, int) else None


def is_division_by_zero(event: Event) -> bool:
    """Whether every bad element of an operator's output has a zero divisor and a finite dividend.

    For "nan" the dividend must be zero, else non-zero; integer division and remainders take any finite one.
    """
    mask = hits(event)
    if mask is None or event.base not in DIVISIONS:
        return False
    if event.base == "reciprocal":
        return all_at_hits(operand(event, 0), mask, is_zero)
    over = is_zero if event.kind == "nan" else lambda value: torch.isfinite(value) & (value != 0)
    if event.base in {"remainder", "fmod", "floor_divide"}:
        over = torch.isfinite
    return all_at_hits(operand(event, 1), mask, is_zero) and all_at_hits(operand(event, 0), mask, over)


def is_zero_times_infinity(event: Event) -> bool:
    """Whether a product has a zero and an infinite factor wherever it is NaN."""
    mask = hits(event)
    pair = (operand(event, 0), operand(event, 1))
    return (
        mask is not None
        and event.base == "mul"
        and event.kind == "nan"
        and any(
            all_at_hits(zero, mask, is_zero) and all_at_hits(infinite, mask, torch.isinf)
            for zero, infinite in (pair, pair[::-1])
        )
    )


def zero_to_a_negative_power(event: Event, mask: Tensor) -> str | None:
    """0 ** -2."""
    return every(self=is_zero, exponent=lambda x: x < 0)(event, mask)


def fractional_power_of_a_negative(event: Event, mask: Tensor) -> str | None:
    """(-8) ** 0.5."""
    return every(self=lambda x: x < 0, exponent=lambda x: x != torch.round(x))(event, mask)


def singular(event: Event, mask: Tensor) -> str | None:
    """An operator of a derivative's formula that divides by zero, or multiplies 0 by infinity."""
    is_edge = (
        is_division_by_zero(event)
        or is_zero_times_infinity(event)
        or (event.base == "rsqrt" and all_at_hits(operand(event, 0), mask, is_zero))
        or (event.base == "pow" and zero_to_a_negative_power(event, mask) is not None)
    )
    return place_of(mask) if is_edge else None


def within(base: str, test: Test) -> Test:
    """A test that asks one operator of a derivative's formula only."""
    return lambda event, mask: test(event, mask) if event.base == base else None


# -- rows and samples --------------------------------------------------------------------------------------------------


def is_empty(event: Event, _: Tensor) -> str | None:
    """A reduction over no elements."""
    value = operand(event, 0)
    return f", of a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) and value.numel() == 0 else None


def constant_row(event: Event, mask: Tensor) -> str | None:
    """A normalization without an eps over values that are all equal."""
    value, eps = operand(event, 0), argument(event, "eps")
    if not isinstance(value, Tensor) or not isinstance(eps, float):
        return None
    if torch.tensor(eps, dtype=torch.float32, device="cpu").item() != 0:
        return None
    rows = _normalized_rows(event, value)
    if rows is None or mask.numel() != value.numel():
        return None
    is_constant, is_hit = rows.amax(1) == rows.amin(1), mask.reshape(rows.shape).any(1)
    return _rows(is_hit) if bool((is_constant | ~is_hit).all()) else None


def _normalized_rows(event: Event, value: Tensor) -> Tensor | None:
    """The values as (rows, values that are normalized together)."""
    if event.base == "native_layer_norm":
        return value.reshape(-1, torch.Size(argument(event, "normalized_shape")).numel())
    count, groups = argument(event, "N"), argument(event, "group")
    return value.reshape(count * groups, -1) if isinstance(count, int) and isinstance(groups, int) else None


def _rows(is_hit: Tensor, name: str = "row") -> str:
    found = is_hit.reshape(-1).nonzero().reshape(-1)
    return f": {name}{'s' if len(found) > 1 else ''} {listed(found[:3].tolist(), 3, len(found))}"


def no_variance(event: Event, mask: Tensor) -> str | None:
    """Batch normalization in evaluation by a running variance that is not above 0 with its eps."""
    variance, eps = argument(event, "running_var"), argument(event, "eps")
    if argument(event, "training") or not isinstance(variance, Tensor) or mask.dim() < 2:
        return None
    is_hit = mask.transpose(0, 1).reshape(mask.shape[1], -1).any(1)
    is_bad = variance + eps <= 0
    if not bool((is_bad | ~is_hit).all()):
        return None
    return f" (eps={eps:g}){_rows(is_hit, 'channel')}, such as {variance[is_hit][0].item():.3g}"


def zero_weight(event: Event, mask: Tensor) -> str | None:
    """A weight norm over values whose squares add up to 0."""
    value, dim = argument(event, "v"), argument(event, "dim")
    if not isinstance(value, Tensor) or value.shape != mask.shape or value.dim() < 2:
        return None
    is_hit = mask.transpose(0, dim).flatten(1).any(1)
    is_bad = value.square().transpose(0, dim).flatten(1).sum(1) == 0
    return _rows(is_hit) if bool((is_bad | ~is_hit).all()) else None


def empty_segment(event: Event, mask: Tensor) -> str | None:
    """A segment without any element."""
    lengths, offsets, axis = (argument(event, name) for name in ("lengths", "offsets", "axis"))
    lengths = offsets.diff() if isinstance(offsets, Tensor) else lengths
    if not isinstance(lengths, Tensor) or axis != 0 or lengths.dim() != 1 or len(lengths) != mask.shape[0]:
        return None
    is_hit = mask.reshape(len(lengths), -1).any(1)
    return _rows(is_hit, "segment") if bool(((lengths == 0) | ~is_hit).all()) else None


def cannot_align(event: Event, mask: Tensor) -> str | None:
    """CTC with more labels, and blanks between equal ones, than there are frames."""
    frames, lengths = argument(event, "input_lengths"), argument(event, "target_lengths")
    labels = argument(event, "targets")
    if not isinstance(labels, Tensor) or mask.dim() != 1:
        return None
    frames, lengths = (v.tolist() if isinstance(v, Tensor) else list(v) for v in (frames, lengths))
    found = []
    for sample in mask.nonzero().reshape(-1).tolist():
        start = sum(lengths[:sample])
        own = labels[sample, : lengths[sample]] if labels.dim() == 2 else labels[start : start + lengths[sample]]
        needed = lengths[sample] + int((own[1:] == own[:-1]).sum())
        if needed <= frames[sample]:
            return None
        found.append(f"sample {sample} needs {needed} frames for {lengths[sample]} labels and has {frames[sample]}")
    return f": {listed(found, 2)}" if found else None


# -- matrices ----------------------------------------------------------------------------------------------------------


def equal_values(noun: str) -> Test:
    """A derivative of a decomposition that divides by the differences of its values, two of which are equal."""

    def holds(event: Event, mask: Tensor) -> str | None:
        return _pair(noun, mask) if all_at_hits(_differences(event), mask, is_zero) else None

    return holds


def nearly_equal_values(noun: str) -> Test:
    """As `equal_values`, but the difference is a number so small that the division by it overflows."""

    def holds(event: Event, mask: Tensor) -> str | None:
        gaps = _differences(event)
        if gaps is None or not all_at_hits(gaps, mask, lambda x: (x != 0) & (x.abs() < 1e-30)):
            return None
        return f"{_pair(noun, mask)} differ by {gaps.expand(mask.shape)[mask][0].abs().item():.3g}"

    return holds


def _differences(event: Event) -> Tensor | None:
    """The divisor, if it can be the matrix of all differences of values."""
    gaps = operand(event, 1)
    if event.base != "div" or not isinstance(gaps, Tensor) or gaps.dim() < 2:
        return None
    return gaps if gaps.shape[-1] == gaps.shape[-2] > 1 else None


def _pair(noun: str, mask: Tensor) -> str:
    *matrix, one, other = mask.nonzero()[0].tolist()
    return f": {noun} {min(one, other)} and {max(one, other)}{_matrix(matrix)}"


def _matrix(index: list[int], before: str = " of ") -> str:
    """Which matrix of a batch; "" where there is one only."""
    return f"{before}matrix {index[0] if len(index) == 1 else tuple(index)}" if index else ""


def zero_value(event: Event, mask: Tensor) -> str | None:
    """A derivative of a decomposition that divides by its values, one of which is 0."""
    values = operand(event, 1)
    if event.base != "div" or not isinstance(values, Tensor) or values.dim() < 2 or 1 not in values.shape[-2:]:
        return None
    return _matrix(mask.nonzero()[0].tolist()[:-2], ": ") if all_at_hits(values, mask, is_zero) else None


def zero_on_diagonal(name: str) -> Test:
    """A triangular matrix that is solved with has a 0 on its diagonal."""

    def holds(event: Event, mask: Tensor) -> str | None:
        matrix = argument(event, name)
        if not isinstance(matrix, Tensor) or matrix.dim() < 2 or mask.dim() < 2:
            return None
        zero = matrix.diagonal(dim1=-2, dim2=-1) == 0
        is_hit = mask.flatten(-2).any(-1)
        try:
            is_singular = zero.any(-1).expand(is_hit.shape)
        except RuntimeError:
            return None
        if not bool(is_hit.any()) or not bool((is_singular | ~is_hit).all()):
            return None
        index = is_hit.nonzero()[0].tolist() if is_hit.dim() else []
        own = zero.expand(*is_hit.shape, zero.shape[-1])[tuple(index)]
        return f": its diagonal is 0 at {listed(own.nonzero().reshape(-1).tolist(), 3)}{_matrix(index)}"

    return holds


def singular_matrix(event: Event, mask: Tensor) -> str | None:
    """A square matrix whose determinant is exactly 0: its factorization is asked for the pivots."""
    matrix = argument(event, "A")
    if not isinstance(matrix, Tensor):
        return None
    factors = torch.linalg.lu_factor_ex(matrix)[0]
    zero = (factors.diagonal(dim1=-2, dim2=-1) == 0).any(-1)
    is_hit = mask.reshape(*zero.shape, -1).any(-1)
    if not bool((zero | ~is_hit).all()):
        return None
    return _matrix(is_hit.nonzero()[0].tolist() if is_hit.dim() else [], ": ")


# -- for the evidence --------------------------------------------------------------------------------------------------


def example(event: Event) -> str:
    """One of the numbers that were given where the output is hit, for the evidence; "" where that says nothing."""
    mask = hits(event)
    found = at_hits(operand(event, 0), mask) if mask is not None else None
    is_told = found is not None and found.numel() > 0 and not found.is_complex() and bool(found[0] != 0)
    return f", such as {found[0].item():.3g}" if found is not None and is_told else ""
