"""Screens that are bad, confirmed element by element from the tensors that are still there; see [Note: screens]."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ddp_nanguard.capture.record import StepRecord
from ddp_nanguard.context import GuardContext
from ddp_nanguard.probes.gradient import GradientSource, TotalNormSource
from ddp_nanguard.probes.slot_roles import SlotRole
from ddp_nanguard.probes.slots import SlotStats, is_clean
from ddp_nanguard.probes.state import StateSource
from ddp_nanguard.tensors.minmax import extremes


@dataclass
class Confirmed:
    """Slots in which screens that were bad have made way for what their tensors hold.

    Attributes:
        slot_stats: in execution order.
        overflowed: whether a screen was infinite over elements that are all finite.
        undecided: orders of screens that are infinite, and whose tensor is gone.
    """

    slot_stats: list[SlotStats]
    overflowed: bool
    undecided: set[int]


def confirm(context: GuardContext, record: StepRecord, slot_stats: list[SlotStats]) -> Confirmed:
    """Look at the tensors behind bad screens. Host sync: one per such tensor. No collective.

    Args:
        context: of the guard.
        record: of the step; after a deferred verdict the gradients are the next step's, and every screen stands.
        slot_stats: the slots of the step.
    """
    found = Confirmed(list(slot_stats), False, set())
    if not record.is_current or all(is_clean(stats) for stats in slot_stats if stats.is_screen):
        return found
    tensors = _Tensors(context, record, slot_stats)
    for index, stats in enumerate(slot_stats):
        if isinstance(stats.source, TotalNormSource) and not is_clean(stats):
            _add_gradients(context, stats, found)
            continue
        if stats.is_screen and not is_clean(stats) and stats.role is not SlotRole.PARAMETER_NORM:
            if math.isnan(stats.maximum):  # of finite and infinite elements no norm is NaN
                continue
            exact = tensors.extremes_behind(stats)
            if exact is None:
                found.undecided.add(stats.order)
                continue
            if math.isnan(exact[0]):  # the norm was no NaN: clipping has multiplied what was infinite by zero
                continue
            low, high = exact
            found.slot_stats[index] = stats._replace(minimum=low, maximum=high, is_screen=False)
            found.overflowed = found.overflowed or is_clean(found.slot_stats[index])
    return found


def without_undecided(confirmed: Confirmed) -> list[SlotStats]:
    """The slots; where another gradient of the backward is known to be bad, without those that are not decided.

    The norm of a diverging model overflows in layers whose gradients are finite, before one of them is not: to name
    the first of these as the origin would be wrong.
    """
    undecided = confirmed.undecided
    bad = [stats for stats in confirmed.slot_stats if _is_of_backward(stats) and not is_clean(stats)]
    is_known = any(stats.order not in undecided for stats in bad)
    return [stats for stats in confirmed.slot_stats if not (is_known and stats.order in undecided)]


def _is_of_backward(stats: SlotStats) -> bool:
    """Whether it is a rank's own gradient as the backward made it, before the reduce and before code of the loop."""
    source = stats.source
    return isinstance(source, GradientSource) and not source.reduced and not source.at_update


def _add_gradients(context: GuardContext, total: SlotStats, found: Confirmed) -> None:
    """Add the gradients that made the norm of all of them bad, unless slots of their own tell already."""
    if any(isinstance(stats.source, GradientSource) and not is_clean(stats) for stats in found.slot_stats):
        return
    bad = list(context.gradient.nonfinite_now(extremes))
    found.overflowed = found.overflowed or not bad
    found.slot_stats += [SlotStats(total.order, source, total.role, *exact) for source, exact in bad]


class _Tensors:
    """What is still there of the tensors that were screened."""

    def __init__(self, context: GuardContext, record: StepRecord, slot_stats: list[SlotStats]) -> None:
        self._context = context
        self._state: dict[str, Tensor] = {}
        for name, tensor in (*context.state.parameters(), *context.state.optimizer_state()):
            self._state.setdefault(name, tensor)
        self._was_reduced = bool(record.window.reduced_micro_batches)
        # the gradient that is there now is the one that was looked at last under its name
        self._last = {s.source.name: s.order for s in slot_stats if isinstance(s.source, GradientSource)}

    def extremes_behind(self, stats: SlotStats) -> tuple[float, float] | None:
        """Minimum and maximum of the tensor of a slot; None where that is gone and nothing else tells them."""
        source = stats.source
        if isinstance(source, StateSource):
            tensor = self._state.get(source.name)
            return None if tensor is None else extremes(self._context.wrapper.local(tensor))
        if not isinstance(source, GradientSource):
            return None
        gradient = self._context.gradient.unchanged(source.name)
        exact = None if gradient is None else extremes(gradient)
        if exact is None or source.reduced or self._last.get(source.name) == stats.order:
            return exact
        return self._before_the_reduce(stats, exact)

    def _before_the_reduce(self, stats: SlotStats, exact: tuple[float, float]) -> tuple[float, float] | None:
        """What a local gradient was, of which a later one is left that has it in it.

        Infinite elements do not get finite by a reduce or by what is added: where all are finite they always were, and
        where all that are not have one sign they always had it. A rank that holds a shard of the later one sees too
        little of it to tell.
        """
        is_one_sided = not math.isnan(exact[0]) and exact != (-math.inf, math.inf)
        if not is_one_sided or (self._context.wrapper.is_sharded and self._was_reduced):
            return None
        return exact
