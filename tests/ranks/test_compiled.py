"""Inside compiled code: every layer is named, nothing is compiled again, and the model trains to the same bits."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard, NonFiniteError, Recipe
from tests.ranks import run_ranks
from tests.replaying import replay_alone
from tests.training import Loop, listening
from tests.training.digests import local_of

WIDTH, ACCUMULATION, STEPS = 8, 3, 17
GATE, CODE, STEEP, STEEP_CODE = range(4)
EXPECTED = {
    GATE: ("forward", "blocks.1.gate", False),
    CODE: ("forward", "blocks.1", True),
    STEEP: ("backward", "blocks.1.steep", False),
    STEEP_CODE: ("backward", "blocks.1", True),
}
PLANTED = {3: GATE, 6: CODE, 9: STEEP, 12: STEEP_CODE}
"""Step and place; the last four steps are clean."""


def steep(values: Tensor, flag: Tensor) -> Tensor:
    """The values, and a derivative of 0 * inf where the flag is zero."""
    return values + torch.sqrt(values * 0 + flag) * 0


@dataclasses.dataclass
class Gated:
    values: Tensor


class Gate(nn.Module):
    def forward(self, *, values: Tensor, flag: Tensor) -> Gated:
        return Gated(values / flag)


class Steep(nn.Module):
    def forward(self, values: Tensor, flag: Tensor) -> Tensor:
        return steep(values, flag)


class Block(nn.Module):
    breaks = False

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
        self.act, self.gate, self.steep = nn.Tanh(), Gate(), Steep()
        self.prompt = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, values: Tensor, flags: Tensor) -> dict[str, Tensor]:
        hidden = self.act(self.inner(values) + self.inner(self.prompt))
        hidden = self.gate(values=self.act(hidden + 0.5) + 1, flag=flags[GATE]).values  # one module, called twice
        hidden = self.steep(hidden, flags[STEEP]) / flags[CODE]
        hidden.mul_(2)
        hidden = steep(hidden, flags[STEEP_CODE])
        if self.breaks:
            torch._dynamo.graph_break()
        return {"values": values + self.outer(hidden)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, values: Tensor, flags: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            values = block(values, flags if index == 1 else torch.ones_like(flags))["values"]
        return self.head(values)


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="aot_eager", fullgraph=True)  # type: ignore[return-value]


def in_place(net: Net) -> Net:
    net.compile(backend="aot_eager", fullgraph=True)
    return net


def by_block(net: Net) -> Net:
    for block in net.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return net


def sharded(net: Net) -> nn.Module:
    for block in net.blocks:
        fully_shard(block)
    return fully_shard(net)


def with_breaks(net: Net) -> Net:
    """Hooks around a break of the graph run outside of it."""
    for block in net.blocks:
        block.breaks = True
    return net


def broken(module: nn.Module) -> nn.Module:
    """What wrappers do breaks the graph, guard or not."""
    return torch.compile(module, backend="aot_eager")  # type: ignore[return-value]


SETUPS: dict[str, Callable[[Net], nn.Module]] = {
    "compiled, then DDP": lambda net: DistributedDataParallel(compiled(net)),
    "DDP, then compiled": lambda net: broken(DistributedDataParallel(with_breaks(net))),
    "compiled in place": in_place,
    "blocks in place, then DDP": lambda net: DistributedDataParallel(by_block(net)),
    "blocks in place, then FSDP2": lambda net: sharded(by_block(net)),
    "FSDP2, then compiled": lambda net: broken(sharded(net)),
}


EAGER: dict[str, Callable[[Net], nn.Module]] = {
    "compiled, then DDP": DistributedDataParallel,
    "compiled in place": lambda net: net,
    "blocks in place, then DDP": DistributedDataParallel,
    "blocks in place, then FSDP2": sharded,
}
"""The same where the whole graph is compiled: `aot_eager` trains to the bits of eager code, and breaks nowhere."""

LATE = "blocks in place, then DDP"
"""Compiled once the guard is there: compiled before, it goes the way of the FSDP2 setup."""


SLOW = (
    "DDP, then compiled",
    "FSDP2, then compiled",
    "compiled in place",
    "blocks in place, then DDP",
    "blocks in place, then FSDP2",
)
"""They take two thirds of the time here; what is left compiles a whole model and its blocks."""


def batch_of(rank: int, step: int, index: int, plants: bool) -> tuple[Tensor, Tensor]:
    values = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * index + rank))
    flags = torch.ones(4)
    if plants and rank == 1 and index == 1 and step in PLANTED:
        flags[PLANTED[step]] = 0.0
    return values, flags


def counted() -> dict[str, Any]:
    counters = torch._dynamo.utils.counters
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


def trained(
    rank: int, setup: str, guarded: bool, late: bool = False, layers: str = "every", eager: bool = True
) -> tuple[list[Tensor], list[dict[str, Any]], list[Any]]:
    """Weights, counts after the sixth and the last step, and what each fault was put down to.

    Without a guard the steps that it stops are left out, and nothing is compiled that is exact without, if ``eager``.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    net = Net()
    model = (
        DistributedDataParallel(net) if late else ({**SETUPS, **EAGER} if eager and not guarded else SETUPS)[setup](net)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    # what the hooks in the graph see, not what a second look adds
    guard = NanGuard(model, optimizer, dump_dir=None, layers=layers, look_again=False) if guarded else None
    if late:  # the guard is there before anything is compiled
        by_block(net)
    counts: list[dict[str, Any]] = []
    found: list[Any] = []
    loop = Loop(model, optimizer, step_of, guard=guard, call=model, accumulation=ACCUMULATION)
    loop.updates = lambda index: guarded or index // ACCUMULATION not in PLANTED
    loop.caught = lambda index, error: found.append(_put_down(index // ACCUMULATION, error))
    loop.after_update = lambda index: _evaluate_and_count(model, index // ACCUMULATION, rank, counts)
    loop.run(batch_of(rank, step, index, guarded) for step in range(STEPS) for index in range(ACCUMULATION))
    assert not any(p._backward_hooks for p in model.parameters()), "hooks pile up on leaf tensors"
    if guard is not None:
        guard.close()
    return [local_of(parameter).clone() for parameter in model.parameters()], counts, found


def _put_down(step: int, error: NonFiniteError) -> tuple[Any, ...]:
    origin = error.report.origin
    assert origin is not None
    site = (str(origin.phase), origin.layer, origin.inline_code is not None)
    return (step, origin.rank, origin.micro_batch, *site, error.report.unchecked, str(error))


def _evaluate_and_count(model: nn.Module, step: int, rank: int, counts: list[dict[str, Any]]) -> None:
    if step == 4:
        with torch.no_grad():
            model(*batch_of(rank, step, 0, plants=False))
    if step in (5, STEPS - 1):
        counts.append(counted())


def _both(rank: int, world_size: int, setup: str, late: bool) -> Any:
    plain, plain_counts, _ = trained(rank, setup, guarded=False)
    weights, counts, found = trained(rank, setup, guarded=True, late=late)
    same = all(torch.equal(mine, other) for mine, other in zip(plain, weights, strict=True))
    return same, plain_counts, counts, found


@pytest.mark.parametrize(
    ("setup", "late"),
    [
        pytest.param(setup, setup == LATE, id=setup, marks=[pytest.mark.exhaustive] if setup in SLOW else [])
        for setup in SETUPS
    ],
)
def test_every_layer_is_named_and_nothing_is_compiled_again(setup: str, late: bool) -> None:
    for same, plain, counts, found in run_ranks(_both, setup=setup, late=late, timeout_s=100):
        assert [entry[:6] for entry in found] == [(step, 1, 1, *EXPECTED[place]) for step, place in PLANTED.items()]
        assert all(unchecked == () for *_, unchecked, _ in found)
        assert counts[0] == counts[1], "something was compiled after the sixth step"
        assert counts[1]["breaks"] == plain[1]["breaks"]
        assert same, "guarded and unguarded weights differ"


def _with_blocks(rank: int, world_size: int) -> Any:
    return trained(rank, "compiled, then DDP", guarded=True, layers="blocks")


@pytest.mark.exhaustive
def test_with_blocks_the_block_is_named_and_what_is_left_out_is_said() -> None:
    """Of each of the two blocks five modules hold no others; the head is in no block."""
    for _, counts, found in run_ranks(_with_blocks, timeout_s=60):
        assert [entry[:5] for entry in found] == [
            (step, 1, 1, EXPECTED[place][0], "blocks.1") for step, place in PLANTED.items()
        ]
        for *_, unchecked, _ in found:
            (phrase,) = unchecked
            assert phrase.startswith("10 modules left out by layers='blocks' (blocks.0.inner, "), phrase
            assert phrase.endswith("; replay --trace finds the operator")
        assert counts[0] == counts[1], "something was compiled after the sixth step"


def _without_layers(rank: int, world_size: int, setup: str) -> Any:
    plain, plain_counts, _ = trained(rank, setup, guarded=False, eager=False)
    weights, counts, found = trained(rank, setup, guarded=True, layers="none")
    same = all(torch.equal(mine, other) for mine, other in zip(plain, weights, strict=True))
    return same, plain_counts, counts, [entry[:4] for entry in found]


@pytest.mark.parametrize(
    "setup", ["compiled, then DDP", pytest.param("compiled in place", marks=pytest.mark.exhaustive)]
)
def test_without_layers_graphs_and_bits_are_those_of_the_model(setup: str) -> None:
    for same, plain_counts, counts, found in run_ranks(_without_layers, setup=setup, timeout_s=100):
        assert same and counts == plain_counts
        assert [entry[:2] for entry in found] == [(step, 1) for step in PLANTED]


def step_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(*batch).pow(2).mean()


def recipe() -> Any:
    return Recipe(model=Net(), step=step_of)


def _dumped(rank: int, world_size: int, dump_dir: str) -> Any:
    """Dumps of a step that goes bad in one layer."""
    found = []
    for layers in ("every", "blocks", "none"):
        torch.manual_seed(0)
        model = in_place(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        guard = NanGuard(model, optimizer, dump_dir=dump_dir, layers=layers, replay=f"{__name__}:recipe")
        loop = Loop(model, optimizer, step_of, guard=guard, call=model)
        error = loop.until_fault([batch_of(1, step, 1, plants=True) for step in (2, 3)])
        assert error is not None and error.report.origin is not None
        found.append((str(error.report.dump_path), error.report.origin.layer))
        guard.close()
    return found


def test_a_compiled_step_replays_the_same_as_finely_as_it_was_watched(tmp_path: Path) -> None:
    ((fine, coarse, none),) = run_ranks(_dumped, 1, dump_dir=str(tmp_path), timeout_s=60)
    assert {fine[1], coarse[1], none[1]} == {"blocks.1.gate"}
    for replayed in replay_alone([fine[0], coarse[0], none[0]]):
        assert replayed.code == 0, replayed.output


def _compiled_before(rank: int, world_size: int) -> Any:
    model = DistributedDataParallel(compiled(Net()))
    step_of(model, batch_of(rank, 0, 0, plants=False)).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    optimizer.zero_grad()
    with listening() as logged:
        guard = NanGuard(model, optimizer, dump_dir=None, layers="every", look_again=False)
        loop = Loop(model, optimizer, step_of, guard=guard, call=model)
        error = loop.until_fault([batch_of(rank, step, 1, plants=True) for step in range(4)])
    assert error is not None and error.report.origin is not None
    said = [line for line in logged if "no hook runs" in line]
    return said, str(error.report.origin.phase), error.report.origin.layer, error.report.unchecked


def test_code_that_was_compiled_before_the_guard_is_said_to_be_unchecked() -> None:
    """The compiler does not look at hooks again."""
    for said, phase, layer, unchecked in run_ranks(_compiled_before, timeout_s=60):
        assert len(said) == 1 and said[0].startswith(
            "no hook runs in 17 modules of compiled code (blocks.0, blocks.0.act, "
        )
        assert (phase, layer) == ("forward", "")  # the hooks of what is compiled run outside of it
        assert unchecked[0].startswith("17 modules whose hooks did not fire")


def test_a_compiled_step_function_is_said_to_be_unseen_and_leaves_its_buffers(caplog: pytest.LogCaptureFixture) -> None:
    """The entry hook is inlined and never runs: what it would have kept is kept when the micro-batch begins."""
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    guard = NanGuard(net, optimizer, dump_dir=None, layers="every", look_again=False)
    step = torch.compile(lambda batch: net(batch).pow(2).mean(), backend="eager")
    batches = [torch.full((4, 4), float("nan") if index == 3 else 1.0) + torch.eye(4) for index in range(5)]
    with caplog.at_level(logging.WARNING, "ddp_nanguard"):
        error = Loop(net, optimizer, lambda call, batch: step(batch), guard=guard).until_fault(batches)
    guard.close()
    assert error is not None and error.report.step == 3 and error.report.nonfinite_state == ()
    assert all(buffer.isfinite().all() for buffer in net.buffers())
    assert [record.getMessage().partition(",")[0] for record in caplog.records if "no call" in record.getMessage()] == [
        "step 0: no call of the model was seen"
    ]
