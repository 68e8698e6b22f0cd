"""Tracks which operator last wrote a non-finite value into a storage, and which parameter or batch item owns it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.multiprocessing.reductions import StorageWeakRef

from .events import Event


def key_of(tensor: Tensor) -> int:
    """Identifies the storage of a tensor, which its views share; the tensor itself where it has no storage."""
    storage = storage_of(tensor)
    return id(tensor) if storage is None else int(storage._cdata)


def storage_of(tensor: Tensor) -> Any:
    """The untyped storage of a tensor, the local one of a DTensor; None for tensors without storage."""
    local = getattr(tensor, "_local_tensor", tensor)  # DTensor
    local = local.elem if isinstance(local, AsyncCollectiveTensor) else local  # a result that was not waited for
    try:
        return local.untyped_storage()
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


def weak_reference(storage: Any) -> Any:
    """A reference that keeps the address of a storage from being reused, but does not keep its memory."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch's own


class StorageTracker:
    """Writers and names of storages, looked up by address.

    Attributes:
        look_up: asked first for the name of a tensor, or None. FSDP gathers a parameter into new memory for each use,
            so that no address can be named before the step.
    """

    def __init__(self) -> None:
        # Each entry holds a weak reference to its storage, else a later storage at the same address would inherit the
        # entry.
        self._writers: dict[int, tuple[Event, Any]] = {}
        self._names: dict[int, str] = {}
        self._made_empty: dict[int, tuple[str, Any]] = {}
        self._addresses: dict[int, str] = {}
        # Named tensors stay alive for the whole trace, for the same reason.
        self._kept: list[Any] = []
        self.look_up: Callable[[Tensor], str | None] = _nobody_knows
        _trackers.add(self)

    def name(self, tensor: Tensor, name: str) -> None:
        """Name memory that existed before the step: a parameter, a buffer, optimizer state, a batch item."""
        self._names[key_of(tensor)] = name
        self._kept.append(tensor)

    def name_address(self, array: np.ndarray[Any, Any], name: str) -> None:
        """Name the memory of a numpy array, which a tensor may share without a common storage object."""
        self._addresses[array.ctypes.data] = name
        self._kept.append(array)

    def wrote(self, event: Event, tensor: Tensor) -> None:
        """Record that the operator of ``event`` left a non-finite value in the storage of ``tensor``."""
        storage = storage_of(tensor)
        self._writers[key_of(tensor)] = (event, tensor if storage is None else weak_reference(storage))

    def passed_on(self, tensor: Tensor, name: str) -> None:
        """Record that ``tensor`` is an unchanged copy of the memory called ``name``, which existed before the step."""
        self._writers.pop(key_of(tensor), None)
        self.name(tensor, name)

    def left_empty(self, tensor: Tensor, name: str) -> None:
        """Record that the storage of ``tensor`` is uninitialised; ``name`` says who allocated it."""
        storage = storage_of(tensor)
        if storage is not None:
            self._made_empty[key_of(tensor)] = (name, weak_reference(storage))

    def writer(self, tensor: Tensor) -> Event | None:
        """The event that last left a non-finite value in the storage of ``tensor``, or None."""
        found = self._writers.get(key_of(tensor))
        return None if found is None else found[0]

    def is_unnamed(self, tensor: Tensor) -> bool:
        """Whether nothing is known of the memory of ``tensor``, but perhaps who allocated it."""
        return self.look_up(tensor) is None and key_of(tensor) not in self._names and self._name_at(tensor) is None

    def kept_name_of(self, tensor: Tensor) -> str | None:
        """`name_of`, without what `look_up` would have to search for: cheap enough for every operator."""
        return self._names.get(key_of(tensor))

    def name_of(self, tensor: Tensor) -> str | None:
        """The name of the memory of ``tensor``, or None where it has none."""
        found = self.look_up(tensor)
        if found is not None:
            return found
        key = key_of(tensor)
        empty = self._made_empty.get(key)
        return self._names.get(key) or (self._name_at(tensor) if empty is None else empty[0])

    def _name_at(self, tensor: Tensor) -> str | None:
        storage = storage_of(tensor) if self._addresses and tensor.device.type == "cpu" else None
        return None if storage is None else self._addresses.get(storage.data_ptr())


_trackers: weakref.WeakSet[StorageTracker] = weakref.WeakSet()


def name_unknown(tensor: Tensor, name: str) -> None:
    """Say in every running trace where the contents of a tensor would have come from, unless it has a name already."""
    for tracker in _trackers:
        if tracker.is_unnamed(tensor):
            tracker.name(tensor, name)


def _nobody_knows(_: Tensor) -> None:
    return None
