"""The accumulation window: what one optimizer step needs to run again, and what a skipped one must put back."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ddp_nanguard.errors import Undone
from ddp_nanguard.hooks.positions import LoaderPosition, Position
from ddp_nanguard.tensors.containers import copy_containers, named_tensors_in, path_text
from ddp_nanguard.tensors.dtypes import dtype_name
from ddp_nanguard.tensors.minmax import kind_in
from ddp_nanguard.tensors.written import write_back

from . import rng
from .host_copies import HostCopies
from .model_calls import ModelCalls
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
        modified: paths of batch tensors that the step changed in place, as `AccumulationWindow.record_modified` found.
        scaler: scale and growth tracker during the micro-batch; None without a scaler.
    """

    index: int
    batch: Any
    random_state: RandomState
    losses: dict[str, Tensor] = field(default_factory=dict)
    modified: list[str] = field(default_factory=list)
    scaler: dict[str, Any] | None = None

    @property
    def is_of_call(self) -> bool:
        """Whether the batch is what the root was called with, since none came through the guard."""
        return isinstance(self.batch, dict) and self.batch.keys() == {"args", "kwargs"}


class AccumulationWindow:
    """The micro-batches of the step now running, and the buffers from before it.

    Args:
        device: of the model; its random state is kept too, and those of `rng.other_devices`.
        copy_batch: whether batch tensors are copied instead of referred to.
        hold: where batches are held; ``host`` copies them, see [Note: batches held on the host].
        weights: the model's parameters.
        modules: the model's modules.

    Attributes:
        micro_batches: those begun so far.
        reduced_micro_batches: indices of those after whose backward gradients were communicated.
        generators: registered random generators by name.
        other_devices: see `rng.other_devices`.
        calls: calls of the model and backward passes through them.
        progress: where the loop is in its loader.
        positions: of the batches that came through ``guard.steps``, one per micro-batch.

    Memory: references to the batches (copies with ``copy_batch`` or where ``hold="host"`` moves them off the device),
    and one copy of the floating buffers, and of others up to `SMALL_BYTES` each.
    """

    def __init__(
        self,
        device: torch.device,
        copy_batch: bool,
        hold: Literal["device", "host"],
        weights: Sequence[Tensor] = (),
        modules: Sequence[nn.Module] = (),
    ) -> None:
        self._device = device
        self.other_devices = rng.other_devices(device, weights)
        self.generators: dict[str, Any] = {}
        self.calls = ModelCalls(device, weights, copy_batch, modules, self.generators, self.other_devices)

        self.progress = LoaderPosition()
        self.positions: list[Position] = []

        # - Batches. Tensors kept by reference can be changed in place by the step, which would make the dump lie: their
        # versions tell
        self.micro_batches: list[MicroBatch] = []
        self.reduced_micro_batches: set[int] = set()
        self._copies = HostCopies(is_ordered=copy_batch) if hold == "host" else None
        self._keep_tensor = _clone if copy_batch else _same
        self._versions: list[list[_Version]] = []

        # - Copies of the buffers. Their memory stays from window to window, so a flag says whether they are valid
        self._buffers: dict[str, Tensor] = {}
        self._has_buffers = False

    def empty_copy(self) -> AccumulationWindow:
        """An empty window of the same kind, with the same generators."""
        other = copy.copy(self)
        other.micro_batches, other._versions, other._buffers, other._has_buffers = [], [], {}, False
        other.reduced_micro_batches, other.positions, other.calls = set(), [], self.calls.empty_copy()
        other._copies = self._copies and self._copies.empty_copy()
        return other

    def frozen_copy(self) -> AccumulationWindow:
        """A window with the same micro-batches and its own copies of the buffers; clearing this one leaves it alone."""
        other = copy.copy(self)
        other._buffers = {name: buffer.clone() for name, buffer in self.buffers().items()}
        other.calls = self.calls.empty_copy()  # a step that is put back is not looked at again
        return other

    def begin_micro_batch(self, batch: Any) -> MicroBatch:
        """Keep a batch and the random states of this moment, before the forward.

        Args:
            batch: the loader's item. Its containers are copied, its tensors kept as the options say.

        Host sync: none.
        """
        kept = self._held(batch) if self._copies is not None else _kept(batch, self._keep_tensor)
        micro_batch = MicroBatch(
            len(self.micro_batches), kept, rng.capture(self._device, self.generators, self.other_devices)
        )
        self.micro_batches.append(micro_batch)
        self.positions += [self.progress.now] if self.progress.now is not None else []
        # what is being copied may be written to meanwhile; copies that were waited for are as safe as others
        source = batch if self._copies is not None and not self._copies.is_ordered else kept
        self._versions.append([_Version(path, tensor) for path, tensor in named_tensors_in(source)])
        return micro_batch

    @property
    def is_of_calls(self) -> bool:
        """Whether there are micro-batches, and each is the arguments of a call of the model."""
        return bool(self.micro_batches) and all(micro_batch.is_of_call for micro_batch in self.micro_batches)

    def _held(self, batch: Any) -> Any:
        assert self._copies is not None
        self._copies.hold_up_computation()  # of the batches before
        kept = _kept(batch, self._copies.keep)
        self._copies.end_batch()
        return kept

    def mark_reduced(self) -> None:
        """Note that gradients were communicated after the backward of the last micro-batch."""
        self.reduced_micro_batches.add(self.micro_batches[-1].index if self.micro_batches else 0)

    def snapshot_buffers(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the buffers before the model changes them; only the first call in a window does anything.

        Args:
            named: clean name and buffer; large integer buffers are left out, see `SMALL_BYTES`.

        Host sync: none.
        """
        if self._has_buffers:
            return
        self._has_buffers = True
        sources = {name: buffer.detach() for name, buffer in named if _can_change(buffer)}
        if not _fits(self._buffers, sources):
            self._buffers = {name: torch.empty_like(source) for name, source in sources.items()}
        if sources:
            torch._foreach_copy_(list(self._buffers.values()), list(sources.values()))

    def buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers from before the window, by clean name; empty where no forward has run in it."""
        return self._buffers if self._has_buffers else {}

    @torch.no_grad()
    def restore_buffers(self, named: Iterable[tuple[str, Tensor]], undone: Undone) -> None:
        """Write the copies from before the window into the model's buffers, in place.

        Args:
            named: clean name and buffer, as they are now: the forward may have given one another shape, or removed it.
            undone: told of those that could not be put back.
        """
        present = dict(named)
        for name, saved in self.buffers().items():
            what = f"buffer {name} was not put back"
            if name in present:
                undone.attempt(what, partial(write_back, present[name], saved), None)
            else:
                undone.add(f"{what}: the model has none of this name any more")

    @torch.no_grad()
    def repair_buffer_copies(self, earlier: AccumulationWindow) -> None:
        """Replace copies of buffers that the step before had made non-finite by the copies from before that step.

        Needed where the verdict on that step comes late: this window has copied the buffers meanwhile.

        Args:
            earlier: the window of the step before.

        Host sync: one per buffer.
        """
        for name, copied in self.buffers().items():
            before = earlier.buffers().get(name)
            if before is not None and kind_in(copied, allow_negative_inf=True) is not None:
                write_back(copied, before)

    def record_modified(self) -> None:
        """Find out which batch tensors the step has changed in place, by their versions. Host sync: none."""
        for micro_batch, versions in zip(self.micro_batches, self._versions, strict=True):
            micro_batch.modified = [path_text(version.path) for version in versions if version.has_changed()]

    def wait_for_copies(self, within_s: float | None = None) -> None:
        """Wait until the copies of batches that ``hold="host"`` makes are there; those that do not come are described.

        Args:
            within_s: how long at most; None waits for the device, which must not have stopped.

        Host sync: one where there are any.
        """
        if self._copies is None:
            return
        for micro_batch, is_there in zip(self.micro_batches, self._copies.wait(within_s), strict=False):
            if not is_there:
                micro_batch.batch = described(micro_batch.batch)

    def end_copies(self) -> None:
        """The step is over: what comes after it may write to the memory of its batches. Host sync: none."""
        if self._copies is None:
            return
        self._copies.hold_up_computation()
        if any(version.has_changed() for versions in self._versions for version in versions):
            self._copies.order()

    def clear(self) -> None:
        """Forget the window; the memory of the buffers' copies stays for the next one."""
        self.end_copies()
        self.micro_batches, self.positions = [], []
        self.reduced_micro_batches = set()
        self.calls.clear()
        self._versions = []
        self._has_buffers = False
        self._copies = self._copies and self._copies.empty_copy()


class _Version:
    """How often a tensor of a batch had been written to when it was kept. The tensor may go meanwhile."""

    def __init__(self, path: tuple[Any, ...], tensor: Tensor) -> None:
        self.path = path
        self._tensor, self._version = weakref.ref(tensor), _version(tensor)

    def has_changed(self) -> bool:
        """Whether it has been written to since, as far as there is anybody who could tell."""
        tensor = self._tensor()
        return tensor is not None and _version(tensor) != self._version


def described(batch: Any) -> dict[str, Any]:
    """Shapes and dtypes in the place of a batch, and nothing else of its contents."""
    named = {path_text(path): tensor for path, tensor in named_tensors_in(batch)}
    return {"redacted": {path: {"shape": list(t.shape), "dtype": dtype_name(t.dtype)} for path, t in named.items()}}


def _kept(batch: Any, keep: Callable[[Tensor], Tensor]) -> Any:
    """The batch with its containers copied; itself where their code, which is the job's, raises."""
    try:
        return copy_containers(batch, keep)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return batch


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _can_change(buffer: Tensor) -> bool:
    if buffer.layout is not torch.strided or buffer.is_nested:
        return False  # no copy in one go with the others
    return buffer.is_floating_point() or buffer.is_complex() or buffer.numel() * buffer.element_size() <= SMALL_BYTES


def _fits(copies: dict[str, Tensor], sources: dict[str, Tensor]) -> bool:
    return copies.keys() == sources.keys() and all(
        copies[name].shape == source.shape
        and copies[name].dtype == source.dtype
        and copies[name].device == source.device
        for name, source in sources.items()
    )
