"""Who is told of a fault beside the log: torch's trace, the list of skipped steps, and the user's ``on_event``."""

from __future__ import annotations

import logging
import time
from typing import Any, Literal

from ddp_nanguard.capture.record import StepRecord
from ddp_nanguard.capture.window import AccumulationWindow
from ddp_nanguard.context import GuardContext
from ddp_nanguard.dump.rank_records import PlainState
from ddp_nanguard.dump.skip_list import SKIPS, SkippedStep, append_skip, bounded_state
from ddp_nanguard.errors import line_of
from ddp_nanguard.report.fingerprint import fault_text, fingerprint
from ddp_nanguard.report.types import FaultReport

from .told import say, trace

Action = Literal["stop", "skip", "warn"]
"""What is done about a fault."""


class Notices:
    """Tells of faults, once each: torch's trace on every rank, the others on the first rank of the group.

    Nothing that fails in here replaces the fault.

    Args:
        context: of the guard.

    Collective: none. Host sync: none.
    """

    def __init__(self, context: GuardContext) -> None:
        self._context = context

    def tell(self, action: Action, report: FaultReport, record: StepRecord, text: str) -> None:
        """Leave an artifact for torch's trace, list the step unless the fault is let through, tell the user's function.

        Args:
            action: what is done about it.
            report: all that is known of it by now.
            record: of the step that was judged.
            text: of the error, or of the line in the log.
        """
        trace(report)
        context = self._context
        if context.ranks.index != 0:
            return
        if action != "warn" and context.config.dump_dir is not None:
            try:
                append_skip(context.config.dump_dir, self._skipped(action, report, record))
            except Exception as error:
                say(logging.ERROR, f"{SKIPS} in {context.config.dump_dir} lacks step {report.step}: {line_of(error)}")
        if context.on_event is not None:
            context.on_event(event_of(action, report, text))

    def _skipped(self, action: Action, report: FaultReport, record: StepRecord) -> SkippedStep:
        # of a bad update it is the next step that is judged, whose batches have done nothing
        window = record.window if record.step == report.step else None
        return SkippedStep(
            action,
            report.step,
            tuple((each.epoch, each.batch) for each in window.positions) if window else (),
            report.origin_rank,
            fingerprint(report),
            fault_text(report.origin) if report.origin is not None else "",
            report.dump_path,
            self._state_of(window) if window else None,
            time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        )

    def _state_of(self, window: AccumulationWindow) -> PlainState | None:
        try:
            state = window.progress.loader_state()
            return None if state is None else bounded_state(state)
        except Exception as error:  # the loader may be the user's own
            say(logging.ERROR, f"{SKIPS} lacks the state of the loader: {line_of(error)}")
            return None


def event_of(action: Action, report: FaultReport, text: str) -> dict[str, Any]:
    """The report as JSON-ready data, with ``event`` (what was done), ``text`` and ``fingerprint`` beside it."""
    return {**report.to_dict(), "event": action, "text": text, "fingerprint": fingerprint(report)}
