"""Leaves of a batch by the name that people see, and which of its samples are bad."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .containers import named_tensors_in, path_text


def batch_tensors(batch: Any) -> dict[str, Tensor]:
    """Tensors of a batch by ``batch[...]``."""
    return {f"batch{path_text(path)}": tensor for path, tensor in named_tensors_in(batch)}


def batch_arrays(batch: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Floating numpy arrays of a batch by ``batch[...]``."""
    leaves = {f"batch{path_text(path)}": leaf for path, leaf in batch_leaves(batch)}
    return {name: leaf for name, leaf in leaves.items() if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fc"}


def batch_leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(path, value) of what is no container, in plain containers."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if _is_sequence(value) else None
    if items is None:
        yield path, value
        return
    for key, item in items:
        yield from batch_leaves(item, (*path, key))


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def batch_size(batch: Any) -> int | None:
    """The commonest length of dim 0 among the batch's tensors, the first of equals."""
    lengths = [tensor.shape[0] for _, tensor in named_tensors_in(batch) if tensor.dim() > 0]
    lengths += [array.shape[0] for array in batch_arrays(batch).values() if array.ndim]
    return Counter(lengths).most_common(1)[0][0] if lengths else None


def bad_rows(bad: Tensor, size: int | None) -> list[int]:
    """Samples with a marked element; none where dim 0 does not count samples.

    Args:
        bad: bool, any shape.
        size: of the batch.
    """
    if not bad.dim() or bad.shape[0] != size:
        return []
    return [int(row) for row in bad.reshape(bad.shape[0], -1).any(1).nonzero().reshape(-1).tolist()]


def nonfinite(tensor: Tensor) -> Tensor:
    """Where a dense tensor is NaN or infinite; bool, same shape."""
    return ~torch.isfinite(torch.view_as_real(tensor).sum(-1) if tensor.is_complex() else tensor)
