"""What the second look says to the first: the same, elsewhere, or finite; and the report that follows from both."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace

from ddp_nanguard.blame.inspect import RankFindings
from ddp_nanguard.capture.record import StepRecord
from ddp_nanguard.context import GuardContext
from ddp_nanguard.report.types import FaultReport, Phase, Site
from ddp_nanguard.report.wording import listed

from .compare import Agreement, agreement
from .run import SecondRun


@dataclass(frozen=True)
class Concluded:
    """What came of the second run over all ranks.

    Attributes:
        outcome: as in `SecondLook`.
        text: one sentence.
        finite_ranks: where the fault did not come again.
        changed_after: whether every gradient was finite when the backward ended, and only later was not.
        is_elsewhere: whether, on some rank, another vital sign was the first to go bad.
    """

    outcome: str
    text: str
    finite_ranks: tuple[int, ...] = ()
    changed_after: bool = False
    is_elsewhere: bool = False


def own_sites(findings: RankFindings) -> list[Site]:
    """What this rank had seen before any communication, with full confidence."""
    sites = [ranked.site for ranked in findings.sites if not ranked.low_confidence]
    return [site for site in sites if site.phase is not Phase.REDUCE]


def is_bad_here(findings: RankFindings) -> bool:
    """Whether this rank has made, or been given, something bad."""
    return bool(own_sites(findings))


def is_late(site: Site) -> bool:
    """Whether a gradient was first seen bad after the backward had ended: code of the loop may have changed it."""
    return site.phase is Phase.BACKWARD and site.micro_batch is None


def concluded(
    context: GuardContext, record: StepRecord, report: FaultReport, then: RankFindings, again: SecondRun
) -> Concluded:
    """Compare both looks on every rank.

    Args:
        context: of the guard.
        record: of the step.
        report: of the first look.
        then: what this rank found at first; its sites are filled in.
        again: what it found in the second run; likewise.

    Collective: one SUM all-reduce of four bytes per rank and one of 8 KiB, on the fault group.
    """
    ranks, now = context.ranks, again.findings
    mine = agreement(then.recorded, now.recorded, record, context.wrapper.is_sharded)
    was_bad = [site for site in own_sites(then) if not is_late(site)]
    is_finite = bool(was_bad) and not is_bad_here(now)
    late = [site for site in own_sites(then) if is_late(site)]
    is_changed = bool(late) and not was_bad and not is_bad_here(now)
    moved = _has_moved(was_bad, [ranked.site for ranked in again.as_watched])
    flags = (is_finite, mine.first_different is not None or moved, is_changed, moved)
    finite, different, changed, elsewhere = ranks.ranks_where(*flags)
    speaker = (finite or different or [ranks.members[0]])[0]
    text = ranks.text_of(ranks.rank == speaker, _own_text(context, mine, is_finite))
    if finite:
        return Concluded("finite", f"{_who(finite)} finite on the second run, {text}", tuple(finite))
    changed_after = bool(changed) and report.origin is not None and is_late(report.origin)
    if different:
        said = f"{_who(different)} has other bits on the second run: {text}"
        return Concluded("elsewhere", said, (), changed_after, bool(elsewhere))
    return Concluded("same", _same_text(context, report, changed_after), (), changed_after)


def _has_moved(then: list[Site], now: list[Site]) -> bool:
    """Whether another vital sign of this rank was the first to go bad."""
    now = [site for site in now if site.phase is not Phase.REDUCE]
    return bool(then) and bool(now) and not then[0].same_place(now[0])


def _own_text(context: GuardContext, mine: Agreement, is_finite: bool) -> str:
    upto = f"identical up to {mine.last_same}" if mine.last_same is not None else "different from the start"
    if not is_finite:
        return f"{upto}; first different: {mine.first_different}"
    device = context.device
    same = upto if mine.first_different is not None and mine.last_same is not None else "same inputs and random states"
    return f"{same}: suspect that device ({socket.gethostname()}, {device}), nondeterminism, or memory that was not set"


def _same_text(context: GuardContext, report: FaultReport, changed_after: bool) -> str:
    everywhere = f"same on all {report.world_size} ranks" if report.world_size > 1 else "same"
    if changed_after:
        return f"{everywhere}: gradients are finite when the backward ends, so code after the backward changed them"
    is_reduce = report.origin is not None and report.origin.phase is Phase.REDUCE
    if is_reduce and not context.wrapper.is_sharded:
        return f"{everywhere}, up to the communication, which was not run again"
    return f"{everywhere}: deterministic"


def as_compiled(found: Concluded, is_bad: bool) -> Concluded:
    """What a compiled step gave, and the eager one after it.

    Args:
        found: of the compiled step.
        is_bad: whether the eager one was bad on any rank.
    """
    if found.outcome == "finite" or found.changed_after:
        return found
    eager = "the place is that of an eager run, which is not the compiled step"
    if not is_bad:
        eager = "finite when it runs eagerly: suspect the kernel that torch.compile made"
    return replace(found, text=f"{found.text}, compiled; {eager}")


def merged(first: FaultReport, second: FaultReport, found: Concluded) -> FaultReport:
    """The report of both looks: the first tells whether and when, the second where.

    Args:
        first: of what a clean step looks at.
        second: of everything, in the second run.
        found: how they agree.
    """
    origin = second.origin
    if not _is_shown(first, second, found) or origin is None:
        return first
    cause = second.cause if not first.cause.startswith("scale collapse") else first.cause
    return replace(first, origin=origin, sites=second.sites, cause=cause, unchecked=second.unchecked)


def _is_shown(first: FaultReport, second: FaultReport, found: Concluded) -> bool:
    """Whether the second look's origin is that of the fault."""
    then, now = first.origin, second.origin
    if found.outcome == "finite" or found.changed_after or then is None or now is None:
        return False
    if then.phase is Phase.REDUCE or now.phase in (Phase.STATE, Phase.OPTIMIZER):
        return False
    return found.outcome == "same" or (then.rank == now.rank and not found.is_elsewhere)


def _who(ranks: list[int]) -> str:
    return f"rank {listed(ranks)}" if len(ranks) == 1 else f"ranks {listed(ranks)}"
