"""What the second look says to the first: the same, elsewhere, or finite; and the report that follows from both."""

from __future__ import annotations

import socket
from collections.abc import Container
from dataclasses import dataclass, replace

from ddp_nanguard.blame import local_sites
from ddp_nanguard.blame.inspect import RankFindings, blame_input
from ddp_nanguard.blame.report import as_changed_by_the_loop
from ddp_nanguard.capture.record import StepRecord
from ddp_nanguard.context import GuardContext
from ddp_nanguard.probes.slot_keys import vital_signs
from ddp_nanguard.report.types import FaultReport, InlineCode, Phase, Site
from ddp_nanguard.report.wording import listed
from ddp_nanguard.wrappers.aside import has_hooks_of_the_job

from .compare import Agreement, agreement, own_sites
from .inputs import Inputs, inputs_of, other_gradients
from .outside import is_outside, runs_step
from .run import SecondRun


@dataclass(frozen=True)
class Concluded:
    """What came of the second run over all ranks.

    Attributes:
        outcome: as in `SecondLook`.
        text: one sentence.
        finite_ranks: where the fault did not come again.
        changed_after: whether what was bad had been finite until code outside of the step changed it.
        is_placed: whether what the second run saw is the fault; if not, it names no place.
    """

    outcome: str
    text: str
    finite_ranks: tuple[int, ...] = ()
    changed_after: bool = False
    is_placed: bool = True


def is_late(site: Site, hooked: Container[str]) -> bool:
    """Whether a gradient was seen bad only after other code may have changed it.

    Args:
        site: of the first look.
        hooked: names of parameters whose gradients the job's own hooks see.
    """
    return site.phase is Phase.BACKWARD and (site.micro_batch is None or site.slot in hooked)


def concluded(
    context: GuardContext, record: StepRecord, report: FaultReport, then: RankFindings, now: SecondRun
) -> Concluded:
    """Compare both looks on every rank.

    Args:
        context: of the guard.
        record: of the step.
        report: of the first look.
        then: what this rank found at first; its sites are filled in.
        now: the second run; the sites that it found are filled in too.

    Collective: one SUM all-reduce of seven bytes per rank and one or two of 8 KiB, on the fault group.
    """
    ranks = context.ranks
    hooked = _hooked(context)
    given = inputs_of(context, record)
    if now.stateful:
        given.unseen.append(f"Python state that a call changes ({listed(now.stateful, 3)})")
    if now.unfollowed:  # such as a cache, an object of its own class
        given.unseen.append(f"gradients of what else the model returns ({listed(now.unfollowed, 3)})")
    if names := other_gradients(then.recorded, now.findings.recorded):
        given.different.append(f"which parameters got a gradient ({listed(names, 3)})")
    mine = agreement(
        then.recorded, now.findings.recorded, now.outputs, context.wrapper.is_sharded, hooked, _without_loss(record)
    )
    was_bad = [site for site in own_sites(then) if not is_late(site, hooked)]
    late = [site for site in own_sites(then) if is_late(site, hooked)]
    is_finite = now.has_healed or (bool(was_bad) and not now.is_bad)
    is_changed = bool(late) and not is_finite and not was_bad and not now.is_bad
    moved = _has_moved(_vital(context, record, then), now.as_watched)
    flags = (is_finite, mine.first_different is not None or moved, is_changed, moved, now.is_bad)
    marks = ranks.ranks_where(*flags, bool(given.different), bool(given.unseen))
    finite, different, changed, elsewhere, bad, others, unseen = marks
    speaker = (finite or different or [ranks.members[0]])[0]
    text = ranks.text_of(ranks.rank == speaker, _own_text(mine, is_finite))
    if finite:
        knows = (others or unseen or [speaker])[0]
        why = ranks.text_of(ranks.rank == knows, _why_finite(context, given))
        whose = f"rank {knows}: " if (others or unseen) and ranks.world_size > 1 else ""
        return Concluded("finite", f"{_who(finite)} finite on the second run, {text}; {whose}{why}", tuple(finite))
    # where a rank's own backward is bad, the others may have had it by a collective of the loop
    is_late_only = report.origin is not None and report.origin.phase is Phase.BACKWARD and not bad
    changed_after = bool(changed) and is_late_only
    if different:
        said = f"{_who(different)} with other bits on the second run: {text}"
        return Concluded("elsewhere", said, (), changed_after, is_placed=not elsewhere)
    return Concluded("same", _same_text(context, report, changed_after), (), changed_after)


