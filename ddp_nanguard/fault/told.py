"""What is told about a fault beside its error: log lines, with the report for handlers that write JSON, and a trace."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from typing import Any

from ddp_nanguard.report.messages import log_line, looked_line
from ddp_nanguard.report.types import FaultReport

_log = logging.getLogger(__name__)

_TRACE_NAME = "nanguard_fault"
_TRACED_BY = ("TORCH_TRACE", "TORCH_DTRACE")
_FIRST_WORD = "non-finite"
"""Programs that sort the logs of failed jobs look for it."""


def say(level: int, text: str, report: FaultReport | None = None) -> None:
    """One log record; with a report it has the attribute ``nanguard``, the report as JSON-ready data.

    Nothing that a handler of the job raises gets out.
    """
    extra = None
    if report is not None:
        with contextlib.suppress(Exception):  # the line is told without it
            extra = {"nanguard": report.to_dict()}
    with contextlib.suppress(Exception):
        _log.log(level, "%s", text, extra=extra)


def say_fault(level: int, report: FaultReport, *, is_first_sign: bool = False, after: str = "") -> str:
    """The log line of a fault: where it began, and after a second look what came of that.

    Args:
        level: of the record.
        report: of the fault.
        is_first_sign: whether a second look is going to tell more.
        after: to follow the line.

    Returns:
        The line.
    """
    line = log_line(report) if report.second_look is None else looked_line(report)
    sign = ", first sign, not yet the origin" if is_first_sign else ""
    text = f"{_FIRST_WORD}{sign}: {line}{after}"
    say(level, text, report)
    return text


def trace(report: FaultReport) -> None:
    """The report as an artifact of torch's structured trace, once per fault; nothing without ``TORCH_TRACE``."""
    # without it the first record would end as an empty line in the log of a job that has a root handler
    if not any(os.environ.get(name) for name in _TRACED_BY):
        return

    def metadata() -> dict[str, Any]:
        return {"name": _TRACE_NAME, "encoding": "json"}

    with contextlib.suppress(Exception):  # torch's own function, not documented yet: whatever it raises
        from torch._logging import trace_structured  # type: ignore[attr-defined]  # imported there for this

        trace_structured(
            "artifact", metadata_fn=metadata, payload_fn=lambda: json.dumps(report.to_dict()), expect_trace_id=False
        )
