"""Batches that are drawn before the model is called with them, or that it is never called with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.report.types import Phase, Site

NAN = float("nan")
Loop = Callable[[Any, nn.Linear, Iterator[Tensor]], None]


def _origin(loop: Loop, look_again: bool = True) -> Site:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batches = [torch.full((3, 4), value) for value in (NAN, 1.0, 2.0)]
    with NanGuard(net, optimizer, dump_dir=None, look_again=look_again) as guard:
        loop(guard, net, iter(guard.steps(batches)))
        with pytest.raises(NonFiniteError) as raised:
            optimizer.step()
        origin = raised.value.report.origin
    assert origin is not None
    return origin


def _draws_ahead(guard: Any, net: nn.Linear, items: Iterator[Tensor]) -> None:
    for batch in list(items):
        guard(batch).sum().backward()


def _spoils_the_loss(guard: Any, net: nn.Linear, items: Iterator[Tensor]) -> None:
    next(items)
    guard.run(lambda model, batch: model(batch).sum() * NAN, next(items)).backward()


def _spoils_a_gradient(guard: Any, net: nn.Linear, items: Iterator[Tensor]) -> None:
    next(items)
    guard(next(items)).sum().backward()
    assert net.bias.grad is not None
    net.bias.grad[0] = NAN


@pytest.mark.parametrize("look_again", [True, False])
def test_the_first_of_several_that_were_drawn_at_once_is_named(look_again: bool) -> None:
    origin = _origin(_draws_ahead, look_again)
    assert (origin.phase, origin.micro_batch) == (Phase.INPUT, 0)


def test_one_that_was_drawn_for_nothing_did_not_spoil_the_loss() -> None:
    origin = _origin(_spoils_the_loss)
    assert (origin.phase, origin.micro_batch) == (Phase.LOSS, 1)


def test_nor_a_gradient_after_a_backward_that_was_finite() -> None:
    origin = _origin(_spoils_a_gradient)
    assert (origin.phase, origin.slot) == (Phase.LOOP, "bias")
