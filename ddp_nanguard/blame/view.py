"""What blame is read from, and a site with what sorts it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from ddp_nanguard.probes.calls import ModuleCall, TensorRecord
from ddp_nanguard.probes.slots import SlotStats
from ddp_nanguard.probes.sources import KnownNonFinite
from ddp_nanguard.report.types import KINDS, Evidence, Site
from ddp_nanguard.tensors.minmax import kind_of

LAST_MICRO_BATCH = (1 << 15) - 1
_ORDER_BITS, _PHASE_BITS, _MICRO_BATCH_BITS, _RANK_BITS = 22, 3, 16, 18


@dataclass(frozen=True)
class RankedSite:
    """A site with what sorts it: ``weak`` ones come after all others."""

    site: Site
    low_confidence: bool = False
    order_key: int = -1
    """Micro-batch for sorting: -1 before the first one, `LAST_MICRO_BATCH` after the last."""

    def key(self, rank: int, this_step: int) -> int:
        """The causal order as one non-negative 61-bit integer, so that a MIN over ranks finds the earliest."""
        key = int(self.low_confidence)
        key = key << 1 | int(self.site.step == this_step)
        key = key << _MICRO_BATCH_BITS | min(self.order_key + 1, LAST_MICRO_BATCH + 1)
        key = key << _PHASE_BITS | self.site.phase.causal_rank
        key = key << _ORDER_BITS | min(self.site.order, (1 << _ORDER_BITS) - 1)
        return key << _RANK_BITS | rank


@dataclass(frozen=True)
class NonFiniteTensor:
    """One tensor that a rescan found non-finite: a batch item or a piece of state."""

    name: str
    kind: str
    evidence: Evidence | None
    micro_batch: int | None = None
    tensor: Tensor | None = field(default=None, compare=False, repr=False)


@dataclass
class NonFiniteState:
    """State that is non-finite now, by when it became so.

    Attributes:
        by_update: since the last update.
        before: before the window, not by the last update, or never looked at before.
        since: looked at and clean when the window began.
        buffers: buffers that the window's forwards have spoilt; they can be put back.
    """

    by_update: list[NonFiniteTensor] = field(default_factory=list)
    before: list[NonFiniteTensor] = field(default_factory=list)
    since: list[NonFiniteTensor] = field(default_factory=list)
    buffers: list[NonFiniteTensor] = field(default_factory=list)

    def names(self) -> list[str]:
        """Names of everything that is bad now."""
        return [*self.lasting(), *(bad_tensor.name for bad_tensor in self.buffers)]

    def lasting(self) -> list[str]:
        """Names of what putting the window's buffers back does not heal."""
        return [bad_tensor.name for bad_tensor in (*self.by_update, *self.before, *self.since)]


@dataclass
class BlameInput:
    """What blame is read from: the slots of the window and the rescans of the fault path.

    Attributes:
        owner_of: the clean name of the module that owns a parameter or buffer.
        sharers_of: names of all modules that hold a parameter, or took it as an argument.
        losses: the watched ones by (micro-batch, name).
        batch: non-finite batch items, with their path as name.
        nonfinite_state: non-finite state.
        reduced: non-finite gradients after the reduce, by original parameter.
        hyper_parameters: bad numbers in the parameter groups.
        known_nonfinite: what was non-finite in clean steps.
    """

    rank: int
    step: int
    slot_stats: list[SlotStats]
    owner_of: Callable[[str], str]
    sharers_of: Callable[[str, list[ModuleCall]], list[str]]
    is_ignored: Callable[[str], bool]
    losses: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    batch: list[NonFiniteTensor] = field(default_factory=list)
    nonfinite_state: NonFiniteState = field(default_factory=NonFiniteState)
    reduced: list[NonFiniteTensor] = field(default_factory=list)
    hyper_parameters: list[NonFiniteTensor] = field(default_factory=list)
    known_nonfinite: frozenset[KnownNonFinite] = frozenset()


class WorstKinds:
    """Which sightings are bad, and how, by the forward's slots."""

    def __init__(self, slot_stats: list[SlotStats]) -> None:
        self._worst: dict[int, str] = {}
        self._read: set[int] = set()
        for stats in slot_stats:
            if isinstance(stats.source, TensorRecord):
                self._add(stats.source, stats)

    def _add(self, record: TensorRecord, stats: SlotStats) -> None:
        self._read.add(id(record))
        kind = kind_of(stats.minimum, stats.maximum)
        if kind is not None:
            self._worst[id(record)] = worst([kind, self._worst.get(id(record), kind)]) or kind

    def of(self, record: TensorRecord) -> str | None:
        """The worst kind in a tensor, None where it was finite or not looked at."""
        return self._worst.get(id(record))

    def was_read(self, record: TensorRecord) -> bool:
        """Whether the tensor was looked at."""
        return id(record) in self._read or record.is_empty

    def worst_of(self, records: list[TensorRecord]) -> str | None:
        """The worst kind in several."""
        return worst(kind for record in records if (kind := self.of(record)) is not None)

    def masks(self, call: ModuleCall, kind: str) -> bool:
        """Whether the outputs of a call were looked at and hold nothing as bad as ``kind``; -inf is legal in masks."""
        read = [record for record in call.outputs if id(record) in self._read]
        found = self.worst_of(read)
        return bool(read) and (found is None or (found == "-inf" and kind != "-inf"))

    def was_clean(self, call: ModuleCall) -> bool:
        """Whether the outputs of a call were looked at and finite."""
        return self.masks(call, "-inf")


def worst(kinds: Iterable[str]) -> str | None:
    """The worst of several kinds, None of none."""
    return min(kinds, key=KINDS.index, default=None)
