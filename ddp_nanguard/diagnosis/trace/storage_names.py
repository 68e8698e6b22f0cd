"""Which operator last wrote a non-finite value into which memory, and what that memory is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .events import Event


def key_of(tensor: Tensor) -> int:
    """Identifies the memory of a tensor; views share it."""
    storage = storage_of(tensor)
    return id(tensor) if storage is None else int(storage._cdata)


def storage_of(tensor: Tensor) -> Any:
    """The untyped storage of a tensor of any kind, None where it has none of its own."""
    local = getattr(tensor, "_local_tensor", tensor)  # DTensor
    try:
        return local.untyped_storage()
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


def weak_reference(storage: Any) -> Any:
    """Keeps the address of a storage from being used for another one, and not its memory."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch's own


class StorageTracker:
    """Memory by the storage's address. A weak reference keeps an address from being used for another storage.

    Attributes:
        look_up: asked for the name of a tensor whose memory has none: FSDP gathers a parameter anew for each use.
    """

    def __init__(self) -> None:
        self._writers: dict[int, tuple[Event, Any]] = {}
        self._names: dict[int, str] = {}
        self._made_empty: dict[int, tuple[str, Any]] = {}
        self._addresses: dict[int, str] = {}
        self._kept: list[Any] = []
        self.look_up: Callable[[Tensor], str | None] = _nobody_knows

    def name(self, tensor: Tensor, name: str) -> None:
        """Memory that was there before the step: a parameter, a buffer, a batch item."""
        self._names[key_of(tensor)] = name
        self._kept.append(tensor)

    def name_address(self, array: np.ndarray[Any, Any], name: str) -> None:
        """Memory of numpy's, which a tensor may share."""
        self._addresses[array.ctypes.data] = name
        self._kept.append(array)

    def wrote(self, event: Event, tensor: Tensor) -> None:
        """An operator left a non-finite value there."""
        storage = storage_of(tensor)
        self._writers[key_of(tensor)] = (event, tensor if storage is None else weak_reference(storage))

    def passed_on(self, tensor: Tensor, name: str) -> None:
        """What was there before the step has been copied there as it was."""
        self._writers.pop(key_of(tensor), None)
        self.name(tensor, name)

    def left_empty(self, tensor: Tensor, name: str) -> None:
        """Memory that nobody has written yet."""
        storage = storage_of(tensor)
        if storage is not None:
            self._made_empty[key_of(tensor)] = (name, weak_reference(storage))

    def writer(self, tensor: Tensor) -> Event | None:
        """The last operator that left a non-finite value there."""
        found = self._writers.get(key_of(tensor))
        return None if found is None else found[0]

    def name_of(self, tensor: Tensor) -> str | None:
        """What the memory is called, None where nobody knows."""
        found = self.look_up(tensor)
        if found is not None:
            return found
        key = key_of(tensor)
        empty = self._made_empty.get(key)
        return self._names.get(key) or (self._name_at(tensor) if empty is None else empty[0])

    def _name_at(self, tensor: Tensor) -> str | None:
        storage = storage_of(tensor) if self._addresses and tensor.device.type == "cpu" else None
        return None if storage is None else self._addresses.get(storage.data_ptr())


def _nobody_knows(_: Tensor) -> None:
    return None
