"""An optimizer whose ``step`` calls that of its own parent class, around which torch puts hooks too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddp_nanguard import NanGuard


class Outer(torch.optim.SGD):
    """Steps by its parent's step, once or, told so, raises within it."""

    raises = False

    def step(self, closure: Any = None) -> Any:
        if self.raises:
            super().step()
            raise KeyError("after the inner step")
        return super().step(closure)


def _train(optimizer: torch.optim.Optimizer, guard: NanGuard) -> None:
    guard(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def made() -> tuple[Outer, NanGuard]:
    model = nn.Linear(4, 2)
    torch.optim.SGD(model.parameters(), lr=0.1)  # now torch has its hooks around the parent's step as well
    optimizer = Outer(model.parameters(), lr=0.1)
    assert hasattr(torch.optim.SGD.__dict__["step"], "hooked") and hasattr(Outer.__dict__["step"], "hooked")
    return optimizer, NanGuard(model, optimizer, dump_dir=None)


def test_one_step_has_one_verdict(made: tuple[Outer, NanGuard]) -> None:
    optimizer, guard = made
    for number in range(3):
        assert guard.step == number
        _train(optimizer, guard)


def test_a_step_that_raised_does_not_hide_the_next(made: tuple[Outer, NanGuard]) -> None:
    optimizer, guard = made
    optimizer.raises = True
    with pytest.raises(KeyError):
        _train(optimizer, guard)
    optimizer.raises = False
    _train(optimizer, guard)
    assert guard.step == 2


def test_a_closure_is_judged_once(made: tuple[Outer, NanGuard]) -> None:
    optimizer, guard = made

    def closure() -> torch.Tensor:
        loss = guard(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert guard.step == 1
