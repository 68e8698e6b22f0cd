"""One verdict for all ranks, or for none: forwards without a backward, caught errors, several guards."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import run_ranks, run_ranks_raw
from tests.ranks.small import ended, guard_of, is_finite, rows, run_step, sgd, small_model


def _forward_between(rank: int, world_size: int) -> int:
    model = small_model()
    first, second = (torch.optim.SGD(model.module[index].parameters(), lr=0.1) for index in (0, 2))
    guard = guard_of(model, [first, second])
    for _ in range(3):
        guard(rows(False)).sum().backward()
        first.step()
        if rank == 0:
            guard(rows(False))  # a logger's forward, no backward
            next(iter(guard.steps([rows(False)])))
        second.step()
        model.zero_grad()
    guard.close()
    return guard.step


def test_only_a_backward_asks_for_a_verdict() -> None:
    assert run_ranks(_forward_between) == [3, 3]


def _without_losses(rank: int, world_size: int) -> list[int]:
    return [_without_loss(rank, idle_step) for idle_step in range(3)]


def _without_loss(rank: int, idle_step: int) -> int:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = sgd(model)
    guard = guard_of(model, optimizer)
    for step in range(3):
        if rank == 0 or step != idle_step:
            guard(rows(False)).sum().backward()
        for parameter in model.parameters():  # gradients are reduced by hand
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    guard.close()
    return guard.step


def test_a_rank_without_a_loss_keeps_step() -> None:
    assert run_ranks(_without_losses) == [[3, 3, 3], [3, 3, 3]]


def _caught(rank: int, world_size: int) -> Any:
    """Training that goes on after an error: zero_grad, next batch, next fault. Then steps without a backward."""
    from ddp_nanguard import NonFiniteError

    model = small_model(norm=True)
    optimizer = sgd(model)
    guard = guard_of(model, optimizer, first_step=1000)
    caught = []
    for step in range(6):
        values = torch.randn(4, 4) / (0.0 if rank == 1 and step in (1, 4) else 1.0)
        try:
            run_step(guard, optimizer, values)
        except NonFiniteError as error:
            caught.append((error.report.step, error.report.to_dict()["origin"]["rank"]))
        optimizer.zero_grad()
    went_on = (caught, guard.step, is_finite(model), bool(model.module[1].running_mean.isfinite().all()))
    guard(rows(rank == 1)).sum().backward()
    retries = [ended(optimizer.step) is not None for _ in range(3)]
    optimizer.zero_grad()
    guard.close()
    return went_on, retries, is_finite(model)


def test_a_caught_error_leaves_the_process_usable_and_the_weights_alone() -> None:
    for went_on, retries, finite in run_ranks(_caught):
        assert went_on == ([(1001, 1), (1003, 1)], 1004, True, True)
        assert retries == [True, True, True], "a step after a fault, without a new backward, is no new verdict"
        assert finite


def _in_context(rank: int, world_size: int) -> Any:
    from ddp_nanguard import NonFiniteError

    model = small_model()
    optimizer = sgd(model)
    hook, threads, steps = sys.excepthook, threading.active_count(), []
    for _ in range(3):
        try:
            with guard_of(model, optimizer) as guard:
                for step in range(3):
                    run_step(guard, optimizer, rows(rank == 1 and step == 1))
        except NonFiniteError:
            steps.append(guard.step)
        optimizer.zero_grad()
    del guard
    reference = weakref.ref(model)
    del model, optimizer
    gc.collect()
    return steps, reference() is None, threading.active_count() - threads, sys.excepthook is hook


def test_an_error_caught_around_the_context_manager_leaves_nothing_behind() -> None:
    assert run_ranks(_in_context) == [([1, 1, 1], True, 0, True)] * 2


def _gan(rank: int, world_size: int, bad: bool) -> Any:
    torch.manual_seed(0)
    maker, judge = DistributedDataParallel(nn.Linear(3, 4)), DistributedDataParallel(nn.Linear(4, 1))
    maker_optimizer, judge_optimizer = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
    maker_guard, judge_guard = guard_of(maker, maker_optimizer), guard_of(judge, judge_optimizer)

    def train() -> None:
        for step in range(3):
            noise = torch.randn(4, 3) / (0.0 if bad and rank == 1 and step == 1 else 1.0)
            (judge_guard(maker_guard(noise).detach()).mean() - judge_guard(torch.randn(4, 4)).mean()).backward()
            judge_optimizer.step()
            judge_optimizer.zero_grad()
            (-judge_guard(maker_guard(noise)).mean()).backward()
            maker_optimizer.step()
            maker_optimizer.zero_grad()
            judge_optimizer.zero_grad()
        maker_guard.close()
        judge_guard.close()

    return ended(train), maker_guard.step, is_finite(maker) and is_finite(judge)


def test_two_guards_in_one_process_stop_together() -> None:
    assert run_ranks(_gan, bad=False) == [(None, 3, True)] * 2
    first, second = run_ranks(_gan, bad=True)
    assert first == second
    assert first[0].startswith("NonFiniteError: rank 1, step 1")
    assert first[2]


def _two_exit_codes(rank: int, world_size: int) -> None:
    models = [small_model(), small_model()]
    optimizers = [sgd(model) for model in models]
    closed, guard = (
        guard_of(model, optimizer, exit_code=70 + index)
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True))
    )
    closed.close()
    run_step(guard, optimizers[1], rows(rank == 1))


def test_a_closed_guard_leaves_the_exit_to_the_open_one() -> None:
    assert [outcome.exit_code for outcome in run_ranks_raw(_two_exit_codes, through_excepthook=True)] == [71, 71]


def _often(rank: int, world_size: int) -> tuple[int, int]:
    model = small_model()
    optimizer = sgd(model)
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        guard = guard_of(model, optimizer)
        run_step(guard, optimizer, rows(False))
        guard.close()
    return threading.active_count() - threads, len(os.listdir("/proc/self/fd")) - files


def test_guards_built_and_closed_often_leave_no_threads_and_no_files() -> None:
    for threads, files in run_ranks(_often):
        assert threads == 0
        assert files < 10
