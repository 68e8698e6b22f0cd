"""Whether a tensor looks like memory that nobody wrote, as `torch.empty` and `torch.nn.Module.to_empty` leave it.

[Note: memory that nobody wrote]
Such memory holds what was there before: pointers, integers, texts. Read as numbers they give NaN of many bit patterns,
where an operator makes one, and magnitudes from the denormals to the largest exponents, where no initialisation and no
training puts the elements of one tensor. Both are signs and no proof; where memory last held numbers of the same dtype,
or zeros, nothing tells. So "looks like" is all that is said, and only of a first step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .minmax import dense_parts

MAX_ELEMENTS = 2**20
MIN_NAN_PATTERNS = 2
TOO_SMALL, TOO_LARGE = 1e-20, 1e10
_BITS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float64: torch.int64,
}


def unwritten_signs(tensor: Tensor) -> str | None:
    """What about a tensor looks like memory that nobody wrote, in words; None where nothing does.

    Args:
        tensor: a parameter or buffer; of a large one the first `MAX_ELEMENTS` elements are looked at.

    Host sync: one copy. Called on the fault path only.
    """
    try:
        parts = dense_parts(tensor) or []
        if len(parts) != 1 or parts[0].dtype not in _BITS:
            return None
        values = parts[0].reshape(-1)[:MAX_ELEMENTS].cpu().contiguous()
    except (RuntimeError, NotImplementedError, TypeError):
        return None  # its memory is gone, or its class refuses
    signs = [_nan_patterns(values), _magnitudes(values)]
    return ", ".join(sign for sign in signs if sign is not None) or None


def _nan_patterns(values: Tensor) -> str | None:
    """NaN that no operator makes: those of arithmetic have one bit pattern, on some devices all bits set."""
    bits = values[values.isnan()].view(_BITS[values.dtype])
    made = torch.full((1,), torch.nan, dtype=values.dtype, device="cpu").view(bits.dtype)
    largest = torch.iinfo(bits.dtype).max
    patterns = torch.unique(bits & largest)
    odd = patterns[(patterns != made & largest) & (patterns != largest)]
    return f"NaN of {len(patterns)} bit patterns" if len(odd) >= MIN_NAN_PATTERNS else None


def _magnitudes(values: Tensor) -> str | None:
    """Elements of the smallest and of the largest exponents in one tensor, or denormals and no ordinary number."""
    found = values[values.isfinite() & (values != 0)].double().abs()
    if values.dtype is torch.float16 or not len(found):
        return None
    low, high = found.min().item(), found.max().item()
    is_ordinary = bool(((found >= TOO_SMALL) & (found <= TOO_LARGE)).any())
    has_denormals = low < torch.finfo(values.dtype).tiny
    is_spread = low < TOO_SMALL and high > TOO_LARGE
    return f"magnitudes from {low:.2g} to {high:.2g}" if is_spread or (has_denormals and not is_ordinary) else None
