"""Slots by name, for the dump and for comparing a replay with it."""

from __future__ import annotations

from .backward import GradientHook
from .calls import TensorRecord
from .gradient import GradientSource
from .slots import SlotRole, SlotStats
from .sources import LossSource


def labelled_slots(slot_stats: list[SlotStats]) -> list[tuple[str, float, float]]:
    """(label, minimum, maximum) of every slot in execution order; a replay of the same step gives the same labels.

    State is left out: it says nothing about this step's arithmetic.
    """
    counts: dict[str, int] = {}
    found: list[tuple[str, float, float]] = []
    for stats in slot_stats:
        label = _label(stats)
        if label is not None:
            counts[label] = counts.get(label, 0) + 1
            found.append((f"{label}|{counts[label]}", stats.minimum, stats.maximum))
    return found


def _label(stats: SlotStats) -> str | None:
    source = stats.source
    if isinstance(source, TensorRecord):
        call = source.call
        role = "root output" if stats.role is SlotRole.OUTPUT else source.slot
        return f"forward|{call.micro_batch}|{call.layer}|{call.number}|{role}"
    if isinstance(source, GradientHook):
        call = source.call
        return f"backward|{call.micro_batch}|{call.layer}|{call.number}|gradient of {source.record.slot}"
    if isinstance(source, GradientSource):
        return f"{'reduce' if source.reduced else 'backward'}|{source.micro_batch}|{source.name}|gradient"
    if isinstance(source, LossSource):
        return f"loss|{source.micro_batch}|{source.name}"
    return None
