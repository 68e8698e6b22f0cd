"""The second look on devices: every wrapper, without ``set_device``, on a stream of the loop's own, with offloading."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import run_ranks

from . import jobs

BAD_STEP = 2
SETUPS = [
    ("ddp", True, False),
    ("ddp", False, True),
    ("fsdp2", False, False),
    ("fsdp2 offloaded", True, True),
]
"""Wrapper, whether each rank calls ``set_device``, whether the loop runs on a stream of its own."""


def _looked(rank: int, world_size: int, setups: list[tuple[str, bool, bool]]) -> list[dict[str, Any]]:
    return [_look(rank, *setup) for setup in setups]


def _look(rank: int, wrapper: str, sets_device: bool, on_side: bool) -> dict[str, Any]:
    """One job whose last rank divides by zero."""
    from ddp_nanguard import NanGuard, NonFiniteError

    torch.cuda.set_device(0)
    device = jobs.device_of(rank, sets_device)
    model = jobs.wrapped(wrapper, device, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guard = NanGuard(model, optimizer, dump_dir=None, layers="every")
    bad = BAD_STEP if rank == 1 else None
    stream = torch.cuda.Stream(device) if on_side else torch.cuda.default_stream(device)
    found: dict[str, Any] = {}
    current = torch.cuda.current_device()
    try:
        with torch.cuda.stream(stream):
            for batch in guard.steps(list(jobs.batches(device, BAD_STEP + 1, bad=bad))):
                before = _bits(model)
                jobs.train(guard, optimizer, batch)
    except NonFiniteError as error:
        report = error.report.to_dict()
        found = {
            "origin": report["origin"],
            "look": report["second_look"],
            "notes": report["notes"],
            "text": str(error),
        }
    guard.close()
    return {**found, "kept": _same(before, _bits(model)), "stays": torch.cuda.current_device() == current}


def _bits(model: torch.nn.Module) -> list[torch.Tensor]:
    locals_ = (getattr(parameter, "to_local", lambda p=parameter: p)() for parameter in model.parameters())
    return [tensor.detach().cpu().clone() for tensor in locals_]


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(first, second) for first, second in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def found(simulated: str) -> dict[tuple[str, bool, bool], list[dict[str, Any]]]:
    """All setups, one after the other in the same two processes."""
    per_rank = run_ranks(_looked, 2, 100, device=simulated, setups=SETUPS)
    return dict(zip(SETUPS, map(list, zip(*per_rank, strict=True)), strict=True))


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_the_same_bits_come_again_and_the_operator_is_named(
    found: dict[tuple[str, bool, bool], list[dict[str, Any]]], setup: tuple[str, bool, bool]
) -> None:
    first, second = found[setup]
    assert first["text"] == second["text"]
    origin, look = first["origin"], first["look"]
    assert (origin["rank"], origin["phase"], origin["layer"], origin["kind"]) == (1, "forward", "divide", "nan")
    assert look["outcome"] == "same", look
    operator = look["operator"]
    assert (operator["rank"], operator["name"]) == (1, "aten.div.Tensor")
    assert operator["code"] == "return (values * divisor) / divisor"
    for each in (first, second):
        assert each["notes"] == [] and each["kept"] and each["stays"], each
