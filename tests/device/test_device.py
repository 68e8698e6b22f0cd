"""What holds on any device: one host read, the bits, a stop that leaves the process usable, its state in the dump."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.counting import counting, watching_waits
from tests.rank_processes import REAL
from tests.ranks import run_ranks

from . import jobs

STEPS, FULL, BAD_STEP = 6, 4, 2
VERDICTS = ("sync", "deferred")


def _build(rank: int, dump_dir: str | None = None, **options: Any) -> tuple[Any, Any, Any, torch.device]:
    from ddp_nanguard import NanGuard

    device = jobs.device_of(rank)
    model = jobs.wrapped("plain", device, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return model, optimizer, NanGuard(model, optimizer, dump_dir=dump_dir, **options), device


def _trained(rank: int, world_size: int) -> dict[str, Any]:
    """Host reads of a step and the weights in the end, without a guard and with each verdict."""
    found: dict[str, Any] = {}
    for name, options in {"off": {"enabled": False}, **{name: {"verdict": name} for name in VERDICTS}}.items():
        model, optimizer, guard, device = _build(rank, history=2, **options)
        torch.manual_seed(1)
        for step, batch in enumerate(guard.steps(list(jobs.batches(device, STEPS)))):
            if step != FULL:
                jobs.train(guard, optimizer, batch)
                continue
            with counting() as counted, watching_waits() as waits:
                jobs.train(guard, optimizer, batch)
        guard.close()
        weights = [parameter.detach().cpu() for parameter in model.parameters()]
        found[name] = {"counted": counted, "waits": waits.count, "weights": weights}
    return found


def test_a_clean_step_reads_the_host_once_and_changes_no_bit(device: str) -> None:
    (found,) = run_ranks(_trained, 1, 60, device=device, process_group=False)
    off = found["off"]
    assert off["waits"] == 0
    for name in VERDICTS:
        assert all(torch.equal(one, other) for one, other in zip(off["weights"], found[name]["weights"], strict=True))
        reads = (found[name]["counted"] - off["counted"])["host_reads"]
        assert sum(reads.values()) == 1, (name, reads)
    assert {name: found[name]["waits"] for name in VERDICTS} == {"sync": 1, "deferred": 0}


def _stopped(rank: int, world_size: int, directory: str) -> dict[str, Any]:
    from ddp_nanguard import NonFiniteError

    model, optimizer, guard, device = _build(rank, directory, layers="every")
    states: list[torch.Tensor] = []
    try:
        for batch in guard.steps(list(jobs.batches(device, STEPS, bad=BAD_STEP))):
            states.append(torch.cuda.get_rng_state(device))
            jobs.train(guard, optimizer, batch)
    except NonFiniteError as error:
        report = error.report.to_dict()
    guard.close()
    optimizer.zero_grad()
    model(*next(jobs.batches(device, 1))).sum().backward()
    torch.cuda.synchronize(device)
    finite = all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    return {"report": report, "state": states[-1], "finite": finite}


def test_the_process_is_usable_after_a_stop_and_the_dump_holds_the_device_state(device: str, tmp_path: Path) -> None:
    from ddp_nanguard.dump.read import open_dump

    (found,) = run_ranks(_stopped, 1, 60, device=device, process_group=False, directory=str(tmp_path / "dumps"))
    origin = found["report"]["origin"]
    assert (origin["step"], origin["phase"], origin["layer"], origin["kind"]) == (BAD_STEP, "forward", "divide", "nan")
    (micro_batch,) = open_dump(found["report"]["dump_path"]).window(0)
    state = micro_batch.random_state
    assert state.device_type == "cuda" and state.device is not None
    assert torch.equal(state.device, found["state"])
    assert found["finite"]


def test_the_sanitizer_finds_no_race(device: str) -> None:
    """Streams that do not wait for each other: torch's own check, which needs a build of torch for CUDA."""
    if device != REAL:
        pytest.skip("the sanitizer is told by kernels of a CUDA build")
    code = "from tests.device.test_device import held_on_the_host; held_on_the_host()"
    env = {**os.environ, "TORCH_CUDA_SANITIZER": "1"}
    ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def held_on_the_host() -> None:
    """Steps whose batches are copied on a stream of their own, with a deferred verdict."""
    _, optimizer, guard, device = _build(0, hold_batches="host", verdict="deferred")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in guard.steps(list(jobs.batches(device, STEPS))):
            jobs.train(guard, optimizer, batch)
    guard.close()
    torch.cuda.synchronize(device)
