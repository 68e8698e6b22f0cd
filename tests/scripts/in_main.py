"""``main()`` with a loader and its sampler; the wrapper and how precise it computes are arguments."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_nanguard import NanGuard, is_replay


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrapper", default="ddp")
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--share", action="store_true")
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--out")
    return parser.parse_args()


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.dropout(self.norm(self.first(x)).relu(), 0.2, self.training))


def own_device() -> torch.device:
    """The GPU of this rank, where there are some."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def wrapped(model: nn.Module, wrapper: str, device: torch.device) -> nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    if wrapper == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=device)
    if wrapper == "fsdp2":
        fully_shard(model.last)
        fully_shard(model)
    return model


def balanced_loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Each class counts the same, so that one without a sample divides 0 by 0."""
    targets = F.one_hot(y, 4).float()
    errors = F.cross_entropy(logits.float(), y, reduction="none")[:, None]
    return ((errors * targets).sum(0) / targets.sum(0)).mean()


@dataclass
class Batch:
    """What the loop gets."""

    x: torch.Tensor
    y: torch.Tensor


def collated(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> Batch:
    return Batch(torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows]))


def loader(world_size: int) -> DataLoader:
    """In the fourth batch of the last rank a class is absent."""
    x = torch.randn(48 * world_size, 8, generator=torch.Generator().manual_seed(3))
    y = (torch.arange(len(x)) // world_size) % 4
    absent = y[world_size - 1 :: world_size][24:32]
    absent[absent == 3] = 2
    dataset = TensorDataset(x, y)
    sampler = DistributedSampler(dataset, shuffle=False)
    return DataLoader(dataset, batch_size=8, sampler=sampler, collate_fn=collated)


def main() -> None:
    args = parsed()
    device = own_device()
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    if args.share:
        names = ["run 7" if rank == 0 else None]
        dist.broadcast_object_list(names, src=0)
    model = wrapped(Net(args.width).to(device), args.wrapper, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0) if args.amp else None
    guard = NanGuard(model, optimizer, scaler=scaler)
    average = Net(args.width)
    guard.register(average=average)
    if args.out and not is_replay():
        print("a server is told of the run", flush=True)
    batches = loader(dist.get_world_size())
    for step, batch in enumerate(batches if args.bare else guard.steps(batches)):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.amp):
            logits = guard(batch.x.to(device))
        loss = balanced_loss(logits, batch.y.to(device))
        guard.watch(loss=loss)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if (step + 1) % args.accumulate:
            continue
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        print(f"step {step} done", flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)
