"""Blame for the backward: the layer whose output gradient is clean and whose input or parameter gradient is not."""

from __future__ import annotations

from dataclasses import replace

from ddp_nanguard.board import Reading, is_clean
from ddp_nanguard.probes.backward import GradientHook
from ddp_nanguard.probes.calls import Call, Sighting
from ddp_nanguard.probes.gradient import GradientNote
from ddp_nanguard.scan import kind_of
from ddp_nanguard.site import Between, Phase, Site

from .view import LAST_MICRO_BATCH, RankedSite, StepView


def backward_sites(view: StepView) -> list[RankedSite]:
    """Bad gradients of activations, and of parameters before any communication, in execution order.

    Under DDP a parameter's gradient is what has accumulated, earlier reduces of the window included.
    """
    sites: list[RankedSite] = []
    for micro_batch, readings in _backward_readings(view).items():
        for index, reading in enumerate(readings):
            kind = kind_of(reading.minimum, reading.maximum)
            if kind is None:
                continue
            site = _BackwardBlame(view, readings[:index], readings[index:]).site(reading, kind)
            if site is not None and not (site.layer is not None and view.is_ignored(site.layer)):
                place = LAST_MICRO_BATCH if micro_batch is None else micro_batch
                sites.append(RankedSite(site, weak=(site.layer, site.slot, kind) in view.habits, place=place))
    return sites


def _backward_readings(view: StepView) -> dict[int | None, list[Reading]]:
    by_micro_batch: dict[int | None, list[Reading]] = {}
    spoilt: set[str] = set()
    for reading in view.readings:
        note = reading.note
        if isinstance(note, GradientNote) and not is_clean(reading):
            if note.name in spoilt:
                continue  # a reduce of this window spoilt it: what accumulates on it since is no rank's own
            if note.reduced:
                spoilt.add(note.name)
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
        calls = self._calls()
        owner, suspects = self._owner(note.name, calls)
        owned = [c for c in calls if c.layer == owner and note.micro_batch in (c.micro_batch, None)]
        only = owned[0] if len(owned) == 1 else None
        looked = not suspects and any(id(output) in self._clean for call in owned for output in call.outputs)
        site = self._site(owner, only, note.name, kind, order, None)
        taken = None if looked else "unchecked"
        return replace(site, micro_batch=note.micro_batch, taken_in=taken, suspects=suspects)

    def _owner(self, name: str, calls: list[Call]) -> tuple[str, tuple[str, ...]]:
        """Of the layers that share a parameter the one whose input gradient is bad too; else any of them may be it."""
        sharers = self._view.sharers_of(name, calls)
        if len(sharers) == 1:
            return sharers[0], ()
        bad = {c.layer for c in calls for s in c.inputs if id(s) in self._bad | self._bad_later}
        guilty = [layer for layer in sharers if layer in bad]
        return (guilty[0], ()) if len(guilty) == 1 else (sharers[0], tuple(sharers))

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
            between = self._between(call.layer, sighting) if call.children else None
            return self._site(call.layer, call, "grad", kind, order, between)
        outermost = _outermost_giver(sighting)
        if outermost.parent is None:
            between = Between(None, "loss" if self._view.losses else None, outermost.layer)
            return self._site(outermost.layer, outermost, "grad", kind, order, between)
        parent = outermost.parent
        if guilty:
            around = _innermost_around(guilty) or parent
            suspects = tuple(dict.fromkeys(call.layer for call in guilty))
            return replace(self._site(around.layer, around, "grad", kind, order, None), suspects=suspects)
        between = self._between(parent.layer, sighting)
        return self._site(parent.layer, parent, "grad", kind, order, between)

    def _guilty_consumers(self, sighting: Sighting) -> list[Call]:
        """Innermost calls that took the tensor, did not give it on, and whose output gradients were all clean."""
        consumers = {id(call): call for call in sighting.consumers}.values()  # one that runs again takes it again
        guilty = [call for call in consumers if self._got_clean_gradients(call, sighting)]
        outer = {id(ancestor) for call in guilty for ancestor in call.ancestors()}
        return [call for call in guilty if id(call) not in outer]

    def _got_clean_gradients(self, call: Call, taken: Sighting) -> bool:
        outputs = {id(sighting) for sighting in call.outputs}
        return id(taken) not in outputs and bool(outputs & self._clean) and not outputs & self._bad

    def _between(self, layer: str, sighting: Sighting) -> Between:
        if not sighting.call.is_ordered:
            return Between(layer, None, None)
        return Between(layer, self._last_clean_layer(), sighting.call.layer)

    def _last_clean_layer(self) -> str | None:
        for reading in reversed(self._before):
            if is_clean(reading):
                note = reading.note
                return self._view.owner_of(note.name) if isinstance(note, GradientNote) else note.call.layer
        return None


def _outermost_giver(sighting: Sighting) -> Call:
    """The outermost call that gives the tensor as its output: its caller's code goes on with it.

    A tensor that was first seen as an input was made by the code around that call.
    """
    call = sighting.call
    if sighting.slot == "input":
        around = call.parent
        if around is None or not _gives(around, sighting):
            return call
        call = around
    while call.parent is not None and _gives(call.parent, sighting):
        call = call.parent
    return call


def _innermost_around(calls: list[Call]) -> Call | None:
    """The innermost call that encloses all of several: its code joins what they did."""
    around = [{id(ancestor) for ancestor in call.ancestors()} for call in calls[1:]]
    return next((call for call in calls[0].ancestors() if all(id(call) in ids for ids in around)), None)


def _gives(call: Call, sighting: Sighting) -> bool:
    return any(output is sighting for output in call.outputs)
