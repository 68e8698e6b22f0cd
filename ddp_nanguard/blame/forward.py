"""Blame for the forward: layers, the code between them, the batch and the loss."""

from __future__ import annotations

from dataclasses import replace

from ddp_nanguard.board import Reading, Region, is_clean
from ddp_nanguard.message import layer_text
from ddp_nanguard.probes.backward import GradientHook
from ddp_nanguard.probes.calls import Call, Sighting
from ddp_nanguard.scan import evidence, kind_of
from ddp_nanguard.site import Between, Evidence, Phase, Site

from .view import Finding, Habit, Kinds, LossNote, RankedSite, StepView, worst


def forward_sites(view: StepView) -> list[RankedSite]:
    """Tensors of the forward that are bad and not contained, in execution order."""
    kinds = Kinds(view.readings)
    sites: list[RankedSite] = []
    done: set[int] = set()
    weak: set[int] = set()
    for reading in view.readings:
        sighting = reading.note
        if isinstance(sighting, Sighting) and id(sighting) not in done and (kind := kinds.of(sighting)) is not None:
            done.add(id(sighting))
            if not _is_contained(sighting, kinds, kind) and not view.is_ignored(sighting.call.layer):
                ranked = _forward_site(view, sighting, kinds, kind, reading.order, weak)
                sites.append(ranked)
                if ranked.weak:
                    weak.add(id(sighting))
    return sites


def habits(readings: list[Reading]) -> set[Habit]:
    """What is NaN or +inf in a clean step without being contained. -inf is what masks are made of, and no habit."""
    kinds = Kinds(readings)
    found: set[Habit] = set()
    for reading in readings:
        note, kind = reading.note, kind_of(reading.minimum, reading.maximum)
        if isinstance(note, Sighting) and kind in ("nan", "inf") and not _is_contained(note, kinds, kind):
            found.add((note.call.layer, note.slot, kind))
        elif isinstance(note, GradientHook) and kind is not None:
            found.add((note.call.layer, "grad", kind))
    return found


def _is_contained(sighting: Sighting, kinds: Kinds, kind: str) -> bool:
    enclosing = sighting.call.ancestors()
    if sighting.slot == "input":
        enclosing = [sighting.call, *enclosing]
    return any(kinds.contains(call, kind) for call in enclosing)


def _forward_site(
    view: StepView, sighting: Sighting, kinds: Kinds, kind: str, order: int, weak_before: set[int]
) -> RankedSite:
    call = sighting.call
    between: Between | None = None
    place, taken = call, _taken_in(call, kinds)
    if sighting.slot == "input":
        taken = None
        if call.parent is None:
            between = Between(None, "batch", call.layer)
        else:
            place = call.parent
            before = call.layer if call.is_ordered else None
            between = Between(place.layer, _clean_child_before(place, call, kinds), before)
    elif call.children and taken in (None, "unchecked"):
        taken = None
        between = Between(call.layer, _clean_child_before(call, None, kinds), None)
    site = Site(
        rank=view.rank,
        step=view.step,
        micro_batch=call.micro_batch,
        phase=Phase.FORWARD,
        layer=place.layer,
        call=place.number,
        slot=sighting.slot,
        kind=kind,
        between=between,
        evidence=_evidence_of(sighting),
        taken_in=taken,
        fed_by=_source_of_negative_inf(call, kinds) if taken == "-inf" and sighting.slot == "output" else None,
        order=order,
    )
    is_habit = (call.layer, sighting.slot, kind) in view.habits
    weak = kind == "-inf" or is_habit or _merely_took(call, kinds, kind, weak_before)
    return RankedSite(site, weak=weak, place=call.micro_batch)


def _taken_in(call: Call, kinds: Kinds) -> str | None:
    """The worst kind among the inputs; ``unchecked`` where a tensor was not looked at, or none could be found."""
    found = kinds.worst_of(call.inputs)
    if found is None and (not call.takes_tensors or not all(kinds.was_read(taken) for taken in call.inputs)):
        return "unchecked"
    return found


def _source_of_negative_inf(call: Call, kinds: Kinds) -> str | None:
    """Where the -inf came from that a call took: a layer, or the code between layers."""
    for taken in call.inputs:
        if kinds.of(taken) == "-inf":
            if taken.slot == "output":
                return layer_text(taken.call.layer)
            around = taken.call.parent
            return "the training step" if around is None else f"code of {layer_text(around.layer)}"
    return None


def _merely_took(call: Call, kinds: Kinds, kind: str, weak: set[int]) -> bool:
    """Whether everything as bad that the call took was a habit already."""
    taken = [sighting for sighting in call.inputs if kinds.of(sighting) == kind]
    return bool(taken) and all(id(sighting) in weak for sighting in taken)


