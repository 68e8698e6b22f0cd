"""What a guard asks of the device a model computes on, through torch's names that hold for every accelerator."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")
_R = TypeVar("_R")


def accelerator() -> torch.device | None:
    """The current device of the kind of accelerator that this machine has; None where it has none."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return None if kind is None else torch.device(kind.type, torch.accelerator.current_device_index())


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched on the device goes into a graph instead of running; never on a CPU. No host wait."""
    return device.type != "cpu" and _capture_test(device.type)()


@functools.cache
def _capture_test(device_type: str) -> Callable[[], bool]:
    try:
        module = torch.get_device_module(device_type)
    except RuntimeError:  # a device that came without a module of its own
        return _never
    return getattr(module, "is_current_stream_capturing", _never)


def _never() -> bool:
    return False


def copy_for_later(tensor: Tensor) -> tuple[Tensor, torch.Event | None]:
    """A copy on the host that is on its way, and the event after which it is there; None where it is there already.

    The event is recorded on the stream of the tensor's own device, whichever device is the current one.

    Host sync: none where the host can pin memory, else one.
    """
    if tensor.device.type == "cpu":
        return tensor.clone(), None
    host = _pinned_like(tensor)
    if host is None:
        return tensor.cpu(), None
    host.copy_(tensor, non_blocking=True)
    event = torch.Event(tensor.device)
    event.record(torch.accelerator.current_stream(tensor.device))
    return host, event


def _pinned_like(tensor: Tensor) -> Tensor | None:
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError:  # no pinned memory for this device (mps, hpu)
        return None


@contextlib.contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """What this thread launches in the block goes to the stream; the current device stays what it was."""
    before, current = torch.accelerator.current_stream(stream.device), torch.accelerator.current_device_index()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(current)


def on_device(number: Tensor, device: torch.device) -> Tensor:
    """A tensor of shape () on a device. Host sync: none; from the CPU it goes along as the argument of a kernel."""
    if number.device.type == "cpu" and device.type != "cpu":
        return torch.full((), number.item(), dtype=number.dtype, device=device)
    return number.to(device)


# -- where the device may have stopped, or waits for a peer that is gone -----------------------------------------------


@contextlib.contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """On an accelerator, a stream of its own for this thread: it waits for nothing that the job has launched.

    Only for what no kernel writes to any more, and best for copies to the host: a kernel that is used for the first
    time may be loaded, and memory that is given back may make the device wait for all its streams.
    """
    if device.type == "cpu":
        yield
        return
    stream, before = torch.Stream(device), _own_streams()
    _own.streams = (*before, stream)
    try:
        with on_stream(stream):
            yield
    finally:
        _own.streams = before


_own = threading.local()


def _own_streams() -> tuple[torch.Stream, ...]:
    """Those that `aside` has given this thread, the current one last."""
    return getattr(_own, "streams", ())


def on_same_stream(act: Callable[[_T], _R]) -> Callable[[_T], _R]:
    """What does ``act`` on the streams that `aside` has given the present thread, also in another thread."""
    streams = _own_streams()
    if not streams:
        return act

    def aside_too(item: _T) -> _R:
        for stream in streams:
            torch.accelerator.set_stream(stream)
        return act(item)

    return aside_too


def answers(device: torch.device, within_s: float) -> bool:
    """Whether the device copies a number to the host in time; always so for a CPU.

    Not where an error has taken its context, and not where all streams share a queue that waits for a peer.
    """
    if device.type == "cpu":
        return True
    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(RuntimeError), aside(device):
            # a device without memory does answer: the job's own lack of it is no failure of the device
            with contextlib.suppress(torch.OutOfMemoryError):
                torch.empty((), dtype=torch.uint8, device=device).cpu()
            answered.set()

    asking = threading.Thread(target=ask, name="ddp_nanguard-asks-device", daemon=True)
    asking.start()
    asking.join(within_s)
    return answered.is_set()


class StreamMark:
    """A point in the work of the stream that is the current one when it is made. One event; none on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.accelerator.current_stream(device)
        self._event = torch.Event(device)
        self._event.record(self._stream)

    def is_reached(self) -> bool:
        """Whether all that came before it has run. No host wait."""
        return bool(self._event.query())

    def is_idle(self, within_s: float) -> bool:
        """Whether the stream has nothing left to do, now or within so many seconds."""
        deadline = time.monotonic() + within_s
        while not (idle := bool(self._stream.query())) and time.monotonic() < deadline:
            time.sleep(0.05)
        return idle
