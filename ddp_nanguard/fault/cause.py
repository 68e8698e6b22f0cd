"""The sentence `FaultReport.cause`: what the rules answer on the rank where the fault began, told to all ranks."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from torch import Tensor

from ddp_nanguard.blame.inspect import RankFindings, named_parameter_tensors
from ddp_nanguard.capture.record import StepRecord
from ddp_nanguard.context import GuardContext
from ddp_nanguard.diagnosis.rules.report_rules import ReportFacts, finite_in_place, reason_of
from ddp_nanguard.report.types import FaultReport, Phase
from ddp_nanguard.second_look.look import Looked

from .dump_request import dtypes_of, history_of, plain_optimizers

_log = logging.getLogger(__name__)

MAX_TEXT = 600


def explained(
    context: GuardContext, record: StepRecord, findings: RankFindings, report: FaultReport, cause: str
) -> FaultReport:
    """The report with the reason in its ``cause``, where a rule has one without running anything; never an exception.

    Args:
        context: of the guard.
        record: of the step.
        findings: what this rank found.
        report: what all ranks say.
        cause: what is known beside the reason, and said after it.

    Collective: `RankGroup.text_of` on the fault group, where the report has an origin on a rank. Host sync: many.
    """
    origin = report.origin
    if origin is None or origin.phase is Phase.REDUCE or report.cause.startswith("scale collapse"):
        return report
    # the rules look at histories and batches, which only the rank where the fault began has, if it is one
    is_mine = context.ranks.rank == (context.ranks.members[0] if origin.rank is None else origin.rank)
    answer = _answer(context, record, findings, report) if is_mine else ""
    text = context.ranks.ask(lambda ranks: ranks.text_of(is_mine, answer))
    return replace(report, cause=f"{text}; {cause}" if cause else text) if text else report


def own_reason(context: GuardContext, record: StepRecord, findings: RankFindings, view: FaultReport) -> str:
    """The reason that this rank has for its own view, "" where no rule has one. Collective: none. Host sync: many."""
    origin = view.origin
    is_mine = origin is not None and origin.phase is not Phase.REDUCE and origin.rank == context.ranks.rank
    return _answer(context, record, findings, view) if is_mine else ""


def known_before(context: GuardContext, record: StepRecord, findings: RankFindings) -> dict[str, Any]:
    """What the rules are told of this rank beside its trace. Host sync: many."""

    def known() -> dict[str, Any]:
        return {
            "histories": {context.ranks.rank: history_of(context, findings.slot_stats)},
            "optimizers": plain_optimizers(context),
            "dtypes": dtypes_of(context),
            "first_weights": _first_weights(context, record),
        }

    return context.undone.attempt("the rules were told less", known, {})


def told_why(context: GuardContext, record: StepRecord, looked: Looked, cause: str) -> FaultReport:
    """The report of a second look, with the reason: that of its trace, else what rules say without one.

    Args:
        context: of the guard.
        record: of the step.
        looked: what the second look gave.
        cause: what was known beside the reason.

    Collective: as `explained`, where the step was run again and its trace gave no reason.
    """
    report = looked.report
    if report.cause.startswith("scale collapse"):
        return report
    if looked.reason:
        return replace(report, cause=f"{looked.reason}; {cause}" if cause else looked.reason)
    finite = finite_in_place(ReportFacts(report))
    if finite is not None:
        return replace(report, cause=finite.text)
    return report if looked.findings is None else explained(context, record, looked.findings, report, cause)


def _answer(context: GuardContext, record: StepRecord, findings: RankFindings, report: FaultReport) -> str:
    try:
        found = reason_of(_known(context, record, findings, report))
    except Exception as error:  # a defect here must not replace the fault that is to be told
        _log.debug("no reason: %s: %s", type(error).__name__, error)
        return ""
    return "" if found is None else found.text[:MAX_TEXT]


def _known(context: GuardContext, record: StepRecord, findings: RankFindings, report: FaultReport) -> ReportFacts:
    """What the rules for this phase look at."""
    assert report.origin is not None
    match report.origin.phase:
        case Phase.FORWARD | Phase.LOSS | Phase.BACKWARD:
            histories = {context.ranks.rank: history_of(context, findings.slot_stats)}
            weights = _first_weights(context, record)
            return ReportFacts(report, histories, plain_optimizers(context), first_weights=weights)
        case Phase.STATE:
            return ReportFacts(report, first_weights=_first_weights(context, record))
        case Phase.INPUT:
            return ReportFacts(report, batch=_batch(record, report.origin.micro_batch))
        case Phase.OPTIMIZER:
            return ReportFacts(report, optimizers=plain_optimizers(context), dtypes=dtypes_of(context))
    return ReportFacts(report)


def _first_weights(context: GuardContext, record: StepRecord) -> dict[str, Tensor]:
    """This rank's parameters and buffers in the guard's first step, in which nothing has written to them yet."""
    if record.step != context.config.first_step:
        return {}
    parameters = {name: tensor for _, name, tensor in named_parameter_tensors(context)}
    return parameters | dict(context.state.buffers())


def _batch(record: StepRecord, micro_batch: int | None) -> Any:
    return next((m.batch for m in record.window.micro_batches if m.index == micro_batch), None)
