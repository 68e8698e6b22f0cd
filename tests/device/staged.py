"""Collectives of tensors on a simulated device, staged through gloo; like NCCL the backend takes none of the CPU."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import distributed_c10d
from torch.futures import Future

from .simulated_cuda import activate, unlogged

NAME = "staged"


class StagedGroup(dist.ProcessGroup):
    """Copies to the host, asks gloo, copies back: the calls that DDP, FSDP and a verdict make."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._name = "0"

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        hosts = _on_host(tensors)
        self.gloo.allreduce(hosts, opts or dist.AllreduceOptions()).wait()
        return _written(tensors, hosts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        hosts = _on_host(tensors)
        self.gloo.broadcast(hosts, opts).wait()
        return _written(tensors, hosts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        hosts = [[torch.empty_like(tensor, device="cpu") for tensor in each] for each in outputs]
        self.gloo.allgather(hosts, _on_host(inputs)).wait()
        return _written([t for each in outputs for t in each], [t for each in hosts for t in each])

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        (mine,) = _on_host([given])
        parts = [torch.empty_like(mine) for _ in range(self.size())]
        self.gloo.allgather([parts], [mine]).wait()
        return _written([output], [torch.cat([part.flatten() for part in parts]).view(output.shape)])

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        (host,) = _on_host([given])
        averages = opts is not None and opts.reduceOp == dist.ReduceOp.AVG
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        self.gloo.allreduce([host], options).wait()
        host = host / self.size() if averages else host
        return _written([output], [host.view(self.size(), -1)[self.rank()].view(output.shape)])

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self._allgather_base(output, given, opts)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self._reduce_scatter_base(output, given, opts)

    def barrier(self, opts: Any = None) -> Any:
        self.gloo.barrier(dist.BarrierOptions()).wait()
        return _written([], [])

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:  # torch's name
        return NAME


def _on_host(tensors: list[Tensor]) -> list[Tensor]:
    if any(not tensor.is_cuda for tensor in tensors):
        raise RuntimeError("No backend type associated with device type cpu")
    with unlogged():
        return [tensor.detach().cpu() for tensor in tensors]


def _written(tensors: list[Tensor], hosts: list[Tensor]) -> Any:
    with unlogged():
        for tensor, host in zip(tensors, hosts, strict=True):
            tensor.copy_(host)
    done: Future[Any] = Future(devices=[tensors[0].device] if tensors else None)
    done.set_result(tensors)
    return _create_work_from_future(done)


def register() -> None:
    """Make this process one with simulated devices, and with this backend, also for scripts that ask for NCCL."""
    activate()
    dist.Backend.register_backend(NAME, StagedGroup, devices=["cuda"])
    dist.Backend.default_device_backend_map["cuda"] = NAME
    dist.is_nccl_available = lambda: True
    for name in ("init_process_group", "new_group"):
        asked = _as_staged(getattr(distributed_c10d, name))
        setattr(distributed_c10d, name, asked)
        setattr(dist, name, asked)


def _as_staged(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def make_staged(*args: Any, **given: Any) -> Any:
        args = tuple(_renamed(arg) for arg in args)
        return make(*args, **given | {name: _renamed(given[name]) for name in ("backend",) if name in given})

    return make_staged


def _renamed(backend: Any) -> Any:
    return backend.replace("nccl", NAME) if isinstance(backend, str) else backend


def environment() -> dict[str, str]:
    """What gives interpreters that a test does not fork the simulated devices."""
    here = Path(__file__).parent
    return {"PYTHONPATH": os.pathsep.join([str(here / "interpreter"), str(here.parents[1])]), "OMP_NUM_THREADS": "1"}
