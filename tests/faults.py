"""Faults as data: where, when and on which rank a value goes bad.

A fault is always an operator of the model, the data, the optimizer or a communication hook, never a write into the
guard. Those in the model and the loss are switched on by whole numbers in the batch, so that a replay of the batch
meets them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

KIND_CODES = {"none": 0, "nan": 1, "inf": 2, "-inf": 3, "huge": 4}


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        place: one of `tests.models.PLACES` (switched on by the batch), ``input``, ``parameter``, ``buffer``,
            ``optimizer_state``, ``reduce``, ``lr`` or ``update``.
        kind: ``nan``, ``inf`` or ``-inf``; ``huge``: finite in single precision, not in half.
        rank: the rank it happens on.
        step: the optimizer step.
        micro_batch: within the step.
    """

    place: str
    kind: str
    rank: int
    step: int
    micro_batch: int = 0

    def hits(self, rank: int, step: int, micro_batch: int) -> bool:
        return (self.rank, self.step, self.micro_batch) == (rank, step, micro_batch)

    def begins(self, rank: int, step: int) -> bool:
        return (self.rank, self.step) == (rank, step)


def nan_at(place: str, rank: int, step: int, micro_batch: int = 0) -> Fault:
    return Fault(place, "nan", rank, step, micro_batch)


def inf_at(place: str, rank: int, step: int, micro_batch: int = 0) -> Fault:
    return Fault(place, "inf", rank, step, micro_batch)


def minus_inf_at(place: str, rank: int, step: int, micro_batch: int = 0) -> Fault:
    return Fault(place, "-inf", rank, step, micro_batch)


def addend(code: torch.Tensor) -> torch.Tensor:
    """0, 0/0, 1/0, -1/0 or 300000 for the codes 0 to 4: a division decides, no constant does."""
    numerator = torch.tensor([0.0, 0.0, 1.0, -1.0, 3e5], device=code.device)[code]
    denominator = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0], device=code.device)[code]
    return numerator / denominator


class _Plant(torch.autograd.Function):
    """Identity that spoils the first element of its output, or of its input's gradient."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, in_forward: torch.Tensor, in_backward: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(in_backward)
        return _spoil(values, in_forward)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (in_backward,) = ctx.saved_tensors
        return _spoil(grad, in_backward), None, None


def _spoil(values: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    spoiled = values.clone(memory_format=torch.contiguous_format)
    if spoiled.numel():
        spoiled.view(-1)[0] += addend(code).to(spoiled.dtype)
    return spoiled


def plant(values: torch.Tensor, in_forward: torch.Tensor, in_backward: torch.Tensor) -> torch.Tensor:
    """``values``; its first element spoiled by the code ``in_forward``, that of its gradient by ``in_backward``."""
    return _Plant.apply(values, in_forward, in_backward)  # type: ignore[no-any-return]  # torch does not type apply


class FadingSGD(torch.optim.Optimizer):
    """SGD with momentum whose update divides by a fuel that runs out: finite gradients, then 0/0 in one parameter.

    The fuel is a hyper-parameter (``g0.fuel``), so a replay that starts from the step's own optimizer state meets it.
    """

    def __init__(self, params: Any, lr: float = 0.05, momentum: float = 0.9, target: int = 0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "fuel": -1.0, "target": target})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
            group["fuel"] -= 1.0
            self._fade(group)

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = state["momentum_buffer"]
        momentum.mul_(group["momentum"]).add_(gradient)
        parameter.add_(momentum, alpha=-group["lr"])

    def _fade(self, group: dict[str, Any]) -> None:
        parameter = group["params"][group["target"]]
        local = getattr(parameter, "_local_tensor", parameter)
        fuel = torch.tensor(group["fuel"], dtype=local.dtype)
        local.view(-1)[:1].mul_(fuel / fuel)
