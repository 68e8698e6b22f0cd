"""From the slots of one rank to its sites, in causal order: whom a fault is put down to.

[Note: causal order]
Per micro-batch, by phase, then by execution order, then by rank. A site is *contained*, hence no origin, if an
enclosing module's
output is finite in that call. A layer that is non-finite in clean steps too is *habitual*, and -inf alone is what
masks are made of: neither
comes before any other site.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from .board import Reading, Region, is_clean
from .probes.backward import GradientHook
from .probes.calls import Call, Sighting
from .probes.gradient import GradientNote
from .probes.state import StateNote
from .scan import evidence, kind_of
from .site import Between, Evidence, Phase, Site

_LAST_MICRO_BATCH = (1 << 15) - 1
_ORDER_BITS, _PHASE_BITS, _MICRO_BATCH_BITS, _RANK_BITS = 22, 3, 16, 18


@dataclass(frozen=True, slots=True)
class LossNote:
    """Note of a watched loss."""

    name: str
    micro_batch: int


@dataclass(frozen=True)
class RankedSite:
    """A site with what sorts it: ``weak`` ones come after all others."""

    site: Site
    weak: bool = False
    place: int = -1
    """Micro-batch for sorting: -1 before the first one, `_LAST_MICRO_BATCH` after the last."""

    def key(self, rank: int, this_step: int) -> int:
        """The causal order as one non-negative 62-bit integer, so that a MIN over ranks finds the earliest."""
        key = int(self.weak)
        key = key << 1 | int(self.site.step == this_step)
        key = key << _MICRO_BATCH_BITS | min(self.place + 1, _LAST_MICRO_BATCH + 1)
        key = key << _PHASE_BITS | self.site.phase.causal_rank
        key = key << _ORDER_BITS | min(self.site.order, (1 << _ORDER_BITS) - 1)
        return key << _RANK_BITS | rank


@dataclass(frozen=True)
class Finding:
    """One tensor that a rescan found non-finite: a batch item or a piece of state."""

    name: str
    kind: str
    evidence: Evidence | None
    micro_batch: int | None = None


@dataclass
class StepView:
    """What blame is read from: the slots of the window and the rescans of the fault path.

    Attributes:
        owner_of: the clean name of the module that owns a parameter or buffer.
        sharers_of: names of all modules that hold a tied parameter.
        losses: the watched ones by (micro-batch, name).
        batch: non-finite batch items, with their path as name.
        damaged_before: state that is bad and was so before the window, not by the last update.
        damaged_buffers: buffers that only the window's forwards made bad.
        reduced: non-finite gradients after the reduce, by original parameter.
        hyper_parameters: bad numbers in the parameter groups.
        habitual: layers that were non-finite in clean steps.
    """

    rank: int
    step: int
    readings: list[Reading]
    owner_of: Callable[[str], str]
    sharers_of: Callable[[str], list[str]]
    is_ignored: Callable[[str], bool]
    losses: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    batch: list[Finding] = field(default_factory=list)
    damaged_before: list[Finding] = field(default_factory=list)
    damaged_by_update: list[Finding] = field(default_factory=list)
    damaged_buffers: list[Finding] = field(default_factory=list)
    reduced: list[Finding] = field(default_factory=list)
    hyper_parameters: list[Finding] = field(default_factory=list)
    habitual: frozenset[str] = frozenset()


def local_sites(view: StepView) -> list[RankedSite]:
    """The sites of this rank, earliest first."""
    found = [*_state_sites(view), *_forward_sites(view), *_loss_sites(view), *_backward_sites(view)]
    found += _input_sites(view, found)
    found += _late_sites(view)
    return sorted(found, key=lambda ranked: ranked.key(0, view.step))


def habitual_layers(readings: list[Reading]) -> set[str]:
    """Layers that are non-finite in the slots of a clean step."""
    return {
        reading.note.call.layer
        for reading in readings
        if isinstance(reading.note, (Sighting, GradientHook)) and not is_clean(reading)
    }


# -- state, hyper-parameters, reduce
# ---------------------------------------------------------------------------------------


def _state_sites(view: StepView) -> list[RankedSite]:
    sites = [_state_site(view, f, Phase.OPTIMIZER, view.step - 1, n) for n, f in enumerate(view.damaged_by_update)]
    sites += [_state_site(view, f, Phase.STATE, view.step, n) for n, f in enumerate(view.damaged_before)]
    return [RankedSite(site) for site in sites]


def _late_sites(view: StepView) -> list[RankedSite]:
    sites = [_state_site(view, f, Phase.REDUCE, view.step, n) for n, f in enumerate(view.reduced)]
    sites += [_state_site(view, f, Phase.STATE, view.step, n) for n, f in enumerate(view.damaged_buffers)]
    sites += [_state_site(view, f, Phase.OPTIMIZER, view.step, n) for n, f in enumerate(view.hyper_parameters)]
    return [RankedSite(site, place=_LAST_MICRO_BATCH) for site in sites]


def _state_site(view: StepView, finding: Finding, phase: Phase, step: int, order: int) -> Site:
    is_number = finding in view.hyper_parameters
    return Site(
        rank=None if phase is Phase.REDUCE else view.rank,
        step=step,
        micro_batch=None,
        phase=phase,
        layer=None if is_number else view.owner_of(finding.name),
        call=None,
        slot=finding.name,
        kind=finding.kind,
        evidence=finding.evidence,
        taken_in="unchecked" if finding in view.damaged_buffers else None,
        order=order,
    )


# -- forward
# -------------------------------------------------------------------------------------------------------------------


class _Kinds:
    """Which sightings are bad, and how."""

    def __init__(self, readings: list[Reading]) -> None:
        self._worst: dict[int, str] = {}
        self._read: set[int] = set()
        for reading in readings:
            if isinstance(reading.note, Sighting):
                self._add(reading.note, reading)

    def _add(self, sighting: Sighting, reading: Reading) -> None:
        self._read.add(id(sighting))
        kind = kind_of(reading.minimum, reading.maximum)
        if kind is not None:
            self._worst[id(sighting)] = min(kind, self._worst.get(id(sighting), kind), key=_badness)

    def of(self, sighting: Sighting) -> str | None:
        return self._worst.get(id(sighting))

    def worst_of(self, sightings: list[Sighting]) -> str | None:
        kinds = [kind for sighting in sightings if (kind := self.of(sighting)) is not None]
        return min(kinds, key=_badness) if kinds else None

    def is_finite(self, call: Call) -> bool:
        """Whether the outputs of a call were looked at and finite."""
        read = [sighting for sighting in call.outputs if id(sighting) in self._read]
        return bool(read) and self.worst_of(read) is None


def _badness(kind: str) -> int:
    return ("nan", "inf", "-inf").index(kind)


def _forward_sites(view: StepView) -> list[RankedSite]:
    kinds = _Kinds(view.readings)
    sites: list[RankedSite] = []
    done: set[int] = set()
    for reading in view.readings:
        sighting = reading.note
        if not isinstance(sighting, Sighting) or id(sighting) in done or kinds.of(sighting) is None:
            continue
        done.add(id(sighting))
        if not _is_contained(sighting, kinds) and not view.is_ignored(sighting.call.layer):
            sites.append(_forward_site(view, sighting, kinds, reading.order))
    return sites


def _is_contained(sighting: Sighting, kinds: _Kinds) -> bool:
    enclosing = sighting.call.ancestors()
    if sighting.slot == "input":
        enclosing = [sighting.call, *enclosing]
    return any(kinds.is_finite(call) for call in enclosing)


def _forward_site(view: StepView, sighting: Sighting, kinds: _Kinds, order: int) -> RankedSite:
    call, kind = sighting.call, kinds.of(sighting)
    assert kind is not None
    between: Between | None = None
    place, taken = call, kinds.worst_of(call.inputs)
    if sighting.slot == "input":
        taken = None
        if call.parent is None:
            between = Between(None, "batch", call.layer)
        else:
            place = call.parent
            between = Between(place.layer, _clean_child_before(place, call, kinds), call.layer)
    elif call.children and taken is None:
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
        order=order,
    )
    return RankedSite(site, weak=kind == "-inf" or call.layer in view.habitual, place=call.micro_batch)


def _clean_child_before(parent: Call, child: Call | None, kinds: _Kinds) -> str | None:
    earlier = parent.children if child is None else parent.children[: parent.children.index(child)]
    clean = [call.layer for call in earlier if kinds.is_finite(call)]
    return clean[-1] if clean else None


def _evidence_of(sighting: Sighting) -> Evidence | None:
    tensor = sighting.ref()
    return evidence(tensor) if tensor is not None and sighting.is_still(tensor) else None


# -- input and loss
# ------------------------------------------------------------------------------------------------------------


def _input_sites(view: StepView, found: list[RankedSite]) -> list[RankedSite]:
    """A batch item counts only if the micro-batch's forward or loss is bad too: NaN may mean "label missing"."""
    reached = {r.site.micro_batch for r in found if r.site.phase in (Phase.FORWARD, Phase.LOSS) and not r.weak}
    sites: list[RankedSite] = []
    for order, finding in enumerate(view.batch):
        if finding.micro_batch in reached and finding.micro_batch is not None:
            site = Site(view.rank, view.step, finding.micro_batch, Phase.INPUT, None, None, finding.name, finding.kind)
            site = replace(site, evidence=finding.evidence, order=order)
            sites.append(RankedSite(site, weak=finding.kind == "-inf", place=finding.micro_batch))
    return sites


