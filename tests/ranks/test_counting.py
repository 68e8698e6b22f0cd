"""The counter itself sees every kind of communication and every kind of host read."""

from __future__ import annotations

from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.counting import counting
from tests.ranks import run_ranks


def _everything(rank: int, world_size: int) -> Any:
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    store = dist.distributed_c10d._get_default_store()
    with counting() as ddp:
        model(torch.ones(4, 3)).sum().backward()
    with counting() as direct:
        dist.all_reduce(torch.ones(4))
        dist.barrier()
        dist.all_gather_object([None, None], {"rank": rank})
        if rank == 0:
            dist.send(torch.ones(2), 1)
        else:
            dist.recv(torch.ones(2), 0)
        store.set(f"key {rank}", "value")
    with counting() as nothing:
        torch.ones(3) + 1
    return ddp, direct, nothing


def test_communication_is_seen_whoever_issues_it() -> None:
    for rank, (ddp, direct, nothing) in enumerate(run_ranks(_everything)):
        assert ddp.calls == {} and dict(ddp.operators) == {"c10d::allreduce_": 1} and ddp.operator_bytes == [4 * 8]
        point_to_point = "recv" if rank else "send"
        assert dict(direct.calls) == {"all_reduce": 1, "barrier": 1, "all_gather_object": 1, point_to_point: 1}
        assert direct.call_bytes[0] == 16 and direct.operators["c10d::allgather_"] == 2
        assert dict(direct.store) == {"set": 1}
        assert not nothing.calls and not nothing.operators and not nothing.store and not nothing.host_reads


def test_host_reads_are_seen() -> None:
    values = torch.arange(3.0)
    reads = {
        "item": lambda: values[0].item(),
        "bool": lambda: bool(values[1]),
        "float": lambda: float(values[0]),
        "int": lambda: int(values[0]),
        "tolist": lambda: values.tolist(),
        "numpy": lambda: values.numpy(),
        "array": lambda: numpy.asarray(values),
        "cpu": lambda: values.cpu(),
        "equal": lambda: torch.equal(values, values),
        "nonzero": lambda: values.nonzero(),
        "mask": lambda: values[values > 1],
        "if": lambda: 1 if values.sum() > 0 else 0,
    }
    for name, read in reads.items():
        with counting() as counts:
            read()
        assert sum(counts.host_reads.values()) == 1, (name, counts.host_reads)


def test_everything_is_put_back() -> None:
    before = (dist.all_reduce, torch.Tensor.tolist, dist.Store.set)
    with counting():
        assert dist.all_reduce is not before[0]
    assert (dist.all_reduce, torch.Tensor.tolist, dist.Store.set) == before
