"""Models and steps that the cases share; each takes a whole batch, so that the batch can switch its fault on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.diagnosing import WIDTH, N

__all__ = ["INF", "NAN", "WIDTH", "BadWeight", "N", "ValidatedArgs", "given", "mlp", "of_batch", "spoilt_gradient"]
NAN, INF = float("nan"), float("inf")


class ValidatedArgs(nn.Module):
    """Two layers with a function of the case's between them, which also gets the batch."""

    def __init__(self, inline_code: Callable[[Tensor, dict[str, Any]], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.inline_code = inline_code

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.b(self.inline_code(self.a(batch["x"]), batch))  # type: ignore[no-any-return]  # modules return Any


def given(inline_code: Callable[[Tensor, dict[str, Any]], Tensor]) -> Callable[[], nn.Module]:
    return lambda: ValidatedArgs(inline_code)


def of_batch(model: Any, batch: Any) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


class _SpoiltGradient(torch.autograd.Function):
    """The gradient divided by a number of the batch: 0 spoils all of it, or one column."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, divisor: Tensor, column: int | None) -> Tensor:
        ctx.divisor, ctx.column = divisor, column
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        if ctx.column is None:
            return gradient / ctx.divisor, None, None
        gradient = gradient.clone()
        gradient[:, ctx.column] /= ctx.divisor
        return gradient, None, None


def spoilt_gradient(values: Tensor, divisor: Tensor, column: int | None = None) -> Tensor:
    return _SpoiltGradient.apply(values, divisor, column)  # type: ignore[no-any-return, no-untyped-call]  # torch's own


class BadWeight(nn.Module):
    """A layer whose weight's gradient alone is bad where the batch's "g" is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        hidden = nn.functional.linear(batch["x"], spoilt_gradient(self.a.weight, batch["g"]), self.a.bias)
        return self.b(hidden)  # type: ignore[no-any-return]  # modules return Any
