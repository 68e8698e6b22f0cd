"""The sentence `FaultReport.cause`: what the rules of `why` answer on the rank where the fault began, told to all."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from .fault import LocalView
from .parts import Parts
from .record import dtypes_of, history_of, plain_optimizers
from .site import FaultReport, Phase
from .why import Known, reason_of

_log = logging.getLogger(__name__)

MAX_TEXT = 600


def explained(parts: Parts, view: LocalView, report: FaultReport, cause: str) -> FaultReport:
    """The report with the reason in its ``cause``, where a rule has one without running anything; never an exception.

    Args:
        parts: of the guard.
        view: what this rank saw.
        report: what all ranks say.
        cause: what is known beside the reason, and said after it.

    Collective: `Peers.text_of` on the fault group, where the report has an origin on a rank. Host sync: many.
    """
    origin = report.origin
    if origin is None or origin.rank is None or report.cause.startswith("scale collapse"):
        return report
    is_mine = origin.rank == parts.peers.rank
    text = _shared(parts, is_mine, _answer(parts, view, report) if is_mine else "")
    return replace(report, cause=f"{text}; {cause}" if cause else text) if text else report


def _shared(parts: Parts, is_mine: bool, text: str) -> str:
    try:
        return (parts.peers.alone() if parts.peers.lost else parts.peers).text_of(is_mine, text)
    except RuntimeError:
        parts.peers.lost = True
        return text


def _answer(parts: Parts, view: LocalView, report: FaultReport) -> str:
    try:
        found = reason_of(_known(parts, view, report))
    except Exception as error:  # a defect here must not replace the fault that is to be told
        _log.debug("no reason: %s: %s", type(error).__name__, error)
        return ""
    return "" if found is None else found.text[:MAX_TEXT]


def _known(parts: Parts, view: LocalView, report: FaultReport) -> Known:
    """What the rules for this phase look at."""
    assert report.origin is not None
    match report.origin.phase:
        case Phase.FORWARD | Phase.LOSS | Phase.BACKWARD:
            return Known(report, histories={parts.peers.rank: history_of(parts, view.readings)})
        case Phase.INPUT:
            return Known(report, batch=_batch(parts, report.origin.micro_batch))
        case Phase.OPTIMIZER:
            return Known(report, optimizers=plain_optimizers(parts), dtypes=dtypes_of(parts))
    return Known(report)


def _batch(parts: Parts, micro_batch: int | None) -> Any:
    return next((m.batch for m in parts.window.micro_batches if m.index == micro_batch), None)
