"""What came of a second run on this rank: the fault and the same bits, the fault with other bits, or no fault."""

from __future__ import annotations

import math
import struct
from collections.abc import Container, Iterator
from dataclasses import dataclass

from torch import Tensor

from ddp_nanguard.blame.inspect import RankFindings
from ddp_nanguard.capture.model_calls import same_screen
from ddp_nanguard.probes.slot_keys import keyed_slots
from ddp_nanguard.probes.slots import SlotStats
from ddp_nanguard.report.slot_key import SlotKey
from ddp_nanguard.report.types import Phase, Site

Values = tuple[float, float]


@dataclass(frozen=True)
class Agreement:
    """How the vital signs of two runs agree on one rank.

    Attributes:
        last_same: the last one before the first that differs, as text; None where none was the same.
        first_different: the first that differs, as text; None where none does.
    """

    last_same: str | None
    first_different: str | None


@dataclass(frozen=True)
class OutputPair:
    """One output of the model in both runs.

    Attributes:
        micro_batch: of the call.
        then, now: its screens, see `screen_of`.
    """

    micro_batch: int
    then: Tensor | None
    now: Tensor | None

    @property
    def then_is_finite(self) -> bool:
        """Whether it was finite in training, as far as its screen tells. Host sync: one."""
        return self.then is None or bool(self.then.isfinite())

    @property
    def now_is_finite(self) -> bool:
        """Whether it is finite in the second run, as far as its screen tells. Host sync: one."""
        return self.now is None or bool(self.now.isfinite())


def own_sites(findings: RankFindings) -> list[Site]:
    """What a rank has seen before any communication, with full confidence."""
    sites = [ranked.site for ranked in findings.sites if not ranked.low_confidence]
    return [site for site in sites if site.phase not in (Phase.REDUCE, Phase.LOOP)]


def agreement(
    then: list[SlotStats],
    now: list[SlotStats],
    outputs: list[OutputPair],
    is_sharded: bool,
    left_out: Container[str],
    other_calls: Container[int | None] = (),
) -> Agreement:
    """Compare what both runs have seen: the model's outputs, losses, and each rank's own gradients.

    Args:
        then: slots of training.
        now: slots of the second run.
        outputs: of the model, in both.
        is_sharded: whether the second run reduced its gradients too.
        left_out: names of parameters whose gradients are not compared.
        other_calls: micro-batches whose gradients are not compared: what was there before the window is added to them.
    """
    last_same = first_different = None
    for what, is_same in (*_same_outputs(outputs), *_same_slots(then, now, is_sharded, left_out, other_calls)):
        if is_same:
            last_same = what if first_different is None else last_same
        else:
            first_different = first_different or what
    return Agreement(last_same, first_different)


def _same_outputs(outputs: list[OutputPair]) -> Iterator[tuple[str, bool]]:
    for pair in outputs:
        if pair.then is not None and pair.now is not None:
            yield f"the model's output, micro-batch {pair.micro_batch}", same_screen(pair.then, pair.now)


def _same_slots(
    then: list[SlotStats],
    now: list[SlotStats],
    is_sharded: bool,
    left_out: Container[str],
    other_calls: Container[int | None],
) -> Iterator[tuple[str, bool]]:
    again = dict(keyed_slots(now))
    reduced = False
    for key, values in keyed_slots(then):
        reduced = reduced or key.phase is Phase.REDUCE
        is_left_out = key.is_parameter_gradient and (key.name in left_out or key.micro_batch in other_calls)
        if key in again and not is_left_out and _comparable(key, reduced, is_sharded):
            yield str(key), same_bits(values, again[key])


def _comparable(key: SlotKey, reduced: bool, is_sharded: bool) -> bool:
    if key.phase in (Phase.REDUCE, Phase.LOOP) or (key.phase is Phase.BACKWARD and key.micro_batch is None):
        return False  # what communication, or the loop, made of it
    # after a reduce the gradients that accumulate in place are not this rank's alone
    return is_sharded or not (reduced and key.is_parameter_gradient)


def same_bits(one: Values, other: Values) -> bool:
    """Whether both pairs have the same bits; a NaN is like any other."""
    return all(
        (math.isnan(a) and math.isnan(b)) or struct.pack("d", a) == struct.pack("d", b)
        for a, b in zip(one, other, strict=True)
    )
