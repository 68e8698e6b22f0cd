"""Slots that compiled code filled, as calls and sightings that blame is read from like any other.

[Note: order in a compiled region]
The slots say what each module took and gave, not when it ran. The order is made up so that blame comes out right
whatever it was: what is clean first, then what is bad without a reason that the slots show, then what is bad because
something else is.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from ddp_nanguard.board import Reading, Region
from ddp_nanguard.probes.backward import GradientHook
from ddp_nanguard.probes.calls import Call, Sighting
from ddp_nanguard.probes.compiled import RegionNote, What
from ddp_nanguard.scan import kind_of

Rows = dict[str, dict[What, Reading]]


def resolved(readings: list[Reading]) -> list[Reading]:
    """The readings with those of compiled regions made like the others, in execution order."""
    rows: dict[int, Rows] = defaultdict(lambda: defaultdict(dict))
    others: list[Reading] = []
    for reading in readings:
        if not isinstance(reading.note, RegionNote):
            others.append(reading)
        elif not reading.minimum > reading.maximum:  # an empty slot: the module did not run
            rows[reading.note.micro_batch][reading.note.layer][reading.note.what] = reading
    if not rows:
        return others
    early: list[Reading] = []
    late: list[Reading] = []
    for micro_batch, layers in rows.items():
        for is_explained, reading in _Region(micro_batch, layers, others).readings():
            (late if is_explained else early).append(reading)
    made = [*early, *others, *late]
    return [reading._replace(order=order) for order, reading in enumerate(made, start=1)]


class TracedCall(Call):
    """All calls of one module in compiled code."""

    __slots__ = ()
    is_ordered = False

    def __init__(self, layer: str, micro_batch: int, parent: Call | None) -> None:
        super().__init__(layer, None, micro_batch, parent)


class TracedSighting(Sighting):
    """All that a module took or gave in compiled code; no tensor is left of it."""

    __slots__ = ()

    def __init__(self, call: Call, slot: str) -> None:
        self.ref = _nothing  # type: ignore[assignment]  # dead from the beginning
        self.version = -1
        self.shape = torch.Size([1])
        self.call = call
        self.slot = slot
        self.order = 0
        self.is_watched = True
        self.consumers = []


class _Region:
    """The compiled modules of one micro-batch.

    Args:
        micro_batch: index.
        rows: by layer, parents first, what its slots say.
        others: readings outside of compiled code.
    """

    def __init__(self, micro_batch: int, rows: Rows, others: list[Reading]) -> None:
        self._rows = rows
        around = _calls_in(micro_batch, others)
        for call in around.values():  # of an earlier reading of the same slots
            call.children = [child for child in call.children if not isinstance(child, TracedCall)]
        self._bad_outside = {
            id(reading.note) for reading in others if isinstance(reading.note, Sighting) and _kind(reading) is not None
        }
        self._fed_bad_gradients = {
            id(reading.note.call)
            for reading in others
            if isinstance(reading.note, GradientHook) and reading.note.sighting.slot == "output" and _kind(reading)
        }
        self._calls: dict[str, Call] = {}
        for layer in rows:
            self._calls[layer] = around.get(layer) or TracedCall(layer, micro_batch, self._parent(layer, around))

    def _parent(self, layer: str, around: dict[str, Call]) -> Call | None:
        path = layer
        while path:
            path = path.rpartition(".")[0]
            parent = self._calls.get(path) or around.get(path)
            if parent is not None:
                return parent
        return None

    def readings(self) -> list[tuple[bool, Reading]]:
        """Whether its badness is explained, and the reading: clean ones, then bad ones, the innermost first."""
        depth = {layer: len(self._calls[layer].ancestors()) for layer in self._rows}
        # what a module has taken is known before its children's: a bad value that it took explains theirs
        values = {layer: self._values(layer) for layer in sorted(self._rows, key=lambda name: depth[name])}
        layers = sorted(self._rows, key=lambda name: -depth[name])
        made = [entry for layer in layers for entry in (*values[layer], *self._gradients(layer))]
        return sorted(made, key=lambda entry: _kind(entry[1]) is not None)

    # -- values ------------------------------------------------------------------------------------------------------

    def _values(self, layer: str) -> list[tuple[bool, Reading]]:
        call, row = self._calls[layer], self._rows[layer]
        found: list[tuple[bool, Reading]] = []
        cause: Sighting | None = None
        is_bad = self._is_bad(layer, "taken")
        if "taken" in row and not call.inputs:
            call.takes_tensors = True
            cause = self._giver(call) if is_bad else None
            taken = cause or TracedSighting(call, "input")
            call.inputs.append(taken)
            taken.consumers.append(call)
            if cause is None:
                found.append((False, _reading(row["taken"], taken)))
        if "given" in row and isinstance(call, TracedCall):
            found.append((is_bad, _reading(row["given"], self._output(call))))
        return found

    def _output(self, call: Call) -> Sighting:
        if not call.outputs:
            call.outputs.append(TracedSighting(call, "output"))
        return call.outputs[0]

    def _giver(self, call: Call) -> Sighting | None:
        """What brought a bad value in: the output of a sibling that began it, or what the code around has taken."""
        parent = call.parent
        if parent is None:
            return None
        for sibling in parent.children:
            began = self._is_bad(sibling.layer, "given") and not self._is_bad(sibling.layer, "taken")
            if began and sibling is not call:
                return self._output(sibling)
            outside = [output for output in sibling.outputs if id(output) in self._bad_outside]
            if outside:
                return outside[0]
        outside = [taken for taken in parent.inputs if id(taken) in self._bad_outside]
        if outside:
            return outside[0]
        is_taken = self._is_bad(parent.layer, "taken") and bool(parent.inputs)
        return parent.inputs[0] if is_taken else None

    # -- gradients ---------------------------------------------------------------------------------------------------

    def _gradients(self, layer: str) -> list[tuple[bool, Reading]]:
        call, row = self._calls[layer], self._rows[layer]
        found: list[tuple[bool, Reading]] = []
        if "given gradient" in row and isinstance(call, TracedCall):
            is_explained = self._is_bad(layer, "given gradient") and self._comes_from_beyond(call)
            found.append((is_explained, _gradient(row["given gradient"], self._output(call))))
        if "taken gradient" in row:
            taken = TracedSighting(call, "input")
            taken.consumers.append(call)
            found.append((self._is_bad(layer, "given gradient"), _gradient(row["taken gradient"], taken)))
        return found

    def _comes_from_beyond(self, call: Call) -> bool:
        """Whether a bad gradient of an output was brought by a sibling that began it, or to the module around."""
        parent = call.parent
        if parent is None:
            return False
        begun = any(
            self._is_bad(other.layer, "taken gradient") and not self._is_bad(other.layer, "given gradient")
            for other in parent.children
            if other is not call
        )
        return begun or self._is_bad(parent.layer, "given gradient") or id(parent) in self._fed_bad_gradients

    def _is_bad(self, layer: str, what: What) -> bool:
        reading = self._rows.get(layer, {}).get(what)
        return reading is not None and _kind(reading) is not None


def _calls_in(micro_batch: int, readings: list[Reading]) -> dict[str, Call]:
    """Calls outside of compiled code, the first of each layer."""
    found: dict[str, Call] = {}
    for reading in readings:
        if isinstance(reading.note, Sighting) and reading.note.call.micro_batch == micro_batch:
            for call in (*reversed(reading.note.call.ancestors()), reading.note.call):
                found.setdefault(call.layer, call)
    return found


def _kind(reading: Reading) -> str | None:
    return kind_of(reading.minimum, reading.maximum)


def _reading(reading: Reading, sighting: Sighting) -> Reading:
    return Reading(0, sighting, Region.EVIDENCE, reading.minimum, reading.maximum)


def _gradient(reading: Reading, sighting: Sighting) -> Reading:
    return Reading(0, GradientHook(None, sighting), Region.EVIDENCE, reading.minimum, reading.maximum)


def _nothing() -> None:
    return None
