"""`FaultReport.cause` at the time of the fault: what the rules answer without a trace, as the dump says later."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.diagnosis.diagnose import without_replay
from ddp_nanguard.diagnosis.rules.report_rules import _grows
from ddp_nanguard.dump import open_dump
from ddp_nanguard.fault import cause
from tests.diagnosing import Body, N, Training, batch, body, square, trained


class Scaled(Body):
    """Its output is scaled by ``factor``, which the loop raises from step to step."""

    def __init__(self) -> None:
        super().__init__(torch.tanh)
        self.register_buffer("factor", torch.ones(()))

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values) * self.factor  # type: ignore[no-any-return]


def _raise_factor(model: Any, optimizer: Any, index: int) -> None:
    with torch.no_grad():
        model.factor *= 1e3


class Half(Body):
    """A parameter in half precision without a gradient to speak of: the update divides by an eps that is 0."""

    def __init__(self) -> None:
        super().__init__(torch.tanh)
        self.gain = nn.Parameter(torch.ones(1, dtype=torch.float16))

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values) + (self.gain * 0).sum()  # type: ignore[no-any-return]


class Spoilt(Body):
    def __init__(self) -> None:
        super().__init__(torch.tanh)
        self.b.weight.data[1, 2] = math.nan


def _bad_item() -> dict[str, Any]:
    items = batch(path=["a", "b", "c", "d", "e", "f"][:N])
    items["x"][3, 1] = math.nan
    return items


def _still(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def _lose_lr(model: Any, optimizer: Any, index: int) -> None:
    optimizer.param_groups[0]["lr"] = math.nan


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, eps=1e-8, foreach=False)


JOBS = {
    "growth": (
        Training(Scaled, square, [batch()] * 8, optimizer=_still, before_update=_raise_factor),
        "growth: the loss grew by a factor of",
    ),
    "bad input": (
        Training(body(torch.tanh), square, [batch(), _bad_item()], 2),
        'bad input: batch["x"] holds NaN, sample 3',
    ),
    "state": (Training(Spoilt, square, [batch()]), "state: b.weight held NaN before any training"),
    "hyper-parameter": (
        Training(body(torch.tanh), square, [batch()] * 2, before_update=_lose_lr),
        "hyper-parameter: g0.lr is NaN",
    ),
    "update overflow": (
        Training(Half, square, [batch()] * 2, optimizer=_adam),
        "update overflow: eps=1e-08 is 0 in float16: the update of gain divides by zero",
    ),
    "no rule": (Training(body(lambda h: h / (h - h)), square, [batch()]), "unknown"),
}


def _looked_at_once(job: Training) -> Training:
    """Without the second look, whose trace gives reasons of its own."""
    return dataclasses.replace(job, options={**job.options, "look_again": False})


@pytest.mark.parametrize("kind", JOBS)
def test_the_cause_is_what_the_dump_explains_without_a_replay(kind: str, tmp_path: Path) -> None:
    job, begins = JOBS[kind]
    dump = open_dump(trained(_looked_at_once(job), tmp_path))
    assert dump.report.cause.startswith(begins)
    reason = without_replay(dump, None, "").reason
    assert reason.kind == kind.replace("no rule", "unknown")
    assert kind == "no rule" or dump.report.cause == reason.text


def test_a_rule_that_fails_leaves_the_report_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(known: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cause, "reason_of", fail)
    dump = open_dump(trained(_looked_at_once(JOBS["bad input"][0]), tmp_path))
    assert dump.report.cause == "the loader delivered a non-finite value"


@pytest.mark.parametrize("rate", [1e4, 1e-4])
def test_only_a_loss_that_one_batch_made_bad_may_be_let_through(rate: float) -> None:
    """Weights on their way to infinity are no harmless ones, though every gradient is finite yet."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    guard = NanGuard(model, optimizer, dump_dir=None, look_again=False)

    def run() -> None:
        for step in range(40):
            output = guard(torch.ones(2, 2))
            guard.watch(loss=output.detach().pow(4).mean() * (math.inf if rate < 1 and step == 5 else 1.0))
            output.pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(NonFiniteError) as raised:
        run()
    harmless = "on_loss='warn' lets such steps pass" in raised.value.report.cause
    assert harmless is (rate < 1), raised.value.report.cause
    assert ("letting such steps pass does not help" in raised.value.report.cause) is not harmless
    guard.close()


@pytest.mark.parametrize(
    ("values", "grows"),
    [
        ([0.21, 0.365, 1.02e11], False),  # one bad batch
        ([1.0, 3e3, 9e6], True),
        ([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1e9], False),
        ([2.0**n for n in range(8)], True),
    ],
)
def test_growth_is_more_than_one_jump(values: list[float], grows: bool) -> None:
    assert _grows(values) is grows
