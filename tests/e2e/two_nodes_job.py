"""Trains on any number of nodes; rank 1 meets a NaN in step 2. Its argument is where the dump goes."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=sys.argv[1], timeout_s=20)
    batches = [torch.ones(2, 4) for _ in range(4)]
    if dist.get_rank() == 1:
        batches[2][0, 0] = torch.nan
    for batch in guard.steps(batches):
        loss = guard(batch).mean()
        guard.watch(loss=loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
