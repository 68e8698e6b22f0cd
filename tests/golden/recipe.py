"""The job behind the golden dump. Its numbers are small and exact, whatever the order of a sum, on every machine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ddp_nanguard import Recipe

BAD_STEP, BAD_RANK = 2, 1


class Root(nn.Module):
    """The square root, NaN for what is negative; exact for squares."""

    def forward(self, values: Tensor) -> Tensor:
        return values.sqrt()


class Net(nn.Module):
    """A parameter, a buffer that counts, and a layer without either."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Root()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 4.0, 8.0]))
        self.register_buffer("num_calls", torch.tensor(0))

    def forward(self, values: Tensor) -> Tensor:
        self.num_calls += 1
        return self.root(values) * self.scale


def batch_of(rank: int, step: int) -> dict[str, Tensor]:
    """Squares, but for one value on one rank in one step."""
    roots = torch.tensor([1.0, 2.0, 3.0, 4.0]) + rank
    values = roots.square()
    if (rank, step) == (BAD_RANK, BAD_STEP):
        values[2] = -values[2]
    return {"x": values, "y": roots}


def step(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean of four squares."""
    return (model(batch["x"]) - batch["y"]).square().mean()


def recipe() -> Recipe:
    """Of training and of its replay."""
    return Recipe(model=Net(), step=step)
