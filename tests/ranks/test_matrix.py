"""Every phase on every wrapper, on the first rank or the last, without or with accumulation.

Each fault is stopped, named, kept and replayed. The cells of a wrapper run in a few launches, one after the other in
the same processes, each with a fresh model and guard: that a process stays usable after a stop is part of the promise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_nanguard.dump.read import Dump, open_dump
from tests.matrix import Cell, all_cells, usual_cell
from tests.ranks import run_ranks
from tests.replaying import Replayed, replay_alone, replay_on_all_ranks
from tests.training import WRAPPERS, Record, digest, digest_of_random, run_jobs

CANNOT, SAME = 5, 0
DOCUMENTED = "step world_size wrapper origin inline_code holders sites ranks_affected cause nonfinite_state dump_path"
"""Fields of the report on which the error, the manifest and ``show --json`` agree."""


@dataclass(frozen=True)
class JobResult:
    """One cell after its run: a record per rank, and the dump."""

    cell: Cell
    records: list[Record]

    @property
    def report(self) -> dict[str, Any]:
        report = self.records[0].report
        assert report is not None, f"{self.cell}: no fault was raised"
        return report

    @functools.cached_property
    def dump(self) -> Dump:
        return open_dump(self.report["dump_path"])


Launch = Callable[[Cell], JobResult]
Replay = Callable[[Cell], Replayed]


Selection = Callable[[Cell], tuple[Cell, ...]]
LAUNCH_SIZE, REPLAY_SIZE = 12, 6
"""Cells that share one launch, and dumps that are replayed at a time."""


@pytest.fixture(scope="module")
def selection(request: pytest.FixtureRequest) -> Selection:
    """The cells of the same wrapper that this run of pytest is asked for."""
    asked = {item.callspec.params.get("cell") for item in request.session.items if hasattr(item, "callspec")}
    return lambda cell: tuple(other for other in CELLS if other.wrapper == cell.wrapper and other in asked)


def _among(cell: Cell, cells: tuple[Cell, ...], size: int) -> tuple[Cell, ...]:
    """The part of the cells, cut into parts of this size, that a cell is in."""
    first = cells.index(cell) // size * size
    return cells[first : first + size]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory, selection: Selection) -> Launch:
    """Runs some cells of a wrapper in one launch, once."""

    @functools.cache
    def run(cells: tuple[Cell, ...]) -> dict[Cell, JobResult]:
        root = str(tmp_path_factory.mktemp("dumps"))
        per_rank = run_ranks(run_jobs, 2, timeout_s=50, jobs=[cell.job(root) for cell in cells])
        return {cell: JobResult(cell, [records[index] for records in per_rank]) for index, cell in enumerate(cells)}

    return lambda cell: run(_among(cell, selection(cell), LAUNCH_SIZE))[cell]


@pytest.fixture(scope="module")
def replay(launch: Launch, selection: Selection) -> Replay:
    """Replays the culprits of some cells of a wrapper, each in a process of its own, once."""

    @functools.cache
    def run(cells: tuple[Cell, ...]) -> dict[Cell, Replayed]:
        return dict(zip(cells, replay_alone([launch(cell).report["dump_path"] for cell in cells]), strict=True))

    return lambda cell: run(_among(cell, selection(cell), REPLAY_SIZE))[cell]


def marked(cells: list[Cell]) -> list[Any]:
    """The parameters of a test; most of what is crossed with ranks and accumulation waits for ``pytest -m ''``."""
    return [
        pytest.param(cell, id=str(cell), marks=[pytest.mark.exhaustive] if cell.is_exhaustive else []) for cell in cells
    ]


CELLS = all_cells()
BAD_UPDATES = [cell for cell in CELLS if cell.place == "update"]
KEPT = [cell for cell in CELLS if cell.place != "update" or cell.keep_previous]
"""Without ``keep_previous``, what was before a bad update is gone: the one exception to the promise."""

each_cell = pytest.mark.parametrize("cell", marked(CELLS))
each_kept_cell = pytest.mark.parametrize("cell", marked(KEPT))


@each_cell
def test_every_rank_stops_in_the_same_step_with_the_same_text(cell: Cell, launch: Launch) -> None:
    records = launch(cell).records
    assert [record.error_step for record in records] == [cell.error_step] * len(records)
    assert len({record.error for record in records}) == 1
    assert all(record.report == records[0].report for record in records)


@each_cell
def test_the_origin_is_the_planted_one(cell: Cell, launch: Launch) -> None:
    report = launch(cell).report
    assert {key: report["origin"][key] for key in cell.origin()} == cell.origin()
    assert report["step"] == cell.fault.step
    assert report["wrapper"] == cell.wrapper.replace("hsdp", "fsdp2")
    assert report["world_size"] == cell.world_size


@each_kept_cell
def test_no_weight_has_changed(cell: Cell, launch: Launch) -> None:
    for record in launch(cell).records:
        before = record.before[cell.fault.step]
        weights = {name: value for name, value in before.items() if not name.startswith("buffer ")}
        assert {name: record.after.get(name) for name in weights} == weights


@each_kept_cell
def test_the_buffers_are_those_from_before_the_step(cell: Cell, launch: Launch) -> None:
    """Those of DDP's other ranks are rank 0's, which the step's first forward has broadcast."""
    for rank, record in enumerate(launch(cell).records):
        source = launch(cell).records[0] if cell.wrapper == "ddp" else record
        before = {name: v for name, v in source.before[cell.fault.step].items() if name.startswith("buffer ")}
        assert before, rank
        assert {name: record.after.get(name) for name in before} == before


