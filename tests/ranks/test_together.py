"""A layer that mixes all ranks: no rank can run its step alone, and the trace of all leads to the one at fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard, Recipe
from tests.ranks import run_ranks
from tests.replaying import Replayed, replay_on_all_ranks
from tests.training import Loop

WIDTH = 4


class Mixed(nn.Module):
    """The mean of a logarithm over all ranks is taken off."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        mean = self.a(values).square().mean() * values.sign().amax()
        total = torch.distributed.nn.functional.all_reduce(mean.log())
        return self.b(values) - total / dist.get_world_size()  # type: ignore[no-any-return]  # modules return Any


def step(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]  # modules return Any


def recipe() -> Recipe:
    torch.manual_seed(0)
    return Recipe(Mixed(), step)


def broken_recipe() -> Recipe:
    """Its second step fails on rank 1: the one under the trace."""
    calls: list[int] = []

    def failing(model: Any, batch: Tensor) -> Tensor:
        calls.append(1)
        _num_steps.append(1)
        if len(_num_steps) == 2 and dist.get_rank() == 1:
            raise LookupError("only under a trace")
        return step(model, batch)

    return Recipe(recipe().model, failing)


_num_steps: list[int] = []


def _train(rank: int, world_size: int, out: str) -> str | None:
    model = DistributedDataParallel(recipe().model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    guard = NanGuard(model, optimizer, dump_dir=out, replay=f"{__name__}:recipe", look_again=False)
    items = [torch.ones(3, WIDTH), torch.ones(3, WIDTH) * (-1.0 if rank == 1 else 1.0)]
    error = Loop(model, optimizer, step, guard=guard).until_fault(items)
    return None if error is None else error.report.dump_path


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(run_ranks(_train, out=str(tmp_path_factory.mktemp("dumps")))[0])


def test_the_trace_is_that_of_the_rank_where_the_fault_began(dump: str) -> None:
    first, second = replay_on_all_ranks(dump, 2, "--trace")
    assert (first.code, second.code, first.outcome["outcome"], second.output) == (0, 0, "same", "")
    assert "\nrank 0 got the value from another rank\nrank 1: trace of " in first.output
    assert "operator  aten.log.default made it" in first.output
    assert "reason: edge of domain: log of a negative number in `" in first.output


def test_a_rank_that_fails_in_its_trace_leaves_no_other_waiting(dump: str) -> None:
    ended: list[Replayed] = replay_on_all_ranks(dump, 2, "--trace", "--recipe", f"{__name__}:broken_recipe")
    assert [one.code for one in ended] == [0, 0]
    assert ended[0].outcome["outcome"] == "same" and "trace of" not in ended[0].output
