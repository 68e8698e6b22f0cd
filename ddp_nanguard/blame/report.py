"""From what each rank found to one report that is the same on all ranks."""

from __future__ import annotations

from dataclasses import replace

from ddp_nanguard.capture.record import StepRecord
from ddp_nanguard.config import ENV_INJECT
from ddp_nanguard.context import GuardContext
from ddp_nanguard.probes.coverage import unchecked
from ddp_nanguard.probes.sources import KnownNonFinite
from ddp_nanguard.report.audit import contradictions, settled
from ddp_nanguard.report.types import FaultReport, Phase, Site

from . import local_sites
from .exchange import JobFault, RankFault, exchange_sites
from .inspect import RankFindings, blame_input
from .view import RankedSite


def report_of(
    context: GuardContext, record: StepRecord, findings: RankFindings, cause: str, let_through: int | None = None
) -> FaultReport:
    """Find this rank's sites, exchange them with all ranks, and make the report, which is the same on every rank.

    Where peers do not answer, the report holds this rank's view alone and says so (``single_rank_view``).

    Args:
        context: of the guard.
        record: of the step.
        findings: what this rank found; its sites are filled in.
        cause: what is known of the cause already, such as a scale collapse; "" if nothing is.
        let_through: the last step whose fault was let through (``on_fault="warn"``).

    Collective: those of `exchange_sites`, on the fault group.
    """
    fill_sites(context, record, findings)
    return shared_report(context, record, findings, cause, let_through)


def fill_sites(context: GuardContext, record: StepRecord, findings: RankFindings) -> None:
    """Find this rank's own sites, earliest first. Collective: none. Host sync: many.

    Args:
        context: of the guard.
        record: of the step.
        findings: what this rank found; its sites are filled in.
    """
    nothing: tuple[list[RankedSite], frozenset[KnownNonFinite]] = [], frozenset()
    what = "the sites of this rank were not found"
    found = context.undone.attempt(what, lambda: _sites_and_known(context, record, findings), nothing)
    findings.sites, findings.known_nonfinite = found


def _sites_and_known(
    context: GuardContext, record: StepRecord, findings: RankFindings
) -> tuple[list[RankedSite], frozenset[KnownNonFinite]]:
    blame = blame_input(context, record, findings)
    return local_sites(blame), blame.known_nonfinite


def shared_report(
    context: GuardContext, record: StepRecord, findings: RankFindings, cause: str, let_through: int | None = None
) -> FaultReport:
    """As `report_of`, from sites that are filled in already."""
    shared = exchange_sites(context.ranks, rank_fault(context, record, findings), record.step)
    # read after the exchange: that is where peers are found to be lost
    is_single = context.ranks.peers_lost
    silent = f"peers were not asked or did not answer: this is rank {context.ranks.rank}'s own view"
    return report_from(context, record, shared, cause, let_through, silent if is_single else "")


def report_from(
    context: GuardContext,
    record: StepRecord,
    shared: JobFault,
    cause: str,
    let_through: int | None = None,
    silent: str = "",
) -> FaultReport:
    """The report of what ranks know together.

    Args:
        context: of the guard.
        record: of the step.
        shared: what they know.
        cause: as in `report_of`.
        let_through: likewise.
        silent: who of them was not heard, in words; "" where all were.
    """
    is_single = bool(silent)
    sites = _without_victims(shared.sites)
    sites = _not_told_apart(_single_rank_sites(sites) if is_single else sites, shared.num_affected)
    origin = sites[0] if sites else None
    is_reduce = origin is not None and origin.phase is Phase.REDUCE
    report = FaultReport(
        step=origin.step if origin is not None else record.step,
        world_size=context.ranks.world_size,
        wrapper=context.wrapper.kind,
        origin=origin,
        sites=sites,
        holders=shared.holders if is_reduce else (),
        num_ranks_affected=shared.num_affected,
        ranks_affected=shared.affected,
        cause=_with_more(cause, _cause_of(origin, sites, let_through)),
        nonfinite_state=shared.nonfinite_state,
        unchecked=shared.unchecked,
        single_rank_view=is_single,
        notes=(*_notes(context), *filter(None, [silent])),
    )
    return settled(report, contradictions(report))


def rank_fault(context: GuardContext, record: StepRecord, findings: RankFindings) -> RankFault:
    """What this rank brings to the fault round; its sites are filled in."""
    reduced_bad = any(ranked.site.phase is Phase.REDUCE for ranked in findings.sites)
    return RankFault(
        findings.sites, findings.nonfinite_state.lasting(), reduced_bad, not_checked(context, record, findings)
    )


def not_checked(context: GuardContext, record: StepRecord, findings: RankFindings) -> list[str]:
    """What this rank did not look at in a step, one phrase each; see `probes.coverage.unchecked`."""
    calls = record.calls if record.window.micro_batches else None
    what = "what was not looked at is not known"
    return context.undone.attempt(
        what, lambda: unchecked(context.config, context.forward, calls, findings.slot_stats), []
    )


