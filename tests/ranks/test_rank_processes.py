"""The harness itself: values, errors, deaths and hangs are told apart, within the deadline."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import RanksFailedError, run_ranks, run_ranks_raw


def _ddp_step(rank: int, world_size: int, scale: float) -> Any:
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    model(torch.full((4, 3), scale * (rank + 1))).sum().backward()
    gradient = model.module.weight.grad
    assert gradient is not None
    return gradient


def _one_raises(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("bad layer")


def _one_hangs(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.barrier()


def _one_dies(rank: int, world_size: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return str(error)
    return "no error"


def _exit(rank: int, world_size: int, code: int) -> None:
    os._exit(code)


def _hook_exits(rank: int, world_size: int) -> None:
    sys.excepthook = lambda *_: os._exit(65)
    raise RuntimeError("to the hook")


def _environment(rank: int, world_size: int) -> tuple[str | None, str, str]:
    return os.environ.get("NANGUARD_ON_FAULT"), os.environ["RANK"], os.getcwd()


def test_values_come_in_rank_order() -> None:
    first, second = run_ranks(_ddp_step, scale=2.0)
    assert torch.equal(first, torch.full((2, 3), 12.0)) and torch.equal(first, second)


def test_an_exception_names_its_rank() -> None:
    with pytest.raises(RanksFailedError, match="rank 1: ValueError: bad layer"):
        run_ranks(_one_raises)


def test_a_hang_shows_stacks_within_the_deadline() -> None:
    started = time.monotonic()
    hung, done = run_ranks_raw(_one_hangs_body_stays, timeout_s=3)
    assert hung.hung and "barrier" in hung.stacks
    assert done.hung and time.monotonic() - started < 10


def _one_hangs_body_stays(rank: int, world_size: int) -> None:
    _one_hangs(rank, world_size)
    time.sleep(60)


def test_a_death_is_an_outcome() -> None:
    alive, dead = run_ranks_raw(_one_dies)
    assert dead.exit_code == -signal.SIGKILL and not dead.returned
    assert alive.exit_code == 0 and "onnection" in alive.value


def test_exit_codes() -> None:
    assert run_ranks(_exit, expect_exit=7, code=7) == [None, None]
    with pytest.raises(RanksFailedError, match="exit code 7"):
        run_ranks(_exit, code=7)
    assert [outcome.exit_code for outcome in run_ranks_raw(_hook_exits, through_excepthook=True)] == [65, 65]


def test_ranks_see_only_the_given_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANGUARD_ON_FAULT", "warn")
    values = run_ranks(_environment)
    assert [value[:2] for value in values] == [(None, "0"), (None, "1")]
    assert values[0][2] != os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    assert run_ranks(_environment, env={"NANGUARD_ON_FAULT": "skip"})[0][0] == "skip"