@each_kept_cell
def test_the_dump_holds_the_window(cell: Cell, launch: Launch) -> None:
    ran = launch(cell)
    assert ran.dump.ranks == list(range(cell.world_size))
    assert _documented(ran.dump.report.to_dict()) == _documented(ran.report)
    for rank, record in enumerate(ran.records):
        _assert_window(ran, rank, record)
        _assert_buffers(ran, rank)


@each_kept_cell
def test_the_dump_holds_the_state_from_before_the_step(cell: Cell, launch: Launch) -> None:
    ran = launch(cell)
    for rank in range(cell.world_size):
        stored = ran.dump.load_state(None, rank)
        expected = _whole_state(ran, rank, {name: tuple(tensor.shape) for name, tensor in stored.items()})
        assert expected.keys() <= stored.keys()
        assert {name: digest(stored[name]) for name in expected} == {name: digest(t) for name, t in expected.items()}


@each_cell
def test_the_replay_of_the_culprit_alone(cell: Cell, launch: Launch, replay: Replay) -> None:
    replayed = replay(cell)
    if cell.place == "reduce" or (cell.place == "update" and not cell.keep_previous):
        assert (replayed.code, replayed.outcome.get("outcome")) == (CANNOT, "cannot"), replayed
    else:
        assert (replayed.code, replayed.outcome.get("outcome")) == (SAME, "same"), replayed


@pytest.mark.parametrize("cell", marked(BAD_UPDATES))
def test_a_bad_update_is_named(cell: Cell, launch: Launch) -> None:
    """Without ``keep_previous``: the weights, and what the next forward has made of them."""
    ran = launch(cell)
    damaged = {name for record in ran.records for name in (*record.bad_parameters, *record.bad_buffers)}
    assert set(ran.report["nonfinite_state"]) == damaged
    assert (cell.expected.slot in damaged) is not cell.keep_previous


REDUCES = {
    "ddp": ("c10d.allreduce_", "aten._to_copy.default"),
    "fsdp1": ("c10d._reduce_scatter_base_", "aten._to_copy.default"),
    "fsdp2": ("c10d._reduce_scatter_base_", "aten.add_.Tensor"),
}
"""The collective, and the operator that made the value too large for half precision just before it."""


