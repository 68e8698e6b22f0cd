"""The budget: measured on every rank, decided alike, said once, and never at the price of the stop."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard
from ddp_nanguard.probes import budget
from ddp_nanguard.probes.slots import SlotBuffer
from tests.ranks import run_ranks
from tests.replaying import replay_alone
from tests.training import Loop, listening

FAULT_STEP = 40


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), nn.Tanh()

    def forward(self, values: Tensor) -> Tensor:
        return values + self.act(self.linear(values))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = layer(values)
        return values


def test_levels_go_from_every_module_to_the_root() -> None:
    modules = [(name, module) for name, module in Net().named_modules() if name != "layers"]
    levels = budget.levels_of(modules)
    assert [level.text for level in levels] == [
        "every module",
        "every module, activation gradients of blocks alone",
        "blocks",
        "blocks, no activation gradients inside",
        "the root",
    ]
    every = {"", *(f"layers.{i}{part}" for i in range(2) for part in ("", ".linear", ".act"))}
    blocks = {"", "layers.0", "layers.1"}
    assert [level.layers for level in levels] == [every, every, blocks, blocks, {""}]
    assert [level.gradient_layers for level in levels] == [every, blocks, blocks, {""}, {""}]


def test_outermost_blocks_are_those_that_the_root_calls() -> None:
    net = nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(2, 2))
    levels = budget.levels_of(list(net.named_modules()))
    assert [level.text for level in levels[4:]] == [
        "outermost blocks",
        "outermost blocks, no activation gradients inside",
        "the root",
    ]
    assert [level.layers for level in levels[4:]] == [{"", "0"}, {"", "0"}, {""}]


def _trained(rank: int, world_size: int, limit: float | None, slow_s: float, dump_dir: str | None) -> Any:
    """Steps of 50 ms; on rank 1 each probe takes ``slow_s`` longer while a step is measured."""
    budget.WARM_UP, budget.MEASURED = 4, 3
    reduce = SlotBuffer.reduce

    def slowed(self: SlotBuffer, *args: Any) -> int | None:
        if rank == 1 and self.meter is not None:
            time.sleep(slow_s)
        return reduce(self, *args)

    SlotBuffer.reduce = slowed  # type: ignore[method-assign]
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"budget": limit, "dump_dir": dump_dir, "replay": f"{__name__}:recipe"}
    levels: list[int] = []
    batches = [torch.full((2, 8), float("inf") if (step, rank) == (FAULT_STEP, 1) else 1.0) for step in range(50)]
    with listening() as logged:
        guard = NanGuard(model, optimizer, **options)
        loop = Loop(model, optimizer, trained_step, guard=guard, call=model)
        loop.before_batch = lambda *_: time.sleep(0.05 if guard._context.slots.meter is not None else 0.0)
        loop.after_update = lambda _: levels.append(guard._context.budget.level_index)
        error = loop.until_fault(batches)
    assert error is not None
    said = [line for line in logged if line.startswith("budget=")]
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return levels, said, error.report.to_dict(), weights


def trained_step(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch.clamp(max=1.0) * 2 if batch.isfinite().all() else batch / batch).pow(2).mean()


def recipe() -> Any:
    from ddp_nanguard.replay.recipe import Recipe

    return Recipe(model=Net(), step=trained_step)


@pytest.mark.parametrize("slow_s", [0.0, 0.01], ids=["within", "one slow rank"])
def test_all_ranks_coarsen_alike_and_say_so_once(slow_s: float, tmp_path: Path) -> None:
    ranks = run_ranks(_trained, limit=0.5, slow_s=slow_s, dump_dir=str(tmp_path), timeout_s=60)
    levels = ranks[0][0]
    assert levels == ranks[1][0] and len(levels) == FAULT_STEP
    if not slow_s:
        assert set(levels) == {0} and all(not said for _, said, _, _ in ranks)
        return
    assert levels[:6] == [0] * 6 and max(levels) >= 2, "the first decision falls in the seventh step"
    for _, said, report, _ in ranks:
        (line,) = said
        assert line.startswith("budget=0.5: the probes took ") and "watched from now on: " in line
        assert any("left out to keep within the budget" in text for text in report["unchecked"])
        assert report["origin"]["rank"] == 1 and report["origin"]["step"] == FAULT_STEP
    (replayed,) = replay_alone([ranks[0][2]["dump_path"]])
    assert replayed.code == 0, replayed.output


def test_none_watches_everything_and_the_bits_are_the_same() -> None:
    everything = run_ranks(_trained, limit=None, slow_s=0.01, dump_dir=None, timeout_s=60)
    coarse = run_ranks(_trained, limit=0.0001, slow_s=0.0, dump_dir=None, timeout_s=60)
    for (levels, said, _, weights), (coarse_levels, coarse_said, _, coarse_weights) in zip(
        everything, coarse, strict=True
    ):
        assert set(levels) == {0} and not said
        assert max(coarse_levels) == 4 and coarse_said[0].split("; ")[1].startswith("watched from now on: the root (")
        assert all(torch.equal(a, b) for a, b in zip(weights, coarse_weights, strict=True))