def _loss_sites(view: StepView) -> list[RankedSite]:
    sites: list[RankedSite] = []
    outputs = _worst_outputs(view)
    for reading in view.readings:
        note = reading.note
        kind = kind_of(reading.minimum, reading.maximum)
        if isinstance(note, LossNote) and kind is not None:
            site = Site(view.rank, view.step, note.micro_batch, Phase.LOSS, None, None, note.name, kind)
            taken = outputs.get(note.micro_batch, "unchecked")
            loss = view.losses.get((note.micro_batch, note.name))
            found = evidence(loss) if loss is not None else None
            site = replace(site, order=reading.order, taken_in=taken, evidence=found)
            sites.append(RankedSite(site, place=note.micro_batch))
    return sites


def _worst_outputs(view: StepView) -> dict[int, str | None]:
    """Worst kind among the root's outputs, by micro-batch."""
    found: dict[int, str | None] = {}
    for reading in view.readings:
        if reading.region is Region.OUTPUT:
            micro_batch = reading.note.call.micro_batch
            kind = kind_of(reading.minimum, reading.maximum)
            found[micro_batch] = kind or found.get(micro_batch)
    return found


# -- backward
# --------------------------------------------------------------------------------------------------------------------


def _backward_sites(view: StepView) -> list[RankedSite]:
    sites: list[RankedSite] = []
    for micro_batch, readings in _backward_readings(view).items():
        for index, reading in enumerate(readings):
            kind = kind_of(reading.minimum, reading.maximum)
            if kind is None:
                continue
            site = _BackwardBlame(view, readings[:index], readings[index:]).site(reading, kind)
            if site is not None and not (site.layer is not None and view.is_ignored(site.layer)):
                place = _LAST_MICRO_BATCH if micro_batch is None else micro_batch
                sites.append(RankedSite(site, weak=site.layer in view.habitual, place=place))
    return sites


