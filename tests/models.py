"""Small odd models, the step that trains them, and the recipes that rebuild them for a replay.

Odd on purpose: tied weights, a parameter with fewer rows than ranks, rows that do not divide by the number of ranks, a
module called twice, arithmetic between modules, dropout and BatchNorm.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults import FadingSGD, plant

PLACES = (
    "gate.forward",
    "gate.backward",
    "second_call.forward",
    "second_call.backward",
    "between.forward",
    "between.backward",
    "weight.backward",
    "loss.forward",
    "loss.backward",
)
"""Columns of ``batch["fault"]``: each holds a code of `tests.faults.KIND_CODES`."""

IMAGE_SHAPE = (3, 6, 5)
NUM_CLASSES = 7
BATCH_SIZE = 5
NUM_CHANNELS = 5


def _code(fault: Tensor, place: str) -> Tensor:
    return fault[PLACES.index(place)]


class Gate(nn.Module):
    """Identity with an operator that the batch can spoil, forward or backward."""

    def forward(self, values: Tensor, in_forward: Tensor, in_backward: Tensor) -> Tensor:
        return plant(values, in_forward, in_backward)


class SpoiltLinear(nn.Linear):
    """Linear whose weight gradient, and nothing else, can be spoiled."""

    def forward(self, values: Tensor, in_backward: Tensor) -> Tensor:  # type: ignore[override]  # one argument more
        return F.linear(values, plant(self.weight, torch.zeros_like(in_backward), in_backward), self.bias)


class Residual(nn.Module):
    """Convolution, BatchNorm, gate; the sum and the ReLU are plain code."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(num_channels, num_channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(num_channels)
        self.gate = Gate()

    def forward(self, values: Tensor, in_forward: Tensor, in_backward: Tensor) -> Tensor:
        return values + self.gate(self.norm(self.conv(values)), in_forward, in_backward).relu()


class OddNet(nn.Module):
    """A residual net of about 600 parameters on images of 3 x 6 x 5."""

    def __init__(self, dropout: float = 0.25) -> None:
        super().__init__()
        self.stem = nn.Conv2d(IMAGE_SHAPE[0], NUM_CHANNELS, 3, padding=1)
        self.blocks = nn.ModuleList([Residual(NUM_CHANNELS), Residual(NUM_CHANNELS)])
        self.twice = Gate()
        self.drop = nn.Dropout(dropout)
        self.mix = nn.Linear(NUM_CHANNELS, NUM_CHANNELS, bias=False)
        self.remix = nn.Linear(NUM_CHANNELS, NUM_CHANNELS, bias=False)
        self.remix.weight = self.mix.weight  # tied
        self.gain = nn.Parameter(torch.ones(1))  # one row: an empty shard on every rank but one
        self.head = SpoiltLinear(NUM_CHANNELS, NUM_CLASSES)

    def forward(self, image: Tensor, fault: Tensor) -> Tensor:
        none = torch.zeros_like(fault[0])
        values = self.blocks[0](self.stem(image), none, none)
        values = self.blocks[1](values, _code(fault, "gate.forward"), _code(fault, "gate.backward"))
        values = self.twice(self.drop(values.mean((2, 3))), none, none)
        values = self.remix(self.mix(values * self.gain).tanh())
        values = self.twice(values, _code(fault, "second_call.forward"), _code(fault, "second_call.backward"))
        values = plant(values, _code(fault, "between.forward"), _code(fault, "between.backward"))
        return self.head(values, _code(fault, "weight.backward"))  # type: ignore[no-any-return]  # modules return Any


class Tower(nn.Module):
    """As many layers as asked for, on the same batches as `OddNet`."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        width = 8
        self.stem = nn.Linear(IMAGE_SHAPE[0] * IMAGE_SHAPE[1] * IMAGE_SHAPE[2], width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, image: Tensor, fault: Tensor) -> Tensor:
        values = self.stem(image.flatten(1))
        for layer in self.layers:
            values = values + 0.1 * layer(values).tanh()
        return self.head(self.norm(values))  # type: ignore[no-any-return]  # modules return Any


def train_step(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Two named losses: cross entropy, and a small penalty on the logits; both already weighted for accumulation."""
    logits = model(batch["image"], batch["fault"])
    cls = F.cross_entropy(logits, batch["label"]) * batch["weight"]
    penalty = logits.square().mean() * (0.01 * batch["weight"])
    cls = plant(cls.reshape(1), _code(batch["fault"], "loss.forward"), _code(batch["fault"], "loss.backward"))[0]
    return {"cls": cls, "penalty": penalty}


def build_model(num_layers: int | None = None) -> nn.Module:
    """`OddNet`, or a `Tower`, with the same weights on every rank, without touching the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return OddNet() if num_layers is None else Tower(num_layers)


def build_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def build_fading_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return FadingSGD(parameters, lr=0.05, momentum=0.9)


def recipe() -> Any:
    """Rebuilds `OddNet`. ``TEST_REPLAY_CHANGE`` makes the negative controls: ``random`` or ``weight``."""
    from ddp_nanguard import Recipe

    return Recipe(model=build_model(), step=_changed_step, optimizer=build_optimizer)


def fading_recipe() -> Any:
    from ddp_nanguard import Recipe

    return Recipe(model=build_model(), step=_changed_step, optimizer=build_fading_optimizer)


def half_hook_recipe() -> Any:
    """For the reduce fault under DDP: gradients are summed in half precision."""
    from ddp_nanguard import Recipe
    from tests.training.jobs import wrap_ddp_with_half_hook

    return Recipe(model=build_model(), step=_changed_step, optimizer=build_optimizer, wrap=wrap_ddp_with_half_hook)


def _changed_step(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    change = os.environ.get("TEST_REPLAY_CHANGE")
    if change == "random":
        torch.rand(1)
    if change == "weight":
        _flip_one_bit(model)
    return train_step(model, batch)


def _flip_one_bit(model: nn.Module) -> None:
    """One bit in the lowest byte of ``gain``, in whatever way the wrapper stores it."""
    for name, parameter in model.named_parameters():
        if name.endswith(("gain", "_flat_param")):
            local = getattr(parameter, "_local_tensor", parameter).detach()
            local.view(torch.uint8)[:1].bitwise_xor_(0x40)
            return
    raise LookupError("no parameter named gain")
