"""The report of ranks that cannot communicate any more: each leaves what it saw in the store, and reads the others'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ddp_nanguard.blame.exchange import Posted, merged
from ddp_nanguard.blame.inspect import RankFindings
from ddp_nanguard.blame.report import fill_sites, rank_fault, report_from
from ddp_nanguard.capture.record import StepRecord
from ddp_nanguard.context import GuardContext
from ddp_nanguard.report.types import RAISED, FaultReport, Phase
from ddp_nanguard.report.wording import listed

from .cause import own_reason

Meet = Callable[[int, str], dict[int, str]]
"""Leaves this rank's text under its position in the group; the texts of those that answer, by theirs."""


def report_without_collective(
    context: GuardContext,
    record: StepRecord,
    findings: RankFindings,
    raised: str,
    meet: Meet,
    let_through: int | None,
) -> FaultReport:
    """What all ranks saw that answer in the store, the same on each of them; else this rank's own view.

    Args:
        context: of the guard; its peers are lost.
        record: of the step.
        findings: what this rank found; its sites are filled in.
        raised: name of the exception that this rank's own code raised; "" where a peer's did.
        meet: posts and reads.
        let_through: the last step whose fault was let through.

    Collective: none. Host sync: many.
    """
    ranks = context.ranks
    fill_sites(context, record, findings)
    fault = rank_fault(context, record, findings)
    lacks = context.reach.lacks() or ""
    own = {ranks.index: Posted.of(ranks, fault, record.step, raised, "", lacks)}
    view = report_from(context, record, merged(ranks.members, own), "", let_through, _silent(context, own))
    mine = Posted.of(ranks, fault, record.step, raised, own_reason(context, record, findings, view), lacks)
    texts = {index: Posted.from_text(text) for index, text in meet(ranks.index, mine.to_text()).items()}
    # a rank in another step has nothing to say about this one
    posted = {index: each for index, each in sorted(texts.items()) if each.step == record.step}
    cause = _raised_by(context, posted)
    shared, silent = merged(ranks.members, posted), _silent(context, posted)
    report = report_from(context, record, shared, cause, let_through, silent)
    unseen = _unseen(context, posted)
    if unseen and report.origin is not None and report.origin.phase is Phase.REDUCE:
        # "finite on every rank before" would be said of ranks that nobody has looked at
        report = report_from(context, record, shared, cause, let_through, silent or unseen)
    elif unseen:
        report = replace(report, notes=(*report.notes, unseen))
    return _with_reason(context, report, posted, cause)


def _unseen(context: GuardContext, posted: Mapping[int, Posted]) -> str:
    """What ranks did not look at, "" where all have seen all."""
    members = context.ranks.members
    texts = (each.lacks.replace("this rank", f"rank {members[i]}", 1) for i, each in posted.items() if each.lacks)
    return listed(texts, 4)


def _raised_by(context: GuardContext, posted: Mapping[int, Posted]) -> str:
    members = context.ranks.members
    return listed((f"rank {members[i]} raised {each.raised} {RAISED}" for i, each in posted.items() if each.raised), 4)


def _silent(context: GuardContext, posted: Mapping[int, Posted]) -> str:
    """Who did not answer, "" where all did."""
    ranks = context.ranks
    if len(posted) == len(ranks.members):
        return ""
    if len(posted) == 1:
        return f"peers were not asked or did not answer: this is rank {ranks.rank}'s own view"
    missing = [member for index, member in enumerate(ranks.members) if index not in posted]
    return f"not heard in time: {listed(f'rank {member}' for member in missing)}; this is what the others saw"


def _with_reason(context: GuardContext, report: FaultReport, posted: Mapping[int, Posted], cause: str) -> FaultReport:
    """The report with the reason of the rank where it began."""
    origin, members = report.origin, context.ranks.members
    if origin is None or origin.rank not in members:
        return report
    winner = posted.get(members.index(origin.rank))
    text = "" if winner is None else winner.cause
    return replace(report, cause="; ".join(filter(None, [text, cause]))) if text else report
