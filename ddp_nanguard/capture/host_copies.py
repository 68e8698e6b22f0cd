"""Copies of batches in pinned memory, which no computation waits for.

[Note: batches held on the host]
Each accelerator has one stream for such copies. It begins where the computation is when the batch comes, and the
computation goes on meanwhile; it meets the copies again when the window ends, so that a loader may then write the next
batch into the same memory. A step that changes its batch in place would overtake its own copy: once that has been seen,
the computation waits for each copy at once. Behind each batch a 1 is copied too: the host sees by it that all is there
even where the device answers no more.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddp_nanguard.errors import line_of
from ddp_nanguard.tensors.accelerator import on_stream

_log = logging.getLogger(__name__)

_POLL_S = 0.02


class _Lane:
    """The stream for copies from one device, and the 1 that is copied behind each batch."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.Stream(device)
        self.one = torch.ones((), dtype=torch.uint8, device=device)

    def follow(self) -> None:
        """Begin where the computation is."""
        self.stream.wait_stream(torch.accelerator.current_stream(self.stream.device))


@dataclass
class _Shared:
    """What the windows of one guard share.

    Attributes:
        lanes: by device.
        is_ordered: whether the computation waits for each copy at once.
    """

    is_ordered: bool
    lanes: dict[torch.device, _Lane] = field(default_factory=dict)


class _Copy:
    """The tensors of one batch that come from one device; made when all of them are queued."""

    def __init__(self, lane: _Lane) -> None:
        self._has_come = torch.zeros((), dtype=torch.uint8, device="cpu", pin_memory=True)
        with on_stream(lane.stream):
            self._has_come.copy_(lane.one, non_blocking=True)
        self._event = torch.Event(lane.stream.device)
        self._event.record(lane.stream)
        self.device = lane.stream.device

    def is_there(self) -> bool:
        """Whether all of it is on the host. Nothing is asked of the device."""
        return bool(self._has_come)

    def wait(self, deadline: float | None) -> bool:
        """Whether all of it is on the host, by ``deadline`` at the latest. Host sync: one without a deadline."""
        if deadline is None:
            self._event.synchronize()
        while not (there := self.is_there()) and deadline is not None and time.monotonic() < deadline:
            self._event.query()  # a device that is late may be made to get on by this
            time.sleep(_POLL_S)
        return there

    def hold_up_computation(self) -> None:
        """What the computation does from here on comes after the copy. Host sync: none."""
        torch.accelerator.current_stream(self.device).wait_event(self._event)


class HostCopies:
    """The copies of one window, see [Note: batches held on the host].

    Args:
        is_ordered: the computation waits for each copy at once, as ``copy_batch`` wants it.
    """

    def __init__(self, is_ordered: bool) -> None:
        self._shared = _Shared(is_ordered)
        self._queued: list[_Lane] = []  # of the batch that is being copied
        self._batches: list[list[_Copy]] = []

    @property
    def is_ordered(self) -> bool:
        """Whether the computation waits for each copy at once."""
        return self._shared.is_ordered

    def empty_copy(self) -> HostCopies:
        """For another window of the same guard."""
        other = HostCopies(False)
        other._shared = self._shared
        return other

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy that is on its way; the tensor itself where it is on the host, or has no pinned copy.

        Host sync: none.
        """
        if tensor.device.type == "cpu":
            return tensor
        try:
            held = torch.empty_like(tensor, device="cpu", pin_memory=True)
        except RuntimeError as error:  # sparse tensors, and devices without pinned memory
            _say_once(f"option hold_batches='host': a {_kind_of(tensor)} tensor stays where it is: {line_of(error)}")
            return tensor
        lane = self._lane(tensor.device)
        with on_stream(lane.stream):
            held.copy_(tensor.detach(), non_blocking=True)
        try:
            tensor.record_stream(lane.stream)
        except (RuntimeError, NotImplementedError):  # a subclass: its memory may not be given away before the copy ends
            torch.accelerator.current_stream(tensor.device).wait_stream(lane.stream)
        return held

    def _lane(self, device: torch.device) -> _Lane:
        lane = self._shared.lanes.get(device) or self._shared.lanes.setdefault(device, _Lane(device))
        if lane not in self._queued:
            lane.follow()
            self._queued.append(lane)
        return lane

    def end_batch(self) -> None:
        """All tensors of a batch have been given to `keep`. Host sync: none."""
        copies = [_Copy(lane) for lane in self._queued]
        self._queued = []
        if self._shared.is_ordered:
            _hold_up(copies)
        self._batches.append(copies)

    def order(self) -> None:
        """From now on the computation waits for each copy: a step has changed its batch."""
        self._shared.is_ordered = True

    def hold_up_computation(self) -> None:
        """What is computed from here on comes after these copies. Host sync: none."""
        _hold_up(copy for copies in self._batches for copy in copies)

    def wait(self, within_s: float | None) -> list[bool]:
        """Whether the copies of each batch are there, after ``within_s`` at most, without a limit where that is None.

        Host sync: one for each copy.
        """
        deadline = None if within_s is None else time.monotonic() + within_s
        return [_all_there(copies, deadline) for copies in self._batches]


def _all_there(copies: list[_Copy], deadline: float | None) -> bool:
    try:
        return all(copy.wait(deadline) for copy in copies)
    except RuntimeError:  # the device has failed
        return all(copy.is_there() for copy in copies)


def _hold_up(copies: Iterable[_Copy]) -> None:
    for copy in copies:
        copy.hold_up_computation()


def _kind_of(tensor: Tensor) -> str:
    return f"{str(tensor.layout).removeprefix('torch.')} {tensor.device.type}"


@functools.cache
def _say_once(text: str) -> None:
    _log.warning("%s", text)
