"""A rank that raises, stalls or dies in the second look, and only there: all ranks end, and the dump tells why."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard
from ddp_nanguard.dump.read import open_dump
from tests.rank_processes import Outcome
from tests.ranks import run_ranks_raw

TIMEOUT_S = 3.0
NUM_STEPS = 4
BAD_STEP = 1
EXIT_CODE = 65


@dataclass(frozen=True)
class Fall:
    """One job whose model breaks down in the second look.

    Attributes:
        wrapper: ``plain``, ``ddp``, ``fsdp1`` or ``fsdp2``.
        how: what the model does: a key of `_HOW`.
        rank: on which rank; None for all.
        talks: whether the model itself communicates in its forward.
        in_backward: whether it breaks down in its backward.
        run: in which run of the second look: the first, or the second with the trace.
        num_ranks: of the job.
        options: of the guard.
    """

    wrapper: str
    how: str
    rank: int | None = 1
    talks: bool = False
    in_backward: bool = False
    run: int = 1
    num_ranks: int = 2
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        where = "backward" if self.in_backward else "forward"
        talks = "talks" if self.talks else "silent"
        policy = self.options.get("on_fault", "stop")
        return f"{self.wrapper}-{self.how}-rank{self.rank}of{self.num_ranks}-{talks}-{where}-run{self.run}-{policy}"


def _raise(error: BaseException) -> None:
    raise error


_HOW = {
    "raises": lambda: _raise(ValueError("this model runs once only")),
    "memory": lambda: _raise(MemoryError()),
    "device memory": lambda: _raise(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")),
    "leaves": lambda: _raise(SystemExit(3)),
    "exits": lambda: os._exit(7),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stalls": lambda: time.sleep(100),
}


_SAID = {
    "raises": "ValueError: this model runs once only",
    "memory": "MemoryError",
    "device memory": "OutOfMemoryError: CUDA out of memory",
    "leaves": "SystemExit: 3",
    "stalls": "no rank has shown a sign of life for 3 s",
}


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, net: _Net) -> Tensor:
        ctx.net = net
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.net.came_by(in_backward=True)
        return gradient, None


class _Net(nn.Module):
    """Divides by what the batch brings, and counts its calls where no guard sees it."""

    def __init__(self, fall: Fall) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.fall = fall
        self.counted = SimpleNamespace(calls=0)

    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        self.counted.calls += 1
        values = self.first(values)
        self.came_by(in_backward=False)
        if self.fall.talks:
            total = values.detach().clone()
            dist.all_reduce(total)
            values = values + 0.01 * total
        values = self.second(_Backward.apply(values / divisor, self))
        return values  # noqa: RET504  # the division is a line of its own

    def came_by(self, in_backward: bool) -> None:
        calls = BAD_STEP + 1 + self.fall.run
        here = self.fall.rank in (dist.get_rank(), None) and in_backward == self.fall.in_backward
        if here and self.counted.calls == calls:
            _HOW[self.fall.how]()


def _wrapped(fall: Fall) -> nn.Module:
    torch.manual_seed(0)
    net = _Net(fall)
    if fall.wrapper == "ddp":
        return DistributedDataParallel(net)
    if fall.wrapper == "fsdp1":
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    if fall.wrapper == "fsdp2":
        fully_shard(net.second)
        return fully_shard(net)
    return net


def _train(rank: int, world_size: int, fall: Fall, dump_dir: str) -> int:
    """The number of the step at the end."""
    model = _wrapped(fall)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = NanGuard(model, optimizer, dump_dir=dump_dir, timeout_s=TIMEOUT_S, **fall.options)
    for step in range(NUM_STEPS):
        divisor = torch.ones(2, 1)
        divisor[0] -= float(rank == 1 and step == BAD_STEP)
        loss = guard(torch.ones(2, 4), divisor).square().sum()
        guard.watch(loss=loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    step = guard.step
    guard.close()
    return int(step)


def _run(falls: list[Fall], tmp_path: Path) -> list[tuple[Fall, Path, list[Outcome]]]:
    """A few at a time: they wait more than they work."""

    def one(fall: Fall) -> list[Outcome]:
        directory = str(tmp_path / fall.name.replace(" ", "_"))
        return run_ranks_raw(_train, fall.num_ranks, 30, through_excepthook=True, fall=fall, dump_dir=directory)

    with ThreadPoolExecutor(6) as pool:
        outcomes = list(pool.map(one, falls))
    return [(fall, tmp_path / fall.name.replace(" ", "_"), found) for fall, found in zip(falls, outcomes, strict=True)]


def _check_ended(fall: Fall, directory: Path, outcomes: list[Outcome]) -> None:
    """No rank hangs, the exit code is ours, and the dump is whole and says that the step was not run again."""
    text = f"{fall.name}\n" + "\n".join(outcome.describe() for outcome in outcomes)
    assert not any(outcome.hung for outcome in outcomes), text
    for outcome in outcomes:
        gone = {"exits": 7, "is killed": -signal.SIGKILL}.get(fall.how) if outcome.rank == fall.rank else None
        assert outcome.exit_code == (EXIT_CODE if gone is None else gone), text
    (dump,) = directory.glob("step-*")
    report = open_dump(dump).report
    assert report.step == BAD_STEP, text
    assert report.second_look is not None, text
    assert report.second_look.outcome == "not_done" and report.second_look.text.startswith("not done: "), text
    assert _SAID.get(fall.how, "") in report.second_look.text, text
    assert report.second_look.text in " ".join((dump / "report.txt").read_text().split()), text
    assert not [path.name for path in dump.iterdir() if path.name.startswith(".")], text


ENDINGS = [
    Fall("ddp", "raises", talks=True, options={"on_fault": "skip"}),
    Fall("fsdp1", "device memory", rank=0),
    Fall("fsdp2", "stalls"),
    Fall("fsdp2", "is killed", rank=0),
    Fall("ddp", "exits", talks=True),
    Fall("ddp", "memory", in_backward=True),
]
MORE_ENDINGS = {
    wrapper: [
        Fall(wrapper, how, rank=rank, talks=talks)
        for talks in (False, True)
        for rank, how in [(0, "raises"), (1, "stalls"), (1, "exits"), (0, "is killed"), (1, "memory"), (1, "leaves")]
    ]
    for wrapper in ("plain", "ddp", "fsdp1", "fsdp2")
}
IN_BACKWARD = [
    Fall(wrapper, how, in_backward=True)
    for wrapper in ("ddp", "fsdp1", "fsdp2")
    for how in ("raises", "stalls", "exits", "device memory")
]
FOUR = [
    Fall(wrapper, how, rank=rank, talks=talks, num_ranks=4)
    for wrapper, talks in [("ddp", False), ("ddp", True), ("fsdp2", False)]
    for rank, how in [(3, "raises"), (2, "stalls"), (0, "is killed")]
]
exhaustive = [pytest.mark.exhaustive, pytest.mark.timeout(200)]


@pytest.mark.parametrize(
    "falls",
    [
        pytest.param(ENDINGS, id="a few"),
        *(pytest.param(falls, id=wrapper, marks=exhaustive) for wrapper, falls in MORE_ENDINGS.items()),
        pytest.param(IN_BACKWARD, id="backward", marks=exhaustive),
        pytest.param(FOUR, id="four ranks", marks=exhaustive),
    ],
)
def test_all_ranks_end(falls: list[Fall], tmp_path: Path) -> None:
    _check_all(falls, tmp_path, _check_ended)


def _check_all(falls: list[Fall], tmp_path: Path, check: Callable[[Fall, Path, list[Outcome]], None]) -> None:
    problems = []
    for each in _run(falls, tmp_path):
        try:
            check(*each)
        except AssertionError as error:
            problems.append(str(error))
    assert not problems, "\n".join(problems)


def _check_went_on(fall: Fall, directory: Path, outcomes: list[Outcome]) -> None:
    """Without sharding a rank that raises in the second look costs only that; a sharded model cannot be trusted."""
    text = f"{fall.name}\n" + "\n".join(outcome.describe() for outcome in outcomes)
    assert not any(outcome.hung for outcome in outcomes), text
    if fall.wrapper in ("plain", "ddp"):
        assert [outcome.value for outcome in outcomes] == [NUM_STEPS] * fall.num_ranks, text
        assert all(f"not done: rank {fall.rank}: {_SAID[fall.how]}" in outcome.output for outcome in outcomes), text
    else:
        assert {outcome.exit_code for outcome in outcomes} == {EXIT_CODE}, text
        for outcome in outcomes:
            assert f"again:    not done: rank {fall.rank or 0}: {_SAID[fall.how]}" in outcome.output, text
            assert "no rank trains on: the second look did not end on all of them" in outcome.output, text


SKIP = {"on_fault": "skip"}
# under warn, the update of the step is bad and found one step later
WARN = {"on_fault": "warn"}


def test_training_goes_on_without_a_second_look_unless_it_is_sharded(tmp_path: Path) -> None:
    falls = [
        Fall("plain", "raises", options=SKIP),
        Fall("ddp", "raises", options=SKIP),
        Fall("ddp", "memory", options=WARN, in_backward=True),
        Fall("fsdp1", "raises", options=WARN),
        Fall("fsdp2", "memory", options=SKIP, in_backward=True),
        Fall("fsdp2", "raises", rank=None, options=SKIP),
    ]
    _check_all(falls, tmp_path, _check_went_on)


def _check_shown(fall: Fall, directory: Path, outcomes: list[Outcome]) -> None:
    """What the first run has shown stays, without an operator."""
    text = f"{fall.name}\n" + "\n".join(outcome.describe() for outcome in outcomes)
    assert {outcome.exit_code for outcome in outcomes} == {EXIT_CODE}, text
    (dump,) = directory.glob("step-*")
    report = open_dump(dump).report
    assert report.second_look is not None and report.second_look.operator is None, text
    assert report.second_look.outcome == "same", text
    why = f"the operator was not looked for: rank 1: {_SAID[fall.how]}"
    assert report.origin is not None and report.origin.phase == "forward" and why in report.notes, text
    for outcome in outcomes:
        assert f"again:    {report.second_look.text}" in outcome.output and why in outcome.output, text


def test_a_trace_that_breaks_down_leaves_what_the_run_before_it_has_shown(tmp_path: Path) -> None:
    _check_all([Fall("ddp", "raises", run=2), Fall("fsdp2", "memory", run=2)], tmp_path, _check_shown)
