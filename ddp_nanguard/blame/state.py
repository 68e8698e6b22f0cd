"""Blame for state, hyper-parameters and the reduce."""

from __future__ import annotations

from ddp_nanguard.probes.calls import Sighting
from ddp_nanguard.site import Phase, Site

from .view import LAST_MICRO_BATCH, Finding, Kinds, RankedSite, StepView


def state_sites(view: StepView) -> list[RankedSite]:
    """State that was bad when the window began, or at the latest when its layer first ran in it."""
    early, _ = _spoilt(view)
    sites = [_site(view, f, Phase.OPTIMIZER, view.step - 1, n) for n, f in enumerate(view.damage.by_update)]
    sites += [_site(view, f, Phase.STATE, view.step, n) for n, f in enumerate(view.damage.before)]
    sites += [_site(view, f, Phase.STATE, view.step, n, taken_in="unchecked") for n, f in enumerate(early)]
    return [RankedSite(site) for site in sites]


def late_sites(view: StepView) -> list[RankedSite]:
    """What can only have gone bad after the last micro-batch, or in the course of the window."""
    _, late = _spoilt(view)
    spoilt = [*late, *view.damage.buffers]
    sites = [_site(view, f, Phase.REDUCE, view.step, n) for n, f in enumerate(view.reduced)]
    sites += [_site(view, f, Phase.STATE, view.step, n, taken_in="unchecked") for n, f in enumerate(spoilt)]
    sites += [_number_site(view, f, n) for n, f in enumerate(view.hyper_parameters)]
    return [RankedSite(site, place=LAST_MICRO_BATCH) for site in sites]


def _spoilt(view: StepView) -> tuple[list[Finding], list[Finding]]:
    """State that was clean after the last update, split by whether its layer met it bad already or ran well before."""
    kinds = Kinds(view.readings)
    ran_well = {
        reading.note.call.layer
        for reading in view.readings
        if isinstance(reading.note, Sighting) and reading.note.slot == "output" and kinds.was_clean(reading.note.call)
    }
    early = [finding for finding in view.damage.since if view.owner_of(finding.name) not in ran_well]
    return early, [finding for finding in view.damage.since if finding not in early]


def _site(view: StepView, finding: Finding, phase: Phase, step: int, order: int, taken_in: str | None = None) -> Site:
    return Site(
        rank=None if phase is Phase.REDUCE else view.rank,
        step=step,
        micro_batch=None,
        phase=phase,
        layer=view.owner_of(finding.name),
        call=None,
        slot=finding.name,
        kind=finding.kind,
        evidence=finding.evidence,
        taken_in=taken_in,
        order=order,
    )


def _number_site(view: StepView, finding: Finding, order: int) -> Site:
    return Site(view.rank, view.step, None, Phase.OPTIMIZER, None, None, finding.name, finding.kind, order=order)
