"""Gradients that wait to be reduced, while micro-batches are accumulated without communication."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from ddp_nanguard import NanGuard, NonFiniteError
from tests.ranks import run_ranks
from tests.training import digest

WRAPPERS = ("fsdp1", "fsdp2")


def _wrapped(wrapper: str) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    if wrapper == "fsdp2":
        return fully_shard(net)
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)


@contextlib.contextmanager
def _syncing(model: Any, wrapper: str, is_last: bool) -> Iterator[None]:
    if wrapper == "fsdp2":
        model.set_requires_gradient_sync(is_last)
        yield
    else:
        with contextlib.nullcontext() if is_last else model.no_sync():
            yield


def _accumulated(wrapper: str, rank: int, guarded: bool, bad_at: int | None) -> tuple[dict[str, str], list[str]]:
    """Digests of the reduced gradients of four micro-batches, and what the guard has logged as an error."""
    model = _wrapped(wrapper)
    guard: Any = None
    if guarded:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = NanGuard(model, optimizer, dump_dir=None, on_fault="warn")
    told: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ddp_nanguard").addHandler(handler)
    for index in range(4):
        batch = torch.full((2, 4), float(index + 1 + rank))
        with _syncing(model, wrapper, index == 3):
            output: Tensor = (guard or model)(batch)
            output.sum().backward()
        if index == bad_at and guard is not None:
            guard.watch(loss=output.sum() * (float("nan") if rank == 1 else 1.0))
            guard.check()
    logging.getLogger("ddp_nanguard").removeHandler(handler)
    held = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients = {name: digest(gradient) for name, gradient in held.items() if gradient is not None}
    if guard is not None:
        guard.close()
    return gradients, told


def _all(rank: int, world_size: int) -> dict[str, list[tuple[dict[str, str], list[str]]]]:
    runs = [(False, None), (True, None), (True, 1)]
    return {wrapper: [_accumulated(wrapper, rank, *run) for run in runs] for wrapper in WRAPPERS}


@pytest.fixture(scope="module")
def accumulated() -> list[dict[str, list[tuple[dict[str, str], list[str]]]]]:
    return run_ranks(_all, timeout_s=40)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_they_are_not_taken_for_cleared(accumulated: list[Any], wrapper: str) -> None:
    for rank in accumulated:
        (unguarded, _), (guarded, told), _ = rank[wrapper]
        assert guarded == unguarded
        assert told == []


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_second_look_among_them_leaves_them_as_they_were(accumulated: list[Any], wrapper: str) -> None:
    for rank in accumulated:
        (unguarded, _), _, (looked, told) = rank[wrapper]
        assert looked == unguarded
        assert len(told) > 0 and "second look: same" in told[-1], told


def _left_running(rank: int, world_size: int) -> dict[str, Any]:
    """Two micro-batches that are both reduced, of which FSDP2 waits for the second only; rank 1 spoils the first."""
    found: dict[str, Any] = {"gradients": []}
    for guarded, bad in ((False, False), (True, False), (True, True)):
        model = _wrapped("fsdp2")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = NanGuard(model, optimizer, dump_dir=None, enabled=guarded)
        for index in range(2):
            model.set_is_last_backward(index == 1)
            output = guard(torch.full((2, 4), float(index + 1 + rank)))
            output.register_hook(lambda g, spoil=bad and rank == 1 and index == 0: g * float("nan") if spoil else g)
            output.sum().backward()
        found["gradients"].append({n: digest(p.grad) for n, p in model.named_parameters() if p.grad is not None})
        try:
            optimizer.step()
        except NonFiniteError as error:
            found["origin"], found["text"] = error.report.to_dict()["origin"], str(error)
        guard.close()
    return found


def test_a_reduce_that_is_left_running_is_not_read_before_its_end() -> None:
    found = run_ranks(_left_running, timeout_s=40)
    for each in found:
        without, guarded, _ = each["gradients"]
        assert without == guarded != {}
        assert each["text"] == found[0]["text"]
    origin = found[0]["origin"]
    assert (origin["rank"], origin["phase"], origin["micro_batch"]) == (1, "backward", 0), found[0]["text"]
