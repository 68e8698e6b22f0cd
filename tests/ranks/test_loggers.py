"""What a logger is told of a training on several ranks, what that costs, and that it ends no rank."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.counting import Counts, counting
from tests.ranks import run_ranks
from tests.ranks.small import guard_of, is_finite, rows, sgd, small_model

LOGGED, UNLOGGED = 4, 5
EVERY = 4


def _count(rank: int, on_metrics: Any) -> tuple[dict[int, Counts], list[float]]:
    """What the verdicts of two steps take, and the norms of the gradients in all of them."""
    model = small_model()
    optimizer = sgd(model)
    extra = {} if on_metrics is None else {"on_metrics": on_metrics}
    guard = guard_of(model, optimizer, log_every=EVERY, layers="every", **extra)
    counts, norms = {}, []
    for step in range(UNLOGGED + 1):
        loss = guard(rows(False) * (1 + rank)).square().sum()
        guard.watch(loss=loss)
        loss.backward()
        norms.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))
        with counting() as counted:
            optimizer.step()
        counts[step] = counted
        optimizer.zero_grad()
    guard.close()
    return counts, norms


def _differences(rank: int, world_size: int) -> Any:
    told: list[tuple[int, dict[str, float]]] = []
    without, norms = _count(rank, None)
    # each rank has a logger of its own, or none
    log = (lambda step, metrics: told.append((step, metrics))) if rank == 0 else None
    with_log, _ = _count(rank, log)
    found = {}
    for step in (LOGGED, UNLOGGED):
        on, off = with_log[step], without[step]
        found[step] = (on.num_operators - off.num_operators, on - off)
    return found, told, norms


def test_a_logger_costs_one_host_read_in_a_logged_step_and_nothing_in_any_other() -> None:
    (first, told, norms), (second, silent, _) = run_ranks(_differences)
    nothing = (0, {"calls": {}, "store": {}, "operators": {}, "host_reads": {}})
    assert first[UNLOGGED] == second[UNLOGGED] == second[LOGGED] == nothing
    num_operators, difference = first[LOGGED]
    assert (num_operators, difference) == (0, {**nothing[1], "host_reads": {"tolist": 1}})
    assert silent == []
    assert [step for step, _ in told] == [0, 4]
    for step, metrics in told:
        assert metrics["nanguard/grad_norm"] == pytest.approx(norms[step])
        assert sorted(metrics) == [
            *(f"nanguard/absmax/{layer}" for layer in "012"),
            "nanguard/grad_norm",
            *(f"nanguard/headroom/{layer}" for layer in "012"),
            *("nanguard/loss/loss", "nanguard/overflows", "nanguard/skips"),
        ]


def _fail(error: BaseException) -> Any:
    def log(*args: Any) -> None:
        raise error

    return log


def _train_with(rank: int, error: BaseException) -> tuple[int, bool, list[str]]:
    model = small_model()
    optimizer = sgd(model)
    extra = {"on_metrics": _fail(error), "on_event": _fail(error)} if rank == 0 else {}
    guard = guard_of(model, optimizer, log_every=1, on_fault="skip", look_again=False, **extra)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ddp_nanguard.hooks.callbacks").handlers = [handler]
    for step in range(4):
        guard(rows(rank == 1 and step in (1, 2))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    guard.close()
    return guard.step, is_finite(model), said


def _train_with_failing_loggers(rank: int, world_size: int) -> Any:
    return [_train_with(rank, error) for error in (ValueError("the server is gone"), SystemExit(3))]


def test_a_logger_that_raises_is_said_once_and_ends_no_rank() -> None:
    first, second = run_ranks(_train_with_failing_loggers)
    for (step, finite, said), (peer_step, peer_finite, peer_said), text in zip(
        first, second, ("ValueError: the server is gone", "SystemExit: 3"), strict=True
    ):
        assert (step, finite) == (peer_step, peer_finite) == (4, True)
        assert sorted(said) == sorted(
            f"{name} raised {text}; training goes on (said once)" for name in ("on_metrics", "on_event")
        )
        assert peer_said == []