def _without_loss(record: StepRecord) -> set[int | None]:
    """Micro-batches without a watched loss beside others that have one: calls for the loss of another model."""
    micro_batches = record.window.micro_batches
    has_losses = any(micro_batch.losses for micro_batch in micro_batches)
    return {micro_batch.index for micro_batch in micro_batches if has_losses and not micro_batch.losses}


def _vital(context: GuardContext, record: StepRecord, then: RankFindings) -> list[Site]:
    """What this rank's vital signs alone had shown before any communication."""
    if context.config.layers == "none":
        return [site for site in own_sites(then) if not is_late(site, ())]
    signs = vital_signs(then.slot_stats, context.scaler is not None)
    ranked = local_sites(blame_input(context, record, replace(then, slot_stats=signs)))
    sites = [each.site for each in ranked if not each.low_confidence]
    return [site for site in sites if site.phase not in (Phase.REDUCE, Phase.LOOP) and not is_late(site, ())]


def _has_moved(then: list[Site], now: list[Site]) -> bool:
    """Whether another vital sign of this rank was the first to go bad."""
    # not the outputs that a scaler needs: a module inside may have given them out first
    first, second = ([s for s in sites if s.phase in (Phase.LOSS, Phase.BACKWARD)] for sites in (then, now))
    return bool(first) and bool(second) and not first[0].same_place(second[0])


def _own_text(mine: Agreement, is_finite: bool) -> str:
    if is_finite and mine.last_same is None and mine.first_different is None:
        return "nothing that could be compared"
    upto = f"identical up to {mine.last_same}" if mine.last_same is not None else "different from the start"
    return f"{upto}; first different: {mine.first_different}" if mine.first_different is not None else upto


MAX_WHY = 700


def _why_finite(context: GuardContext, given: Inputs) -> str:
    """What may have made the difference. The device comes last, and only where all that goes in was the same."""
    if given.different:
        return f"it was not given the same: {listed(given.different, 6, separator='; ')}"[:MAX_WHY]
    rest = "memory that was not set, nondeterminism, or random streams and Python objects that the guard does not see"
    undone = "tensors that were written past autograd and written back"
    if given.unseen:
        return f"not compared: {listed(given.unseen, 6, separator='; ')}: these, {rest}"[:MAX_WHY]
    same = "arguments, weights, buffers, random states, settings and modes were the same"
    return f"{same}: {undone}, {rest}; last of all that device ({socket.gethostname()}, {context.device})"


def _same_text(context: GuardContext, report: FaultReport, changed_after: bool) -> str:
    everywhere = f"same on all {report.world_size} ranks" if report.world_size > 1 else "same"
    if changed_after:
        return f"{everywhere}: gradients are finite where backward makes them, so {_who_changed(report)}"
    is_reduce = report.origin is not None and report.origin.phase is Phase.REDUCE
    if is_reduce and not context.wrapper.is_sharded:
        return f"{everywhere}, up to the communication, which was not run again"
    return f"{everywhere}: deterministic"


def _hooked(context: GuardContext) -> frozenset[str]:
    """Parameters with hooks of the job, which are not run again, unless gradients never reach those."""
    if context.wrapper.is_sharded:
        return frozenset()
    return frozenset(name for name, parameter in context.wrapper.named_parameters() if has_hooks_of_the_job(parameter))


def _who_changed(report: FaultReport) -> str:
    is_hook = report.origin is not None and report.origin.micro_batch is not None
    hook = "a hook of the job on the parameter changed them"
    return hook if is_hook else "code after the backward put others in their place, which no hook has seen"


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
    return replace(found, text=f"{found.text}, compiled; {eager}", is_placed=is_bad)


def hinted(found: Concluded, second: FaultReport, record: StepRecord) -> Concluded:
    """What would make a second look show more: the loss is not run again where it is code of the loop.

    Args:
        found: so far.
        second: what was seen.
        record: of the step.
    """
    if found.outcome != "same" or not found.is_placed or not is_outside(second.origin) or runs_step(record):
        return found
    upto = f"{found.text.removesuffix(': deterministic')} up to the model's output"
    return replace(found, text=f"{upto}; the loss was not run again: guard.run(step, batch) would name its line")


def taken_in(found: Concluded, shown: FaultReport) -> Concluded:
    """A value that was there before the second run: what reads it first has not made it.

    Args:
        found: so far.
        shown: what is reported so far; its origin stays only where it is code of the loop, which was not run again.
    """
    code = shown.origin.inline_code if shown.origin is not None else None
    if code is not None and code.layer is None:
        said = "the model was given it; guard.run(step, batch) runs the code before the model too"
        return replace(found, text=f"{found.text}; {said}")
    said = "the value was there before, in a tensor that the model or the loop keeps: where it began is not known"
    return replace(found, text=f"{found.text.removesuffix(': deterministic')}; {said}", is_placed=False)