def _notes(context: GuardContext) -> tuple[str, ...]:
    notes = []
    if context.injection is not None:
        notes.append(f"{ENV_INJECT} plants a fault in this job: {context.injection}")
    if context.legal_text:
        notes.append(f"non-finite before anything went wrong, which is no fault by itself: {context.legal_text}")
    if context.checkpoint is not None:
        path, step = context.checkpoint
        notes.append(f"last checkpoint that was checked before it was saved: {path} (weights before step {step})")
    return tuple(notes)


def _single_rank_sites(sites: tuple[Site, ...]) -> tuple[Site, ...]:
    """The sites, where peers could not be asked: whether their gradients were finite before is not known."""
    return tuple(replace(site, input_kind="unchecked") if site.phase in _SPREADING else site for site in sites)


MAX_TOGETHER = 3
"""Gradients changed by the loop that a report names; the sites have more."""
_SPREADING = (Phase.REDUCE, Phase.LOOP)
"""Phases in which a value may come from another rank, or from another gradient: the reduce, then clipping and such."""


def _without_victims(sites: tuple[Site, ...]) -> tuple[Site, ...]:
    """The sites without those to which the reduce, or code after it, has only spread what was bad before."""
    is_spread = any(site.phase in (Phase.INPUT, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD) for site in sites)
    is_reduced = any(site.phase is Phase.REDUCE for site in sites)
    victims = _SPREADING if is_spread else ((Phase.LOOP,) if is_reduced else ())
    return tuple(site for site in sites if site.phase not in victims)


def _not_told_apart(sites: tuple[Site, ...], num_affected: int) -> tuple[Site, ...]:
    """The sites; where code of the loop changed several gradients, the first of them does not stand for the cause.

    Clipping by norm makes all of one, and a collective of the loop carries it to all ranks.
    """
    if not sites or sites[0].phase is not Phase.LOOP:
        return sites
    origin = sites[0]
    together = _together(origin, sites)
    listed = (*together[:MAX_TOGETHER], "others") if len(together) > MAX_TOGETHER else together
    rank = origin.rank if num_affected <= 1 else None
    return (replace(origin, rank=rank, suspects=listed if len(together) > 1 else ()), *sites[1:])


def _together(origin: Site, sites: tuple[Site, ...]) -> tuple[str, ...]:
    """Gradients that were seen bad with the origin's, on its rank."""
    found = [site.slot for site in sites if site.phase is Phase.LOOP and site.rank == origin.rank]
    return tuple(dict.fromkeys([origin.slot, *found]))


def _with_more(cause: str, known: str) -> str:
    return known if not cause else (cause if known.startswith("unknown") else f"{known}; {cause}")


def as_changed_by_the_loop(report: FaultReport) -> FaultReport:
    """The report of gradients that no hook saw, once it is known that every backward pass made finite ones."""
    sites = tuple(replace(site, phase=Phase.LOOP, input_kind=None) for site in report.sites)
    return replace(report, origin=sites[0], sites=sites, cause=_changed_text(sites[0], sites))


def _cause_of(origin: Site | None, sites: tuple[Site, ...], let_through: int | None) -> str:
    if origin is None:
        return "unknown: no probe saw where the value came from"
    # a case without `input_kind` is for a value that was made there: what it was made from was seen finite
    match origin.phase:
        case Phase.STATE if origin.input_kind is None:
            return "a parameter, buffer or optimizer state was bad before the step"
        case Phase.STATE:
            return "written in the course of this step, not by an update"
        case Phase.INPUT:
            return "the loader delivered a non-finite value"
        case Phase.LOSS if origin.input_kind is None:
            return "the loss function made it from a finite model output"
        case Phase.REDUCE if origin.input_kind is None:
            return "finite on every rank before communication, non-finite after it"
        case Phase.LOOP:
            return _changed_text(origin, sites)
        case Phase.OPTIMIZER if origin.layer is None:
            return "a hyper-parameter is not a finite number"
        case Phase.OPTIMIZER if let_through == origin.step:
            return f"the update of step {origin.step} used gradients that were known to be bad and were let through"
        case Phase.OPTIMIZER:
            return "the update, or code of the loop: gradients and hyper-parameters were finite when looked at last"
        case _:
            return "unknown"


def _changed_text(origin: Site, sites: tuple[Site, ...]) -> str:
    """What is known of gradients that were finite after the backward: not which of several came first."""
    code = "clipping, noise, a division or a collective of the loop, between backward and step"
    if not origin.suspects:
        return code
    num_together = len({site.slot for site in sites if site.phase is Phase.LOOP})
    return f"{code}; {num_together} gradients were seen bad together, so which was first is not known"
