"""What came of a second run on this rank: the fault and the same bits, the fault with other bits, or no fault."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from ddp_nanguard.capture.record import StepRecord
from ddp_nanguard.probes.slot_keys import keyed_slots
from ddp_nanguard.probes.slots import SlotStats
from ddp_nanguard.report.slot_key import SlotKey
from ddp_nanguard.report.types import Phase

Values = tuple[float, float]


@dataclass(frozen=True)
class Agreement:
    """How the vital signs of two runs agree on one rank.

    Attributes:
        num_compared: how many were compared.
        last_same: the last one before the first that differs, as text; None where none was the same.
        first_different: the first that differs, as text; None where none does.
        bad_then, bad_now: whether any of those compared was non-finite.
    """

    num_compared: int
    last_same: str | None
    first_different: str | None
    bad_then: bool
    bad_now: bool


def agreement(then: list[SlotStats], now: list[SlotStats], record: StepRecord, is_sharded: bool) -> Agreement:
    """Compare what both runs have seen: losses, root outputs, and each rank's own gradients.

    Args:
        then: slots of training.
        now: slots of the second run.
        record: of the step.
        is_sharded: whether the second run reduced its gradients too.
    """
    recorded, again = keyed_slots(then), dict(keyed_slots(now))
    last_same = first_different = None
    count, bad_then, bad_now, reduced = 0, False, False, False
    for key, values in recorded:
        reduced = reduced or key.phase is Phase.REDUCE
        if key not in again or not _comparable(key, reduced, is_sharded):
            continue
        count += 1
        bad_then, bad_now = bad_then or _is_bad(values), bad_now or _is_bad(again[key])
        if same_bits(values, again[key]):
            last_same = str(key) if first_different is None else last_same
        else:
            first_different = first_different or str(key)
    return Agreement(count, last_same, first_different, bad_then, bad_now)


def _comparable(key: SlotKey, reduced: bool, is_sharded: bool) -> bool:
    if key.phase is Phase.REDUCE or (key.phase is Phase.BACKWARD and key.micro_batch is None):
        return False  # what communication, or the loop, made of it
    # after a reduce the gradients that accumulate in place are not this rank's alone
    return is_sharded or not (reduced and key.is_parameter_gradient)


def same_bits(one: Values, other: Values) -> bool:
    """Whether both pairs have the same bits; a NaN is like any other."""
    return all(
        (math.isnan(a) and math.isnan(b)) or struct.pack("d", a) == struct.pack("d", b)
        for a, b in zip(one, other, strict=True)
    )


def _is_bad(values: Values) -> bool:
    return not all(map(math.isfinite, values))
