"""Models that go bad in one place while they are switched on, and the report of it; one process, no wrapper."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.report.types import FaultReport
from tests.training import Loop

WIDTH = 6
Step = Callable[[Any, Any], "Tensor | dict[str, Tensor]"]


class _SpoilGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, spoils: bool) -> Tensor:
        ctx.spoils = spoils
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad * math.nan if ctx.spoils else grad), None


def spoil_gradient(values: Tensor, spoils: bool = True) -> Tensor:
    return _SpoilGradient.apply(values, spoils)  # type: ignore[no-any-return]  # torch does not type apply


def spoil(values: Tensor, spoils: bool = True) -> Tensor:
    return values + torch.zeros(()) / torch.tensor(0.0 if spoils else 1.0)


class Bad(nn.Module):
    """Identity that spoils its output or its input's gradient while ``on``."""

    def __init__(self, backward: bool = False) -> None:
        super().__init__()
        self.backward_only = backward
        self.on = False

    def forward(self, values: Tensor) -> Tensor:
        return (spoil_gradient if self.backward_only else spoil)(values, self.on)


class BadWeight(nn.Linear):
    on = False

    def forward(self, values: Tensor) -> Tensor:
        return F.linear(values, spoil_gradient(self.weight, self.on), self.bias)


class Model(nn.Module):
    """Linear ``a``, then ``body`` (a function of itself and the values), then linear ``b``."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.a = linear()
        for name, module in parts.items():
            self.add_module(name, module)
        self.b = linear()
        self.body = body

    def forward(self, values: Tensor) -> Tensor:
        return self.b(self.body(self, self.a(values)))  # type: ignore[no-any-return]  # modules return Any


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def batches(count: int = 3) -> list[Tensor]:
    return [torch.randn(4, WIDTH) for _ in range(count)]


def square(guard: Any, batch: Tensor) -> Tensor:
    return guard(batch).square().mean()  # type: ignore[no-any-return]  # the guard returns Any


def report_of(
    model: nn.Module,
    items: Iterable[Any],
    step: Step = square,
    *,
    plant: Callable[[bool], object] = bool,
    fault_at: int = 1,
    accumulation: int = 1,
    before_update: Callable[[int], object] = bool,
    **options: Any,
) -> FaultReport | None:
    """Trains with ``plant(True)`` in item ``fault_at`` only; the report of the fault, if any."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=None, **{"layers": "every", **options})
    loop = Loop(model, optimizer, step, guard=guard, accumulation=accumulation, before_update=before_update)
    loop.before_batch = lambda index, _: plant(index == fault_at)
    error = loop.until_fault(items)
    with contextlib.suppress(NonFiniteError):
        guard.close()
    return None if error is None else error.report


def place_of(report: FaultReport | None) -> tuple[Any, ...] | None:
    if report is None or report.origin is None:
        return None
    site = report.origin
    return str(site.phase), site.layer, site.call, site.slot


def switch(*modules: Any) -> Callable[[bool], None]:
    def plant(on: bool) -> None:
        for module in modules:
            module.on = on

    return plant
