"""What a guard asks of the device a model computes on, through torch's names that hold for every accelerator."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


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


def on_device(number: Tensor, device: torch.device) -> Tensor:
    """A tensor of shape () on a device. Host sync: none; from the CPU it goes along as the argument of a kernel."""
    if number.device.type == "cpu" and device.type != "cpu":
        return torch.full((), number.item(), dtype=number.dtype, device=device)
    return number.to(device)
