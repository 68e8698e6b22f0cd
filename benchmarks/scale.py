"""How the guard's cost grows: with layers, parameters, micro-batches and ranks; in memory; and in the fault round.

    python benchmarks/scale.py [--steps 30] [--max-ranks 32] [--json FILE] [--plot DIRECTORY]

Every point is a launch of real processes with a gloo group of their own, one thread each. Per point the cost is the
median difference between a guarded and an unguarded step of the same round, and the processor time that the training
thread spent on it, averaged over ranks; where more ranks than cores run, only the latter says anything about the guard.
The verdict's collective is timed by itself, behind a barrier. `cost_model` fits these points.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  # after the path of this repository
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from benchmarks import cost_model, fault_round, memory  # noqa: E402
from benchmarks.limit import Stopwatch  # noqa: E402
from benchmarks.machine import load, machine  # noqa: E402
from benchmarks.watches import EVERY, EVERYTHING, Guard, Watch  # noqa: E402
from tests import rank_processes  # noqa: E402
from tests.rank_processes import run_ranks  # noqa: E402

WARM_UP = 5
TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Shape:
    """What is trained: square linear layers in a row."""

    ranks: int = 2
    layers: int = 30
    width: int = 16
    micro_batches: int = 1

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(self.layers)))


SERIES: dict[str, list[Shape]] = {
    "layers": [Shape(layers=layers) for layers in (10, 30, 100, 300, 1000)],
    "width": [Shape(layers=10, width=width) for width in (16, 64, 256, 512, 1024)],
    "micro_batches": [Shape(micro_batches=count) for count in (1, 2, 4, 8)],
    "ranks": [Shape(ranks=ranks) for ranks in (2, 4, 8, 16, 32)],
}


class Loop:
    """Training of a shape, with a watch; gradients add up over micro-batches."""

    def __init__(self, shape: Shape, watch: Watch) -> None:
        self.shape, self.watch = shape, watch
        self.model = DistributedDataParallel(shape.model())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        watch.start(self.model, self.optimizer)

    def step(self, batch: Tensor) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.thread_time()
        for index, item in enumerate(self.watch.batches([batch] * self.shape.micro_batches)):
            self.model.require_backward_grad_sync = index + 1 == self.shape.micro_batches
            loss = self.model(item).square().mean()
            self.watch.after_forward(loss)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - wall, time.thread_time() - cpu


def measure(rank: int, world_size: int, shape: Shape, num_steps: int) -> dict[str, float]:
    """Body of a rank: one point."""
    loops = [Loop(shape, Watch()), Loop(shape, Guard(EVERY, **EVERYTHING))]
    times: list[list[tuple[float, float]]] = [[], []]
    for index in range(WARM_UP + num_steps):
        batch = torch.randn(8, shape.width)
        for which in (0, 1) if index % 2 else (1, 0):
            dist.barrier()
            took = loops[which].step(batch)
            if index >= WARM_UP:
                times[which].append(took)
    with Stopwatch() as watch:
        loops[1].step(torch.randn(8, shape.width))
    loops[1].watch.close()
    added = [tuple(a - b for a, b in zip(on, off, strict=True)) for off, on in zip(*times, strict=True)]
    return {
        "plain_s": statistics.median(wall for wall, _ in times[0]),
        "plain_cpu_s": statistics.median(cpu for _, cpu in times[0]),
        "added_s": statistics.median(wall for wall, _ in added),
        "added_cpu_s": statistics.median(cpu for _, cpu in added),
        "num_probes": watch.num_probes,
        "size_bytes": watch.size_bytes,
        "collective_s": _collective_s(num_steps),
    }


def _collective_s(repeats: int) -> float:
    """The verdict's own 16 bytes, from a barrier on."""
    found = []
    for _ in range(repeats):
        words = torch.zeros(2, dtype=torch.int64)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(words, op=dist.ReduceOp.MAX)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def point(series: str, shape: Shape, num_steps: int) -> dict[str, Any]:
    """One launch."""
    before = load()
    ranks = run_ranks(measure, shape.ranks, TIMEOUT_S, shape=shape, num_steps=num_steps)
    means = {name: statistics.mean(rank[name] for rank in ranks) for name in ranks[0]}
    whole = {name: int(ranks[0][name]) for name in ("num_probes", "size_bytes")}
    return {"series": series, **asdict(shape), **means, **whole, "load": before}


def _line(found: dict[str, Any]) -> str:
    shape = "{layers:>6}{width:>7}{micro_batches:>7}{ranks:>7}{num_probes:>8}".format(**found)
    times = [1000 * found[name] for name in ("plain_s", "added_s", "added_cpu_s", "collective_s")]
    milliseconds = "".join(f"{value:>12.3f}" for value in times)
    return f"{found['series']:<14}{shape}{found['size_bytes'] / 1e6:>9.2f}{milliseconds}{found['load']:>7.1f}"


HEAD = (
    f"{'series':<14}{'layers':>6}{'width':>7}{'micro':>7}{'ranks':>7}{'probes':>8}{'MB':>9}"
    f"{'plain ms':>12}{'added ms':>12}{'cpu ms':>12}{'verdict ms':>12}{'load':>7}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30, help="per point, a third of it from 16 ranks on")
    parser.add_argument("--max-ranks", type=int, default=32)
    parser.add_argument("--max-layers", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--plot", type=Path, help="directory for the plots")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rank_processes.PRELOAD += ["benchmarks.scale"]
    found = {"machine": machine(), "points": _points(options)}
    found["model"] = cost_model.fitted(found["points"], os.cpu_count() or 1)
    print("\n" + cost_model.described(found["model"]))
    found["memory"] = memory.measured()
    print("\n" + memory.table(found["memory"]))
    found["fault_round"] = fault_round.measured([ranks for ranks in (2, 4, 8, 16, 32) if ranks <= options.max_ranks])
    print("\n" + fault_round.table(found["fault_round"]))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.plot:
        from benchmarks import plots

        plots.scale(found, options.plot)


def _points(options: argparse.Namespace) -> list[dict[str, Any]]:
    print(HEAD)
    points = []
    for series, shapes in SERIES.items():
        for shape in shapes:
            if shape.ranks <= options.max_ranks and shape.layers <= options.max_layers:
                points.append(point(series, shape, options.steps if shape.ranks < 16 else max(5, options.steps // 3)))
                print(_line(points[-1]), flush=True)
    return points


if __name__ == "__main__":
    main()
