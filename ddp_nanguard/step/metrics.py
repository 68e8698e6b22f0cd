"""`MetricsLog`: numbers of a step for the user's logger, from the slots that the step has filled anyway.

[Note: logged steps]
A step that is not logged has nothing more to do for it: no kernel, no read. In one that is, all slots of a device are
read by the host in one go, after the verdict. Nothing is asked of other ranks, so each rank that logs tells of itself
alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from ddp_nanguard.capture.record import StepRecord
from ddp_nanguard.context import GuardContext
from ddp_nanguard.probes.calls import TensorRecord
from ddp_nanguard.probes.gradient import GradientSource
from ddp_nanguard.probes.slot_pages import SlotTable
from ddp_nanguard.probes.slots import PastStep, SlotStats, stats_together
from ddp_nanguard.probes.sources import LossSource
from ddp_nanguard.report.wording import layer_text

PREFIX = "nanguard"


class Counters(NamedTuple):
    """What has been counted since the guard was made.

    Attributes:
        skips: steps that ``on_fault="skip"`` has left out.
        overflows: steps that a scaler has left out.
    """

    skips: int
    overflows: int


class MetricsLog:
    """Hands numbers of every ``log_every``-th step to the user's ``on_metrics``; see [Note: logged steps].

    Args:
        context: of the guard.
        counters: tells what has been counted so far.

    Collective: none. Host sync: one per accelerator in a step that is logged.
    """

    def __init__(self, context: GuardContext, counters: Callable[[], Counters]) -> None:
        self._context = context
        self._counters = counters

    def is_due(self, step: int) -> bool:
        """Whether this step is logged."""
        return self._context.on_metrics is not None and step % self._context.config.log_every == 0

    def after_verdict(self, record: StepRecord, past: PastStep | None = None) -> None:
        """Log a step if it is due.

        Args:
            record: of the step, with the scale that it had.
            past: its slots, where they lie in the ring already; None for those of the open window.
        """
        on_metrics = self._context.on_metrics
        if on_metrics is None or not self.is_due(record.step):
            return
        slots = self._context.slots
        tables = past.pages if past is not None else [page.table() for page in slots.pages()]
        on_metrics(record.step, self._numbers(tables, record))

    def _numbers(self, tables: Sequence[SlotTable], record: StepRecord) -> dict[str, float]:
        scale = record.scaler.scale() if record.scaler is not None else None
        slot_stats, scales = stats_together(tables, [] if scale is None else [scale])
        slot_stats = self._context.slots.expand_compiled(slot_stats)
        counters = self._counters()
        named = {
            **_losses(slot_stats),
            **_layers(slot_stats),
            **_gradients(slot_stats, *scales),
            **({"scale": scales[0]} if scales else {}),
            "skips": float(counters.skips),
            "overflows": float(counters.overflows),
        }
        return {f"{PREFIX}/{name}": number for name, number in named.items()}


def _losses(slot_stats: Iterable[SlotStats]) -> dict[str, float]:
    """Mean of each watched loss over the micro-batches; of one that is no single number its maximum."""
    found: dict[str, list[float]] = {}
    for stats in slot_stats:
        if isinstance(stats.source, LossSource):
            found.setdefault(f"loss/{stats.source.name}", []).append(stats.maximum)
    return {name: sum(numbers) / len(numbers) for name, numbers in found.items()}


def _layers(slot_stats: Iterable[SlotStats]) -> dict[str, float]:
    """The largest absolute value that each layer has returned, and how many bits lie between it and the dtype's."""
    sizes: dict[str, float] = {}
    bits: dict[str, float] = {}
    for stats in slot_stats:
        if not isinstance(stats.source, TensorRecord) or stats.source.slot != "output":
            continue
        layer, size = layer_text(stats.source.call.layer), _size(stats)
        sizes[layer] = _larger(sizes.get(layer, 0.0), size)
        if stats.kind is not None and 0 < size < math.inf:
            bits[layer] = min(bits.get(layer, math.inf), math.log2(torch.finfo(stats.kind[1]).max) - math.log2(size))
    return {f"absmax/{name}": size for name, size in sizes.items()} | {f"headroom/{n}": b for n, b in bits.items()}


def _gradients(slot_stats: Iterable[SlotStats], scale: float = 1.0) -> dict[str, float]:
    """L2 norm, or largest element, of this rank's gradients as the last backward left them, unscaled.

    Which of the two depends on how they were looked at, see `probes.screens`; neither where it was in both ways.
    """
    last: dict[str, SlotStats] = {}
    for stats in slot_stats:
        if isinstance(stats.source, GradientSource) and not stats.source.at_update:
            last[stats.source.name] = stats
    if not last:
        return {}
    if all(stats.is_euclidean for stats in last.values()):
        return {"grad_norm": math.hypot(*(stats.maximum for stats in last.values())) / scale}
    if any(stats.is_euclidean for stats in last.values()):
        return {}
    largest = 0.0
    for stats in last.values():
        largest = _larger(largest, _size(stats))
    return {"grad_max": largest / scale}


def _size(stats: SlotStats) -> float:
    return _larger(abs(stats.minimum), abs(stats.maximum))


def _larger(first: float, second: float) -> float:
    """The larger of two numbers, NaN where one of them is."""
    return math.nan if math.isnan(first) or math.isnan(second) else max(first, second)
