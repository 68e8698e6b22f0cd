"""Tensors and containers written back: the same object again, with what it held before."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import Tensor

MAX_KEPT_BYTES = 64 * 2**20
"""Of a tensor of which `contents_kept` makes a copy."""
MAX_KEPT_ITEMS = 4096
_MAX_DEPTH = 4


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


@contextlib.contextmanager
def contents_kept(values: Any, others: Container[int] = ()) -> Iterator[None]:
    """At the end the tensors and builtin containers in here hold what they held, if they were changed in place.

    Tensors of more than `MAX_KEPT_BYTES`, and what lies behind `MAX_KEPT_ITEMS` items, are left as they are.

    Args:
        values: a container of such.
        others: ids of tensors that are somebody else's to put back.
    """
    found: dict[int, Callable[[], None]] = {}
    _keep(values, others, found, _MAX_DEPTH)
    try:
        yield
    finally:
        with torch.no_grad():
            for put_back in found.values():
                put_back()


def _keep(value: Any, others: Container[int], found: dict[int, Callable[[], None]], depth: int) -> None:
    if depth < 0 or id(value) in found or id(value) in others or len(found) >= MAX_KEPT_ITEMS:
        return
    if type(value) is Tensor:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # without memory of its own, or of an odd layout
            if not value.is_inference() and value.numel() * value.element_size() <= MAX_KEPT_BYTES and _is_there(value):
                found[id(value)] = _tensor_back(value)
    elif (back := _container_back(value)) is not None:
        found[id(value)] = back
    if isinstance(value, (dict, list, tuple, deque)):
        for item in list(value.values()) if isinstance(value, dict) else list(value):
            _keep(item, others, found, depth - 1)


def _is_there(tensor: Tensor) -> bool:
    """Whether its memory has not been given up."""
    return tensor.layout is not torch.strided or tensor.is_meta or tensor.untyped_storage().nbytes() > 0


def _tensor_back(tensor: Tensor) -> Callable[[], None]:
    version, saved = tensor._version, tensor.detach().clone()

    def put_back() -> None:
        if tensor._version != version:
            write_back(tensor, saved)

    return put_back


def _container_back(value: Any) -> Callable[[], None] | None:
    """None for what is no container of Python's own that can be changed."""
    if type(value) not in (list, deque, dict, OrderedDict, defaultdict, set):
        return None
    saved, ids = value.copy(), _ids(value)

    def put_back() -> None:
        if _ids(value) != ids:
            value.clear()
            value.extend(saved) if isinstance(value, (list, deque)) else value.update(saved)

    return put_back


def _ids(container: Any) -> list[int]:
    """Of its items; of keys and values."""
    items = [part for item in container.items() for part in item] if isinstance(container, dict) else container
    return [id(item) for item in items]
