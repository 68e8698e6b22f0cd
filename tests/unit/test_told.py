"""What is told about a fault beside its error: to log handlers, and to programs that sort logs."""

from __future__ import annotations

import json
import logging
import re

import pytest
import torch
from torch import nn

from ddp_nanguard import FaultReport, NanGuard, NonFiniteError

NAN_OR_INF = (r"loss[=:\s]+nan", r"nan loss|detected", r"non[- ]finite")
"""By which classifiers of job logs (nvidia-resiliency-ext among them) know a job that met a NaN."""


def _stopped(on_fault: str = "stop", **options: object) -> FaultReport | None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with NanGuard(model, optimizer, on_fault=on_fault, dump_dir=None, **options) as guard:
        try:
            for batch in guard.steps([torch.ones(1, 2), torch.full((1, 2), torch.nan)]):
                loss = guard(batch).sum()
                guard.watch(loss=loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        except NonFiniteError as error:
            return error.report
    return None


@pytest.mark.parametrize(("policy", "look_again"), [("stop", True), ("stop", False), ("skip", True), ("warn", True)])
def test_a_fault_is_logged_as_non_finite_with_its_report(
    policy: str, look_again: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "ddp_nanguard.fault")
    report = _stopped(policy, look_again=look_again)
    lines = [record for record in caplog.records if hasattr(record, "nanguard")]
    line = lines[0].getMessage()
    assert any(re.search(pattern, line, re.IGNORECASE) for pattern in NAN_OR_INF) and "step 1" in line, line
    told = json.loads(json.dumps(lines[-1].nanguard))  # plain data: what a handler that writes JSON needs
    assert (told["step"], told["origin"]["step"]) == (1, 1)
    assert (report is None) == (policy != "stop")
    if report is not None and look_again:
        assert told["second_look"]["outcome"] == "same" == report.second_look.outcome  # type: ignore[union-attr]


class _Raises(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("a log server is gone")


def test_a_handler_that_raises_replaces_no_fault() -> None:
    log, handler = logging.getLogger("ddp_nanguard"), _Raises()
    log.addHandler(handler)
    try:
        assert _stopped() is not None
    finally:
        log.removeHandler(handler)
