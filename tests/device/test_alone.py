"""A rank ends on its own; its peer's stream waits for it for ever, or its own device has failed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import run_ranks, run_ranks_raw

from . import jobs

BAD_STEP, EXIT_CODE, TIMEOUT_S = 3, 65, 8
SHAPE = {"shape": [4, 5, jobs.SIZE], "dtype": "float32"}


def _trained(rank: int, world_size: int, dump_dir: str, what: str) -> None:
    """Rank 1 raises in step `BAD_STEP`; rank 0 waits in a collective, its stream ``stuck``, or its device ``busy``."""
    from ddp_nanguard import NanGuard

    from . import simulated_cuda

    device, core = jobs.device_of(rank), simulated_cuda.core()
    model = DistributedDataParallel(jobs.Model(1).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guard = NanGuard(model, optimizer, dump_dir=dump_dir, timeout_s=TIMEOUT_S, hold_batches="host")
    for step, (values, divisor) in enumerate(guard.steps(list(jobs.batches(device, BAD_STEP + 1)))):
        if step == BAD_STEP and rank == 1:
            if what == "failed":
                torch.cuda.synchronize()  # the copy of this batch has come by then
                core.die()
                values.sum().item()
            loss = guard(values, divisor * 0).square().mean()
            guard.watch(loss=loss)
            raise ValueError("a check of the job's own")
        if step == BAD_STEP:
            guard(values, divisor)
            for stream in range(4096) if what == "busy" else (0,):
                core.stick(0, stream)
            time.sleep(TIMEOUT_S * 3)
            os._exit(7)  # nobody has ended this rank
        jobs.train(guard, optimizer, (values, divisor))


@pytest.mark.parametrize("what", ["stuck", "busy", "failed"])
def test_both_ranks_write_their_part_and_end(simulated: str, tmp_path: Path, what: str) -> None:
    from ddp_nanguard.dump.read import open_dump

    outcomes = run_ranks_raw(
        _trained, 2, 60, device=simulated, through_excepthook=True, dump_dir=str(tmp_path / "dumps"), what=what
    )
    told: Any = "\n".join(outcome.describe() for outcome in outcomes)
    assert [outcome.exit_code for outcome in outcomes] == [EXIT_CODE, EXIT_CODE], told
    (path,) = (p for p in (tmp_path / "dumps").iterdir() if p.is_dir() and not p.is_symlink())
    assert path.suffix != ".partial" and sorted(p.name for p in path.glob("rank-*")) == ["rank-00000", "rank-00001"]
    dump, texts = open_dump(str(path)), [outcome.output for outcome in outcomes]
    first = (
        "step 3: rank 1 raised RuntimeError on its own"
        if what == "failed"
        else "rank 1, step 3, micro-batch 0, forward:"
    )
    assert all(first in text for text in texts), told
    on_rank_0 = "rank 0's device does not answer" if what == "busy" else "rank 0's device waits for a peer"
    assert all(on_rank_0 in text for text in texts), told
    assert all(("rank 1's device does not answer" in text) == (what == "failed") for text in texts), told
    # what has come to the host is written whatever the device does; weights by each rank whose device answers
    given = list(jobs.batches(torch.device("cpu"), BAD_STEP + 1))[BAD_STEP]
    for rank in range(2):
        (micro_batch,) = dump.window(rank)
        assert micro_batch.random_state.device is not None
        if (what, rank) == ("busy", 0):  # its copy has not: nobody knows what lies there
            assert micro_batch.batch == {"redacted": {"[0]": SHAPE, "[1]": {"shape": [1], "dtype": "float32"}}}
            continue
        assert all(torch.equal(kept, was) for kept, was in zip(micro_batch.batch, given, strict=True)), what
    holds_weights = [(path / f"rank-{rank:05d}" / "own.safetensors").exists() for rank in range(2)]
    assert holds_weights == [what != "busy", what != "failed"], told


def _answers(rank: int, world_size: int) -> list[bool]:
    from ddp_nanguard.tensors.accelerator import answers

    from . import simulated_cuda

    device, core = jobs.device_of(rank), simulated_cuda.core()
    found = [answers(device, 1.0)]
    core.limit_memory(0)
    found.append(answers(device, 1.0))
    core.die()
    return [*found, answers(device, 1.0)]


def test_a_device_without_memory_answers_and_one_that_has_failed_does_not(simulated: str) -> None:
    assert run_ranks(_answers, 1, device=simulated) == [[True, True, False]]
