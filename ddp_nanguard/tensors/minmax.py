"""Reduces a tensor of any kind to its minimum and maximum in one pass. The only module that tells tensor kinds apart.

[Note: minimum and maximum decide]
``aminmax`` propagates NaN, so the pair (min, max) says exactly whether every element is finite, in one pass, without a
temporary and without a host read. A norm or a sum does not: finite values overflow both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_nanguard.report.types import Evidence
from ddp_nanguard.tensors.dtypes import dtype_name

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_REDUCIBLE = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
_LARGE = 2**18  # elements, from which on a copy is worth avoiding
_PIECE = 2**20  # elements that are counted at once, so that masks and copies of them stay small
_UPCAST = frozenset(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
)


def is_plain(tensor: Tensor) -> bool:
    """Whether ``aminmax`` accepts the tensor as it is: dense, real, floating-point, not empty, not on meta."""
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.dtype in _REDUCIBLE
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and tensor.numel() > 0
        and not _is_functorch_wrapped(tensor)
        and not tensor.is_nested
    )


def compact(tensor: Tensor) -> Tensor:
    """A contiguous tensor with the same minimum and maximum: a view of memory that is read once, where there is one.

    ``aminmax`` copies what is not contiguous, and takes 6 times longer over it. So repeated elements (expanded masks)
    are left out, dimensions are put in the order of their strides (channels-last, transposed), and of a large slice
    with gaps each row is reduced first, which reads strides as they are: two small tensors, no copy of its size.
    """
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    strides = tensor.stride()
    tensor = tensor.permute(sorted(range(len(strides)), key=strides.__getitem__, reverse=True))
    if tensor.is_contiguous() or tensor.numel() < _LARGE:
        return tensor
    longest = max(range(tensor.dim()), key=tensor.shape.__getitem__)
    return torch.stack(torch.aminmax(tensor, dim=longest))


def is_in_flight(tensor: Tensor) -> bool:
    """Whether a collective may still write to it, as to what layers of tensor parallelism return.

    Nothing tells but whether this very object was waited for; a view of it says yes for good.
    """
    return not getattr(tensor, "completed", True)  # torch's AsyncCollectiveTensor


def arrived(tensor: Tensor) -> Tensor:
    """The tensor, after a collective that writes to it: the stream waits on an accelerator, the host under gloo."""
    return tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor


def dense_parts(tensor: Tensor) -> list[Tensor] | None:
    """The plain tensors that hold the values of ``tensor``.

    Returns:
        Tensors for which `is_plain` holds; none for integers and empty tensors, which are always finite. None where the
        kind cannot be checked: meta, quantised, functorch-wrapped, unknown subclasses; nor what is in flight.
    """
    if is_plain(tensor):
        return [tensor.detach()]
    try:
        if hasattr(tensor, "trigger_wait"):
            return None if is_in_flight(tensor) else dense_parts(arrived(tensor))
        return _context(tensor.detach())
    except (RuntimeError, NotImplementedError, AttributeError, TypeError):
        return None  # a kind that torch itself cannot take apart is unchecked, never an exception in the user's step


def _context(tensor: Tensor) -> list[Tensor] | None:
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor.device.type == "meta" or tensor.is_quantized:
        return None
    if tensor.is_nested:
        return dense_parts(tensor.values())
    if hasattr(tensor, "to_local"):  # DTensor, without importing torch.distributed here
        return dense_parts(tensor.to_local())
    if type(tensor) not in _PLAIN_TYPES:
        return _subclass_parts(tensor)
    if tensor.layout is not torch.strided:
        return dense_parts(tensor._values() if tensor.layout is torch.sparse_coo else tensor.values())
    if tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
        return []
    if tensor.is_complex():
        return dense_parts(torch.view_as_real(tensor.resolve_conj()))
    return [tensor.to(torch.float32)] if tensor.dtype in _UPCAST else None


def _subclass_parts(tensor: Tensor) -> list[Tensor] | None:
    if not hasattr(tensor, "__tensor_flatten__"):
        return dense_parts(tensor.as_subclass(Tensor))
    names, _ = tensor.__tensor_flatten__()
    found: list[Tensor] = []
    for name in names:
        parts = dense_parts(getattr(tensor, name))
        if parts is None:
            return None
        found += parts
    return found


def kind_of(minimum: float, maximum: float, allow_negative_inf: bool = False) -> str | None:
    """The kind of non-finite value that a (min, max) pair shows, or None. A NaN hides an inf; `evidence` counts both.

    Args:
        minimum: smallest element.
        maximum: largest element.
        allow_negative_inf: -inf alone counts as finite, as in attention masks.
    """
    if math.isnan(minimum) or math.isnan(maximum):
        return "nan"
    if maximum == math.inf or minimum == math.inf:
        return "inf"
    if not allow_negative_inf and (minimum == -math.inf or maximum == -math.inf):
        return "-inf"
    return None


def evidence(tensor: Tensor) -> Evidence | None:
    """Counts of one tensor from a rescan; None where the kind cannot be checked.

    Host sync: two per dense part, and one copy per `_PIECE` elements of one that is bad. Called on the fault path only.
    Memory: a few times `_PIECE` elements, however large the tensor is.
    """
    try:
        parts = dense_parts(tensor)
        return None if parts is None else _evidence(tensor, parts)
    except (RuntimeError, NotImplementedError, TypeError):
        return None  # its memory is gone, or its class refuses


def _evidence(tensor: Tensor, parts: list[Tensor]) -> Evidence:
    counts = [_counts(part) for part in parts]
    largest = [count.largest for count in counts if count.largest is not None]
    is_whole = len(parts) == 1 and parts[0].shape == tensor.shape and tensor.dim() > 0
    first = counts[0].first if is_whole else None
    return Evidence(
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        num_nan=sum(count.num_nan for count in counts),
        num_inf=sum(count.num_inf for count in counts),
        num_neg_inf=sum(count.num_neg_inf for count in counts),
        numel=sum(part.numel() for part in parts),
        largest_finite=max(largest) if largest else None,
        first=None if first is None else _position(first, tensor.shape),
    )


class _Counts(NamedTuple):
    """Of one part, or of a piece of it; ``first`` counts elements from its beginning, row by row."""

    num_nan: int
    num_inf: int
    num_neg_inf: int
    largest: float | None
    first: int | None


def _counts(part: Tensor) -> _Counts:
    low, high = _ends(part)
    if math.isfinite(low) and math.isfinite(high):
        return _Counts(0, 0, 0, max(abs(low), abs(high)), None)
    total, before = _Counts(0, 0, 0, None, None), 0
    for piece in _pieces(part):
        # on the host: no memory of the device, and no kernel that would have to be loaded there first
        total = _joined(total, _counts_of_piece(piece.cpu()), before)
        before += piece.numel()
    return total


def _joined(total: _Counts, piece: _Counts, before: int) -> _Counts:
    largest = [number for number in (total.largest, piece.largest) if number is not None]
    first = piece.first + before if total.first is None and piece.first is not None else total.first
    return _Counts(
        total.num_nan + piece.num_nan,
        total.num_inf + piece.num_inf,
        total.num_neg_inf + piece.num_neg_inf,
        max(largest) if largest else None,
        first,
    )


def _ends(part: Tensor) -> tuple[float, float]:
    """Minimum and maximum, NaN for both where there is one; on the host where the device cannot tell."""
    try:
        return _ends_of_piece(part)
    except (RuntimeError, NotImplementedError):  # no memory left, or no such operator
        if part.device.type == "cpu":
            raise
        ends = [_ends_of_piece(piece.cpu()) for piece in _pieces(part)]
        lows, highs = [low for low, _ in ends], [high for _, high in ends]
        return (math.nan, math.nan) if any(map(math.isnan, lows)) else (min(lows), max(highs))


def _ends_of_piece(piece: Tensor) -> tuple[float, float]:
    ends = torch.aminmax(compact(piece))
    return float(ends.min), float(ends.max)


def _counts_of_piece(piece: Tensor) -> _Counts:
    finite = piece.isfinite()
    masks = [piece.isnan(), piece == math.inf, piece == -math.inf]
    bad = finite.logical_not_().view(-1) if finite.is_contiguous() else finite.logical_not_().flatten()
    counts = torch.stack([*(mask.sum() for mask in masks), bad.any().to(torch.int64), bad.to(torch.uint8).argmax()])
    num_nan, num_inf, num_neg_inf, is_bad, first = counts.tolist()
    has_finite = num_nan + num_inf + num_neg_inf < piece.numel()
    largest = float(piece.masked_fill(bad.view(piece.shape), 0).abs_().amax()) if has_finite else None
    return _Counts(num_nan, num_inf, num_neg_inf, largest, first if is_bad else None)


def _pieces(part: Tensor) -> Iterator[Tensor]:
    """The part in pieces of at most `_PIECE` elements, in the order of its elements, row by row."""
    if part.numel() <= _PIECE:
        yield part
    elif part.is_contiguous():
        yield from torch.split(part.view(-1), _PIECE)
    else:
        rows = max(_PIECE * len(part) // part.numel(), 1)
        for some in torch.split(part, rows):
            yield from _pieces(some if len(some) > 1 else some[0])


def _position(index: int, shape: torch.Size) -> tuple[int, ...]:
    position: list[int] = []
    for size in reversed(shape):
        index, within = divmod(index, size)
        position.insert(0, within)
    return tuple(position)


def extremes(tensor: Tensor) -> tuple[float, float] | None:
    """Minimum and maximum of a tensor, NaN where it holds one; None where it is empty or cannot be checked.

    Host sync: two per dense part. Called on the fault path only.
    """
    try:
        found = [_ends(part) for part in dense_parts(tensor) or ()]
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    if not found:
        return None
    lows, highs = [low for low, _ in found], [high for _, high in found]
    return (math.nan, math.nan) if any(map(math.isnan, lows)) else (min(lows), max(highs))


def kind_in(tensor: Tensor, allow_negative_inf: bool = False) -> str | None:
    """The worst kind of non-finite value in a tensor, or None where it is finite or cannot be checked.

    Host sync: as `evidence`.
    """
    ends = extremes(tensor)
    if ends is not None and math.isfinite(ends[0]) and math.isfinite(ends[1]):
        return None
    found = evidence(tensor)
    if found is None:
        return None
    if found.num_nan:
        return "nan"
    if found.num_inf:
        return "inf"
    return "-inf" if found.num_neg_inf and not allow_negative_inf else None
