"""`batch_table`: shapes, ranges and bad rows of the batch of one rank; contents only where they are asked for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_nanguard.capture.window import MicroBatch
from ddp_nanguard.report.wording import listed
from ddp_nanguard.tensors.batch import bad_rows, batch_leaves, batch_size, batch_tensors, nonfinite
from ddp_nanguard.tensors.containers import path_text
from ddp_nanguard.tensors.dtypes import dtype_name

from .timeline import number_text

MAX_LEAVES = 200
MAX_CONTENT = 600
"""Characters of one value that ``--batch-contents`` shows."""


@dataclass(frozen=True)
class Leaf:
    """A value in a batch.

    Attributes:
        name: its path, as in ``batch["image"]``.
        dtype: or type.
        shape: as text; "" for what has none.
        range: smallest and largest finite value; "" where it was not taken.
        bad: counts of NaN and Inf with their rows; "" where there is none.
        content: "" unless it was asked for.
    """

    name: str
    dtype: str
    shape: str = ""
    range: str = ""
    bad: str = ""
    content: str = ""


@dataclass(frozen=True)
class BatchTable:
    """One micro-batch.

    Attributes:
        index: in the step.
        leaves: at most `MAX_LEAVES`.
        num_left_out: of the further ones.
        modified: paths that the step has written in place.
        redacted: whether the batch was left out of the dump, which holds shapes only.
    """

    index: int
    leaves: tuple[Leaf, ...]
    num_left_out: int
    modified: tuple[str, ...]
    redacted: bool


def batch_table(item: MicroBatch, *, contents: bool) -> BatchTable:
    """What a page shows of a micro-batch.

    Args:
        item: of the dump.
        contents: whether values are shown too.
    """
    redacted = isinstance(item.batch, dict) and item.batch.keys() == {"redacted"}
    leaves = list(_redacted(item.batch["redacted"]) if redacted else _leaves(item.batch, contents))
    shown = sorted(leaves, key=lambda leaf: not leaf.bad)[:MAX_LEAVES]
    return BatchTable(item.index, tuple(shown), len(leaves) - len(shown), tuple(item.modified), redacted)


def _redacted(described: Any) -> Iterator[Leaf]:
    for path, known in described.items() if isinstance(described, dict) else ():
        known = known if isinstance(known, dict) else {}
        yield Leaf(f"batch{path}", str(known.get("dtype", "")), _shape(tuple(known.get("shape", ()))))


def _leaves(batch: Any, contents: bool) -> Iterator[Leaf]:
    size = batch_size(batch)
    for name, tensor in batch_tensors(batch).items():
        yield _of_tensor(name, tensor, size, _content(tensor) if contents else "")
    others = ((f"batch{path_text(path)}", leaf) for path, leaf in batch_leaves(batch) if not isinstance(leaf, Tensor))
    for name, leaf in itertools.islice(others, 10 * MAX_LEAVES):
        content = _content(leaf) if contents else ""
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
            yield _of_tensor(name, torch.from_numpy(leaf.astype(np.float64)), size, content, str(leaf.dtype))
        elif not batch_tensors(leaf):  # an object whose tensors have been told
            yield Leaf(name, type(leaf).__name__, content=content)


def _of_tensor(name: str, tensor: Tensor, size: int | None, content: str, dtype: str | None = None) -> Leaf:
    dtype = dtype or dtype_name(tensor.dtype)
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        return Leaf(name, dtype, f"{_dims(tensor)}, {dtype_name(tensor.layout)}: not looked at", content=content)
    tensor = _with_operators(tensor.detach().resolve_conj())
    bad = nonfinite(tensor)
    is_ordered = not tensor.is_complex() and tensor.dtype is not torch.bool
    finite = (tensor[~bad] if bad.any() else tensor) if is_ordered else tensor.new_empty(0)
    ends = f"{number_text(finite.min().item())} … {number_text(finite.max().item())}" if finite.numel() else ""
    return Leaf(name, dtype, _shape(tuple(tensor.shape)), ends, _bad_text(tensor, bad, size), content)


def _with_operators(tensor: Tensor) -> Tensor:
    """The tensor in a dtype that knows minimum and maximum: floats of a byte do not, nor do large unsigned integers."""
    if tensor.is_floating_point():
        return tensor.to(torch.float32) if tensor.itemsize == 1 else tensor
    return tensor.to(torch.float64) if tensor.dtype in _UNSIGNED else tensor


_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def _bad_text(tensor: Tensor, bad: Tensor, size: int | None) -> str:
    if not bad.any():
        return ""
    num_nan = int(torch.isnan(tensor).sum())
    rows = bad_rows(bad, size)
    where = f", rows {listed(rows)}" if rows else ""
    return f"{num_nan} NaN, {int(bad.sum()) - num_nan} Inf{where}"


def _dims(tensor: Tensor) -> str:
    try:
        return _shape(tuple(tensor.shape))
    except RuntimeError:  # of a ragged tensor
        return "ragged"


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) if shape else "scalar"


def _content(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_CONTENT else f"{text[:MAX_CONTENT]} … ({len(text)} characters)"
