"""Guard on and off: twenty steps give the same bytes."""

from __future__ import annotations

import dataclasses

import pytest

from tests.faults import Fault
from tests.ranks import run_ranks
from tests.training import Job, run_jobs

NUM_STEPS = 20


def _jobs(wrapper: str) -> list[Job]:
    plain = Job(wrapper, num_steps=NUM_STEPS)
    jobs = [plain, dataclasses.replace(plain, num_micro_batches=3, clip=True)]
    jobs.append(dataclasses.replace(plain, num_micro_batches=3, clip=True, scaler=True))
    if wrapper == "fsdp1":
        jobs.append(dataclasses.replace(plain, use_orig_params=False))
    return jobs


@pytest.mark.parametrize("wrapper", ["plain", "ddp", "fsdp1", "fsdp2"])
def test_twenty_steps_are_identical_with_the_guard_on_and_off(wrapper: str) -> None:
    guarded_jobs = _jobs(wrapper)
    guarded_jobs += [dataclasses.replace(guarded_jobs[1], options={"keep_previous": True, "copy_batch": True})]
    guarded = run_ranks(run_jobs, jobs=guarded_jobs, timeout_s=50)
    unguarded_jobs = [dataclasses.replace(job, guarded=False) for job in guarded_jobs[:-1]]
    unguarded = run_ranks(run_jobs, jobs=unguarded_jobs, timeout_s=50)
    for rank in range(2):
        for job, on, off in zip(guarded_jobs, guarded[rank], [*unguarded[rank], unguarded[rank][1]], strict=True):
            assert on.error is None
            assert len(on.losses) == NUM_STEPS * job.num_micro_batches
            assert on == off, f"{job} differs on rank {rank}"


@pytest.mark.parametrize("wrapper", ["plain", "ddp", "fsdp1", "fsdp2"])
def test_the_comparison_can_fail(wrapper: str) -> None:
    """One gradient element that differs in one step changes the bytes."""
    usual = Job(wrapper, guarded=False)
    other = dataclasses.replace(usual, fault=Fault("weight.backward", "huge", rank=1, step=1))
    ranks = run_ranks(run_jobs, jobs=[usual, other])
    assert all(first.losses == second.losses for first, second in ranks)
    assert any(first.after != second.after for first, second in ranks)
