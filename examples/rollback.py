"""Goes back instead of ending: a bad batch costs the steps since the last checkpoint, and is not met again.

    torchrun --nproc-per-node 2 examples/rollback.py

A record of the data is corrupt. Every rank raises `NonFiniteError` in the same step, before the update. Each catches
it, loads the last checkpoint, and makes a new guard, whose steps begin at the checkpoint's. ``guard.steps(skip=...)``
passes over the batches of that step on all ranks. A checkpoint is written only after ``guard.check()``, so that its
weights have been looked at. After `MAX_ROLLBACKS` the error goes on its way: a job that fails again and again has
another fault than a bad record. A record that is bad comes again in the next epoch, in another batch: take it out.
"""

from __future__ import annotations

import argparse
import gc
import os
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_nanguard import NanGuard, NonFiniteError

MAX_ROLLBACKS = 3
CHECKPOINT_EVERY = 4
BATCH_SIZE = 8
NUM_RECORDS = 640
CORRUPT = [100]
"""Indices of the records that no training should have met."""


def records() -> TensorDataset:
    """Points of a noisy plane, one of them corrupt."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(NUM_RECORDS, 4, generator=generator)
    targets = values.sum(1, keepdim=True) + 0.1 * torch.randn(NUM_RECORDS, 1, generator=generator)
    values[CORRUPT, 2] = float("inf")
    return TensorDataset(values, targets)


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **where: int) -> None:
    """Rank 0 writes for all, under another name first; every rank waits until it is there."""
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **where}
        torch.save(state, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)
    dist.barrier()


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Step, epoch and batch at which the checkpoint goes on."""
    state: dict[str, Any] = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    optimizer.zero_grad()  # those of the step that was given up are still there
    return state


def train_from(
    where: dict[str, Any], guard: NanGuard, optimizer: torch.optim.Optimizer, num_steps: int, out: Path
) -> Tensor:
    """Trains to the last step, or until the guard stops it; the last loss."""
    data, epoch, start = records(), where["epoch"], where["batch"]
    sampler = DistributedSampler(data)
    while guard.step < num_steps:
        sampler.set_epoch(epoch)  # the same seed and epoch give the same order: positions mean the same batches
        loader = islice(DataLoader(data, BATCH_SIZE, sampler=sampler), start, None)
        batches = guard.steps(loader, epoch=epoch, start=start, skip=out / "nan_dumps" / "skips.jsonl")
        for values, targets in batches:
            loss = nn.functional.mse_loss(guard(values), targets)
            guard.watch(loss=loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if guard.step % CHECKPOINT_EVERY == 0:
                guard.check()  # the weights of the update that has just been: bad ones are not saved
                position = batches.position
                save(
                    out / "checkpoint.pt", guard.module, optimizer, step=guard.step, epoch=epoch, batch=position[1] + 1
                )
        epoch, start = epoch + 1, 0
    return loss.detach()


def train(num_steps: int, out: Path) -> tuple[float, int]:
    """Trains with rollbacks; the last loss, and how many there were."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    out.mkdir(parents=True, exist_ok=True)
    save(out / "checkpoint.pt", net, optimizer, step=0, epoch=0, batch=0)
    num_rollbacks = 0
    while True:
        where = load(out / "checkpoint.pt", net, optimizer)
        guard = NanGuard(model, optimizer, dump_dir=str(out / "nan_dumps"), first_step=where["step"])
        try:
            loss = train_from(where, guard, optimizer, num_steps, out)
            guard.close()
            return loss.item(), num_rollbacks
        except NonFiniteError as error:
            guard.close()
            if num_rollbacks == MAX_ROLLBACKS:
                raise
            num_rollbacks += 1
            if dist.get_rank() == 0:
                print(f"step {error.report.step} is given up; back to the last checkpoint", flush=True)


def main() -> None:
    """Parses the command line and runs one worker of the job."""
    parser = argparse.ArgumentParser(description="Trains through a corrupt record. Start it with torchrun.")
    parser.add_argument("--steps", type=int, default=36, help="number of steps after which the training ends")
    parser.add_argument("--out", type=Path, default=Path("rollback"), help="directory for checkpoint and dumps")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    loss, num_rollbacks = train(options.steps, options.out)
    if dist.get_rank() == 0:
        print(f"trained to step {options.steps} with {num_rollbacks} rollback(s): loss {loss:.3f}", flush=True)
    gc.collect()  # with gloo, a DDP module that is still alive here can hang the process at its end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
