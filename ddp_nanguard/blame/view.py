"""What blame is read from, and a site with what sorts it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from ddp_nanguard.board import Reading
from ddp_nanguard.probes.calls import Call, Sighting
from ddp_nanguard.scan import kind_of
from ddp_nanguard.site import KINDS, Evidence, Site

LAST_MICRO_BATCH = (1 << 15) - 1
_ORDER_BITS, _PHASE_BITS, _MICRO_BATCH_BITS, _RANK_BITS = 22, 3, 16, 18

Habit = tuple[str, str, str]
"""Layer, slot and kind of a value that is non-finite in clean steps."""


@dataclass(frozen=True, slots=True)
class LossNote:
    """Note of a watched loss."""

    name: str
    micro_batch: int


@dataclass(frozen=True)
class RankedSite:
    """A site with what sorts it: ``weak`` ones come after all others."""

    site: Site
    weak: bool = False
    place: int = -1
    """Micro-batch for sorting: -1 before the first one, `LAST_MICRO_BATCH` after the last."""

    def key(self, rank: int, this_step: int) -> int:
        """The causal order as one non-negative 61-bit integer, so that a MIN over ranks finds the earliest."""
        key = int(self.weak)
        key = key << 1 | int(self.site.step == this_step)
        key = key << _MICRO_BATCH_BITS | min(self.place + 1, LAST_MICRO_BATCH + 1)
        key = key << _PHASE_BITS | self.site.phase.causal_rank
        key = key << _ORDER_BITS | min(self.site.order, (1 << _ORDER_BITS) - 1)
        return key << _RANK_BITS | rank


@dataclass(frozen=True)
class Finding:
    """One tensor that a rescan found non-finite: a batch item or a piece of state."""

    name: str
    kind: str
    evidence: Evidence | None
    micro_batch: int | None = None
    tensor: Tensor | None = field(default=None, compare=False, repr=False)


@dataclass
class Damage:
    """State that is non-finite now, by when it became so.

    Attributes:
        by_update: since the last update.
        before: before the window, not by the last update, or never looked at before.
        since: looked at and clean when the window began.
        buffers: buffers that the window's forwards have spoilt; they can be put back.
    """

    by_update: list[Finding] = field(default_factory=list)
    before: list[Finding] = field(default_factory=list)
    since: list[Finding] = field(default_factory=list)
    buffers: list[Finding] = field(default_factory=list)

    def names(self) -> list[str]:
        """Names of everything that is bad now."""
        return [*self.lasting(), *(finding.name for finding in self.buffers)]

    def lasting(self) -> list[str]:
        """Names of what putting the window's buffers back does not heal."""
        return [finding.name for finding in (*self.by_update, *self.before, *self.since)]


@dataclass
class StepView:
    """What blame is read from: the slots of the window and the rescans of the fault path.

    Attributes:
        owner_of: the clean name of the module that owns a parameter or buffer.
        sharers_of: names of all modules that hold a parameter, or took it as an argument.
        losses: the watched ones by (micro-batch, name).
        batch: non-finite batch items, with their path as name.
        damage: non-finite state.
        reduced: non-finite gradients after the reduce, by original parameter.
        hyper_parameters: bad numbers in the parameter groups.
        habits: what was non-finite in clean steps.
    """

    rank: int
    step: int
    readings: list[Reading]
    owner_of: Callable[[str], str]
    sharers_of: Callable[[str, list[Call]], list[str]]
    is_ignored: Callable[[str], bool]
    losses: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    batch: list[Finding] = field(default_factory=list)
    damage: Damage = field(default_factory=Damage)
    reduced: list[Finding] = field(default_factory=list)
    hyper_parameters: list[Finding] = field(default_factory=list)
    habits: frozenset[Habit] = frozenset()


class Kinds:
    """Which sightings are bad, and how, by the forward's slots."""

    def __init__(self, readings: list[Reading]) -> None:
        self._worst: dict[int, str] = {}
        self._read: set[int] = set()
        for reading in readings:
            if isinstance(reading.note, Sighting):
                self._add(reading.note, reading)

    def _add(self, sighting: Sighting, reading: Reading) -> None:
        self._read.add(id(sighting))
        kind = kind_of(reading.minimum, reading.maximum)
        if kind is not None:
            self._worst[id(sighting)] = worst([kind, self._worst.get(id(sighting), kind)]) or kind

    def of(self, sighting: Sighting) -> str | None:
        """The worst kind in a tensor, None where it was finite or not looked at."""
        return self._worst.get(id(sighting))

    def was_read(self, sighting: Sighting) -> bool:
        """Whether the tensor was looked at."""
        return id(sighting) in self._read or sighting.is_empty

    def worst_of(self, sightings: list[Sighting]) -> str | None:
        """The worst kind in several."""
        return worst(kind for sighting in sightings if (kind := self.of(sighting)) is not None)

    def contains(self, call: Call, kind: str) -> bool:
        """Whether the outputs of a call were looked at and hold nothing as bad as ``kind``; -inf is legal in masks."""
        read = [sighting for sighting in call.outputs if id(sighting) in self._read]
        found = self.worst_of(read)
        return bool(read) and (found is None or (found == "-inf" and kind != "-inf"))

    def was_clean(self, call: Call) -> bool:
        """Whether the outputs of a call were looked at and finite."""
        return self.contains(call, "-inf")


def worst(kinds: Iterable[str]) -> str | None:
    """The worst of several kinds, None of none."""
    return min(kinds, key=KINDS.index, default=None)