def _clean_child_before(parent: Call, child: Call | None, kinds: Kinds) -> str | None:
    earlier = parent.children if child is None else parent.children[: parent.children.index(child)]
    if not all(call.is_ordered for call in (*earlier, *([child] if child is not None else []))):
        return None
    clean = [call.layer for call in earlier if kinds.was_clean(call)]
    return clean[-1] if clean else None


def _evidence_of(sighting: Sighting) -> Evidence | None:
    tensor = sighting.ref()
    return evidence(tensor) if tensor is not None and sighting.is_still(tensor) else None


# -- the loss


def loss_sites(view: StepView) -> list[RankedSite]:
    """Watched losses that are bad."""
    sites: list[RankedSite] = []
    outputs = _worst_outputs(view)
    for reading in view.readings:
        note, kind = reading.note, kind_of(reading.minimum, reading.maximum)
        if isinstance(note, LossNote) and kind is not None:
            site = Site(view.rank, view.step, note.micro_batch, Phase.LOSS, None, None, note.name, kind)
            loss = view.losses.get((note.micro_batch, note.name))
            found = evidence(loss) if loss is not None else None
            taken = outputs.get(note.micro_batch, "unchecked")
            follows = _gradient_was_bad_before(view, note.micro_batch, reading.order)
            taken = "unchecked" if follows else taken
            site = replace(site, order=reading.order, taken_in=taken, evidence=found)
            sites.append(RankedSite(site, weak=follows, place=note.micro_batch))
    return sites


def _gradient_was_bad_before(view: StepView, micro_batch: int, order: int) -> bool:
    """A loss made of gradients (a gradient penalty, forces) is bad because they were."""
    return any(
        isinstance(r.note, GradientHook) and r.note.call.micro_batch == micro_batch and r.order < order
        for r in view.readings
        if not is_clean(r)
    )


def _worst_outputs(view: StepView) -> dict[int, str | None]:
    """Worst kind among the root's outputs, by micro-batch; a micro-batch without any is not in it."""
    found: dict[int, str | None] = {}
    for reading in view.readings:
        if reading.region is Region.OUTPUT:
            micro_batch = reading.note.call.micro_batch
            kinds = (kind_of(reading.minimum, reading.maximum), found.get(micro_batch))
            found[micro_batch] = worst(kind for kind in kinds if kind is not None)
    return found


# -- the batch


def input_sites(view: StepView) -> list[RankedSite]:
    """Batch items that explain something: a bad input of the root, or a bad loss of a finite output.

    A NaN in the batch alone may mean "label missing".
    """
    sites: list[RankedSite] = []
    for order, finding in enumerate(_explaining(view)):
        assert finding.micro_batch is not None
        site = Site(view.rank, view.step, finding.micro_batch, Phase.INPUT, None, None, finding.name, finding.kind)
        site = replace(site, evidence=finding.evidence, order=order)
        sites.append(RankedSite(site, weak=finding.kind == "-inf", place=finding.micro_batch))
    return sites


def _explaining(view: StepView) -> list[Finding]:
    found: list[Finding] = []
    kinds = Kinds(view.readings)
    outputs = _worst_outputs(view)
    losses = _bad_losses(view)
    for micro_batch in dict.fromkeys(finding.micro_batch for finding in view.batch):
        items = [finding for finding in view.batch if finding.micro_batch == micro_batch]
        assert micro_batch is not None
        inputs = _root_inputs(view, micro_batch)
        bad = [sighting for sighting in inputs if kinds.of(sighting) is not None]
        unseen_way_in = not inputs and outputs.get(micro_batch, "unchecked") is not None
        by_the_loss = micro_batch in losses and outputs.get(micro_batch) is None
        if bad:
            found += _matching(items, bad) or items
        elif unseen_way_in or by_the_loss:
            found += items
    return found


def _root_inputs(view: StepView, micro_batch: int) -> list[Sighting]:
    found: list[Sighting] = []
    for reading in view.readings:
        note = reading.note
        is_root_input = isinstance(note, Sighting) and note.slot == "input" and note.call.parent is None
        if is_root_input and note.call.micro_batch == micro_batch:
            found.append(note)
    return found


def _matching(items: list[Finding], bad: list[Sighting]) -> list[Finding]:
    """Items that are the root's bad inputs themselves, else those of the same shape: a label is no input."""
    tensors = [tensor for sighting in bad if (tensor := sighting.ref()) is not None]
    same = [item for item in items if any(item.tensor is tensor for tensor in tensors)]
    shapes = {sighting.shape for sighting in bad}
    return same or [item for item in items if item.evidence is not None and item.evidence.shape in shapes]


def _bad_losses(view: StepView) -> set[int]:
    return {r.note.micro_batch for r in view.readings if isinstance(r.note, LossNote) and not is_clean(r)}
