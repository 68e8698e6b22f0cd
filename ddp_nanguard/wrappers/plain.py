"""A model without a wrapper: one process, or parallelism that happens outside the module."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .base import Wrapper


class PlainWrapper(Wrapper):
    """A plain module, compiled or not."""

    kind: ClassVar[str] = "plain"
    communicates: ClassVar[bool] = False

    def will_reduce(self) -> bool:
        """Always False: a plain module does not communicate."""
        return False

    def pending_gradient_bytes(self) -> int | None:
        """None in a world of one rank, else 0: hooks of the user may communicate and change the gradients."""
        return 0 if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 else None


def wrap(
    module: nn.Module, description: dict[str, Any], group: ProcessGroup | None, mesh: DeviceMesh | None
) -> nn.Module:
    """Return ``module`` itself; the other arguments are those that all wrappers take."""
    return module
