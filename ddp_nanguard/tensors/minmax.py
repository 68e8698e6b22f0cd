"""Reduces a tensor of any kind to its minimum and maximum in one pass. The only module that tells tensor kinds apart.

[Note: minimum and maximum decide]
``aminmax`` propagates NaN, so the pair (min, max) says exactly whether every element is finite, in one pass, without a
temporary and without a host read. A norm or a sum does not: finite values overflow both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ddp_nanguard.report.types import Evidence
from ddp_nanguard.tensors.dtypes import dtype_name

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_REDUCIBLE = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
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


def in_memory_order(tensor: Tensor) -> Tensor:
    """A view with its dimensions in the order of their strides: channels-last and transposed tensors become contiguous.

    ``aminmax`` takes 6 times longer over a non-contiguous tensor of 2 MB.
    """
    strides = tensor.stride()
    return tensor.permute(sorted(range(len(strides)), key=strides.__getitem__, reverse=True))


def dense_parts(tensor: Tensor) -> list[Tensor] | None:
    """The plain tensors that hold the values of ``tensor``.

    Returns:
        Tensors for which `is_plain` holds; none for integers and empty tensors, which are always finite. None where the
        kind cannot be checked: meta, quantised, functorch-wrapped, unknown subclasses.
    """
    if is_plain(tensor):
        return [tensor.detach()]
    try:
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

    Host sync: about six per dense part. Called on the fault path only, never in a clean step.
    """
    parts = dense_parts(tensor)
    if parts is None:
        return None
    try:
        return _evidence(tensor, parts)
    except (RuntimeError, NotImplementedError, TypeError):
        return None  # its memory is gone, or its class refuses


def _evidence(tensor: Tensor, parts: list[Tensor]) -> Evidence:
    counts = [_counts(part) for part in parts] or [(0, 0, 0, 0, None)]
    largest = [count[4] for count in counts if count[4] is not None]
    return Evidence(
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        num_nan=sum(count[0] for count in counts),
        num_inf=sum(count[1] for count in counts),
        num_neg_inf=sum(count[2] for count in counts),
        numel=sum(count[3] for count in counts),
        largest_finite=max(largest) if largest else None,
        first=_first(tensor, parts),
    )


def _first(tensor: Tensor, parts: list[Tensor]) -> tuple[int, ...] | None:
    if len(parts) != 1 or parts[0].shape != tensor.shape or tensor.dim() == 0:
        return None
    found = torch.isfinite(parts[0]).logical_not().nonzero()
    return tuple(found[0].tolist()) if len(found) else None


def _counts(part: Tensor) -> tuple[int, int, int, int, float | None]:
    finite = torch.isfinite(part)
    largest = part[finite].abs().max().item() if bool(finite.any()) else None
    return (
        int(torch.isnan(part).sum()),
        int(torch.isposinf(part).sum()),
        int(torch.isneginf(part).sum()),
        part.numel(),
        largest,
    )


def extremes(tensor: Tensor) -> tuple[float, float] | None:
    """Minimum and maximum of a tensor, NaN where it holds one; None where it is empty or cannot be checked.

    Host sync: two per dense part. Called on the fault path only.
    """
    try:
        found = [torch.aminmax(part) for part in dense_parts(tensor) or ()]
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    if not found:
        return None
    lows, highs = [float(pair.min) for pair in found], [float(pair.max) for pair in found]
    return (math.nan, math.nan) if any(map(math.isnan, lows)) else (min(lows), max(highs))


def kind_in(tensor: Tensor, allow_negative_inf: bool = False) -> str | None:
    """The worst kind of non-finite value in a tensor, or None where it is finite or cannot be checked.

    Host sync: as `evidence`.
    """
    found = evidence(tensor)
    if found is None:
        return None
    if found.num_nan:
        return "nan"
    if found.num_inf:
        return "inf"
    return "-inf" if found.num_neg_inf and not allow_negative_inf else None
