"""The modules that a drawn tree stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.properties.trees import Part, Path, Trap

WIDTH = 6
FRESH = ("linear", "frozen_parameters", "norm", "drop")
"""Layers whose output may be changed in place: autograd keeps none of it."""


class _SpoilGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, value: float) -> Tensor:
        ctx.value = value
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] + ctx.value, None


class World:
    """What all modules of one tree know: the trap, while it is armed."""

    trap: Trap | None = None

    def arm(self, trap: Trap | None) -> None:
        self.trap = trap

    def add(self, path: Path, place: str) -> float | None:
        """What is to be added here; None where the trap is not."""
        trap = self.trap
        return trap.value if trap is not None and (trap.path, trap.place) == (path, place) else None

    def spoilt(self, values: Tensor, path: Path, place: str) -> Tensor:
        value = self.add(path, place)
        return values if value is None else values + value

    def spoilt_gradient(self, values: Tensor, path: Path, place: str) -> Tensor:
        value = self.add(path, place)
        return values if value is None else _SpoilGradient.apply(values, value)  # type: ignore[no-any-return, no-untyped-call]


@dataclass
class Both:
    """An output of several tensors."""

    main: Tensor
    aside: Tensor


def _given(values: Tensor, gives: str) -> Any:
    aside = values * 0.5
    return {
        "tensor": values,
        "tuple": (aside, values),
        "dict": {"aside": aside, "main": values},
        "dataclass": Both(values, aside),
    }[gives]


def _taken(output: Any) -> Tensor:
    if isinstance(output, tuple):
        return output[1]  # type: ignore[no-any-return]
    if isinstance(output, dict):
        return output["main"]  # type: ignore[no-any-return]
    return output.main if isinstance(output, Both) else output  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One layer without children."""

    def __init__(self, part: Part, world: World) -> None:
        super().__init__()
        self.kind, self.gives, self.world = part.kind, part.gives, world
        if part.kind in ("linear", "frozen_parameters"):
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH, requires_grad=part.kind == "linear")
        if part.kind == "norm":
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, values: Tensor, path: Path) -> Any:
        values = self.world.spoilt_gradient(values, path, "grad")
        match self.kind:
            case "linear" | "frozen_parameters":
                values = F.linear(values, self.world.spoilt_gradient(self.weight, path, "weight"))
            case "norm":
                values = F.batch_norm(values, self.mean, self.variance, training=True)
            case "drop":
                values = F.dropout(values, 0.2)
            case "in-place":
                values = F.leaky_relu(values, 0.5, inplace=True)
            case "writes":
                values.add_(self.world.add(path, "output") or 0.0)
                return None
        return _given(self.world.spoilt(values, path, "output"), self.gives)


class Tree(nn.Module):
    """A container that runs its body in order; what joins its children is plain code."""

    def __init__(self, part: Part, world: World, pool: dict[int, nn.Module]) -> None:
        super().__init__()
        self.part, self.world = part, world
        for index, child in enumerate(part.body):
            if child.kind == "fork":
                for side, empty_like_this in enumerate(child.body):
                    self.add_module(f"m{index}_{side}", Layer(empty_like_this, world))
            elif not child.is_line:
                self.add_module(f"m{index}", _module(child, world, pool))

    def forward(self, values: Tensor, path: Path) -> Any:
        before: Part | None = None
        for index, child in enumerate(self.part.body):
            if child.kind.startswith(("in-place", "writes")) and not _is_fresh(before):
                values = values * 1.0
            values = self._after(child, index, values, path)
            before = child
        return _given(values, self.part.gives)

    def _after(self, child: Part, index: int, values: Tensor, path: Path) -> Tensor:
        here = (*path, index, 0)
        match child.kind:
            case "code":
                return self.world.spoilt(self.world.spoilt_gradient(values, here, "grad"), here, "output")
            case "in-place code":
                return values.add_(self.world.add(here, "output") or 0.0)
            case "views":
                return values.t().reshape(WIDTH, -1).t()
            case "plus tanh":
                return values + values.tanh()
            case "fork":
                sides = [getattr(self, f"m{index}_{side}")(values, (*path, index, side)) for side in (0, 1)]
                return sides[0] + sides[1]  # type: ignore[no-any-return]
            case "writes":
                getattr(self, f"m{index}")(values, here)
                return values
        return self._called(getattr(self, f"m{index}"), child.how, values, here)

    @staticmethod
    def _called(module: nn.Module, how: str, values: Tensor, path: Path) -> Tensor:
        match how:
            case "twice":
                values = _taken(module(values, path))
                return _taken(module(values, (*path[:-1], 1)))
            case "residual":
                return values + _taken(module(values, path))
            case "unused":
                module(values * 1.0, path)
                return values
            case "checkpoint" | "reentrant":
                return _taken(checkpoint(module, values, path, use_reentrant=how == "reentrant"))
        return _taken(module(values, path))


def _is_fresh(part: Part | None) -> bool:
    return part is not None and part.kind in FRESH and part.how == "plain" and part.gives == "tensor"


def _module(part: Part, world: World, pool: dict[int, nn.Module]) -> nn.Module:
    if part.shared is None:
        return Tree(part, world, pool) if part.kind == "tree" else Layer(part, world)
    if part.shared not in pool:
        pool[part.shared] = Tree(part, world, pool) if part.kind == "tree" else Layer(part, world)
    return pool[part.shared]


class Net(nn.Module):
    """A layer with weights, the tree, and another layer."""

    def __init__(self, tree: Part) -> None:
        super().__init__()
        self.world = World()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tree = Tree(tree, self.world, {})

    def forward(self, values: Tensor, trap: Trap | None = None) -> Tensor:
        self.world.arm(trap)  # it comes with the batch, as what makes a value bad does: a second look meets it again
        return self.last(_taken(self.tree(self.first(values), ())))  # type: ignore[no-any-return]
