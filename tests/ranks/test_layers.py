"""The option ``layers``: which modules carry hooks, and what a step without any still says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard
from ddp_nanguard.probes.coverage import NO_LAYERS
from ddp_nanguard.probes.layers import watched_layers
from tests.ranks import run_ranks
from tests.training import Loop

FAULT_STEP = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), nn.Tanh()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, values: Tensor) -> Tensor:
        self.count += 1
        return values + self.act(self.linear(values))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = layer(values)
        return self.head(values)  # type: ignore[no-any-return]  # modules return Any


def test_blocks_are_modules_that_hold_others_and_in_compiled_code_also_those_in_no_block() -> None:
    modules = [(name, module) for name, module in Net().named_modules() if name != "layers"]
    none, blocks, every = (watched_layers(option, modules) for option in ("none", "blocks", "every"))
    assert none.layers == none.in_compiled_code == frozenset()
    assert blocks.layers == {"", "layers.0", "layers.1"}
    assert blocks.in_compiled_code == {"", "layers.0", "layers.1", "head"}
    assert every.layers == every.in_compiled_code == {name for name, _ in modules}


def _mean_square(model: Any, batch: Tensor) -> Tensor:
    return model(batch).pow(2).mean()  # type: ignore[no-any-return]  # modules return Any


def _num_hooks(net: nn.Module) -> dict[str, int]:
    found = {name: len(module._forward_pre_hooks) + len(module._forward_hooks) for name, module in net.named_modules()}
    return {name: count for name, count in found.items() if count}


def _trained(rank: int, world_size: int, layers: str, scaled: bool) -> Any:
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    guard = NanGuard(model, optimizer, scaler=scaler, dump_dir=None, layers=layers, look_again=False)
    loop = Loop(model, optimizer, _mean_square, guard=guard, call=model, scaler=scaler)
    hooks: list[dict[str, int]] = []
    loop.before_update = lambda _: hooks.append(_num_hooks(net))
    batches = [torch.rand(3, 8, generator=torch.Generator().manual_seed(index)) for index in range(4)]
    if rank == 1:
        batches[FAULT_STEP][0, 0] = float("nan")
    error = loop.until_fault(batches)
    assert error is not None
    return error.report.to_dict(), hooks[1], float(net.layers[0].count)  # type: ignore[arg-type]  # a buffer


@pytest.mark.parametrize("scaled", [False, True])
def test_without_layers_only_the_root_is_hooked_and_rank_and_batch_are_named_all_the_same(scaled: bool) -> None:
    for report, hooks, count in run_ranks(_trained, layers="none", scaled=scaled):
        assert hooks == {"": 1}
        assert (report["step"], report["origin"]["rank"], report["origin"]["phase"]) == (FAULT_STEP, 1, "input")
        assert report["unchecked"] == [NO_LAYERS]
        assert count == FAULT_STEP, "the buffers are those of before the step"


def test_every_layer_carries_two_hooks() -> None:
    for report, hooks, _ in run_ranks(_trained, layers="every", scaled=False):
        assert set(hooks.values()) == {2} and len(hooks) == 9
        assert report["unchecked"] == []
