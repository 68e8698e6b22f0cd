"""A verdict is taken for nothing else: ranks that are not in the same step are told so, all that can speak."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import run_ranks, run_ranks_raw
from tests.ranks.small import NAN, ended, guard_of, run_step

REMEDY = "give every rank the same number of batches and steps, and let all close the guard after the same step"


def _met(step: str, rank: int, met: str) -> str:
    return f"OutOfStepError: ranks are not in the same step: the verdict of {step} on rank {rank} met {met}; {REMEDY}"


def _local() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, guard_of(model, optimizer)


def _trained(rank: int, steps: int, after: dict[int, Any]) -> str | None:
    _, optimizer, guard = _local()

    def train() -> None:
        for step in range(steps):
            run_step(guard, optimizer, torch.ones(2, 4))
            if step in after:
                after[step]()
        guard.close()

    return ended(train)


def _cases(rank: int, world_size: int) -> dict[str, str | None]:
    def reduced(numbers: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        return (lambda: dist.all_reduce(numbers.clone(), op=op)) if rank == 1 else (lambda: None)

    numbers = {
        "floats": (torch.ones(2, dtype=torch.float64), dist.ReduceOp.SUM),
        "negative floats": (-torch.ones(2, dtype=torch.float64), dist.ReduceOp.SUM),
        "largest of integers": (torch.tensor([3, 5]), dist.ReduceOp.MAX),
        "largest of negative integers": (torch.tensor([-3, -5]), dist.ReduceOp.MAX),
        "sum of integers": (torch.tensor([1, 1]), dist.ReduceOp.SUM),
    }
    found = {"one batch less": _trained(rank, 4 - rank, {})}
    dist.barrier()
    for name, (values, op) in numbers.items():
        found[name] = _trained(rank, 3, {0: reduced(values, op)})
        if rank == 0:  # the other rank's verdict waits
            dist.all_reduce(values.clone(), op=op)
        dist.barrier()
    return found


def test_ranks_that_are_not_in_the_same_step_are_told_so() -> None:
    first, second = run_ranks(_cases, timeout_s=60)
    assert first.pop("one batch less") == _met("step 3", 0, "that of close() in step 3")
    assert second.pop("one batch less") == _met("close() in step 3", 1, "that of step 3")
    for rank, errors in enumerate((first, second)):
        for name, error in errors.items():
            assert error == _met("step 1", rank, "another collective of the job, of the same size"), name


def _even(rank: int, world_size: int) -> tuple[list[int], str | None]:
    """More steps than the words of a verdict have numbers, two guards in turn, a check between, and a close."""
    jobs = [_local() for _ in range(2)]
    guards = [guard for *_, guard in jobs]

    def train() -> None:
        for _ in range(70):
            for _, optimizer, guard in jobs:
                run_step(guard, optimizer, torch.ones(2, 4))
        guards[0].check()

    error = ended(train)
    steps = [guard.step for guard in guards]
    for guard in guards:
        guard.close()
    return steps, error


def test_ranks_in_the_same_step_are_not_told_so() -> None:
    assert run_ranks(_even) == [([70, 70], None)] * 2


def _other_guard(rank: int, world_size: int) -> str | None:
    jobs = [_local() for _ in range(2)]

    def train() -> None:
        for _, optimizer, guard in jobs if rank == 0 else reversed(jobs):
            run_step(guard, optimizer, torch.ones(2, 4))

    return ended(train)


def test_guards_in_another_order_are_told() -> None:
    assert run_ranks(_other_guard) == [_met("step 0", rank, "that of another guard") for rank in range(2)]


def _closed(rank: int, world_size: int) -> list[str | None]:
    return [_after_a_step(rank), *(_before_any_step(rank, value) for value in (1.0, NAN))]


def _before_any_step(rank: int, value: float) -> str | None:
    """One rank has a batch and the other has none, so they leave together."""
    _, _, guard = _local()
    for batch in guard.steps([torch.full((2, 4), value)] * rank):
        guard.watch(loss=guard(batch).sum())
    error = ended(guard.close)
    dist.barrier()  # the job goes on, and its collectives meet
    return error


def _after_a_step(rank: int) -> str | None:
    """Checked before a checkpoint; then one rank has another micro-batch, which no step uses."""
    _, optimizer, guard = _local()
    run_step(guard, optimizer, torch.ones(2, 4))
    guard.check()
    if rank == 1:
        guard(torch.ones(2, 4)).sum().backward()
    return ended(guard.close)


def test_a_window_that_is_open_on_one_rank_alone_is_closed_by_all() -> None:
    first, second = run_ranks(_closed)
    assert first[:2] == second[:2] == [None, None]
    assert first[2] == second[2]
    assert first[2] is not None and first[2].startswith("NonFiniteError: rank 1, step 0, micro-batch 0, input: ")


def _waiting(rank: int, world_size: int, collective: str) -> None:
    """Rank 0 alone issues a collective of the job; or it takes its time, which is no fault."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = guard_of(model, optimizer, timeout_s=1)
    for step in range(3):
        run_step(guard, optimizer, torch.ones(2, 4))
        if rank == 0 and step == 1:
            match collective:
                case "barrier":
                    dist.barrier()
                case "all_gather_object":
                    dist.all_gather_object([None, None], {"loss": 1.0})
                case "none":
                    time.sleep(3)
    guard.close()


@pytest.mark.parametrize("collective", ["barrier", "all_gather_object"])
def test_ranks_that_wait_for_each_other_in_different_collectives_are_told_so(collective: str) -> None:
    for outcome in run_ranks_raw(_waiting, collective=collective):
        assert outcome.exit_code == 65
        (told,) = [line for line in outcome.output.splitlines() if line.startswith("OutOfStepError: ")]
        assert "have waited for each other for 1 s: rank 0 in " + collective + "() at " in told
        assert "test_out_of_step.py:" in told
        assert ", rank 1 in a verdict of the guard; give every rank" in told


def test_a_rank_that_takes_its_time_is_waited_for() -> None:
    assert run_ranks(_waiting, collective="none") == [None, None]
