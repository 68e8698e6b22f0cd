"""The window: what one optimizer step needs to run again, and what a skipped one must put back."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ddp_nanguard.tensors.containers import copy_containers, named_tensors_in, path_text
from ddp_nanguard.tensors.minmax import kind_in

from . import rng
from .rng import RandomState

SMALL_BYTES = 2**20
"""Integer and boolean buffers up to this size (counters, usage tables) are copied too; larger ones are constants."""


@dataclass
class MicroBatch:
    """One item of the loader, as the step saw it.

    Attributes:
        index: position in the window, from 0.
        batch: the item; without ``guard.steps`` the root's ``{"args": ..., "kwargs": ...}``.
        random_state: random states after the loader produced the item, before the forward.
        losses: watched losses by name, detached, of any shape.
        modified: paths of batch tensors that the step changed in place.
        scaler: the scaler's state, or None.
    """

    index: int
    batch: Any
    random_state: RandomState
    losses: dict[str, Tensor] = field(default_factory=dict)
    modified: list[str] = field(default_factory=list)
    scaler: dict[str, Any] | None = None


class AccumulationWindow:
    """The micro-batches of the step now running, and the buffers from before it.

    Memory: references to the batches (copies with ``copy_batch`` or where ``hold="host"`` moves them off the device),
    and one copy of the floating buffers, and of others up to `SMALL_BYTES` each.
    """

    def __init__(self, device: torch.device, copy_batch: bool, hold: Literal["device", "host"]) -> None:
        self.micro_batches: list[MicroBatch] = []
        self.reduced_micro_batches: set[int] = set()
        self.generators: dict[str, Any] = {}
        self._device = device
        self._keep_tensor = _to_host if hold == "host" else (_clone if copy_batch else _same)
        self._versions: list[list[tuple[str, Tensor, int]]] = []
        self._buffers: dict[str, Tensor] = {}
        self._has_buffers = False

    def empty_copy(self) -> AccumulationWindow:
        """An empty window of the same kind, with the same generators."""
        other = copy.copy(self)
        other.micro_batches, other._versions, other._buffers, other._has_buffers = [], [], {}, False
        other.reduced_micro_batches = set()
        return other

    def frozen_copy(self) -> AccumulationWindow:
        """The same micro-batches, with copies of the buffers: what stays when the window is cleared and filled anew."""
        other = copy.copy(self)
        other._buffers = {name: buffer.clone() for name, buffer in self.buffers().items()}
        return other

    def begin_micro_batch(self, batch: Any) -> MicroBatch:
        """Keep a batch and the random states. Host sync: none (``hold="host"`` copies without waiting)."""
        kept = copy_containers(batch, self._keep_tensor)
        micro_batch = MicroBatch(len(self.micro_batches), kept, rng.capture(self._device, self.generators))
        self.micro_batches.append(micro_batch)
        self._versions.append([(path_text(path), t, _version(t)) for path, t in named_tensors_in(kept)])
        return micro_batch

    def mark_reduced(self) -> None:
        """Gradients were communicated after the backward of the last micro-batch."""
        self.reduced_micro_batches.add(self.micro_batches[-1].index if self.micro_batches else 0)

    def snapshot_buffers(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the buffers before the model changes them; once per window."""
        if self._has_buffers:
            return
        self._has_buffers = True
        sources = {name: buffer.detach() for name, buffer in named if _can_change(buffer)}
        if not _fits(self._buffers, sources):
            self._buffers = {name: torch.empty_like(source) for name, source in sources.items()}
        if sources:
            torch._foreach_copy_(list(self._buffers.values()), list(sources.values()))

    def buffers(self) -> dict[str, Tensor]:
        """The buffers from before the window, empty where no forward has run."""
        return self._buffers if self._has_buffers else {}

    @torch.no_grad()
    def restore_buffers(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Write the buffers from before the window into the model's."""
        saved = self.buffers()
        for name, buffer in named:
            if name in saved:
                buffer.copy_(saved[name])

    @torch.no_grad()
    def repair_buffer_copies(self, earlier: AccumulationWindow) -> None:
        """Copies of buffers that the step before had spoilt become those from before that step. Host sync: many."""
        for name, copied in self.buffers().items():
            before = earlier.buffers().get(name)
            if before is not None and kind_in(copied, allow_negative_inf=True) is not None:
                copied.copy_(before)

    def record_modified(self) -> None:
        """Record which batch tensors the step changed in place."""
        for micro_batch, versions in zip(self.micro_batches, self._versions, strict=True):
            micro_batch.modified = [path for path, tensor, version in versions if _version(tensor) != version]

    def clear(self) -> None:
        """Forget the window; the storage of the buffers' copy stays."""
        self.micro_batches = []
        self.reduced_micro_batches = set()
        self._versions = []
        self._has_buffers = False


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    held = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return held.copy_(tensor.detach(), non_blocking=True)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _can_change(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex() or buffer.numel() * buffer.element_size() <= SMALL_BYTES


def _fits(copies: dict[str, Tensor], sources: dict[str, Tensor]) -> bool:
    return copies.keys() == sources.keys() and all(
        copies[name].shape == source.shape
        and copies[name].dtype == source.dtype
        and copies[name].device == source.device
        for name, source in sources.items()
    )
