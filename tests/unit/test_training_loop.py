"""The loop of the tests does what a user's loop does, in the order that it says."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ddp_nanguard import NanGuard, NonFiniteError
from tests.training import Loop


def _mean(call: Any, batch: Tensor) -> Tensor:
    return call(batch).mean()  # type: ignore[no-any-return]  # modules return Any


def _loop(**more: Any) -> Loop:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    return Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), _mean, **more)


def _noting(loop: Loop) -> list[str]:
    said: list[str] = []

    @contextlib.contextmanager
    def around(name: str, number: int) -> Iterator[None]:
        said.append(f"{name} {number}")
        yield
        said.append(f"end of {name} {number}")

    loop.around_step = lambda step: around("step", step)
    loop.around_silent = lambda step: around("silent", step)
    loop.around_batch = lambda index: around("batch", index)
    loop.before_batch = lambda index, batch: said.append(f"before batch {index}")
    loop.on_losses = lambda losses: said.append("losses")
    loop.before_update = lambda index: said.append(f"before update {index}")
    loop.after_update = lambda index: said.append(f"after update {index}")
    return said


def test_the_order_within_a_step() -> None:
    loop = _loop(accumulation=2)
    said = _noting(loop)
    loop.run([torch.ones(3, 2)] * 2)
    assert said[:14] == [
        *("step 0", "silent 0", "before batch 0", "batch 0", "losses", "end of batch 0", "end of silent 0"),
        *("before batch 1", "batch 1", "losses", "end of batch 1", "before update 1", "after update 1"),
        "end of step 0",
    ]


def test_it_trains_to_the_bits_of_the_loop_written_out() -> None:
    loop = _loop(accumulation=2, clip=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    batches = [torch.randn(3, 2, generator=torch.Generator().manual_seed(number)) for number in range(6)]
    loop.run(batches)
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index, batch in enumerate(batches):
        model(batch).mean().backward()
        if index % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(loop.model.parameters(), model.parameters(), strict=True))


def test_a_step_that_is_not_full_has_no_update() -> None:
    loop = _loop(accumulation=2)
    said = _noting(loop)
    loop.run([torch.ones(3, 2)] * 3)
    assert [line for line in said if "update" in line] == ["before update 1", "after update 1"]
    assert "before batch 2" in said


def test_the_first_error_ends_it_or_each_is_given_to_who_catches_them() -> None:
    batches = [torch.full((3, 2), math.nan if number in (1, 3) else 1.0) for number in range(5)]
    ended = []
    for catches in (False, True):
        loop = _loop()
        loop.guard = NanGuard(loop.model, loop.optimizer, dump_dir=None)
        caught: list[tuple[int, NonFiniteError]] = []
        loop.caught = (lambda *both, caught=caught: caught.append(both)) if catches else None
        ended.append((loop.until_fault(batches) is not None, [index for index, _ in caught]))
        loop.guard.close()
    assert ended == [(True, []), (False, [1, 3])]


def test_an_update_may_be_left_out() -> None:
    loop = _loop(updates=lambda index: index != 0)
    start = loop.model.weight.detach().clone()  # type: ignore[operator, union-attr]  # of a Linear
    loop.run([torch.ones(3, 2)])
    assert torch.equal(start, loop.model.weight)  # type: ignore[arg-type]
    loop.run([torch.ones(3, 2)] * 2)
    assert not torch.equal(start, loop.model.weight)  # type: ignore[arg-type]
