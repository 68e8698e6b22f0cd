"""What a rank finds when it looks again after a verdict that is not clean: slots, state, gradients, batches.

Nothing here runs in a clean step, so host reads and copies cost nothing that matters. There is no collective: a rank
can do all of this alone, also when its peers are gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from ddp_nanguard.capture.record import StepRecord
from ddp_nanguard.capture.window import AccumulationWindow, MicroBatch
from ddp_nanguard.context import GuardContext
from ddp_nanguard.probes.gradient import GradientSource
from ddp_nanguard.probes.slots import SlotStats, is_clean
from ddp_nanguard.probes.sources import KnownNonFinite, LossSource
from ddp_nanguard.probes.state import StateSource, is_bad_number
from ddp_nanguard.report.types import Phase
from ddp_nanguard.tensors.containers import named_tensors_in, path_text
from ddp_nanguard.tensors.minmax import evidence, extremes, kind_in, kind_of

from . import BlameInput, NonFiniteState, NonFiniteTensor, RankedSite, known_nonfinite
from .backward import changed_gradients
from .confirm import Confirmed, confirm, without_undecided


@dataclass
class RankFindings:
    """What this rank sees of a fault.

    Attributes:
        recorded: the slots of the step as they were, in execution order: what a replay compares.
        slot_stats: the same, with bad screens replaced by what their tensors hold, see `confirm`.
        nonfinite_state: parameters, buffers and optimizer state that are bad now.
        hyper_parameters: those that are NaN, or infinite where that makes no sense.
        gradients_bad_now: whether the ``grad`` of any parameter is bad at this moment; False for a past step.
        gradients_bad_seen: whether a probe saw a bad gradient of a parameter in the step, and nothing says that it was
            a norm that overflowed.
        norms_overflowed: whether a screen was infinite over finite elements, or may have been, its tensor being gone.
        loss_bad: whether a watched loss is bad.
        sites: of this rank, earliest first; empty until `blame.report.report_of` fills them in.
        known_nonfinite: what was non-finite in clean steps too; filled in with the sites.
    """

    recorded: list[SlotStats]
    slot_stats: list[SlotStats]
    nonfinite_state: NonFiniteState
    hyper_parameters: list[NonFiniteTensor]
    gradients_bad_now: bool
    gradients_bad_seen: bool
    loss_bad: bool
    norms_overflowed: bool = False
    sites: list[RankedSite] = field(default_factory=list)
    known_nonfinite: frozenset[KnownNonFinite] = frozenset()


def rescan(context: GuardContext, record: StepRecord) -> RankFindings:
    """Look again at everything of a step that is still there: slots, state, gradients.

    Args:
        context: of the guard.
        record: the open step, or the one before it, whose verdict was deferred.

    Host sync: one per tensor. No collective.
    """
    record.window.wait_for_copies(context.reach.waits_s)
    if not context.reach.answers:
        return RankFindings([], [], NonFiniteState(), [], False, False, False)
    if context.reach.up_to is None:
        context.flush_compiled()
        # a backward that raised has left pending gradients behind, which no callback of the engine flushes any more
        context.gradient.flush_pending()
    recorded = [stats for stats in record.slots.slot_stats() if context.reach.covers(stats.order)]
    # from here on everything is read from objects of the job, in which the step may have left anything
    attempt, unconfirmed = context.undone.attempt, Confirmed(list(recorded), False, set())
    confirmed = attempt("norms were not confirmed", lambda: confirm(context, record, recorded), unconfirmed)
    slot_stats, undecided = without_undecided(confirmed), confirmed.undecided
    bad = [stats for stats in slot_stats if isinstance(stats.source, GradientSource) and not is_clean(stats)]
    return RankFindings(
        recorded=recorded,
        slot_stats=slot_stats,
        nonfinite_state=_nonfinite_state(context, record.window, slot_stats),
        hyper_parameters=_bad_hyper_parameters(record),
        gradients_bad_now=attempt("gradients were not read again", lambda: _has_bad_gradients(context, record), True),
        gradients_bad_seen=any(stats.order not in undecided for stats in bad),
        loss_bad=any(isinstance(stats.source, LossSource) and not is_clean(stats) for stats in slot_stats),
        norms_overflowed=confirmed.overflowed or bool(undecided),
    )


# -- rescans ---------------------------------------------------------------------------------------------------------


def _has_bad_gradients(context: GuardContext, record: StepRecord) -> bool:
    return context.reach.up_to is None and any(kind_in(gradient) for _, gradient in _gradients(context, record))


def _nonfinite_state(context: GuardContext, window: AccumulationWindow, slot_stats: list[SlotStats]) -> NonFiniteState:
    found, attempt = NonFiniteState(), context.undone.attempt
    attempt("weights were not read again", lambda: _add_parameters(context, found, slot_stats), None)
    attempt("optimizer state was not read again", lambda: _add_optimizer_state(context, found, slot_stats), None)
    attempt("buffers were not read again", lambda: _add_buffers(context, window, found), None)
    return found


def _add_parameters(context: GuardContext, found: NonFiniteState, slot_stats: list[SlotStats]) -> None:
    updated, clean = _looked_at(slot_stats)
    for holder, name, tensor in named_parameter_tensors(context):
        if not context.is_ignored(name):
            when = found.by_update if holder in updated else (found.since if holder in clean else found.before)
            when.extend(_if_nonfinite(context, name, tensor))


def _add_optimizer_state(context: GuardContext, found: NonFiniteState, slot_stats: list[SlotStats]) -> None:
    updated, clean = _looked_at(slot_stats)
    for name, tensor in optimizer_tensors(context):
        if not context.is_ignored(name):
            when = found.by_update if updated else (found.since if name in clean else found.before)
            when.extend(_if_nonfinite(context, name, tensor))


def _looked_at(slot_stats: list[SlotStats]) -> tuple[set[str], set[str]]:
    """Names of parameters that were bad after the last update, and of state that was clean when last looked at."""
    updated: set[str] = set()
    clean: set[str] = set()
    for stats in slot_stats:
        source = stats.source
        if isinstance(source, StateSource) and source.when in ("before", "update"):
            if is_clean(stats):
                clean.add(source.name)
            elif source.when == "update":
                updated.add(source.name)
    return updated, clean - updated


def named_parameter_tensors(context: GuardContext) -> Iterator[tuple[str, str, Tensor]]:
    """(name as the optimizer holds it, original name, this rank's part) of every parameter. No communication.

    The two names differ where a wrapper flattens parameters: one flat parameter gives one item per original.
    """
    own = dict(context.wrapper.named_parameters())
    for name, parameter in context.state.parameters():
        if name in own:
            for shard in context.wrapper.shards("", name, own[name], parameter):
                yield name, shard.name, shard.tensor
        else:
            yield name, name, context.wrapper.local(parameter)


def optimizer_tensors(context: GuardContext) -> Iterator[tuple[str, Tensor]]:
    """(``<parameter>.<key>``, this rank's part) of every tensor in the optimizers' state. No communication."""
    for name, tensor in context.state.optimizer_state():
        yield name, context.wrapper.local(tensor)


def _add_buffers(context: GuardContext, window: AccumulationWindow, found: NonFiniteState) -> None:
    copies = window.buffers()
    for name, buffer in context.state.buffers():
        if context.is_ignored(name):
            continue
        # without a copy from before the window nothing shows that the forwards did it
        copied = copies.get(name)
        was_bad = copied is None or kind_in(copied, allow_negative_inf=True) is not None
        when = found.before if was_bad else found.buffers
        when.extend(_if_nonfinite(context, name, buffer, allow_negative_inf=True))


def _if_nonfinite(
    context: GuardContext, name: str, tensor: Tensor, allow_negative_inf: bool = False
) -> list[NonFiniteTensor]:
    kind = kind_in(tensor, allow_negative_inf)
    if kind is None or context.is_legal(name, kind):
        return []
    return [NonFiniteTensor(name, kind, evidence(tensor))]


def _bad_hyper_parameters(record: StepRecord) -> list[NonFiniteTensor]:
    found: list[NonFiniteTensor] = []
    for name, value in record.hyper_parameters:
        low, high = (extremes(value) or (0.0, 0.0)) if isinstance(value, Tensor) else (value, value)
        if is_bad_number(name, low) or is_bad_number(name, high):
            kind = kind_of(low, high)
            assert kind is not None
            found.append(NonFiniteTensor(name, kind, None))
    return found


def _gradients(context: GuardContext, record: StepRecord) -> Iterator[tuple[str, Tensor]]:
    if not record.is_current:
        return  # a deferred verdict: the gradients that are there now are the next step's
    for name, parameter in context.wrapper.named_parameters():
        if parameter.grad is not None and not context.is_ignored(name):
            yield name, context.wrapper.local(parameter.grad)
    yield from ((name, waiting) for name, waiting in context.wrapper.unreduced() if not context.is_ignored(name))


def _reduced_findings(context: GuardContext, record: StepRecord, slot_stats: list[SlotStats]) -> list[NonFiniteTensor]:
    """Gradients that were non-finite after the reduce, by original parameter.

    The kind is that of the slot, since clipping may have spread a NaN to gradients that were finite then.
    """
    reduced = [s for s in slot_stats if isinstance(s.source, GradientSource) and s.source.reduced and not is_clean(s)]
    named = [(stats.source.name, kind_of(stats.minimum, stats.maximum)) for stats in reduced]
    return _by_original(context, record, [(name, kind) for name, kind in named if kind is not None])


def _changed_findings(context: GuardContext, record: StepRecord, slot_stats: list[SlotStats]) -> list[NonFiniteTensor]:
    """Gradients that code of the loop has made non-finite after the backward, by original parameter."""
    return _by_original(context, record, changed_gradients(slot_stats))


def _by_original(context: GuardContext, record: StepRecord, bad: list[tuple[str, str]]) -> list[NonFiniteTensor]:
    own = dict(context.wrapper.named_parameters())
    found = [shard for name, kind in bad for shard in _gradient_shards(context, record, name, own[name], kind)]
    return list({bad_tensor.name: bad_tensor for bad_tensor in found}.values())


def _gradient_shards(
    context: GuardContext, record: StepRecord, name: str, parameter: nn.Parameter, kind: str
) -> list[NonFiniteTensor]:
    if parameter.grad is None or not record.is_current:
        return [NonFiniteTensor(name, kind, None)]
    shards = context.wrapper.shards("", name, parameter, parameter.grad)
    bad = [shard for shard in shards if kind_in(shard.tensor) == kind]
    return [NonFiniteTensor(shard.name, kind, evidence(shard.tensor)) for shard in bad] or [
        NonFiniteTensor(name, kind, None)
    ]


def _batch_findings(micro_batches: list[MicroBatch]) -> list[NonFiniteTensor]:
    found: list[NonFiniteTensor] = []
    for micro_batch in micro_batches:
        for path, tensor in named_tensors_in(micro_batch.batch):
            name = path_text(path)
            if name not in micro_batch.modified and (kind := kind_in(tensor)) is not None:
                found.append(NonFiniteTensor(name, kind, evidence(tensor), micro_batch.index, tensor))
    return found


def _batches(context: GuardContext, micro_batches: list[MicroBatch]) -> list[NonFiniteTensor]:
    is_read = Phase.INPUT in context.config.watched and context.reach.answers
    return _batch_findings(micro_batches) if is_read else []


def _of_the_step(record: StepRecord, findings: RankFindings) -> NonFiniteState:
    """The state that was bad in the step: of a step whose verdict was deferred the next forward has changed buffers.

    Under DDP it has overwritten them by those of rank 0, on which the step may have spoilt them.
    """
    if record.is_current:
        return findings.nonfinite_state
    bad = [stats.source for stats in findings.slot_stats if not is_clean(stats)]
    names = {source.name for source in bad if isinstance(source, StateSource) and source.when == "written"}
    state = findings.nonfinite_state
    return replace(state, buffers=[buffer for buffer in state.buffers if buffer.name in names])


def blame_input(context: GuardContext, record: StepRecord, findings: RankFindings) -> BlameInput:
    """Collect everything that the sites of this rank are read from, the slots of earlier clean steps included.

    Host sync: one per page of slots and clean step in the ring, and one per batch tensor. No collective.
    """
    # items that the step has changed in place must be known before batches are searched: theirs is not the loader's NaN
    context.undone.attempt("changed batches were not looked for", record.window.record_modified, None)
    micro_batches, attempt = record.window.micro_batches, context.undone.attempt
    past_steps = context.slots.past() if context.reach.answers else []
    known = [context.known_nonfinite, *(known_nonfinite(past.slot_stats()) for past in past_steps)]
    return BlameInput(
        rank=context.ranks.rank,
        step=record.step,
        slot_stats=findings.slot_stats,
        owner_of=context.owner_of,
        sharers_of=context.sharers_of,
        is_ignored=context.is_ignored,
        losses={(m.index, name): loss for m in micro_batches for name, loss in m.losses.items()},
        batch=attempt("batches were not read again", lambda: _batches(context, micro_batches), []),
        nonfinite_state=_of_the_step(record, findings),
        reduced=attempt(
            "reduced gradients were not read again", lambda: _reduced_findings(context, record, findings.slot_stats), []
        ),
        changed=attempt(
            "gradients that the loop changed were not read again",
            lambda: _changed_findings(context, record, findings.slot_stats),
            [],
        ),
        hyper_parameters=findings.hyper_parameters,
        known_nonfinite=frozenset().union(*known),
    )
