"""Blame for state and hyper-parameters, and for gradients that the reduce or code of the loop made non-finite."""

from __future__ import annotations

from ddp_nanguard.probes.calls import TensorRecord
from ddp_nanguard.probes.sources import LossSource
from ddp_nanguard.probes.state import StateSource
from ddp_nanguard.report.types import Phase, Site

from .view import LAST_MICRO_BATCH, BlameInput, NonFiniteTensor, RankedSite, WorstKinds


def state_sites(blame_input: BlameInput) -> list[RankedSite]:
    """Sites of state that was bad when the window began, or at the latest when its layer first ran in it.

    What the last update made bad belongs to the step before, phase ``optimizer``, and so comes before all else. None
    where the step was replayed: all its state was looked at when it had ended.
    """
    if _was_replayed(blame_input):
        return []
    early, _ = _changed_in_window(blame_input)
    sites = [
        # the update of the step before made it, though only this step's verdict shows it
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
    """Sites of what can only have become bad in the course of the window, sorted behind its last micro-batch.

    That is gradients after the reduce and as the loop changed them, state whose layer had run well before, buffers that
    the forwards wrote, and hyper-parameters.
    """
    early, late = _changed_in_window(blame_input)
    if _was_replayed(blame_input):
        late = [*blame_input.nonfinite_state.before, *early, *late]
    written = [*late, *blame_input.nonfinite_state.buffers]
    sites = [_site(blame_input, f, Phase.REDUCE, blame_input.step, n) for n, f in enumerate(blame_input.reduced)]
    sites += [_site(blame_input, f, Phase.LOOP, blame_input.step, n) for n, f in enumerate(blame_input.changed)]
    sites += [
        _site(blame_input, f, Phase.STATE, blame_input.step, n, input_kind="unchecked") for n, f in enumerate(written)
    ]
    sites += [_number_site(blame_input, f, n) for n, f in enumerate(blame_input.hyper_parameters)]
    return [RankedSite(site, order_key=LAST_MICRO_BATCH) for site in sites]


def _changed_in_window(blame_input: BlameInput) -> tuple[list[NonFiniteTensor], list[NonFiniteTensor]]:
    """State that was clean after the last update and is bad now, split in two.

    The first list holds what may have been bad before its layer ran in this window. The second holds what became bad
    later: its layer returned something finite, and only finite values, at least once.
    """
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


def _was_replayed(blame_input: BlameInput) -> bool:
    """Whether all that was seen of the step is its loss and what it left behind: it was replayed from a graph."""
    sources = [stats.source for stats in blame_input.slot_stats]
    looked_at_weights = any(isinstance(source, StateSource) and source.when == "check" for source in sources)
    has_loss = any(isinstance(source, LossSource) for source in sources)
    return looked_at_weights and has_loss and not any(isinstance(source, TensorRecord) for source in sources)


def _site(
    blame_input: BlameInput,
    bad_tensor: NonFiniteTensor,
    phase: Phase,
    step: int,
    order: int,
    input_kind: str | None = None,
) -> Site:
    return Site(
        # a value that communication made began on no single rank
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
