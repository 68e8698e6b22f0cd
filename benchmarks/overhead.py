"""What the guard costs: guarded and unguarded training steps in alternation, in one process per rank.

    torchrun --nproc-per-node 2 benchmarks/overhead.py [--steps 60] [--json FILE]

Per model and wrapper: the median of the paired ratios guarded / unguarded, their quartiles, and the median unguarded
step. One thread per rank; the two models are equal and see the same data; the order within a pair alternates.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def resnet() -> tuple[nn.Module, Callable[[], Tensor]]:
    body = [nn.Conv2d(3, 32, 3, padding=1), *(ResidualBlock(32) for _ in range(6))]
    model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return model, lambda: torch.randn(16, 3, 32, 32)


def transformer() -> tuple[nn.Module, Callable[[], Tensor]]:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), lambda: torch.randn(8, 128, 256)


def mlp() -> tuple[nn.Module, Callable[[], Tensor]]:
    sizes = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*sizes), lambda: torch.randn(64, 64)


MODELS = {"transformer": transformer, "resnet": resnet, "mlp": mlp}


def wrap(model: nn.Module, wrapper: str) -> nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    for child in model.modules():
        if isinstance(child, (nn.TransformerEncoderLayer, ResidualBlock)):
            fully_shard(child)
    return fully_shard(model)


class Loop:
    """One training loop, guarded or not."""

    def __init__(self, name: str, wrapper: str, guarded: bool) -> None:
        torch.manual_seed(0)
        model, self.batch = MODELS[name]()
        self.model = wrap(model, wrapper)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.guard = NanGuard(self.model, self.optimizer, dump_dir=None) if guarded else None

    def step(self, batch: Tensor) -> float:
        start = time.perf_counter()
        if self.guard is None:
            self._train(batch)
        else:
            for item in self.guard.steps([batch]):
                self._train(item)
        return time.perf_counter() - start

    def _train(self, batch: Tensor) -> None:
        loss = self.model(batch).float().pow(2).mean()
        if self.guard is not None:
            self.guard.watch(loss=loss)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(name: str, wrapper: str, num_steps: int) -> dict[str, Any]:
    loops = [Loop(name, wrapper, guarded=False), Loop(name, wrapper, guarded=True)]
    ratios: list[float] = []
    plain: list[float] = []
    for index in range(num_steps + 10):
        batch = loops[0].batch()
        times = [0.0, 0.0]
        for which in (0, 1) if index % 2 else (1, 0):
            dist.barrier()
            times[which] = loops[which].step(batch)
        if index >= 10:
            ratios.append(times[1] / times[0])
            plain.append(times[0])
    assert loops[1].guard is not None
    loops[1].guard.close()
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "model": name,
        "wrapper": wrapper,
        "ratio": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "step_ms": round(1000 * statistics.median(plain), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Guarded against unguarded steps. Start it with torchrun.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--wrappers", nargs="+", default=["ddp", "fsdp2"])
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rows = [measure(name, wrapper, options.steps) for wrapper in options.wrappers for name in options.models]
    if dist.get_rank() == 0:
        print("| model | wrapper | guarded / unguarded | quartiles | unguarded step |\n|---|---|---|---|---|")
        for row in rows:
            low, high = row["quartiles"]
            ratio = f"{row['ratio']:.3f} | {low:.3f} to {high:.3f}"
            print(f"| {row['model']} | {row['wrapper']} | {ratio} | {row['step_ms']} ms |")
        if options.json:
            machine = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.platform()}
            with open(options.json, "w") as file:
                json.dump({"rows": rows, **machine, "ranks": dist.get_world_size()}, file, indent=1)
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
