"""The verdict: the one collective of a clean step.

[Note: the verdict]
Each rank turns its slots into one integer on the device (`probes.severity`); the verdict is the MAX over ranks.
Integers, because NaN is lost in a MAX over floats, and which rank holds it decides whether. Only where the verdict is
not clean do ranks talk about details, on a CPU group of its own with a timeout of its own (`RankGroup.fault_group`), so
that neither a watchdog of the training group nor a dead peer takes the evidence along.

[Note: taken for nothing else]
Collectives are paired by their order alone, so that a rank with a batch less, or an all-reduce of the job, can meet a
verdict. Two words show it. Both begin with the same small bits (`_Tag`: guard, step, whether the guard is being
closed), in the second word turned around, so that their MAX holds the largest and the smallest tag of all ranks: where
these differ, ranks are not in the same step. And both lie at the very bottom of int64: nearly every other number is
larger, wins the MAX and is seen; only a sum with zeros shows nothing, until the next verdict meets another step. The
words of all steps are made once; a step picks its own and adds its severity, by one kernel as the packing alone takes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_nanguard.errors import OutOfStepError
from ddp_nanguard.probes.severity import Severity
from ddp_nanguard.tensors.accelerator import copy_for_later

_LOWEST = -(1 << 63)
_STEPS, _GUARDS = 64, 256  # numbers modulo these: ranks that are so far apart have met before
_VALUE_BITS, _UNIT = 18, 40503  # severities lie that far apart: what is added to one makes none
_TAGS = _GUARDS * _STEPS * 2


@dataclass(frozen=True)
class _Tag:
    """What all ranks of one verdict have in common.

    Attributes:
        guard: which of the guards over these ranks.
        step: its number.
        closes: whether it is asked for by `NanGuard.close`.
    """

    guard: int
    step: int
    closes: bool

    def number(self) -> int:
        """Below `_TAGS`."""
        return (self.guard % _GUARDS * _STEPS + self.step % _STEPS) * 2 + self.closes

    def words(self, ran_backward: bool) -> tuple[int, int]:
        """Both words of a clean rank."""
        number = self.number()
        first, second = number << _VALUE_BITS, (_TAGS - 1 - number) << _VALUE_BITS
        return _LOWEST + first, _LOWEST + second + _UNIT * ran_backward


@functools.cache
def _constants(device: torch.device, guard: int) -> tuple[list[Tensor], Tensor]:
    """The words of every step of a guard, and which of them the severity is added to."""
    tags = [_Tag(guard, step, closes) for step in range(_STEPS) for closes in (False, True)]
    words = [tag.words(ran_backward) for tag in tags for ran_backward in (False, True)]
    first = torch.tensor([_UNIT, 0], dtype=torch.int64, device=device)
    return list(torch.tensor(words, dtype=torch.int64, device=device).unbind()), first


@dataclass(frozen=True)
class Ballot:
    """What a rank brings to a verdict beside its severity.

    Attributes:
        ran_backward: whether it has run a backward since the last verdict.
        step: of the verdict.
        closes: whether its guard is being closed.
        guard: which of the guards over these ranks it is.
        rank: its own, for messages.
    """

    ran_backward: bool
    step: int = 0
    closes: bool = False
    guard: int = 0
    rank: int = 0

    @property
    def tag(self) -> _Tag:
        """What it has in common with all ranks."""
        return _Tag(self.guard, self.step, self.closes)

    def packed(self, severity: Tensor) -> Tensor:
        """What a rank sends: int64, shape (2,), of which the MAX over ranks is the verdict. One kernel."""
        words, first = _constants(severity.device, self.guard % _GUARDS)
        row = (self.step % _STEPS * 2 + self.closes) * 2 + self.ran_backward
        return torch.addcmul(words[row], severity, first)

    def read(self, words: list[int]) -> tuple[Severity, bool]:
        """Severity, and whether any rank ran a backward.

        Raises:
            OutOfStepError: the words are not those of one verdict.
        """
        first, second = (word - _LOWEST for word in words)
        number, worst = first >> _VALUE_BITS, divmod(first % (1 << _VALUE_BITS), _UNIT)
        other, backwards = _TAGS - 1 - (second >> _VALUE_BITS), divmod(second % (1 << _VALUE_BITS), _UNIT)
        is_verdict = 0 <= other <= number < _TAGS and worst[0] <= max(Severity) and backwards[0] <= 1
        if not is_verdict or worst[1] or backwards[1]:
            raise self._error("another collective of the job, of the same size")
        if number != other:
            raise self._error(self._met(number if other == self.tag.number() else other))
        return Severity(worst[0]), bool(backwards[0])

    def _met(self, number: int) -> str:
        """What the verdict of another rank was about, from its tag."""
        number, closes = divmod(number, 2)
        guard, step = divmod(number, _STEPS)
        if guard != self.guard % _GUARDS:
            return "that of another guard"
        step = self.step + (step - self.step + _STEPS // 2) % _STEPS - _STEPS // 2
        return f"that of close() in step {step}" if closes else f"that of step {step}"

    def _error(self, met: str) -> OutOfStepError:
        own = "close() in step" if self.closes else "step"
        return OutOfStepError(
            f"ranks are not in the same step: the verdict of {own} {self.step} on rank {self.rank} met {met}; "
            "give every rank the same number of batches and steps, and let all close the guard after the same step"
        )


class Verdict:
    """A verdict, still on the device.

    Args:
        payload: the MAX of what `Ballot.packed` gave on each rank.
        ballot: of this rank.
    """

    def __init__(self, payload: Tensor, ballot: Ballot) -> None:
        self._payload = payload
        self._ballot = ballot
        self._host: Tensor | None = None
        self._arrival: torch.Event | None = None

    def as_found_inf(self, severity: int) -> Tensor:
        """1.0 where the verdict is as severe, else 0.0; float32, shape (), on the device.

        A copy of the payload sets out for the host, to be read later without a wait. Host sync: none.
        """
        if self._payload.device.type != "cpu":
            self._host, self._arrival = copy_for_later(self._payload)
        clean, _ = self._ballot.tag.words(False)
        return (self._payload[0] >= clean + _UNIT * severity).to(torch.float32)

    def read(self) -> tuple[Severity, bool]:
        """Severity, and whether any rank ran a backward. Host sync: one read.

        Raises:
            OutOfStepError: it is not the verdict of one step of all ranks.
        """
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._ballot.read((self._payload if self._host is None else self._host).tolist())
