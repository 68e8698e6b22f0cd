"""Whatever the step leaves in the job's objects, the fault ends the job: no error of the fault path takes its place."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.blame import exchange
from ddp_nanguard.report.types import FaultReport

Odd = Callable[["Net", torch.optim.Optimizer], object]


class Net(nn.Module):
    """Does something odd to itself in its second forward."""

    def __init__(self, odd: Callable[[Net], object] = lambda net: None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("cache", torch.zeros(3))
        self.num_calls = 0
        self._odd = [odd]

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == 2:
            self._odd[0](self)
        return self.layer(x)


class Refusing:
    """An object whose code always raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __deepcopy__(self, memo: object) -> Any:
        raise RuntimeError("no copy")

    def __reduce__(self) -> Any:
        raise RuntimeError("no pickle")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class RefusingDict(dict[str, Any]):
    """A mapping that cannot be read."""

    def items(self) -> Any:
        raise RuntimeError("no items")


class UnreadableError(Exception):
    """An error that cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def _stopped(net: Net, then: Odd, directory: Path, batch: Any = None, **options: Any) -> FaultReport:
    """The report of a job whose second loss is NaN, and that does something odd before its update."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    guard = NanGuard(net, optimizer, dump_dir=str(directory / "dumps"), **options)

    def train() -> None:
        for index, _ in enumerate(guard.steps([batch] * 3)):
            loss = guard(torch.ones(4, 2)).mean() * (float("nan") if index == 1 else 1.0)
            guard.watch(loss=loss)
            loss.backward()
            if index == 1:
                then(net, optimizer)
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(NonFiniteError) as stopped:
        train()
    return stopped.value.report


def _is_loss_of_step_1(report: FaultReport) -> bool:
    return report.origin is not None and (str(report.origin.phase), report.origin.step) == ("loss", 1)


BUFFERS: dict[str, Callable[[Net], object]] = {
    "resized": lambda net: net.cache.resize_(7).zero_(),
    "of another shape": lambda net: net._buffers.update(cache=torch.ones(7)),
    "of another dtype": lambda net: net._buffers.update(cache=torch.ones(3).half()),
    "expanded": lambda net: net._buffers.update(cache=torch.ones(1).expand(3)),
}
GONE: dict[str, Callable[[Net], object]] = {
    "removed": lambda net: net._buffers.pop("cache"),
    "None": lambda net: net._buffers.update(cache=None),
    "on meta": lambda net: net._buffers.update(cache=torch.ones(3, device="meta")),
    "sparse": lambda net: net._buffers.update(cache=torch.eye(3).to_sparse()),
}


@pytest.mark.parametrize("odd", BUFFERS.values(), ids=BUFFERS)
def test_a_buffer_that_the_forward_has_changed_is_put_back(odd: Callable[[Net], object], tmp_path: Path) -> None:
    net = Net(odd)
    report = _stopped(net, lambda *_: None, tmp_path)
    assert _is_loss_of_step_1(report)
    assert report.notes == ()
    assert torch.equal(net.cache, torch.zeros(3)) and net.cache.dtype is torch.float32


@pytest.mark.parametrize("odd", GONE.values(), ids=GONE)
def test_a_buffer_that_cannot_be_put_back_is_named(odd: Callable[[Net], object], tmp_path: Path) -> None:
    report = _stopped(Net(odd), lambda *_: None, tmp_path)
    assert _is_loss_of_step_1(report)
    assert [note.partition(" was not put back")[0] for note in report.notes] == ["not done: buffer cache"]


def _odd_state(net: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[net.layer.weight].update(refusing=Refusing(), meta=torch.ones(2, device="meta"))
    optimizer.state[net.layer.bias] = [1, 2]  # type: ignore[assignment]
    optimizer.param_groups[0].update(refusing=Refusing(), rates=torch.ones(3))


def test_odd_optimizer_state_is_left_out_of_the_dump_alone(tmp_path: Path) -> None:
    report = _stopped(Net(), _odd_state, tmp_path)
    assert _is_loss_of_step_1(report)
    assert report.dump_path is not None
    left_out = "dump: optim.0.layer.weight.meta is left out: a meta tensor holds nothing"
    assert report.notes == (f"not done: {left_out}",)


def _cyclic() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


BATCHES: dict[str, Callable[[], Any]] = {
    "unprintable": Refusing,
    "unreadable": lambda: RefusingDict(x=torch.ones(1)),
    "cyclic": _cyclic,
    "unprintable key": lambda: {Refusing(): torch.ones(1)},
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_odd_batches(batch: Callable[[], Any], tmp_path: Path) -> None:
    report = _stopped(Net(), lambda *_: None, tmp_path, batch())
    assert _is_loss_of_step_1(report)
    assert report.dump_path is not None


def test_an_error_without_a_text_in_the_second_look(tmp_path: Path) -> None:
    def refuse(net: Net) -> None:
        raise UnreadableError

    def then(net: Net, optimizer: torch.optim.Optimizer) -> None:
        net.num_calls, net._odd[0] = 1, refuse

    report = _stopped(Net(), then, tmp_path)
    assert _is_loss_of_step_1(report)
    assert report.second_look is not None
    assert report.second_look.text == "not done: UnreadableError: (its text raised RuntimeError)"


@pytest.fixture
def refusing_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A job that has lost its directory and its arguments, and whose log raises."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("no log")

    def spoil(net: Net, optimizer: torch.optim.Optimizer) -> None:
        lost = tmp_path / "lost"
        lost.mkdir()
        monkeypatch.chdir(lost)
        lost.rmdir()
        monkeypatch.delattr(sys, "argv")
        logger.addHandler(handler)

    handler, logger, directory = Handler(), logging.getLogger("ddp_nanguard"), os.getcwd()
    yield spoil
    logger.removeHandler(handler)
    os.chdir(directory)


def test_a_job_without_a_directory_without_arguments_and_with_a_log_that_raises(
    tmp_path: Path, refusing_surroundings: Callable[..., None]
) -> None:
    report = _stopped(Net(), refusing_surroundings, tmp_path)
    assert _is_loss_of_step_1(report)
    assert report.dump_path is not None
    (note,) = report.notes
    assert "argv is left out" in note
    assert "the directory of the job is left out" in note


def test_a_defect_of_the_fault_path_itself_leaves_the_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: object) -> None:
        raise KeyError("defect")

    monkeypatch.setattr(exchange, "_exchanged", defect)
    report = _stopped(Net(), lambda *_: None, tmp_path, timeout_s=1)
    assert report.step == 1
    assert report.origin is None
    assert report.cause == "unknown: the guard could not look at it: KeyError: 'defect'"
