"""The life of a step without policy, dump and replay: stages, and what a handler is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_nanguard.blame.triage import Decision
from ddp_nanguard.build import build_context
from ddp_nanguard.capture.record import StepRecord
from ddp_nanguard.probes.severity import Severity
from ddp_nanguard.step.monitor import StepMonitor
from ddp_nanguard.step.stage import StepStage

IDLE, COLLECTING, BACKWARD, JUDGED, UPDATED, CLOSED = StepStage


class Handler:
    """Writes down what it is told, and decides as it was made to."""

    def __init__(self, decision: Decision = Decision.SKIP) -> None:
        self.told: list[Any] = []
        self.decision = decision

    def on_clean(self) -> None:
        self.told.append("clean")

    def on_verdict(self, severity: Severity, record: StepRecord) -> Decision:
        self.told.append((severity, record.step, [m.batch for m in record.window.micro_batches], record.is_current))
        return self.decision


class Loop:
    def __init__(self, handler: Handler) -> None:
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.context = build_context(self.model, self.optimizer, None, None, None, {"dump_dir": None})
        self.monitor = StepMonitor(self.context, handler)
        self.monitor.attach()

    def backward(self, value: float = 1.0) -> None:
        loss: Tensor = self.model(torch.full((3, 2), value)).sum()
        self.monitor.watch_loss("loss", loss)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own

    @property
    def stage(self) -> StepStage:
        return self.monitor.stage


@pytest.fixture
def make() -> Iterator[Callable[[Handler], Loop]]:
    loops: list[Loop] = []

    def made(handler: Handler) -> Loop:
        loops.append(Loop(handler))
        return loops[-1]

    yield made
    for loop in loops:
        loop.monitor.release()
        loop.context.close()


def test_the_stages_of_a_clean_step(make: Callable[[Handler], Loop]) -> None:
    loop = make(handler := Handler())
    stages = [loop.stage]
    for step in range(2):
        loop.monitor.begin_micro_batch(step)
        stages.append(loop.stage)
        loop.backward()
        stages.append(loop.stage)
        loop.monitor.begin_micro_batch(step)
        stages.append(loop.stage)
        loop.backward()
        stages.append(loop.stage)
        loop.optimizer.step()
        stages.append(loop.stage)
    loop.monitor.check()
    stages.append(loop.stage)
    loop.monitor.close()
    one_step = [COLLECTING, BACKWARD, BACKWARD, BACKWARD, UPDATED]
    assert [*stages, loop.stage] == [IDLE, *one_step, *one_step, UPDATED, CLOSED]
    assert handler.told == ["clean", "clean"], "the last check only speaks of an update that was clean"
    assert loop.monitor.step == 2


@pytest.mark.parametrize(
    ("decision", "goes_on", "num_past"),
    [(Decision.SKIP, False, 0), (Decision.PROCEED, True, 0), (Decision.CLEAN, True, 1)],
)
def test_a_handler_decides_about_the_update_and_the_history(
    make: Callable[[Handler], Loop], decision: Decision, goes_on: bool, num_past: int
) -> None:
    loop = make(handler := Handler(decision))
    loop.monitor.begin_micro_batch("batch")
    loop.backward(float("nan"))
    assert loop.monitor.check() is goes_on
    assert handler.told == [(Severity.FAULT, 0, ["batch"], True)]
    assert len(loop.context.slots.past()) == num_past
    assert (loop.stage, loop.monitor.step, loop.monitor.has_open_window()) == (JUDGED, 1, False)


def test_a_check_before_any_backward_is_no_step(make: Callable[[Handler], Loop]) -> None:
    loop = make(handler := Handler())
    loop.monitor.begin_micro_batch(1)
    assert loop.monitor.check()
    assert (loop.stage, loop.monitor.step, handler.told) == (COLLECTING, 0, [])
    assert loop.monitor.has_open_window()


def test_a_handler_that_raises_leaves_the_step_judged_and_not_counted(make: Callable[[Handler], Loop]) -> None:
    class Broken(Handler):
        def on_verdict(self, severity: Severity, record: StepRecord) -> Decision:
            raise KeyError("defect")

    loop = make(Broken())
    loop.backward(float("inf"))
    with pytest.raises(KeyError):
        loop.optimizer.step()
    assert (loop.stage, loop.monitor.step) == (JUDGED, 0)


def test_faults_that_are_injected_count_by_the_monitor(make: Callable[[Handler], Loop]) -> None:
    loop = make(Handler())
    counter = loop.monitor.counter
    seen = [(counter.entering(), counter.updating(), counter.has_loader())]
    loop.monitor.begin_micro_batch(1)
    loop.backward()
    seen.append((counter.entering(), counter.updating(), counter.has_loader()))
    loop.optimizer.step()
    seen.append((counter.entering(), counter.updating(), counter.has_loader()))
    loop.monitor.close()
    seen.append((counter.entering(), counter.updating(), counter.has_loader()))
    assert seen == [((0, 0), 0, False), ((0, 0), 0, True), ((1, 0), 0, True), (None, None, False)]
