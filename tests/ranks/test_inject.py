"""Faults planted by users on two real ranks: every phase, on either rank, named exactly by both, and replayed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard
from ddp_nanguard.testing import inject
from tests.ranks import run_ranks
from tests.replaying import replay_alone, replay_on_all_ranks
from tests.training import Job, Loop, Record, build, train_steps

STEP, MICRO_BATCH = 1, 1
SAME, CANNOT = 0, 5
LAYERS = {
    "state": "blocks.1.conv",
    "input": None,
    "forward": "blocks.0.norm",
    "loss": None,
    "backward": "blocks.1.conv",
    "reduce": "blocks.0.conv",
    "optimizer": "stem",
}
WITHOUT_MICRO_BATCH = {"state", "reduce", "optimizer"}
EVERYWHERE = [(wrapper, phase, rank) for wrapper in ("ddp", "fsdp2") for phase in LAYERS for rank in (0, 1)]
ONCE = [("fsdp1", phase, 0) for phase in LAYERS]  # a rank holds a flat range: rank 1's begins behind most layers
CELLS = EVERYWHERE + ONCE
REPLAYED = {"ddp": 1, "fsdp1": 0, "fsdp2": 1}
"""The rank whose faults are dumped and replayed: a dump costs more than the training."""


@dataclass(frozen=True)
class Planted:
    """A phase on a rank, and where the dump goes, if one is to be replayed."""

    phase: str
    rank: int
    dump_dir: str | None

    def options(self) -> dict[str, Any]:
        place = {"rank": self.rank, "step": STEP, "layer": LAYERS[self.phase], "phase": self.phase}
        return place if self.phase in WITHOUT_MICRO_BATCH else {**place, "micro_batch": MICRO_BATCH}


def _train(rank: int, world_size: int, wrapper: str, mark_fired: list[Planted]) -> list[Record]:
    return [_train_one(rank, wrapper, each) for each in mark_fired]


def _train_one(rank: int, wrapper: str, mark_fired: Planted) -> Record:
    options = {"keep_previous": True} if mark_fired.phase == "optimizer" else {}
    job = Job(wrapper, num_steps=4, num_micro_batches=2, options=options, dump_dir=mark_fired.dump_dir)
    run = build(job, rank)
    injection = inject(run.model, **mark_fired.options())
    train_steps(run)
    assert injection.num_fired == (rank == mark_fired.rank)
    injection.remove()
    run.guard._detach()
    return run.record


Launch = Callable[[str], dict[tuple[str, int], list[Record]]]


@pytest.fixture(scope="module")
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """The phases and ranks of a wrapper that are asked for, one after the other in the same processes, once."""
    items = [item for item in request.session.items if item.name.startswith("test_both_ranks_name_what_was_planted[")]
    asked = {tuple(item.callspec.params.values()) for item in items}

    @functools.cache
    def run(wrapper: str) -> dict[tuple[str, int], list[Record]]:
        root = tmp_path_factory.mktemp("dumps")
        wanted = asked | {(wrapper, phase, REPLAYED[wrapper]) for phase in LAYERS}
        cells = [(phase, rank) for kind, phase, rank in CELLS if kind == wrapper and (kind, phase, rank) in wanted]
        dumps = [str(root / phase) if rank == REPLAYED[wrapper] else None for phase, rank in cells]
        mark_fired = [Planted(phase, rank, dump) for (phase, rank), dump in zip(cells, dumps, strict=True)]
        per_rank = run_ranks(_train, 2, timeout_s=40, wrapper=wrapper, mark_fired=mark_fired)
        return {cell: [records[index] for records in per_rank] for index, cell in enumerate(cells)}

    return run


def _marks(wrapper: str, rank: int) -> list[pytest.MarkDecorator]:
    """DDP has both ranks; FSDP1, and the other rank of FSDP2, wait for a run of everything."""
    return [pytest.mark.exhaustive] if wrapper == "fsdp1" or (wrapper, rank) == ("fsdp2", 0) else []


@pytest.mark.parametrize(
    ("wrapper", "phase", "rank"), [pytest.param(*cell, marks=_marks(cell[0], cell[2])) for cell in CELLS]
)
def test_both_ranks_name_what_was_planted(wrapper: str, phase: str, rank: int, launch: Launch) -> None:
    records = launch(wrapper)[phase, rank]
    assert records[0].error is not None
    assert records[0].error == records[1].error
    report = records[0].report
    assert report is not None and report == records[1].report
    origin = report["origin"]
    assert (origin["phase"], origin["layer"], origin["step"], origin["kind"]) == (phase, LAYERS[phase], STEP, "nan")
    assert origin["micro_batch"] == (None if phase in WITHOUT_MICRO_BATCH else MICRO_BATCH)
    assert origin["rank"] == (None if phase == "reduce" else rank)
    assert report["holders"] == ([rank] if phase == "reduce" else [])
    assert [record.error_step for record in records] == [STEP + (phase == "optimizer")] * 2


@pytest.mark.parametrize("wrapper", ["ddp", pytest.param("fsdp1", marks=pytest.mark.exhaustive), "fsdp2"])
def test_replays_meet_it_again(wrapper: str, launch: Launch) -> None:
    """The recipe knows nothing of it: the dump does."""
    ran = launch(wrapper)
    dumps = {phase: _dump(ran[phase, REPLAYED[wrapper]]) for phase in LAYERS}
    replayed = dict(zip(dumps, replay_alone(list(dumps.values())), strict=True))
    assert {phase: one.code for phase, one in replayed.items()} == {
        phase: CANNOT if phase == "reduce" else SAME for phase in LAYERS
    }, replayed


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_a_reduce_fault_replays_on_all_ranks(wrapper: str, launch: Launch) -> None:
    replayed = replay_on_all_ranks(_dump(launch(wrapper)["reduce", 1]), 2)
    assert [one.code for one in replayed] == [SAME, SAME], replayed


def _dump(records: list[Record]) -> str:
    assert records[0].report is not None
    return str(records[0].report["dump_path"])


def _from_environment(rank: int, world_size: int) -> tuple[Any, str | None, list[str]]:
    run = build(Job("fsdp2", num_steps=3), rank)
    train_steps(run)
    assert run.record.report is not None
    return run.record.report["origin"], run.record.error, run.record.report["notes"]


def test_the_environment_picks_a_layer_of_which_the_rank_holds_a_part() -> None:
    env = {"NANGUARD_INJECT": "rank=1,step=1,phase=state"}
    (origin, error, notes), other = run_ranks(_from_environment, env=env)
    assert (origin, error, notes) == other
    assert (origin["rank"], origin["step"], origin["phase"]) == (1, 1, "state")
    assert notes[0] == f"NANGUARD_INJECT plants a fault in this job: rank 1 · step 1 · state · {origin['layer']}: nan"


def _refused(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError, match="NANGUARD_INJECT") as raised:
        build(Job("ddp"), rank)
    return str(raised.value)


def test_what_the_planned_rank_cannot_do_is_refused_on_all() -> None:
    first, second = run_ranks(_refused, env={"NANGUARD_INJECT": "rank=1,step=1,phase=state,layer=blocks.1.gate"})
    assert first == second
    assert "option layer='blocks.1.gate' does not fit; valid: \"\", stem, blocks.0.conv" in first


def _reduced_in_every_micro_batch(rank: int, world_size: int) -> Any:
    """Without ``no_sync`` DDP reduces in the backward of each micro-batch."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=None)
    injection = inject(model, rank=1, step=1, layer="0", phase="reduce")
    loop = Loop(model, optimizer, lambda call, batch: call(batch).pow(2).mean(), guard=guard, call=model)
    loop.accumulation = 2
    error = loop.until_fault([torch.randn(3, 4) for _ in range(6)])
    injection.remove()
    guard._detach()
    return None if error is None else error.report.to_dict()


def test_what_accumulates_on_a_bad_reduce_is_no_ranks_own() -> None:
    """The gradient of the second micro-batch holds what the first one's reduce has made."""
    for report in run_ranks(_reduced_in_every_micro_batch):
        origin = report["origin"]
        assert (origin["phase"], origin["rank"], origin["layer"], origin["step"]) == ("reduce", None, "0", 1)
        assert report["holders"] == [0, 1], "the second reduce has spread it"
