"""`skip`, `warn` and the quota: the same decision on every rank, and nothing left behind by a skipped step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ddp_nanguard import NanGuard, NonFiniteError
from tests.faults import Fault
from tests.ranks import run_ranks
from tests.training import Job, Record, Run, build, digests, end_record, listening, train_steps

NUM_STEPS = 4


@dataclass
class Policy:
    """What one rank saw: its record, the guard's step at the end, its warnings, and the state before the bad window."""

    record: Record
    step: int
    warnings: list[str]


def _run(rank: int, world_size: int, jobs: list[Job]) -> list[Policy]:
    return [_run_one(job, rank) for job in jobs]


def _run_one(job: Job, rank: int) -> Policy:
    with listening() as lines:
        run = build(job, rank)
        train_steps(run)
        end_record(run)
        step = run.guard.step
        if run.record.error is None:
            _close(run)
    return Policy(run.record, step, lines)


def _close(run: Run) -> None:
    try:
        run.close()
    except NonFiniteError as error:
        run.record.error = str(error)


def _job(wrapper: str, place: str, kind: str = "nan", **options: Any) -> Job:
    fault = Fault(place, kind, rank=1, step=1, micro_batch=1 if place.count(".") else 0)
    return Job(wrapper, num_steps=NUM_STEPS, num_micro_batches=2, fault=fault, options=options)


def _weights(found: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in found.items() if not name.startswith("buffer ")}


@pytest.mark.parametrize("wrapper", ["plain", "ddp", "fsdp1", "fsdp2"])
def test_a_skipped_step_leaves_no_trace(wrapper: str) -> None:
    """Weights, optimizer state and buffers after the skipped step are those of before it; training goes on."""
    for (skipped,) in run_ranks(_run, jobs=[_job(wrapper, "gate.forward", on_fault="skip")]):
        assert skipped.record.error is None
        assert skipped.step == NUM_STEPS
        before, after = skipped.record.before[1], skipped.record.before[2]
        assert _weights(after) == _weights(before)
        if wrapper != "ddp":  # there, rank 0's buffers come back over rank 1's at the next forward
            assert after == before
        assert skipped.record.before[3] != after
        assert skipped.record.bad_parameters == skipped.record.bad_buffers == []
        assert len(skipped.warnings) >= 1


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp1"])
def test_a_skip_with_a_scaler_leaves_its_scale(wrapper: str) -> None:
    job = dataclasses.replace(_job(wrapper, "gate.forward", on_fault="skip"), scaler=True)
    for (skipped,) in run_ranks(_run, jobs=[job]):
        assert skipped.record.error is None
        assert skipped.record.scaler_state is not None
        assert skipped.record.scaler_state["scale"] == 2.0**10
        assert skipped.record.scaler_state["_growth_tracker"] == NUM_STEPS - 1  # the skipped step counts for nothing
        assert _weights(skipped.record.before[2]) == _weights(skipped.record.before[1])


def test_the_quota_ends_the_skipping() -> None:
    first, second = run_ranks(_run, jobs=[_job("ddp", "gate.forward", on_fault="skip", max_skips=0)])
    assert first[0].record.error == second[0].record.error
    assert first[0].record.error is not None
    assert first[0].record.error_step == 1


@pytest.mark.parametrize("place", ["parameter", "optimizer_state"])
def test_a_skip_of_damaged_state_stops(place: str) -> None:
    job = _job("ddp", place, on_fault="skip")
    if place == "optimizer_state":
        job = Job("ddp", num_steps=2, fault=Fault(place, "nan", rank=1, step=0), options={"on_fault": "skip"})
    first, second = run_ranks(_run, jobs=[job])
    assert first[0].record.error == second[0].record.error
    assert first[0].record.error is not None
    assert first[0].record.report is not None
    assert first[0].record.report["origin"]["phase"] == "state"


def test_warn_lets_the_update_go_ahead_and_says_so_once() -> None:
    for (warned,) in run_ranks(_run, jobs=[_job("ddp", "gate.forward", on_fault="warn")]):
        assert len(warned.record.before) == NUM_STEPS
        assert _weights(warned.record.before[2]) != _weights(warned.record.before[1])
        assert warned.record.bad_parameters
        assert len([line for line in warned.warnings if "blocks.1.gate" in line]) == 1


def test_an_ignored_layer_is_no_origin_and_an_ignored_parameter_no_trigger() -> None:
    layer = _job("ddp", "gate.forward", ignore=("blocks.1.gate",))
    parameter = dataclasses.replace(_job("plain", "weight.backward", ignore=("head.*", "head")), num_steps=2)
    for ignored_layer, ignored_parameter in run_ranks(_run, jobs=[layer, parameter]):
        assert ignored_layer.record.report is not None
        assert ignored_layer.record.report["origin"]["layer"] != "blocks.1.gate"
        assert ignored_parameter.record.error is None


def test_disabled_is_as_if_there_were_no_guard() -> None:
    for (disabled,) in run_ranks(_run, jobs=[_job("ddp", "gate.forward", enabled=False)]):
        assert disabled.record.error is None
        assert disabled.record.bad_parameters
        assert disabled.warnings == []


def test_the_environment_switches_the_policy() -> None:
    job = _job("ddp", "gate.forward", on_fault="stop")
    for (skipped,) in run_ranks(_run, env={"NANGUARD_ON_FAULT": "skip"}, jobs=[job]):
        assert skipped.record.error is None
        assert skipped.step == NUM_STEPS


def _collapse(rank: int, world_size: int) -> tuple[int, str]:
    """B01: the forward's NaN looks like an overflow to the scaler, which would halve its scale for ever."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    with torch.no_grad():
        model.module.weight[0, 0] /= 0.0 * rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    guard = NanGuard(model, optimizer, scaler=scaler, dump_dir=None, timeout_s=10)
    before = digests(model)
    try:
        for _ in range(30):
            scaler.scale(guard(torch.ones(2, 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    except NonFiniteError as error:
        assert digests(model) == before
        return error.report.step, str(error)
    return -1, ""


def test_a_bad_forward_is_not_taken_for_an_overflow() -> None:
    first, second = run_ranks(_collapse)
    assert first == second
    assert first[0] == 0
    assert "state" in first[1]
