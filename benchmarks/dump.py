"""What a dump costs in time and memory, against `torch.save` of the same bytes; and what a replay needs to begin.

    OMP_NUM_THREADS=1 python benchmarks/dump.py [--size-mib 1024] [--directory DIR] [--json FILE]

A model with Adam is trained for two steps, the second one on a NaN, once under DDP with one rank and once under FSDP2
with two. Timed are the writing of the dump on the slowest rank, and `torch.save` and fsync of each rank's weights and
optimizer state at the same time into the same directory, each with the CPU seconds of all ranks; then opening the dump
(which checks every file) and rebuilding the first rank's model and optimizer from it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard, NonFiniteError, Recipe
from ddp_nanguard.fault import policy
from ddp_nanguard.replay.rebuild import rebuild
from ddp_nanguard.replay.session import open_session

WIDTH = 1024
JOBS = {"ddp": 1, "fsdp2": 2}
BYTES_PER_PARAMETER = 12
"""Weight and two moments of Adam, float32."""


class Layers(nn.Sequential):
    """Square layers that hold ``size_mib`` MiB together with Adam's state."""

    def __init__(self, size_mib: int) -> None:
        count = max(1, round(size_mib * 2**20 / (WIDTH * WIDTH * BYTES_PER_PARAMETER)))
        super().__init__(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))


def train_step(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def recipe() -> Recipe:
    return Recipe(model=Layers(int(os.environ["BENCHMARK_SIZE_MIB"])), step=train_step)


def wrapped(how: str, model: nn.Module) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(model)
    for layer in model.children():
        fully_shard(layer)
    return fully_shard(model)


# -- measuring ---------------------------------------------------------------------------------------------------------


class Measured:
    """Seconds, seconds of CPU and peak extra resident memory of what runs in it."""

    seconds = 0.0
    cpu_seconds = 0.0
    extra_bytes = 0

    def __enter__(self) -> Measured:
        gc.collect()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
        self._before = _status("VmRSS")
        self._cpu_start = time.process_time()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self.cpu_seconds = time.process_time() - self._cpu_start
        self.extra_bytes = _status("VmHWM") - self._before


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def run_rank(rank: int, how: str, world_size: int, directory: str) -> None:
    """One rank: train into the fault, then save the same tensors with `torch.save`."""
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=_store(directory, world_size))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = wrapped(how, Layers(int(os.environ["BENCHMARK_SIZE_MIB"])))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    measured = Measured()
    write = policy.write_dump

    def timed(request: Any) -> Any:
        with measured:
            return write(request)

    policy.write_dump = timed
    with contextlib.suppress(NonFiniteError):
        _train(model, optimizer, directory)
    saved, size_bytes = _saved(model, optimizer, Path(directory) / f"rank-{rank}.pt")
    found = {
        "dump": measured.seconds,
        "cpu": measured.cpu_seconds,
        "save": saved.seconds,
        "save_cpu": saved.cpu_seconds,
    }
    found |= {"extra": measured.extra_bytes, "bytes": size_bytes}
    Path(directory, f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # without the teardown of process groups


def _store(directory: str, world_size: int) -> dist.Store:
    return dist.FileStore(f"{directory}/store", world_size)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, directory: str) -> None:
    guard = NanGuard(model, optimizer, dump_dir=f"{directory}/dumps", replay="dump:recipe")
    for batch in guard.steps([torch.ones(2, WIDTH), torch.full((2, WIDTH), math.nan)]):
        train_step(guard, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def _saved(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> tuple[Measured, int]:
    tensors = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    local = [getattr(tensor, "_local_tensor", tensor).detach() for tensor in tensors]
    dist.barrier()
    with Measured() as measured, open(path, "wb") as file:
        torch.save(local, file)
        file.flush()
        os.fsync(file.fileno())
    return measured, path.stat().st_size


def measure(how: str, world_size: int, root: Path) -> dict[str, Any]:
    """Runs one job and the start of its replay."""
    directory = tempfile.mkdtemp(dir=root)
    try:
        mp.start_processes(run_rank, (how, world_size, directory), nprocs=world_size, start_method="spawn")
        ranks = [json.loads(Path(directory, f"rank-{rank}.json").read_text()) for rank in range(world_size)]
        (dump,) = Path(directory, "dumps").glob("step-*")
        with Measured() as opening:
            session = open_session([str(dump)], 0, "dump:recipe", "cpu")
        with Measured() as rebuilding:
            rebuild(session.dump, 0, session.recipe(), session.device, alone=True)
        size_bytes = sum(rank["bytes"] for rank in ranks)
        return {
            "job": f"{how}, {world_size} rank{'s' if world_size > 1 else ''}",
            "size_mib": size_bytes / 2**20,
            "dump_mb_per_s": size_bytes / 1e6 / max(rank["dump"] for rank in ranks),
            "save_mb_per_s": size_bytes / 1e6 / max(rank["save"] for rank in ranks),
            "dump_cpu_s": sum(rank["cpu"] for rank in ranks),
            "save_cpu_s": sum(rank["save_cpu"] for rank in ranks),
            "extra_mib": max(rank["extra"] for rank in ranks) / 2**20,
            "open_s": opening.seconds,
            "rebuild_s": rebuilding.seconds,
        }
    finally:
        shutil.rmtree(directory)


def _line(row: dict[str, Any]) -> str:
    speeds = f"{row['dump_mb_per_s']:>7.0f} MB/s{row['save_mb_per_s']:>7.0f} MB/s"
    cpu = f"{row['dump_cpu_s']:>6.1f} s{row['save_cpu_s']:>6.1f} s"
    times = f"{row['open_s']:>6.1f} s{row['rebuild_s']:>7.1f} s"
    return f"{row['job']:<16}{row['size_mib']:>6.0f}{speeds}{cpu}{row['extra_mib']:>6.0f} MiB{times}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size-mib", type=int, default=1024, help="weights and optimizer state of all ranks together")
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk that is to be measured")
    parser.add_argument("--repeats", type=int, default=1, help="the fastest counts")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    os.environ["BENCHMARK_SIZE_MIB"] = str(options.size_mib)
    sys.path.insert(0, str(Path(__file__).parent))
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores")
    print(
        f"{'job':<16}{'MiB':>6}{'dump':>12}{'torch.save':>12}{'CPU':>8}{'CPU':>8}{'extra':>10}{'open':>8}{'rebuild':>9}"
    )
    rows = []
    for how, world_size in JOBS.items():
        found = [measure(how, world_size, options.directory.resolve()) for _ in range(options.repeats)]
        row = max(found, key=lambda each: float(each["dump_mb_per_s"]))
        row["save_mb_per_s"] = max(each["save_mb_per_s"] for each in found)
        print(_line(row), flush=True)
        rows.append(row)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
