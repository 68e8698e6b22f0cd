"""What of a record its replay can be compared with: a recipe's step need not be all that the loop did with the model.

[Note: what a step does not run]
A loop may call the model for another model's loss, take several backward passes where a recipe takes one, or go on with
another loss than the one that was watched. The dump tells: by calls without loss or gradient, by how often a gradient
came, and by a loss and gradients that do not go together. What such code made is left out, with a note; what it left
alone still has to be the same to the bit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ddp_nanguard.capture.window import MicroBatch
from ddp_nanguard.dump.read import Dump
from ddp_nanguard.report.slot_key import SlotKey
from ddp_nanguard.report.types import Phase, Site

from .run_step import StepResult

Slots = list[tuple[SlotKey, tuple[float, float]]]
"""Key, and smallest and largest value, in execution order."""


@dataclass
class LeftOut:
    """What is not compared.

    Attributes:
        calls: micro-batches that were no such step.
        passes: gradients that came more or less often, as keys of their first occurrence.
        losses: micro-batch and name of losses that were written after they had been watched.
        backward_of: micro-batches whose backward began at another loss than the one that was watched.
        notes: a line for each kind.
    """

    calls: set[int] = field(default_factory=set)
    passes: set[SlotKey] = field(default_factory=set)
    losses: set[tuple[int, str]] = field(default_factory=set)
    backward_of: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def has(self, key: SlotKey) -> bool:
        """Whether a recorded slot is not compared."""
        is_backward = key.phase in (Phase.BACKWARD, Phase.REDUCE)
        return _first(key) in self.passes or (is_backward and _is_from(key, self.backward_of))


def _is_from(key: SlotKey, micro_batches: set[int]) -> bool:
    """Whether a gradient is that of one of some micro-batches, or has accumulated on it."""
    return bool(micro_batches) and (key.micro_batch is None or key.micro_batch >= min(micro_batches))


def recorded_slots(dump: Dump, rank: int) -> Slots:
    """The slots of the step that a rank has recorded."""
    history = dump.history(rank)
    keys = (SlotKey.from_label(label) for label in history["fault.labels"].tolist())
    return [(key, (low, high)) for key, (low, high) in zip(keys, history["fault.values"].tolist(), strict=True)]


def left_out_of(dump: Dump, rank: int, recorded: list[MicroBatch], again: StepResult, then: Site | None) -> LeftOut:
    """What of a rank's record is not compared, since the step that runs again did not make it.

    Args:
        dump: the dump.
        rank: the rank.
        recorded: its micro-batches.
        again: what the step gave in the replay.
        then: what the rank had seen first; a step that raised has watched no loss, but is one.
    """
    slots = recorded_slots(dump, rank)
    calls = _without_loss(recorded) - ({then.micro_batch or 0} if then is not None else set())
    found = LeftOut(calls, _other_passes(slots, again), _written_losses(recorded, slots))
    found.backward_of = _other_backward(recorded, slots, again)
    found.notes += [
        f"micro-batch {i} is a call of the model without a watched loss in training: not compared" for i in found.calls
    ]
    if found.passes:
        found.notes.append("training took another number of backward passes than the step: gradients are not compared")
    found.notes += [f"{name} of micro-batch {i} was written after it was watched" for i, name in sorted(found.losses)]
    found.notes += [
        f"the loop replaced the loss of micro-batch {i} before the backward: gradients are not compared"
        for i in sorted(found.backward_of)
    ]
    return found


def as_in_training(recorded: list[MicroBatch], again: StepResult, left_out: LeftOut, then: Site | None) -> StepResult:
    """The step without what training did not look at: losses that it did not watch, calls that were no such step.

    A recipe watches the loss of every micro-batch. Where training watched some losses and none in this micro-batch, the
    model was called for something else, such as the loss of another model, and the recipe's step stands in for it.
    """
    watched = {(micro_batch.index, name) for micro_batch in recorded for name in micro_batch.losses}
    if then is not None:  # what code that raised had computed stands for a loss
        watched.add((then.micro_batch or 0, then.slot))
    others = left_out.calls

    def is_site(site: Site) -> bool:
        return site.micro_batch not in others and (
            site.phase is not Phase.LOSS or (site.micro_batch, site.slot) in watched
        )

    def is_slot(key: SlotKey) -> bool:
        return key.micro_batch not in others and (key.phase is not Phase.LOSS or (key.micro_batch, key.name) in watched)

    return replace(
        again,
        sites=[site for site in again.sites if is_site(site)],
        as_watched=[site for site in again.as_watched if is_site(site)],
        slots={key: values for key, values in again.slots.items() if key.micro_batch is None or is_slot(key)},
    )


def _without_loss(recorded: list[MicroBatch]) -> set[int]:
    """Micro-batches without a watched loss beside others that have one."""
    has_losses = any(micro_batch.losses for micro_batch in recorded)
    return {micro_batch.index for micro_batch in recorded if has_losses and not micro_batch.losses}


def _other_passes(slots: Slots, again: StepResult) -> set[SlotKey]:
    """Gradients that came in both runs, but not equally often."""
    then, now = _times(key for key, _ in slots), _times(again.slots)
    return {key for key, times in then.items() if now[key] not in (0, times)}


def _times(keys: Iterable[SlotKey]) -> Counter[SlotKey]:
    return Counter(_first(key) for key in keys if key.phase in (Phase.BACKWARD, Phase.REDUCE))


def _first(key: SlotKey) -> SlotKey:
    return replace(key, occurrence=1)


def _written_losses(recorded: list[MicroBatch], slots: Slots) -> set[tuple[int, str]]:
    """Losses of one value that are not those any more that were seen when they were watched."""
    seen = {(key.micro_batch, key.name): values for key, values in slots if key.phase is Phase.LOSS}
    return {
        (micro_batch.index, name)
        for micro_batch in recorded
        for name, loss in micro_batch.losses.items()
        if loss.numel() == 1 and not _is_within(float(loss), seen.get((micro_batch.index, name)))
    }


def _is_within(value: float, limits: tuple[float, float] | None) -> bool:
    """Whether a loss can be the one whose smallest and largest value are known, up to the rounding of those."""
    if limits is None:
        return True
    return all(
        math.isclose(value, limit, rel_tol=1e-5) or math.isnan(value) is math.isnan(limit) is True for limit in limits
    )


def _other_backward(recorded: list[MicroBatch], slots: Slots, again: StepResult) -> set[int]:
    """Micro-batches whose loss was bad, and whose gradients were all finite though those of that loss are not."""
    bad = {key.micro_batch for key, values in slots if key.phase is Phase.LOSS and not _all_finite(values)}
    found = set()
    for micro_batch in recorded:
        keys = [key for key, _ in slots if key.phase is Phase.BACKWARD and key.micro_batch == micro_batch.index]
        then = [values for key, values in slots if key in keys]
        now = [again.slots[key] for key in keys if key in again.slots]
        if micro_batch.index in bad and all(map(_all_finite, then)) and not all(map(_all_finite, now)):
            found.add(micro_batch.index)
    return found


def _all_finite(values: tuple[float, float]) -> bool:
    return all(map(math.isfinite, values))
