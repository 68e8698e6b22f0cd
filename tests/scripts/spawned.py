"""Starts its ranks itself, by ``torch.multiprocessing.spawn``; each rank wants groups, meshes and objects of all."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard


def work(rank, world_size, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    names = [None] * world_size
    dist.all_gather_object(names, f"rank {rank}")
    dist.barrier()
    assert dist.get_backend() == "gloo"
    assert dist.get_rank() == rank and dist.get_world_size() == len(names) == world_size
    even = dist.new_group([0, world_size - 1], backend="gloo")
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("data",))
    assert mesh.size() == world_size and (rank not in (0, world_size - 1) or dist.get_world_size(even) == 2)
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer)
    for step in range(3):
        x = torch.rand(4, 4) - 0.9 * (rank == 1 and step == 2)
        loss = guard(x.log()).mean()
        guard.watch(loss=loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    mp.spawn(work, args=(2, sys.argv[1]), nprocs=2)
