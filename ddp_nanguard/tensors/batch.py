"""Names the leaves of a batch as they are shown to users, and finds its non-finite samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .containers import named_tensors_in, path_text


def batch_tensors(batch: Any) -> dict[str, Tensor]:
    """The tensors of a batch by their path, as in ``batch["image"][0]``."""
    return {f"batch{path_text(path)}": tensor for path, tensor in named_tensors_in(batch)}


def batch_arrays(batch: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The floating-point and complex numpy arrays of a batch by their path, as in ``batch["image"]``."""
    leaves = {f"batch{path_text(path)}": leaf for path, leaf in batch_leaves(batch)}
    return {name: leaf for name, leaf in leaves.items() if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fc"}


def batch_leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every leaf of nested mappings, lists and tuples, as (path, value); other objects are leaves themselves."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if _is_sequence(value) else None
    if items is None:
        yield path, value
        return
    for key, item in items:
        yield from batch_leaves(item, (*path, key))


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def batch_size(batch: Any) -> int | None:
    """The most common length of dim 0 among the batch's tensors and arrays, the first of equals; None without any."""
    lengths = [tensor.size(0) for _, tensor in named_tensors_in(batch) if tensor.dim() > 0]
    lengths += [array.shape[0] for array in batch_arrays(batch).values() if array.ndim]
    return Counter(lengths).most_common(1)[0][0] if lengths else None


def bad_rows(bad: Tensor, size: int | None) -> list[int]:
    """Indices in dim 0 of the samples with a marked element; empty where dim 0 is not of length ``size``.

    Args:
        bad: bool, any shape.
        size: number of samples in the batch, or None.

    Host sync: one.
    """
    if not bad.dim() or bad.shape[0] != size:
        return []
    return [int(row) for row in bad.reshape(bad.shape[0], -1).any(1).nonzero().reshape(-1).tolist()]


def nonfinite(tensor: Tensor) -> Tensor:
    """Marks the NaN and infinite elements of a dense tensor: bool, same shape."""
    return ~torch.isfinite(torch.view_as_real(tensor).sum(-1) if tensor.is_complex() else tensor)
