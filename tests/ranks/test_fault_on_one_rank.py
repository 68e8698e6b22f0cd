"""One rank's objects break its fault path: all ranks stop all the same, with one text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NonFiniteError
from ddp_nanguard.report.types import CALLS_ONLY
from tests.ranks import run_ranks, run_ranks_raw
from tests.ranks.small import NAN, guard_of


class _Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 2)
        self.register_buffer("cache", torch.zeros(3))
        self.register_buffer("lowest", torch.tensor(float("inf")))


def _stopped(rank: int, world_size: int, broken: str, dump_dir: str) -> Any:
    torch.manual_seed(0)
    model = DistributedDataParallel(_Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = guard_of(model, optimizer, dump_dir=dump_dir, timeout_s=1)
    try:
        for step in range(4):
            loss = guard(torch.ones(2, 4)).sum() * (NAN if step == 2 and rank == 0 else 1.0)
            if step == 2 and rank == 1 and broken == "buffer":
                del model.module._buffers["cache"]
            if step == 2 and rank == 1 and broken == "defect":
                guard._policy.triage.examine = lambda *_: 1 / 0
            guard.watch(loss=loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except NonFiniteError as error:
        return str(error), error.report.to_dict()
    return None


def test_what_one_rank_cannot_do_is_a_note_on_all(tmp_path: Any) -> None:
    first, second = run_ranks(_stopped, broken="buffer", dump_dir=str(tmp_path))
    assert first == second
    _, report = first
    assert (report["origin"]["rank"], report["origin"]["phase"], report["step"]) == (0, "loss", 2)
    gone = "not done: rank 1: buffer cache was not put back: the model has none of this name any more"
    kept = "non-finite before anything went wrong, which is no fault by itself: rank 0: lowest"
    assert report["notes"] == [kept, gone, CALLS_ONLY]


def test_a_rank_whose_fault_path_fails_stops_and_so_do_its_peers(tmp_path: Any) -> None:
    (_, first), (_, second) = run_ranks(_stopped, broken="defect", dump_dir=str(tmp_path))
    assert (first["step"], first["origin"]["phase"], first["single_rank_view"]) == (2, "loss", True)
    assert (second["step"], second["origin"]) == (2, None)
    assert second["cause"] == "unknown: the guard could not look at it: ZeroDivisionError: division by zero"


def _wrapped(kind: str) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    if kind == "fsdp1":
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    return fully_shard(net) if kind == "fsdp2" else net


def _taken_down(rank: int, world_size: int, kind: str, dump_dir: str) -> None:
    model = _wrapped(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = guard_of(model, optimizer, dump_dir=dump_dir, timeout_s=10)
    try:
        for batch in guard.steps([torch.ones(2, 4), torch.full((2, 4), NAN if rank == 1 else 1.0)]):
            loss = guard(batch).mean()
            if not torch.isfinite(loss):
                raise ValueError("a check of the job")
            guard.watch(loss=loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["plain", "fsdp1", "fsdp2"])  # DDP: tests/ranks/test_spawned.py
def test_a_rank_that_takes_its_group_down_before_the_exit_hook_has_its_part(kind: str, tmp_path: Path) -> None:
    ended = run_ranks_raw(_taken_down, timeout_s=40, through_excepthook=True, kind=kind, dump_dir=str(tmp_path))
    assert [outcome.exit_code for outcome in ended] == [65, 65], [outcome.describe() for outcome in ended]
    (dump,) = tmp_path.glob("step-*")
    assert sorted(path.parent.name for path in dump.glob("rank-*/evidence.json")) == ["rank-00000", "rank-00001"]