@pytest.mark.parametrize("cell", [Cell(wrapper, "reduce", 1, 3) for wrapper in REDUCES], ids=str)
def test_a_reduce_fault_replays_on_all_ranks(cell: Cell, launch: Launch) -> None:
    ran = launch(cell)
    dump = open_dump(ran.report["dump_path"])  # a sharded model's gradients are given up for the second look
    seen = {rank: {str(site.phase) for site in dump.evidence(rank).sites} for rank in dump.ranks}
    assert ran.report["holders"] == [rank for rank in dump.ranks if "reduce" in seen[rank]] != []
    replayed = replay_on_all_ranks(ran.report["dump_path"], 2, "--trace")
    assert [one.code for one in replayed] == [SAME, SAME], replayed
    assert replayed[0].outcome["outcome"] == "same" and replayed[1].output == ""
    collective, overflow = REDUCES[cell.wrapper]
    assert f"operator  {overflow} " in replayed[0].output and "\nrank 1: trace of " in replayed[0].output
    largest = f"largest gradient of {ran.report['origin']['slot']} before it: 3e+05 on rank 1, "
    assert f"reduce: {collective}.default; {largest}" in replayed[0].output, replayed[0].output


@pytest.mark.parametrize("change", ["random", "weight"])
@pytest.mark.parametrize("cell", [usual_cell(wrapper, "weight.backward") for wrapper in WRAPPERS], ids=str)
def test_a_changed_replay_is_not_the_same(cell: Cell, change: str, launch: Launch) -> None:
    """Negative controls: one more random number drawn, one bit of a weight changed."""
    (replayed,) = replay_alone([launch(cell).report["dump_path"]], {"TEST_REPLAY_CHANGE": change})
    assert replayed.code != SAME
    assert replayed.outcome["outcome"] not in ("same", "cannot")


@pytest.mark.parametrize("place", ["gate.forward", "weight.backward"])
def test_a_mesh_of_replicas_and_shards(place: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    cell = Cell("hsdp", place, rank=3, num_micro_batches=3, world_size=4)
    root = str(tmp_path_factory.mktemp("dumps"))
    per_rank = run_ranks(run_jobs, 4, timeout_s=50, jobs=[cell.job(root)])
    ran = JobResult(cell, [records[0] for records in per_rank])
    test_every_rank_stops_in_the_same_step_with_the_same_text(cell, lambda _: ran)
    test_the_origin_is_the_planted_one(cell, lambda _: ran)
    test_no_weight_has_changed(cell, lambda _: ran)
    test_the_dump_holds_the_window(cell, lambda _: ran)
    test_the_dump_holds_the_state_from_before_the_step(cell, lambda _: ran)
    (replayed,) = replay_alone([ran.report["dump_path"]])
    assert (replayed.code, replayed.outcome.get("outcome")) == (SAME, "same"), replayed


def _documented(report: dict[str, Any]) -> dict[str, Any]:
    return {name: report[name] for name in DOCUMENTED.split()}


def _assert_window(ran: JobResult, rank: int, record: Record) -> None:
    window = ran.dump.window(rank)
    assert [micro_batch.index for micro_batch in window] == list(range(ran.cell.num_micro_batches))
    for micro_batch in window:
        state = micro_batch.random_state
        taken = digest_of_random(state.python, state.numpy, state.torch)
        assert taken == record.random_states[ran.cell.fault.step][micro_batch.index]
        assert micro_batch.batch["id"] == f"rank {rank} step {ran.cell.fault.step} micro-batch {micro_batch.index}"


def _assert_buffers(ran: JobResult, rank: int) -> None:
    """As they were when the window opened; under DDP rank 0's, which its broadcast gives to all."""
    source = ran.records[0 if ran.cell.wrapper == "ddp" else rank]
    before = source.before[ran.cell.fault.step]
    stored = {f"buffer {name}": digest(tensor) for name, tensor in ran.dump.buffers(rank).items()}
    assert {name for name in before if "running_" in name} <= stored.keys()
    assert stored == {name: before[name] for name in stored}


def _whole_state(ran: JobResult, rank: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The outside copies, put together from the shards."""
    if ran.cell.wrapper in ("plain", "ddp"):
        return ran.records[rank].window_state
    shards = [record.window_state for record in ran.records[:2]]  # ranks 2 and 3 of the mesh hold the same again
    names = {name for shard in shards for name in shard}
    return {name: _whole([shard[name] for shard in shards if name in shard], shapes[name]) for name in names}


def _whole(shards: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    filled = [shard for shard in shards if shard.numel()]
    return torch.cat(filled).reshape(shape)