def on_the_makers_rank(report: FaultReport) -> FaultReport:
    """The origin on the rank whose operator made the value, where other ranks had it by communication only."""
    operator = report.second_look.operator if report.second_look is not None else None
    origin = report.origin
    if operator is None or origin is None or origin.rank in (None, operator.rank):
        return report
    if origin.phase not in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD):
        return report
    site = next((site for site in report.sites if site.rank == operator.rank), None)
    if site is None:
        return report
    return replace(report, origin=site, sites=(site, *(other for other in report.sites if other is not site)))


def in_a_hook(report: FaultReport, hooked: str | None) -> FaultReport:
    """The origin between two layers, where a hook of the job on a tensor made the value, and no layer did.

    Args:
        report: so far.
        hooked: the layer whose own code made the tensor; None where no hook did it.
    """
    origin = report.origin
    if hooked is None or origin is None or origin.layer is None or origin.phase is not Phase.BACKWARD:
        return report
    if origin.inline_code is not None or origin.suspects:
        return report
    after = origin.layer if origin.layer != hooked else None
    is_around = after is not None and _is_within(after, hooked)
    around = hooked if is_around else _common(_parent(hooked), _parent(origin.layer))
    code = InlineCode(around, after, None if is_around else hooked)
    site = replace(origin, layer=around, call=None, slot="grad", input_kind=None, inline_code=code)
    return replace(report, origin=site, sites=(site, *report.sites[1:]))


def in_the_step(report: FaultReport, is_of_step: bool) -> FaultReport:
    """The origin in the backward of code of the training step, where that made a value which a layer's gradient showed.

    A gradient penalty runs through the layers twice: that the gradient of a layer's output was finite in one pass does
    not say that the layer made what the other pass gave it.

    Args:
        report: so far.
        is_of_step: whether the operator lies there.
    """
    origin, look = report.origin, report.second_look
    output = look.operator.output if look is not None and look.operator is not None else None
    if not is_of_step or output is None or origin is None or origin.phase is not Phase.BACKWARD:
        return report
    if origin.layer is None or origin.inline_code is not None or origin.suspects:
        return report
    kind = "nan" if output.num_nan else ("inf" if output.num_inf else "-inf")
    code = InlineCode(None, None, None)
    site = replace(
        origin, layer=None, call=None, slot="grad", kind=kind, input_kind=None, inline_code=code, evidence=None
    )
    return replace(report, origin=site, sites=(site, *report.sites[1:]))


def _is_within(layer: str, around: str) -> bool:
    return not around or layer.startswith(f"{around}.")


def _parent(layer: str) -> str:
    return layer.rpartition(".")[0]


def _common(one: str, other: str) -> str:
    """The innermost layer around both."""
    while one and one != other and not _is_within(other, one):
        one = _parent(one)
    return one


def merged(first: FaultReport, second: FaultReport, found: Concluded) -> FaultReport:
    """The report of both looks: the first tells whether and when, the second where.

    Args:
        first: of what a clean step looks at.
        second: of everything, in the second run.
        found: how they agree.
    """
    origin = second.origin
    if found.outcome == "same" and found.changed_after and first.sites and all(map(_is_of_no_hook, first.sites)):
        return as_changed_by_the_loop(first)
    if not _is_shown(first, second, found) or origin is None:
        return first
    cause = second.cause if not first.cause.startswith("scale collapse") else first.cause
    if (
        origin.rank is not None and origin.rank not in first.ranks_affected
    ):  # it handed the value on before its own sign
        affected = tuple(sorted((*first.ranks_affected, origin.rank)))
        first = replace(first, ranks_affected=affected, num_ranks_affected=first.num_ranks_affected + 1)
    return replace(first, origin=origin, sites=second.sites, cause=cause, unchecked=second.unchecked)


def _is_of_no_hook(site: Site) -> bool:
    """Whether a gradient was seen before the update only: the loop has put it there, as after ``autograd.grad``."""
    return site.phase is Phase.BACKWARD and site.micro_batch is None


def _is_shown(first: FaultReport, second: FaultReport, found: Concluded) -> bool:
    """Whether the second look's origin is that of the fault."""
    then, now = first.origin, second.origin
    if found.outcome == "finite" or found.changed_after or not found.is_placed or then is None or now is None:
        return False
    if then.phase is Phase.REDUCE or now.phase in (Phase.STATE, Phase.LOOP, Phase.OPTIMIZER):
        return False
    return found.outcome == "same" or then.rank == now.rank


def _who(ranks: list[int]) -> str:
    return f"rank {listed(ranks)}" if len(ranks) == 1 else f"ranks {listed(ranks)}"
