"""Blame for state, hyper-parameters and the reduce."""

from __future__ import annotations

from ddp_nanguard.probes.calls import TensorRecord
from ddp_nanguard.report.types import Phase, Site

from .view import LAST_MICRO_BATCH, BlameInput, NonFiniteTensor, RankedSite, WorstKinds


def state_sites(blame_input: BlameInput) -> list[RankedSite]:
    """State that was bad when the window began, or at the latest when its layer first ran in it."""
    early, _ = _spoilt(blame_input)
    sites = [
        _site(blame_input, f, Phase.OPTIMIZER, blame_input.step - 1, n)
        for n, f in enumerate(blame_input.nonfinite_state.by_update)
    ]
    sites += [
        _site(blame_input, f, Phase.STATE, blame_input.step, n)
        for n, f in enumerate(blame_input.nonfinite_state.before)
    ]
    sites += [
        _site(blame_input, f, Phase.STATE, blame_input.step, n, input_kind="unchecked") for n, f in enumerate(early)
    ]
    return [RankedSite(site) for site in sites]


def late_sites(blame_input: BlameInput) -> list[RankedSite]:
    """What can only have gone bad after the last micro-batch, or in the course of the window."""
    _, late = _spoilt(blame_input)
    spoilt = [*late, *blame_input.nonfinite_state.buffers]
    sites = [_site(blame_input, f, Phase.REDUCE, blame_input.step, n) for n, f in enumerate(blame_input.reduced)]
    sites += [
        _site(blame_input, f, Phase.STATE, blame_input.step, n, input_kind="unchecked") for n, f in enumerate(spoilt)
    ]
    sites += [_number_site(blame_input, f, n) for n, f in enumerate(blame_input.hyper_parameters)]
    return [RankedSite(site, order_key=LAST_MICRO_BATCH) for site in sites]


def _spoilt(blame_input: BlameInput) -> tuple[list[NonFiniteTensor], list[NonFiniteTensor]]:
    """State that was clean after the last update, split by whether its layer met it bad already or ran well before."""
    kinds = WorstKinds(blame_input.slot_stats)
    ran_well = {
        stats.source.call.layer
        for stats in blame_input.slot_stats
        if isinstance(stats.source, TensorRecord)
        and stats.source.slot == "output"
        and kinds.was_clean(stats.source.call)
    }
    early = [
        bad_tensor
        for bad_tensor in blame_input.nonfinite_state.since
        if blame_input.owner_of(bad_tensor.name) not in ran_well
    ]
    return early, [bad_tensor for bad_tensor in blame_input.nonfinite_state.since if bad_tensor not in early]


def _site(
    blame_input: BlameInput,
    bad_tensor: NonFiniteTensor,
    phase: Phase,
    step: int,
    order: int,
    input_kind: str | None = None,
) -> Site:
    return Site(
        rank=None if phase is Phase.REDUCE else blame_input.rank,
        step=step,
        micro_batch=None,
        phase=phase,
        layer=blame_input.owner_of(bad_tensor.name),
        call=None,
        slot=bad_tensor.name,
        kind=bad_tensor.kind,
        evidence=bad_tensor.evidence,
        input_kind=input_kind,
        order=order,
    )


def _number_site(blame_input: BlameInput, bad_tensor: NonFiniteTensor, order: int) -> Site:
    return Site(
        blame_input.rank,
        blame_input.step,
        None,
        Phase.OPTIMIZER,
        None,
        None,
        bad_tensor.name,
        bad_tensor.kind,
        order=order,
    )
