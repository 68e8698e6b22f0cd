"""The differences between a plain module, DDP, FSDP1 and FSDP2, behind one interface.

Read `base` first, then the file of the wrapper you use.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from . import ddp, fsdp1, fsdp2, plain
from .base import GradientWatch, OnGradient, Wrapper
from .clean_names import class_name, compiled_modules, inner_of, is_compiled, paths

__frame_role__ = "probe"  # see `hooks.frames`

__all__ = [
    "GradientWatch",
    "OnGradient",
    "Wrapper",
    "compiled_modules",
    "is_compiled",
    "wrap_like",
    "wrapper_class",
    "wrapper_of",
]

_WRAP = {"plain": plain.wrap, "ddp": ddp.wrap, "fsdp1": fsdp1.wrap, "fsdp2": fsdp2.wrap}
_CLASSES: dict[str, type[Wrapper]] = {
    "plain": plain.PlainWrapper,
    "ddp": ddp.DDPWrapper,
    "fsdp1": fsdp1.FSDP1Wrapper,
    "fsdp2": fsdp2.FSDP2Wrapper,
}


def wrapper_of(model: nn.Module) -> Wrapper:
    """The wrapper of the model that the training loop calls.

    Raises:
        ValueError: ``model`` is not a module, or is wrapped in a way that cannot be watched; the message has the
            remedy.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; give the torch.nn.Module that the training loop calls")
    found = {
        cls: _where(model, cls)
        for cls in (nn.DataParallel, DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
    }
    _refuse_data_parallel(found[nn.DataParallel])
    _refuse_replicate(model)
    _refuse_mixtures(found)
    if found[FullyShardedDataParallel] is not None:
        return fsdp1.FSDP1Wrapper(model)
    if found[FSDPModule] is not None:
        return fsdp2.FSDP2Wrapper(model)
    if found[DistributedDataParallel] is None:
        return plain.PlainWrapper(model)
    _refuse_inner_ddp(model, found[DistributedDataParallel])
    return ddp.DDPWrapper(model)


def wrap_like(
    module: nn.Module, description: dict[str, Any], *, group: ProcessGroup | None = None, mesh: DeviceMesh | None = None
) -> nn.Module:
    """Wrap a plain module as `Wrapper.describe` recorded it, over ``mesh``, ``group`` or the whole present world.

    Without a process group, one of this process alone is made and left as the default group. If the size of the mesh
    differs from the recorded one, the kind, the wrapped modules and the precision are kept.

    Args:
        module: the plain module; FSDP2 changes it in place.
        description: what `Wrapper.describe` gave.
        group: process group to wrap over.
        mesh: device mesh to wrap over; at most one of the two is needed.

    Raises:
        ValueError: the recorded kind is unknown.

    Collective: those of the wrapper's constructor; every rank of the world calls it.
    """
    if wrapper_class(description["kind"]).communicates and not dist.is_initialized():
        # A HashStore needs neither a port nor a file.
        dist.init_process_group(_backends_for(module), store=HashStore(), rank=0, world_size=1)
    return _WRAP[description["kind"]](module, description, group, mesh)


def _backends_for(module: nn.Module) -> str:
    """Gloo for tensors of the CPU, and torch's own choice for those of the device that the module is on."""
    kinds = {parameter.device.type for parameter in module.parameters()} - {"cpu", "meta"}
    return ",".join(["cpu:gloo", *(f"{kind}:{dist.get_default_backend_for_device(kind)}" for kind in sorted(kinds))])


def wrapper_class(kind: str) -> type[Wrapper]:
    """The class that belongs to a recorded wrapper kind, to ask what such a wrapper can do.

    Raises:
        ValueError: the kind is unknown; the message lists the valid ones.
    """
    if kind not in _CLASSES:
        raise ValueError(f"wrapper kind {kind!r} is unknown; valid: {', '.join(_CLASSES)}")
    return _CLASSES[kind]


def _where(model: nn.Module, cls: type) -> str | None:
    """Clean name of the first module of a class, or None."""
    return next((name for name, module in paths(model) if isinstance(module, cls)), None)


def _refuse_data_parallel(where: str | None) -> None:
    if where is not None:
        raise ValueError(
            f"model holds nn.DataParallel at {_shown(where)}, which trains all devices from one process; "
            "wrap the module in DistributedDataParallel and start one process per device with torchrun"
        )


def _refuse_replicate(model: nn.Module) -> None:
    for where, module in paths(model):
        if any(class_name(cls) == "torch.distributed._composable.replicate.DDP" for cls in type(module).__mro__):
            raise ValueError(
                f"model was given to replicate() at {_shown(where)}, which hides its DDP from hooks; "
                "wrap the module in DistributedDataParallel"
            )


def _refuse_mixtures(found: dict[Any, str | None]) -> None:
    present = [(name, where) for cls, name in _NAMES.items() if (where := found[cls]) is not None]
    if len(present) > 1:
        (first, one), (second, two) = present[:2]
        raise ValueError(
            f"model mixes {first} (at {_shown(one)}) and {second} (at {_shown(two)}); use one for the whole model"
        )


_NAMES = {
    DistributedDataParallel: "DistributedDataParallel",
    FullyShardedDataParallel: "FullyShardedDataParallel",
    FSDPModule: "fully_shard",
}


def _refuse_inner_ddp(model: nn.Module, where: str | None) -> None:
    inner: nn.Module | None = model
    while inner is not None and not isinstance(inner, DistributedDataParallel):
        inner = inner_of(inner)
    if inner is None:
        raise ValueError(
            f"model holds DistributedDataParallel below its root, at {_shown(where or '')}; give the DDP module itself"
        )


def _shown(name: str) -> str:
    return name or "(root)"
