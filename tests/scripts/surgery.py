"""Gradients of two losses put together by hand after the backward, and averaged: 0/0 where one loss has no sample.

That is so in step 2 on the last rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ddp_nanguard import NanGuard


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = NanGuard(model, optimizer, dump_dir="nan_dumps")
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(4, 6, generator=generator) for _ in range(4)]
    has_second = [float(not (rank == world_size - 1 and step == 2)) for step in range(4)]
    for batch, has in guard.steps(zip(batches, has_second, strict=True)):
        first, second = model(batch).pow(2).mean(0)
        guard.watch(first=first, second=second * has)
        ours = torch.autograd.grad(first, list(model.parameters()), retain_graph=True)
        (second * has).backward()
        theirs = [parameter.grad for parameter in model.parameters()]
        share = sum((u * v).sum() for u, v in zip(ours, theirs, strict=True)) / sum(v.pow(2).sum() for v in theirs)
        for parameter, u, v in zip(model.parameters(), ours, theirs, strict=True):
            parameter.grad = u + v - share * v
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
