"""The cause is that of the rank where the fault began, in the same words on every rank."""

from __future__ import annotations

from typing import Any

from ddp_nanguard.fault import cause
from tests.faults import Fault
from tests.ranks import run_ranks
from tests.training import Job, Record, build, end_record, train_steps


def _fail(known: Any) -> None:
    raise ZeroDivisionError


def _run(rank: int, world_size: int, job: Job) -> list[Record]:
    return [_trained(job, rank), _trained(job, rank, fails=rank == 1)]


def _trained(job: Job, rank: int, fails: bool = False) -> Record:
    cause.reason_of = _fail if fails else cause.reason_of  # this process is the test's own
    run = build(job, rank)
    train_steps(run)
    end_record(run)
    return run.record


def test_the_rank_where_it_began_explains_it_to_all() -> None:
    fault = Fault("input", "nan", rank=1, step=1)
    options = {"look_again": False}  # whose trace has reasons of its own
    first, second = run_ranks(_run, job=Job("ddp", num_steps=2, fault=fault, options=options))
    told = [[each.report["cause"] for each in rank if each.report] for rank in (first, second)]
    assert (
        told[0]
        == told[1]
        == ['bad input: batch["image"] holds NaN, sample 1', "the loader delivered a non-finite value"]
    )
    assert [each.error for each in first] == [each.error for each in second]
