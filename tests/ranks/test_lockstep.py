"""What a clean step costs, counted: one collective of at most 16 bytes and one host read, whatever the model does."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.counting import Counts, counting
from tests.ranks import run_ranks, run_ranks_raw
from tests.training import Job, Record, run_jobs

SHARDED = ("fsdp1", "fsdp2")
COUNTED_STEP = 2  # hooks, groups and first-step checks are behind it


def _tower(wrapper: str, num_layers: int) -> Job:
    return Job(wrapper, num_steps=COUNTED_STEP + 1, count_step=COUNTED_STEP, num_layers=num_layers)


def _variants(wrapper: str) -> dict[str, Job]:
    base = Job(wrapper, num_steps=COUNTED_STEP + 1, count_step=COUNTED_STEP)
    return {
        "10 layers": _tower(wrapper, 10),
        "many layers": _tower(wrapper, 50 if wrapper in SHARDED else 300),
        "odd": base,
        "clipping, accumulation 3": dataclasses.replace(base, clip=True, num_micro_batches=3),
        "keep_previous": dataclasses.replace(base, options={"keep_previous": True}),
        "scaler, clipping, accumulation 3": dataclasses.replace(base, scaler=True, clip=True, num_micro_batches=3),
    }


def _off(job: Job) -> Job:
    return dataclasses.replace(job, guarded=False, options={})


def _extra_operators(on: Counts, off: Counts) -> list[int]:
    """Bytes of the operators that only the guarded step issued."""
    return sorted((Counter(on.operator_bytes) - Counter(off.operator_bytes)).elements())


@pytest.mark.parametrize("wrapper", ["plain", "ddp", "fsdp1", "fsdp2"])
def test_a_clean_step_adds_one_small_collective_and_one_host_read(wrapper: str) -> None:
    _assert_costs(wrapper, _variants(wrapper))


@pytest.mark.exhaustive  # sharding 300 layers takes longer than all else here
@pytest.mark.parametrize("wrapper", SHARDED)
def test_so_does_one_of_300_sharded_layers(wrapper: str) -> None:
    _assert_costs(wrapper, {"300 layers": _tower(wrapper, 300)})


def _assert_costs(wrapper: str, variants: dict[str, Job]) -> None:
    jobs = [job for variant in variants.values() for job in (variant, _off(variant))]
    for rank, records in enumerate(run_ranks(run_jobs, jobs=jobs, timeout_s=50)):
        for index, name in enumerate(variants):
            on, off = records[2 * index : 2 * index + 2]
            _assert_cost(on, off, f"{wrapper}, {name}, rank {rank}")


def _assert_cost(on: Record, off: Record, where: str) -> None:
    assert on.error is None, where
    difference = on.counts["step"] - off.counts["step"]
    assert difference["calls"] == {"all_reduce": 1}, (where, difference)
    assert difference["operators"] == {"c10d::allreduce_": 1}, (where, difference)
    assert difference["store"] == {}, (where, difference)
    assert sum(difference["host_reads"].values()) == 1, (where, difference)
    (size_bytes,) = _extra_operators(on.counts["step"], off.counts["step"])
    assert size_bytes <= 16, where
    silent = on.counts["no_sync"] - off.counts["no_sync"]
    assert not any(silent.values()), (where, "under no_sync", silent)


def _evaluate(rank: int, world_size: int) -> tuple[dict[str, Any], int]:
    """Ranks evaluate different numbers of batches, between training steps, with and without a guard."""
    from ddp_nanguard import NanGuard

    counts = []
    for guarded in (False, True):
        model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(), torch.nn.Tanh()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = NanGuard(model, optimizer, dump_dir=None) if guarded else None
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad(), counting() as counted:
                for _ in range(1 + 3 * rank):
                    (guard or model)(torch.full((2, 4), float("nan")))
            model.train()
        counts.append(counted)
        if guard is not None:
            guard.close()
    return counts[1] - counts[0], sum(counts[1].operators.values())


def test_evaluation_costs_nothing() -> None:
    for difference, _ in run_ranks(_evaluate):
        assert not any(difference.values())


class _Forked(torch.nn.Module):
    """Ranks take different layers, a different number of times."""

    def __init__(self) -> None:
        super().__init__()
        self.left = torch.nn.Linear(4, 4)
        self.right = torch.nn.Linear(4, 4)

    def forward(self, values: torch.Tensor, turns: int) -> torch.Tensor:
        for _ in range(turns):
            values = self.left(values) if turns % 2 else self.right(values)
        return values


def _fork(rank: int, world_size: int, bad_rank: int | None) -> tuple[int, str | None, dict[str, Any] | None]:
    from ddp_nanguard import NanGuard, NonFiniteError

    model = DistributedDataParallel(_Forked(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = NanGuard(model, optimizer, dump_dir=None, timeout_s=10)
    for step in range(4):
        values = torch.ones(2, 4)
        if bad_rank == rank and step == 2:
            values = values / torch.zeros(1)
        output = guard(values, rank + 1 + step % 2)
        if rank == 0:
            guard.watch(loss=output.sum())  # the other rank watches none
        try:
            output.sum().backward()
            optimizer.step()
        except NonFiniteError as error:
            return step, str(error), error.report.to_dict()
        optimizer.zero_grad()
    guard.close()
    return 4, None, None


def test_ranks_that_run_different_layers_keep_step() -> None:
    assert run_ranks(_fork, bad_rank=None) == [(4, None, None)] * 2


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_ranks_that_run_different_layers_stop_together(bad_rank: int) -> None:
    first, second = run_ranks(_fork, bad_rank=bad_rank)
    assert first == second
    step, _, report = first
    assert step == 2
    assert report is not None
    assert (report["origin"]["rank"], report["origin"]["phase"], report["origin"]["kind"]) == (bad_rank, "input", "inf")
    assert report["origin"]["slot"] == '["args"][0]'


def _raise_alone(rank: int, world_size: int, dump_dir: str) -> None:
    from ddp_nanguard import NanGuard

    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=dump_dir, timeout_s=3)
    for step in range(3):
        values = torch.ones(2, 4) / (0.0 if rank == 1 and step == 1 else 1.0)
        output = guard(values)
        if not output.isfinite().all():
            raise ValueError("a validator of the user's own")
        output.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_rank_that_raises_on_its_own_does_not_leave_its_peers_waiting(tmp_path: Any) -> None:
    outcomes = run_ranks_raw(_raise_alone, timeout_s=25, through_excepthook=True, dump_dir=str(tmp_path / "dumps"))
    assert not any(outcome.hung for outcome in outcomes), [outcome.describe() for outcome in outcomes]
    assert all(outcome.exit_code not in (0, None) for outcome in outcomes)
    assert outcomes[1].error_type == "ValueError"
    assert "a validator of the user's own" in outcomes[1].output
    assert list((tmp_path / "dumps").rglob("rank-00001")), "the rank that raised left no dump"
    (line,) = (tmp_path / "dumps" / "skips.jsonl").read_text().splitlines()
    assert '"action": "stop", "step": 1' in line
