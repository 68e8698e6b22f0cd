"""Slots that compiled code filled, as calls and sightings that blame is read from like any other.

[Note: order in a compiled region]
The slots say what each module took and gave, not when it ran. The order is made up so that blame comes out right
whatever it was: what is clean first, then what is bad without a reason that the slots show, then what is bad because
something else is.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from ddp_nanguard.tensors.minmax import kind_of

from .backward import GradientHook
from .calls import ModuleCall, TensorRecord
from .compiled import CompiledSource, What
from .slots import SlotRole, SlotStats

Rows = dict[str, dict[What, SlotStats]]


def expand_compiled(slot_stats: list[SlotStats]) -> list[SlotStats]:
    """The readings with those of compiled regions made like the others, in execution order."""
    rows: dict[int, Rows] = defaultdict(lambda: defaultdict(dict))
    others: list[SlotStats] = []
    for stats in slot_stats:
        if not isinstance(stats.source, CompiledSource):
            others.append(stats)
        elif not stats.minimum > stats.maximum:  # an empty slot: the module did not run
            rows[stats.source.micro_batch][stats.source.layer][stats.source.what] = stats
    if not rows:
        return others
    early: list[SlotStats] = []
    late: list[SlotStats] = []
    for micro_batch, layers in rows.items():
        for is_explained, stats in _CompiledRegion(micro_batch, layers, others).slot_stats():
            (late if is_explained else early).append(stats)
    made = [*early, *others, *late]
    return [stats._replace(order=order) for order, stats in enumerate(made, start=1)]


class CompiledModuleCall(ModuleCall):
    """All calls of one module in compiled code."""

    __slots__ = ()
    is_ordered = False

    def __init__(self, layer: str, micro_batch: int, parent: ModuleCall | None) -> None:
        super().__init__(layer, None, micro_batch, parent)


class CompiledTensorRecord(TensorRecord):
    """All that a module took or gave in compiled code; no tensor is left of it."""

    __slots__ = ()

    def __init__(self, call: ModuleCall, slot: str) -> None:
        self.ref = _nothing  # type: ignore[assignment]  # dead from the beginning
        self.version = -1
        self.shape = torch.Size([1])
        self.call = call
        self.slot = slot
        self.order = 0
        self.is_watched = True
        self.consumers = []


class _CompiledRegion:
    """The compiled modules of one micro-batch.

    Args:
        micro_batch: index.
        rows: by layer, parents first, what its slots say.
        others: readings outside of compiled code.
    """

    def __init__(self, micro_batch: int, rows: Rows, others: list[SlotStats]) -> None:
        self._rows = rows
        around = _calls_in(micro_batch, others)
        for call in around.values():  # of an earlier reading of the same slots
            call.children = [child for child in call.children if not isinstance(child, CompiledModuleCall)]
        self._bad_outside = {
            id(stats.source) for stats in others if isinstance(stats.source, TensorRecord) and _kind(stats) is not None
        }
        self._fed_bad_gradients = {
            id(stats.source.call)
            for stats in others
            if isinstance(stats.source, GradientHook) and stats.source.record.slot == "output" and _kind(stats)
        }
        self._calls: dict[str, ModuleCall] = {}
        for layer in rows:
            self._calls[layer] = around.get(layer) or CompiledModuleCall(
                layer, micro_batch, self._parent(layer, around)
            )

    def _parent(self, layer: str, around: dict[str, ModuleCall]) -> ModuleCall | None:
        path = layer
        while path:
            path = path.rpartition(".")[0]
            parent = self._calls.get(path) or around.get(path)
            if parent is not None:
                return parent
        return None

    def slot_stats(self) -> list[tuple[bool, SlotStats]]:
        """Whether its badness is explained, and the reading: clean ones, then bad ones, the innermost first."""
        depth = {layer: len(self._calls[layer].ancestors()) for layer in self._rows}
        # what a module has taken is known before its children's: a bad value that it took explains theirs
        values = {layer: self._values(layer) for layer in sorted(self._rows, key=lambda name: depth[name])}
        layers = sorted(self._rows, key=lambda name: -depth[name])
        made = [entry for layer in layers for entry in (*values[layer], *self._gradients(layer))]
        return sorted(made, key=lambda entry: _kind(entry[1]) is not None)

    # -- values ------------------------------------------------------------------------------------------------------

    def _values(self, layer: str) -> list[tuple[bool, SlotStats]]:
        call, row = self._calls[layer], self._rows[layer]
        found: list[tuple[bool, SlotStats]] = []
        cause: TensorRecord | None = None
        is_bad = self._is_bad(layer, "taken")
        if "taken" in row and not call.inputs:
            call.takes_tensors = True
            cause = self._giver(call) if is_bad else None
            taken = cause or CompiledTensorRecord(call, "input")
            call.inputs.append(taken)
            taken.consumers.append(call)
            if cause is None:
                found.append((False, _stats(row["taken"], taken)))
        if "given" in row and isinstance(call, CompiledModuleCall):
            found.append((is_bad, _stats(row["given"], self._output(call))))
        return found

    def _output(self, call: ModuleCall) -> TensorRecord:
        if not call.outputs:
            call.outputs.append(CompiledTensorRecord(call, "output"))
        return call.outputs[0]

    def _giver(self, call: ModuleCall) -> TensorRecord | None:
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

    def _gradients(self, layer: str) -> list[tuple[bool, SlotStats]]:
        call, row = self._calls[layer], self._rows[layer]
        found: list[tuple[bool, SlotStats]] = []
        if "given gradient" in row and isinstance(call, CompiledModuleCall):
            is_explained = self._is_bad(layer, "given gradient") and self._comes_from_beyond(call)
            found.append((is_explained, _gradient(row["given gradient"], self._output(call))))
        if "taken gradient" in row:
            taken = CompiledTensorRecord(call, "input")
            taken.consumers.append(call)
            found.append((self._is_bad(layer, "given gradient"), _gradient(row["taken gradient"], taken)))
        return found

    def _comes_from_beyond(self, call: ModuleCall) -> bool:
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
        stats = self._rows.get(layer, {}).get(what)
        return stats is not None and _kind(stats) is not None


def _calls_in(micro_batch: int, slot_stats: list[SlotStats]) -> dict[str, ModuleCall]:
    """Calls outside of compiled code, the first of each layer."""
    found: dict[str, ModuleCall] = {}
    for stats in slot_stats:
        if isinstance(stats.source, TensorRecord) and stats.source.call.micro_batch == micro_batch:
            for call in (*reversed(stats.source.call.ancestors()), stats.source.call):
                found.setdefault(call.layer, call)
    return found


def _kind(stats: SlotStats) -> str | None:
    return kind_of(stats.minimum, stats.maximum)


def _stats(stats: SlotStats, record: TensorRecord) -> SlotStats:
    return SlotStats(0, record, SlotRole.EVIDENCE, stats.minimum, stats.maximum)


def _gradient(stats: SlotStats, record: TensorRecord) -> SlotStats:
    return SlotStats(0, GradientHook(None, record), SlotRole.EVIDENCE, stats.minimum, stats.maximum)


def _nothing() -> None:
    return None
