"""State that is non-finite on purpose: running minima from +inf, masks of -inf, observers that have seen nothing yet.

[Note: legal infinities]
What held an infinity, or a NaN, before any training, and has reached neither a loss nor a gradient, is no fault. It is
told once, with ``ignore=`` as the remedy, and from then on its infinities are no trigger: it may become finite and
infinite again. A NaN in it still is one, unless it held a NaN before. What an update or a forward has made infinite is
never legal, since it was seen finite before.
"""

from __future__ import annotations

from ddp_nanguard.capture.record import StepRecord
from ddp_nanguard.context import GuardContext
from ddp_nanguard.probes.slots import SlotStats, is_clean
from ddp_nanguard.probes.state import StateSource
from ddp_nanguard.tensors.minmax import kind_of

from .inspect import RankFindings
from .view import NonFiniteTensor


def legal_state(context: GuardContext, record: StepRecord, findings: RankFindings) -> dict[str, str]:
    """Name and kind of state that is non-finite on purpose, as far as state alone tells; see [Note: legal infinities].

    Args:
        context: of the guard.
        record: of the step.
        findings: what this rank found. Whether a loss or a gradient is bad is for the caller to ask, of all ranks.

    Returns:
        None of it where any other state is bad too. Host sync: one per page of slots of each clean step in the ring.
    """
    state = findings.nonfinite_state
    changed = {bad_tensor.name for bad_tensor in (*state.by_update, *state.since, *state.buffers)}
    bad = [stats for stats in findings.slot_stats if is_bad_state(stats)]
    if context.is_replay or changed or not bad or findings.hyper_parameters:
        return {}
    known = {stats.source.name for past in context.slots.past() for stats in past.slot_stats() if _is_clean(stats)}
    now = {bad_tensor.name: bad_tensor for bad_tensor in state.before}
    found = {s.source.name: _kind(s) for s in bad if _is_on_purpose(s.source, now.get(s.source.name), known)}
    everything = {stats.source.name for stats in bad} | now.keys()
    return found if found.keys() == everything else {}


def _is_on_purpose(source: StateSource, now: NonFiniteTensor | None, known: set[str]) -> bool:
    """Whether a state was non-finite when it was first looked at, or has been filled with infinities by the loop.

    Args:
        source: of a slot that is bad.
        now: what it holds by now; None where that is finite.
        known: names of state that was clean in a step before.
    """
    if source.when not in ("before", "written"):
        return False
    if source.kind == "parameter" or (source.kind == "buffer" and source.name not in known):
        return source.name not in known
    return _is_filled(now, may_be_nan=source.kind == "optimizer state" and source.name not in known)


def _is_filled(now: NonFiniteTensor | None, may_be_nan: bool) -> bool:
    """Whether every element is infinite, or NaN: an overflow seldom leaves that, an initial value does."""
    counts = now.evidence if now is not None else None
    if counts is None:
        return False
    return counts.numel in (counts.num_inf + counts.num_neg_inf, counts.num_nan if may_be_nan else -1)


def is_bad_state(stats: SlotStats) -> bool:
    """Whether a slot shows a parameter, buffer or optimizer state as bad that nobody is about to overwrite."""
    return isinstance(stats.source, StateSource) and stats.source.when != "before broadcast" and not is_clean(stats)


def _is_clean(stats: SlotStats) -> bool:
    return isinstance(stats.source, StateSource) and is_clean(stats)


def _kind(stats: SlotStats) -> str:
    kind = kind_of(stats.minimum, stats.maximum)
    assert kind is not None
    return kind
