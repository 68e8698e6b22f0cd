"""What is trained in the cost benchmarks: models, wrappers, ways to compile, and a training loop that may be guarded.

Every column of a table is a `Loop`: the same model with the same weights on the same data, and one way to look for
non-finite values, which is a `Watch` from `watches`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.watches import Watch

# -- models ------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers in a row. A class of its own, since torch 2.13 compiles nothing of an `nn.Sequential` in place."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class TransformerBlock(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.gelu, self.narrow = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.merge(self._attention(self.norm1(x))))
        return x + self.narrow(self.gelu(self.widen(self.norm2(x))))

    def _attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.heads(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(batch, length, width)


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class TinyBlock(Net):
    """Ten modules that do next to nothing."""

    def __init__(self) -> None:
        super().__init__(*(module for _ in range(5) for module in (nn.Linear(8, 8), nn.Tanh())))


def _transformer() -> nn.Module:
    return Net(*(TransformerBlock(256, 4) for _ in range(4)))


def _resnet() -> nn.Module:
    body = [nn.Conv2d(3, 32, 3, padding=1), *(ResidualBlock(32) for _ in range(6))]
    return Net(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def _mlp() -> nn.Module:
    return Net(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def _tiny() -> nn.Module:
    return Net(*(TinyBlock() for _ in range(50)))


class Workload(NamedTuple):
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of a batch of normally distributed numbers."""
    about: str


MODELS = {
    "transformer": Workload(_transformer, (8, 128, 256), "4 blocks, width 256, 8 x 128 tokens"),
    "resnet": Workload(_resnet, (16, 3, 32, 32), "6 residual blocks, width 32, 16 images of 32 x 32"),
    "mlp": Workload(_mlp, (64, 64), "64-256-256-10, batch 64"),
    "tiny500": Workload(_tiny, (8, 8), "500 modules of width 8 in 50 blocks, batch 8"),
}
BLOCKS = (TransformerBlock, ResidualBlock, TinyBlock)


# -- wrapping and compiling --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model, how it is wrapped, and what is compiled: nothing, its ``whole``, or its ``blocks``."""

    model: str
    wrapper: str = "ddp"
    compiled: str = ""
    backend: str = "inductor"

    def __str__(self) -> str:
        ways = {"": "", "whole": ", compiled", "blocks": ", blocks compiled"}
        return f"{self.model}, {self.wrapper}{ways[self.compiled]}"

    def batch(self) -> Tensor:
        return torch.randn(MODELS[self.model].shape)

    def built(self, watch: Watch) -> nn.Module:
        """Compiled in place before it is wrapped, as both wrappers' own documentation has it."""
        torch.manual_seed(0)
        model = MODELS[self.model].make()
        watch.attach(model)
        for module in self._compiled(model):
            module.compile(backend=self.backend)
        return _wrapped(model, self.wrapper)

    def _compiled(self, model: nn.Module) -> list[nn.Module]:
        if self.compiled == "blocks":
            return [module for module in model.modules() if isinstance(module, BLOCKS)]
        return [model] if self.compiled else []


def _wrapped(model: nn.Module, wrapper: str) -> nn.Module:
    if wrapper == "plain":
        return model
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    for child in model.modules():
        if isinstance(child, BLOCKS):
            fully_shard(child)
    return fully_shard(model)


# -- training ----------------------------------------------------------------------------------------------------------


class Seconds(NamedTuple):
    """Of one step: by the clock, and what the training thread computed meanwhile."""

    wall: float
    cpu: float


NOTHING = Watch()


class Loop:
    """One training loop with one way to look for non-finite values.

    Raises:
        ValueError: on every rank, from the guard, for options that it does not take.
    """

    def __init__(self, case: Case, watch: Watch) -> None:
        self.watch = watch
        self.model = case.built(watch)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        watch.start(self.model, self.optimizer)

    def step(self, batch: Tensor, watched: bool = True) -> Seconds:
        """One step, with the watch or without it."""
        watch = self.watch if watched else NOTHING
        wall, cpu = time.perf_counter(), time.thread_time()
        for item in watch.batches([batch]):
            self._train(item, watch)
        return Seconds(time.perf_counter() - wall, time.thread_time() - cpu)

    def steps(self, batch: Tensor, in_a_row: int) -> list[Seconds]:
        """Steps with the watch, one after the other."""
        return [self.step(batch) for _ in range(in_a_row)]

    def unwatched_steps(self, batch: Tensor, in_a_row: int) -> list[Seconds]:
        """Steps of the same model in the same memory with everything taken off."""
        self.watch.pause()
        try:
            return [self.step(batch, watched=False) for _ in range(in_a_row)]
        finally:
            self.watch.resume()

    def _train(self, batch: Tensor, watch: Watch) -> None:
        with watch.around():
            loss = self.model(batch).float().square().mean()
            watch.after_forward(loss)
            loss.backward()
        watch.after_backward(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        self.watch.close()

    def counted(self) -> Any:
        """The guard, where there is one."""
        return getattr(self.watch, "guard", None)
