"""Slots that compiled code filled, turned into calls and tensor records that blame reads like any other.

[Note: order in a compiled region]
The slots say what each module took and returned, not when it ran. The order is made up so that blame comes out right
whatever it was: clean slots first, then slots that are bad without a reason that other slots show, then those that are
bad because another one is. Modules outside of compiled code keep their order among themselves and stand between the
second and the third kind.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from ddp_nanguard.tensors.minmax import kind_of

from .backward import GradientHook
from .calls import ModuleCall, TensorRecord
from .compiled import Accumulated, CompiledSource
from .slot_roles import SlotRole
from .slots import SlotStats

Rows = dict[str, dict[Accumulated, SlotStats]]
"""By layer, its slots of one micro-batch; a layer that did not run has none."""


def expand_compiled(slot_stats: list[SlotStats]) -> list[SlotStats]:
    """Turn the slots of compiled regions into slots of calls like any other, see [Note: order in a compiled region].

    Args:
        slot_stats: the slots of one step in execution order, as `SlotBuffer` reads them.

    Returns:
        All slots with orders from 1; unchanged where no compiled module ran.
    """
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
    """All calls of one module in compiled code in one micro-batch, as if they were one: ``number`` is None."""

    __slots__ = ()
    is_ordered = False

    def __init__(self, layer: str, micro_batch: int, parent: ModuleCall | None) -> None:
        super().__init__(layer, None, micro_batch, parent)


class CompiledTensorRecord(TensorRecord):
    """All inputs or all outputs of a module in compiled code, as if they were one tensor; its reference is dead."""

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
        rows: its slots by layer, parents first.
        others: the slots outside of compiled code, whose calls can lie around those inside.
    """

    def __init__(self, micro_batch: int, rows: Rows, others: list[SlotStats]) -> None:
        self._rows = rows
        around = _calls_in(micro_batch, others)
        # the same slots may be read more than once, and each reading adds children to the calls outside
        for call in around.values():
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
        """Slots of the region, clean ones first, innermost modules first, each with whether another one explains it."""
        depth = {layer: len(self._calls[layer].ancestors()) for layer in self._rows}
        # values are made from the outside in: a bad input of a module explains bad inputs of its children
        values = {layer: self._values(layer) for layer in sorted(self._rows, key=lambda name: depth[name])}
        layers = sorted(self._rows, key=lambda name: -depth[name])
        made = [entry for layer in layers for entry in (*values[layer], *self._gradients(layer))]
        return sorted(made, key=lambda entry: _kind(entry[1]) is not None)

    # -- values ------------------------------------------------------------------------------------------------------

    def _values(self, layer: str) -> list[tuple[bool, SlotStats]]:
        call, row = self._calls[layer], self._rows[layer]
        found: list[tuple[bool, SlotStats]] = []
        cause: TensorRecord | None = None
        is_bad = self._is_bad(layer, "input")
        if "input" in row and not call.inputs:
            call.takes_tensors = True
            cause = self._source_of_bad_input(call) if is_bad else None
            # a bad input is the tensor that another call returned, not one of its own, and then needs no slot
            record = cause or CompiledTensorRecord(call, "input")
            call.inputs.append(record)
            record.consumers.append(call)
            if cause is None:
                found.append((False, _stats(row["input"], record)))
        if "output" in row and isinstance(call, CompiledModuleCall):
            found.append((is_bad, _stats(row["output"], self._output(call))))
        return found

    def _output(self, call: ModuleCall) -> TensorRecord:
        if not call.outputs:
            call.outputs.append(CompiledTensorRecord(call, "output"))
        return call.outputs[0]

    def _source_of_bad_input(self, call: ModuleCall) -> TensorRecord | None:
        """Where a bad input of ``call`` comes from, None where no slot tells.

        That is the output of a sibling with good inputs, a bad value outside of compiled code, or the parent's input.
        """
        parent = call.parent
        if parent is None:
            return None
        for sibling in parent.children:
            is_first = self._is_bad(sibling.layer, "output") and not self._is_bad(sibling.layer, "input")
            if is_first and sibling is not call:
                return self._output(sibling)
            outside = [output for output in sibling.outputs if id(output) in self._bad_outside]
            if outside:
                return outside[0]
        outside = [record for record in parent.inputs if id(record) in self._bad_outside]
        if outside:
            return outside[0]
        is_taken = self._is_bad(parent.layer, "input") and bool(parent.inputs)
        return parent.inputs[0] if is_taken else None

    # -- gradients ---------------------------------------------------------------------------------------------------

    def _gradients(self, layer: str) -> list[tuple[bool, SlotStats]]:
        call, row = self._calls[layer], self._rows[layer]
        found: list[tuple[bool, SlotStats]] = []
        if "output gradient" in row and isinstance(call, CompiledModuleCall):
            is_explained = self._is_bad(layer, "output gradient") and self._gradient_came_in_bad(call)
            found.append((is_explained, _gradient(row["output gradient"], self._output(call))))
        if "input gradient" in row:
            record = CompiledTensorRecord(call, "input")
            record.consumers.append(call)
            found.append((self._is_bad(layer, "output gradient"), _gradient(row["input gradient"], record)))
        return found

    def _gradient_came_in_bad(self, call: ModuleCall) -> bool:
        """Whether the bad gradient of this call's output came from a sibling or from outside of the parent module."""
        parent = call.parent
        if parent is None:
            return False
        is_from_sibling = any(
            self._is_bad(other.layer, "input gradient") and not self._is_bad(other.layer, "output gradient")
            for other in parent.children
            if other is not call
        )
        return is_from_sibling or self._is_bad(parent.layer, "output gradient") or id(parent) in self._fed_bad_gradients

    def _is_bad(self, layer: str, what: Accumulated) -> bool:
        stats = self._rows.get(layer, {}).get(what)
        return stats is not None and _kind(stats) is not None


def _calls_in(micro_batch: int, slot_stats: list[SlotStats]) -> dict[str, ModuleCall]:
    """Calls of a micro-batch outside of compiled code by layer: the first of each, with those that it ran in."""
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