def _backward_readings(view: StepView) -> dict[int | None, list[Reading]]:
    by_micro_batch: dict[int | None, list[Reading]] = {}
    for reading in view.readings:
        note = reading.note
        if isinstance(note, GradientHook):
            by_micro_batch.setdefault(note.call.micro_batch, []).append(reading)
        elif isinstance(note, GradientNote) and not note.reduced:
            by_micro_batch.setdefault(note.micro_batch, []).append(reading)
    return by_micro_batch


class _BackwardBlame:
    """Blame for one bad gradient, given the readings of its micro-batch before it, and those from it on."""

    def __init__(self, view: StepView, before: list[Reading], after: list[Reading]) -> None:
        self._view = view
        self._before = before
        self._clean = {id(r.note.sighting) for r in before if isinstance(r.note, GradientHook) and is_clean(r)}
        self._bad = {id(r.note.sighting) for r in before if isinstance(r.note, GradientHook) and not is_clean(r)}
        self._bad_later = {id(r.note.sighting) for r in after if isinstance(r.note, GradientHook) and not is_clean(r)}

    def site(self, reading: Reading, kind: str) -> Site | None:
        if isinstance(reading.note, GradientNote):
            return self._parameter_site(reading.note, kind, reading.order)
        return self._activation_site(reading.note.sighting, kind, reading.order)

    def _site(self, layer: str, call: Call | None, slot: str, kind: str, order: int, between: Between | None) -> Site:
        micro_batch = call.micro_batch if call is not None else None
        number = call.number if call is not None else None
        view = self._view
        site = Site(view.rank, view.step, micro_batch, Phase.BACKWARD, layer, number, slot, kind, between)
        return replace(site, order=order)

    def _parameter_site(self, note: GradientNote, kind: str, order: int) -> Site:
        owner = self._owner(note.name)
        calls = [c for c in self._calls() if c.layer == owner and note.micro_batch in (c.micro_batch, None)]
        only = calls[0] if len(calls) == 1 else None
        looked = any(id(output) in self._clean for call in calls for output in call.outputs)
        site = self._site(owner, only, note.name, kind, order, None)
        return replace(site, micro_batch=note.micro_batch, taken_in=None if looked else "unchecked")

    def _owner(self, name: str) -> str:
        """Of the modules that share a tied parameter the one whose input gradient is bad too, else the first."""
        sharers = self._view.sharers_of(name)
        if len(sharers) > 1:
            bad = {c.layer for c in self._calls() for s in c.inputs if id(s) in self._bad | self._bad_later}
            guilty = [layer for layer in sharers if layer in bad]
            if len(guilty) == 1:
                return guilty[0]
        return sharers[0]

    def _calls(self) -> list[Call]:
        calls: dict[int, Call] = {}
        for reading in self._view.readings:
            if isinstance(reading.note, Sighting):
                for call in (reading.note.call, *reading.note.consumers, *reading.note.call.ancestors()):
                    calls[id(call)] = call
        return list(calls.values())

    def _activation_site(self, sighting: Sighting, kind: str, order: int) -> Site:
        guilty = self._guilty_consumers(sighting)
        if len(guilty) == 1:
            call = guilty[0]
            between = Between(call.layer, self._last_clean_layer(), sighting.call.layer) if call.children else None
            return self._site(call.layer, call, "grad", kind, order, between)
        outermost = _outermost_giver(sighting)
        if outermost.parent is None:
            between = Between(None, "loss" if self._view.losses else None, outermost.layer)
            return self._site(outermost.layer, outermost, "grad", kind, order, between)
        parent = outermost.parent
        after = ", ".join(dict.fromkeys(call.layer for call in guilty)) or self._last_clean_layer()
        between = Between(parent.layer, after, sighting.call.layer)
        return self._site(parent.layer, parent, "grad", kind, order, between)

    def _guilty_consumers(self, sighting: Sighting) -> list[Call]:
        """Innermost calls that took the tensor and whose output gradients were all clean."""
        guilty = [call for call in sighting.consumers if self._got_clean_gradients(call)]
        outer = {id(ancestor) for call in guilty for ancestor in call.ancestors()}
        return [call for call in guilty if id(call) not in outer]

    def _got_clean_gradients(self, call: Call) -> bool:
        outputs = {id(sighting) for sighting in call.outputs}
        return bool(outputs & self._clean) and not outputs & self._bad

    def _last_clean_layer(self) -> str | None:
        for reading in reversed(self._before):
            if is_clean(reading):
                note = reading.note
                return self._view.owner_of(note.name) if isinstance(note, GradientNote) else note.call.layer
        return None


def _outermost_giver(sighting: Sighting) -> Call:
    """The outermost call that gives the tensor as its output: its caller's code goes on with it."""
    call = sighting.call
    if sighting.slot == "input":
        return call
    while call.parent is not None and any(output is sighting for output in call.parent.outputs):
        call = call.parent
    return call


__all__ = ["Finding", "LossNote", "RankedSite", "StateNote", "StepView", "habitual_layers", "local_sites"]
