"""What a second look takes, against a step of training: time of each of its runs, and the peak of memory.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/second_look.py [--wrapper ddp | fsdp2 | fsdp1 | plain]

A 4-block transformer (width 256, 128 tokens, batch 8) whose third block divides by zero on the last rank in one step.
Peaks are of resident memory above what the process had before the step, read by a thread every millisecond.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # after the path of this repository
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.machine import described, machine
from benchmarks.trace import BATCH, BLOCKS, TOKENS, WIDTH, Block
from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.second_look.run import StepAgain

STEPS, BAD = 8, 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            values = block(values)
            if index == 2:
                values = values / divisor
        return values


def wrapped(net: nn.Module, wrapper: str) -> nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(net)
    if wrapper == "fsdp1":
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    if wrapper == "fsdp2":
        for block in net.blocks:  # type: ignore[union-attr]  # a ModuleList
            fully_shard(block)
        return fully_shard(net)
    return net


def train_step(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(*batch).square().mean()  # type: ignore[no-any-return]  # a module returns Any


class Peak:
    """The largest resident size within a context, in MiB above that at its beginning."""

    def __init__(self) -> None:
        self.mib = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        begin, stop = _resident_mib(), threading.Event()

        def look() -> None:
            while not stop.wait(0.001):
                self.mib = max(self.mib, _resident_mib() - begin)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def _resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrapper", choices=["plain", "ddp", "fsdp1", "fsdp2"], default="ddp")
    wrapper = parser.parse_args().wrapper
    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    torch.manual_seed(0)
    model = wrapped(Net(), wrapper)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = NanGuard(model, optimizer, dump_dir=None)
    runs: list[tuple[bool, float, float]] = []
    run = StepAgain.run

    def timed(self: StepAgain, *, traced: bool = False, **how: Any) -> Any:
        peak, start = Peak(), time.perf_counter()
        with peak.measured():
            found = run(self, traced=traced, **how)
        runs.append((traced, time.perf_counter() - start, peak.mib))
        return found

    StepAgain.run = timed  # type: ignore[method-assign]
    steps: list[float] = []
    step_peak, look_s = Peak(), 0.0
    for step in range(STEPS):
        divisor = torch.tensor(0.0 if (step, rank) == (BAD, last) else 1.0)
        start = time.perf_counter()
        loss = guard.run(train_step, (torch.randn(BATCH, TOKENS, WIDTH), divisor))
        with step_peak.measured():
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        done = time.perf_counter()
        try:
            optimizer.step()
        except NonFiniteError:
            look_s = time.perf_counter() - done
            break
        optimizer.zero_grad()
        steps.append(time.perf_counter() - start)
    if rank == last:
        step_s = statistics.median(steps[2:])
        print(f"{wrapper}, {last + 1} ranks; {described(machine())}")
        print(f"a step {1000 * step_s:.0f} ms; its backward's peak {step_peak.mib:.0f} MiB")
        print(f"verdict, blame and second look {1000 * look_s:.0f} ms: {look_s / step_s:.1f} steps")
        for traced, seconds, mib in runs:
            what = "every operator traced" if traced else "every layer watched"
            print(f"  {what}: {1000 * seconds:.0f} ms, {seconds / step_s:.2f} steps, peak {mib:.0f} MiB")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
