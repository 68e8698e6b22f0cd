"""Keys of slots, under which a dump records them and a replay finds the slot to compare with."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace

from ddp_nanguard.report.slot_key import PARAMETER_GRADIENT, ROOT_OUTPUT, SlotKey
from ddp_nanguard.report.types import Phase

from .backward import GradientHook
from .calls import ModuleCall, TensorRecord
from .gradient import GradientSource
from .slot_roles import SlotRole
from .slots import SlotStats
from .sources import LossSource


def keyed_slots(slot_stats: list[SlotStats]) -> list[tuple[SlotKey, tuple[float, float]]]:
    """Key and (minimum, maximum) of every slot that has a key, in the order of ``slot_stats``."""
    counts: Counter[SlotKey] = Counter()
    found: list[tuple[SlotKey, tuple[float, float]]] = []
    for stats in slot_stats:
        key = _key(stats)
        # equal keys are numbered in execution order, which is the same in the replay
        if key is not None:
            counts[key] += 1
            found.append((replace(key, occurrence=counts[key]), (stats.minimum, stats.maximum)))
    return found


def vital_signs(slot_stats: list[SlotStats], has_scaler: bool) -> list[SlotStats]:
    """Those slots that a clean step has with ``layers="none"``: of layers only the root's outputs, with a scaler.

    Args:
        slot_stats: of a step in which layers were watched.
        has_scaler: whether a GradScaler is used.
    """
    kept = [stats for stats in slot_stats if not _is_of_layers(stats, has_scaler)]
    return [_of_the_root(stats) if isinstance(stats.source, TensorRecord) else stats for stats in kept]


def _of_the_root(stats: SlotStats) -> SlotStats:
    """The output of the model as one that looks at no layer sees it, whichever layer returned it first."""
    record: TensorRecord = copy.copy(stats.source)
    record.call = ModuleCall("", 1, record.call.micro_batch, None)
    record.call.outputs.append(record)
    record.slot, record.consumers = "output", []
    return stats._replace(source=record)


def _is_of_layers(stats: SlotStats, has_scaler: bool) -> bool:
    if isinstance(stats.source, TensorRecord):
        return not (has_scaler and stats.role is SlotRole.OUTPUT)
    return isinstance(stats.source, GradientHook)


def _key(stats: SlotStats) -> SlotKey | None:
    """The key of a slot without its occurrence; None for state and norms, which no replay compares."""
    source = stats.source
    if isinstance(source, TensorRecord):
        call = source.call
        if stats.role is SlotRole.OUTPUT:
            # of the model as a whole, whichever layer returned it first: training may have looked at no layer
            return SlotKey(Phase.FORWARD, call.micro_batch, "", None if call.number is None else 1, ROOT_OUTPUT)
        return SlotKey(Phase.FORWARD, call.micro_batch, call.layer, call.number, source.slot)
    if isinstance(source, GradientHook):
        call = source.call
        return SlotKey(Phase.BACKWARD, call.micro_batch, call.layer, call.number, f"gradient of {source.record.slot}")
    if isinstance(source, GradientSource):
        phase = Phase.REDUCE if source.reduced else (Phase.LOOP if source.at_update else Phase.BACKWARD)
        return SlotKey(phase, source.micro_batch, source.name, None, PARAMETER_GRADIENT)
    if isinstance(source, LossSource):
        return SlotKey(Phase.LOSS, source.micro_batch, source.name, None, "")
    return None
