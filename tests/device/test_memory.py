"""The fault path on a device whose memory is full: little more is taken, none at all is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard.dump.tensor_digest import PIECE_BYTES
from ddp_nanguard.tensors.shards import TensorShard
from tests.dump_requests import dumped
from tests.ranks import run_ranks, run_ranks_raw

from . import jobs

LARGEST = 20 * 2**20  # more than two pieces
MOST_BEYOND = 2 * PIECE_BYTES + 2**20  # of the largest tensor's size nothing
SHARED = 2**20
BAD_STEP = 1
FAULTS = (("backward", False), ("backward", True), ("forward", False))
"""Where, and whether the device has no memory left from the verdict on."""


class _Large(nn.Module):
    """One large parameter; where ``divisor`` is 0 its gradient becomes NaN, or the output of a layer behind it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        table = torch.ones(LARGEST // 4).view(-1, jobs.SIZE)
        self.table = nn.Embedding(*table.shape, _weight=table)
        self.head, self.where = nn.Linear(jobs.SIZE, 1), where
        self.divide = jobs.Divide()

    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        rows = self.table.weight[0]
        if self.where == "backward":
            values = values + torch.sqrt(divisor * rows.square())
            return self.head(values)  # type: ignore[no-any-return]
        return self.divide(F.linear(values, rows.view(1, -1)) + self.head(values), divisor)  # type: ignore[no-any-return]


def _faults(rank: int, world_size: int, directory: str) -> list[dict[str, Any]]:
    return [_fault(rank, f"{directory}/{where}-{limited}", where, limited) for where, limited in FAULTS]


def _fault(rank: int, directory: str, where: str, limited: bool) -> dict[str, Any]:
    from ddp_nanguard import NanGuard, NonFiniteError

    device = jobs.device_of(rank)
    model = DistributedDataParallel(_Large(where).to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=directory, look_again=False, layers="every")
    try:
        with _measured(limited) as taken:
            for batch in guard.steps(list(jobs.batches(device, BAD_STEP + 1, bad=BAD_STEP))):
                jobs.train(guard, optimizer, batch)
    except NonFiniteError as error:
        (beyond,) = taken
        return {
            "where": where,
            "limited": limited,
            "beyond": beyond,
            "text": str(error),
            "report": error.report.to_dict(),
        }
    finally:
        guard.close()
    raise AssertionError("no fault")


@contextlib.contextmanager
def _measured(limited: bool) -> Iterator[list[int]]:
    """Bytes that are taken on the device once the verdict is known, from when on it has no more if ``limited``."""
    from ddp_nanguard.fault.policy import FaultPolicy

    from . import simulated_cuda

    core, taken = simulated_cuda.core(), []
    handle = FaultPolicy.on_verdict

    def on_verdict(*args: Any) -> Any:
        core.reset_peak()
        core.limit_memory(0 if limited else -1)
        before = core.live_bytes()
        try:
            return handle(*args)
        finally:
            taken.append(core.peak_bytes() - before)
            core.limit_memory(-1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FaultPolicy, "on_verdict", on_verdict)
        yield taken


def test_a_fault_takes_little_memory_and_is_told_without_any(simulated: str, tmp_path: Path) -> None:
    from ddp_nanguard.dump.read import open_dump

    per_rank = run_ranks(_faults, 2, 100, device=simulated, directory=str(tmp_path))
    for one, other in zip(*per_rank, strict=True):
        assert one["text"] == other["text"]
        origin = one["report"]["origin"]
        assert (origin["step"], origin["phase"], origin["kind"]) == (BAD_STEP, one["where"], "nan"), one
        assert origin["layer"] == ("table" if one["where"] == "backward" else "divide"), one
        assert max(one["beyond"], other["beyond"]) <= (0 if one["limited"] else MOST_BEYOND), one
        assert one["report"]["notes"] == [], one
        dump = open_dump(one["report"]["dump_path"])
        dump.verify()
        weight = dump.load_state(["model.table.weight"])["model.table.weight"]
        assert weight.numel() * 4 == LARGEST and bool((weight[1:] == 1).all())


def _digests(rank: int, world_size: int) -> tuple[list[bytes], list[bytes], list[bytes]]:
    from ddp_nanguard.dump.tensor_digest import digests

    from . import simulated_cuda

    device, generator = jobs.device_of(rank), torch.Generator().manual_seed(0)
    numbers = torch.randn(3, 700, 1000, generator=generator)  # more than one piece
    tensors = [numbers, numbers.bfloat16()[1:, 1:, 1:], numbers[0].T, torch.zeros(0), numbers[0, 0, 0], numbers > 0]
    moved = [tensor.to(device).as_strided(tensor.size(), tensor.to(device).stride()) for tensor in tensors]
    found = digests(moved)
    changed = [tensor.clone() for tensor in moved]
    changed[0][2, 699, 999] += 1e-3
    simulated_cuda.core().limit_memory(0)
    on_host = digests(moved)
    simulated_cuda.core().limit_memory(-1)
    return found, on_host, digests(changed)


def test_a_device_without_memory_gives_the_same_digests(simulated: str) -> None:
    ((found, on_host, changed),) = run_ranks(_digests, 1, 60, device=simulated, process_group=False)
    assert found == on_host
    assert [one == other for one, other in zip(found, changed, strict=True)] == [False, *[True] * 5]


def _replicas(rank: int, world_size: int, root: str) -> tuple[list[str], int]:
    """A dump of three replicated tensors, of which one differs in a single bit."""
    from . import simulated_cuda

    device = jobs.device_of(rank)
    tensors = {name: torch.zeros(SHARED // 4, device=device) for name in ("model.a", "model.b", "model.c")}
    if rank == 1:
        tensors["model.b"][-1] = -0.0
    state = [TensorShard.whole(name, tensor) for name, tensor in tensors.items()]
    place = {"shard_index": 0, "num_shards": 1, "replica_index": rank, "group": dist.new_group(backend="gloo")}
    with simulated_cuda.logging() as log:
        result = dumped(Path(root), rank=rank, world_size=world_size, state=state, **place)
    assert not result.problems
    return result.replicas_disagree, sum(entry.bytes for entry in log.of("D2H wait"))


def test_of_replicas_only_what_differs_is_copied(simulated: str, tmp_path: Path) -> None:
    found = run_ranks(_replicas, 2, 60, device=simulated, root=str(tmp_path))
    assert [disagree for disagree, _ in found] == [["rank 1: model.b"]] * 2
    copied = sum(num_bytes for _, num_bytes in found)
    assert 4 * SHARED <= copied < 4 * SHARED + 2**16, "each once, and the one that differs"


def _raised(rank: int, world_size: int, bad: bool) -> None:
    """The job's own memory error in a forward, on a device that stays full."""
    from ddp_nanguard import NanGuard

    from . import simulated_cuda

    device = jobs.device_of(rank)
    model = jobs.wrapped("plain", device, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=None, layers="every")
    for step, batch in enumerate(guard.steps(list(jobs.batches(device, BAD_STEP + 1, bad=BAD_STEP if bad else None)))):
        if step == BAD_STEP:
            guard.watch(loss=guard(*batch).square().mean())
            simulated_cuda.core().limit_memory(0)
            torch.empty(1, device=device)
        jobs.train(guard, optimizer, batch)


def test_a_memory_error_of_the_job_is_no_defect_of_the_slots(simulated: str) -> None:
    for bad in (False, True):
        (ended,) = run_ranks_raw(_raised, 1, 60, device=simulated, through_excepthook=True, bad=bad)
        assert ended.error_type == "OutOfMemoryError"
        assert "cannot be read" not in ended.output and "not looked at" not in ended.output, ended.describe()
        assert ended.exit_code == (65 if bad else 1), ended.describe()
        assert ("rank 0 · step 1 · micro-batch 0 · forward · divide" in ended.output) == bad, ended.describe()
