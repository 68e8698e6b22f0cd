"""Whether torchrun has started this process beside others, and as which of them.

``RANK`` and ``WORLD_SIZE`` alone do not say so: the container of a job has them too, also in a shell within it.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from ddp_nanguard.tensors.accelerator import accelerator


def rank() -> int:
    """This process's rank among all that torchrun started; 0 without it."""
    return _number("RANK", 0)


def local_rank() -> int:
    """This process's rank among those on its node; 0 without torchrun."""
    return _number("LOCAL_RANK", 0)


def world_size() -> int:
    """Number of processes that torchrun started; 1 without it."""
    return _number("WORLD_SIZE", 1)


def local_world_size() -> int:
    """Number of processes that torchrun started on this node; 1 without it."""
    return _number("LOCAL_WORLD_SIZE", 1)


def own_device() -> torch.device:
    """This process's accelerator among those of its node, which processes share where there are fewer; else the CPU."""
    kind = accelerator()
    # MPS has no float64, and would refuse what was trained on a CPU: it is taken only where it is asked for
    if kind is None or kind.type == "mps":
        return torch.device("cpu")
    return torch.device(kind.type, local_rank() % torch.accelerator.device_count())


def backend_for(device: torch.device, is_named: bool) -> str:
    """The backend that reduces tensors of a device; gloo where processes share one, which NCCL refuses.

    Args:
        device: of this process.
        is_named: whether all processes were given this one.
    """
    num_devices = 1 if is_named and device.index is not None else torch.accelerator.device_count()
    shares = device.type != "cpu" and local_world_size() > num_devices
    return dist.Backend.GLOO if shares else dist.get_default_backend_for_device(device)


def _number(variable: str, without: int) -> int:
    return int(os.environ[variable]) if dist.is_torchelastic_launched() else without
