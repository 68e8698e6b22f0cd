"""Tensors written back: the same object again, with what it held before."""

from __future__ import annotations

from torch import Tensor


def write_back(tensor: Tensor, saved: Tensor) -> None:
    """Make a tensor hold what it held before; the object stays the same. To be called without grad mode.

    Args:
        tensor: as it is now, maybe with another shape, dtype or layout, or an expanded one that takes no write.
        saved: a copy of what it was.

    Raises:
        RuntimeError, TypeError: it takes neither a write nor other memory.
    """
    is_alike = tensor.shape == saved.shape and tensor.dtype is saved.dtype and tensor.device == saved.device
    if is_alike and tensor.layout is saved.layout:
        try:
            tensor.copy_(saved)
            return
        except RuntimeError:  # memory that is shared by elements, or gone
            pass
    tensor.data = saved.clone()
