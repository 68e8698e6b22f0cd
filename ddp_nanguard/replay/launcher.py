"""Whether torchrun has started this process beside others, and as which of them.

``RANK`` and ``WORLD_SIZE`` alone do not say so: the container of a job has them too, also in a shell within it.
"""

from __future__ import annotations

import os

import torch.distributed as dist


def rank() -> int:
    """This process's rank among all that torchrun started; 0 without it."""
    return _number("RANK", 0)


def local_rank() -> int:
    """This process's rank among those on its node; 0 without torchrun."""
    return _number("LOCAL_RANK", 0)


def world_size() -> int:
    """Number of processes that torchrun started; 1 without it."""
    return _number("WORLD_SIZE", 1)


def _number(variable: str, without: int) -> int:
    return int(os.environ[variable]) if dist.is_torchelastic_launched() else without
