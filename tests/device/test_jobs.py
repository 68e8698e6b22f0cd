"""The tests' own jobs on devices of their own: bits, a fault of each phase, dumps and their replay, options."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.matrix import Cell, exists, usual_cell
from tests.rank_processes import REAL
from tests.ranks import run_ranks
from tests.replaying import Replayed, replay_alone
from tests.training import WRAPPERS, Job, Record, run_jobs

PLACES = ("input", "gate.forward", "loss.forward", "weight.backward", "reduce", "update")
OPTIONS: tuple[dict[str, Any], ...] = (
    {"on_fault": "skip"},
    {"hold_batches": "host", "layers": "every", "keep_previous": True},
)
CANNOT, SAME = 5, 0

Ran = Callable[[str, str], tuple[list[list[Record]], list[Cell]]]


def cells(wrapper: str) -> list[Cell]:
    found = [usual_cell(wrapper, place) for place in PLACES if (wrapper, place) != ("plain", "reduce")]
    return [cell for cell in found if exists(cell)]


def _clean(wrapper: str) -> list[Job]:
    unguarded, guarded = (Job(wrapper, num_steps=3, num_micro_batches=2, guarded=guarded) for guarded in (False, True))
    return [unguarded, guarded, *(dataclasses.replace(guarded, options=options) for options in OPTIONS)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """All jobs of a wrapper in one launch, clean ones first."""

    @functools.cache
    def run(wrapper: str, device: str) -> tuple[list[list[Record]], list[Cell]]:
        root = str(tmp_path_factory.mktemp("dumps"))
        of_cells = [cell.job(root) for cell in cells(wrapper)]
        jobs = [dataclasses.replace(job, device_type="cuda") for job in [*_clean(wrapper), *of_cells]]
        per_rank = run_ranks(run_jobs, 2, 100, device=device, jobs=jobs)
        return [list(records) for records in zip(*per_rank, strict=True)], cells(wrapper)

    return run


@pytest.fixture(params=[pytest.param(each, marks=[pytest.mark.exhaustive] * (each != "ddp")) for each in WRAPPERS])
def wrapper(request: pytest.FixtureRequest, device: str) -> str:
    if device == REAL:
        pytest.skip("two ranks need two GPUs")
    return str(request.param)


def test_the_same_bits_with_and_without_a_guard(wrapper: str, device: str, ran: Ran) -> None:
    records, _ = ran(wrapper, device)
    without, *guarded = records[: 2 + len(OPTIONS)]
    for each in guarded:
        assert [record.error for record in each] == [None, None]
        assert [record.after for record in each] == [record.after for record in without]
        assert [record.random_after for record in each] == [record.random_after for record in without]


def test_each_phase_is_named_and_kept(wrapper: str, device: str, ran: Ran) -> None:
    records, planted = ran(wrapper, device)
    for cell, each in zip(planted, records[2 + len(OPTIONS) :], strict=True):
        assert len({record.error for record in each}) == 1, cell
        report = each[0].report
        assert report is not None, cell
        assert {key: report["origin"][key] for key in cell.origin()} == cell.origin(), cell
        assert [record.error_step for record in each] == [cell.error_step] * 2, cell


def _replayed(each: list[Record], device: str) -> Replayed:
    assert each[0].report is not None
    (replayed,) = replay_alone([each[0].report["dump_path"]], device=device)
    return replayed


@pytest.mark.parametrize("place", ["gate.forward", "weight.backward"])
def test_a_replay_of_the_culprit_meets_the_same_bits(wrapper: str, place: str, device: str, ran: Ran) -> None:
    records, planted = ran(wrapper, device)
    index = [cell.place for cell in planted].index(place)
    replayed = _replayed(records[2 + len(OPTIONS) + index], device)
    assert (replayed.code, replayed.outcome["outcome"]) == (SAME, "same"), replayed


def test_a_replay_without_the_device_says_that_it_is_another(device: str, ran: Ran) -> None:
    """Random numbers of a device come from no other: the same place, and why its bits are others."""
    records, planted = ran("ddp", device)
    index = [cell.place for cell in planted].index("gate.forward")
    replayed = _replayed(records[2 + len(OPTIONS) + index], "cpu")
    recorded, now = replayed.outcome["recorded"], replayed.outcome["replayed"]
    assert (recorded["phase"], recorded["layer"], recorded["call"]) == (now["phase"], now["layer"], now["call"])
    assert "cuda: recorded on cuda, replayed on device cpu" in replayed.outcome["notes"]
    assert any(text.startswith("device ") and text.endswith("cpu now") for text in replayed.outcome["differs"])
