"""Functions of torch.distributed as a script meets them that is replayed alone; see `intercept.sitecustomize`.

Each has the name of torch's own function and gets that one first.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from ddp_nanguard.diagnosis.experiments import DTYPES
from ddp_nanguard.dump.read import open_dump
from ddp_nanguard.tensors.accelerator import accelerator

from .ending import end_cannot
from .request import ReplayRequest
from .stand_in import NAME, StandIn

Theirs = Callable[..., Any]


def init_process_group(theirs: Theirs, backend: Any = None, *_: Any, **given: Any) -> None:
    """A group of the recorded size in which this process stands for all ranks; nothing is waited for."""
    request = ReplayRequest.from_environment()
    _leave_if_other(given.get("rank", -1), request.as_rank)
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _make, devices=sorted({"cpu", "cuda", _device_type()}))
    theirs(NAME, store=HashStore(), rank=request.as_rank, world_size=request.world_size)
    _call_it(backend)


def _make(store: Any, rank: int, size: int, timeout: Any = None) -> StandIn:
    return StandIn(rank, size)


def _leave_if_other(asked: int, rank: int) -> None:
    """A script that starts its ranks itself starts all of them: only one is needed."""
    launched = int(os.environ.get("RANK", rank)) if int(os.environ.get("WORLD_SIZE", 1)) > 1 else rank
    is_spawned = multiprocessing.parent_process() is not None
    if (asked if asked >= 0 and is_spawned else launched) != rank:
        sys.stdout.flush()
        os._exit(0)


def _call_it(backend: Any) -> None:
    """Let the script read the name of the backend that it asked for."""
    group = dist.group.WORLD
    name = str(backend).lower() if backend is not None else ""
    if group is not None and name in dist.Backend.backend_list:
        distributed_c10d._world.pg_map[group] = (dist.Backend(name), distributed_c10d._world.pg_map[group][1])


# -- objects that another rank alone has -------------------------------------------------------------------------------


def broadcast_object_list(
    theirs: Theirs, objects: Any, src: int | None = None, group: Any = None, device: Any = None, *rest: Any, **more: Any
) -> Any:
    """Where this rank is the source it has what it gives; what another one gives is known to nobody."""
    _require_own("broadcast_object_list", src, group, more.get("group_src"))
    return theirs(objects, src, group, device, *rest, **more)


def scatter_object_list(
    theirs: Theirs, output: Any, given: Any = None, src: int | None = None, group: Any = None, **more: Any
) -> Any:
    """As `broadcast_object_list`."""
    _require_own("scatter_object_list", src, group, more.get("group_src"))
    output[0] = given[dist.get_rank(group)]


def recv_object_list(
    theirs: Theirs, objects: Any, src: int | None = None, group: Any = None, *rest: Any, **more: Any
) -> Any:
    """Nobody sends."""
    _cannot_be_answered("recv_object_list", src)


def _require_own(name: str, src: int | None, group: Any, group_src: int | None) -> None:
    if src is None:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        src = ranks[group_src or 0]
    if src != dist.get_rank():
        _cannot_be_answered(name, src)


def _cannot_be_answered(name: str, src: int | None) -> NoReturn:
    rank = dist.get_rank()
    remedy = f"let this process be rank {src} in the script with --as-rank {src or 0}" if src is not None else "run all"
    request = ReplayRequest.from_environment()
    end_cannot(
        request,
        open_dump(list(request.paths), verify=False),
        request.rank or 0,
        True,
        f"the script waits in {name} for an object of rank {src}, and rank {rank} is alone: {remedy} "
        "(batch, weights and random states are those of the replayed rank all the same)",
        waits_for=src,
    )


# -- sharded wrappers: over this rank alone, in a world of N -----------------------------------------------------------


def fully_shard(theirs: Theirs, module: Any, **options: Any) -> Any:
    """FSDP2 over a mesh of this rank alone: no other rank's part of the weights is at hand."""
    mesh = options.get("mesh")
    device = mesh.device_type if mesh is not None else _device_type()
    options.pop("dp_mesh_dims", None)
    if options.get("reshard_after_forward") not in (None, True, False):
        options["reshard_after_forward"] = True  # a number of ranks, of which there is one
    return theirs(module, **{**options, "mesh": _own_mesh(device)})


def DistributedDataParallel(theirs: Theirs, wrapper: Any, module: Any, *args: Any, **options: Any) -> None:  # noqa: N802
    """DDP over the stand-in; an experiment with another dtype has to cast before the buckets are made."""
    name = ReplayRequest.from_environment().experiment
    if name in DTYPES:
        module.to(DTYPES[name])
    theirs(wrapper, module, *args, **options)


def FullyShardedDataParallel(theirs: Theirs, wrapper: Any, module: Any, *args: Any, **options: Any) -> None:  # noqa: N802
    """FSDP1 over a group of this rank alone, as `fully_shard`."""
    options = {name: value for name, value in options.items() if name not in ("process_group", "device_mesh")}
    strategy = options.get("sharding_strategy")
    if strategy is not None and "HYBRID" in strategy.name:  # takes a pair of groups
        options["sharding_strategy"] = None
    theirs(wrapper, module, _own_mesh(_device_type()).get_group(), *args[1:], **options)


def _device_type() -> str:
    here = accelerator()
    return "cpu" if here is None else here.type


_meshes: dict[str, DeviceMesh] = {}


def _own_mesh(device: str) -> DeviceMesh:
    if device not in _meshes:
        _meshes[device] = DeviceMesh(device, [dist.get_rank()])
    return _meshes[device]
