"""What blame is read from, and the sort key that puts sites in causal order over all ranks."""

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
"""Stands for the end of the window in sort keys; micro-batches beyond it are sorted as if they were this one."""
# the widths of `RankedSite.key`: 61 bits with its two flags, so that an int64 MIN all-reduce can carry it
_ORDER_BITS, _PHASE_BITS, _MICRO_BATCH_BITS, _RANK_BITS = 20, 3, 16, 20


@dataclass(frozen=True)
class RankedSite:
    """A site with what sorts it, see [Note: causal order].

    Attributes:
        low_confidence: whether it comes after all others: -inf alone, or known non-finite in clean steps.
        order_key: micro-batch for sorting; -1 before the first one, `LAST_MICRO_BATCH` after the last.
    """

    site: Site
    low_confidence: bool = False
    order_key: int = -1

    def key(self, rank: int, this_step: int) -> int:
        """The causal order as one non-negative 61-bit integer, so that a MIN over ranks finds the earliest.

        Args:
            rank: index of this rank in the group; breaks ties.
            this_step: the step of the fault; a site of the step before it (a bad update) comes first.
        """
        key = int(self.low_confidence)
        key = key << 1 | int(self.site.step == this_step)
        key = key << _MICRO_BATCH_BITS | min(self.order_key + 1, LAST_MICRO_BATCH + 1)
        key = key << _PHASE_BITS | self.site.phase.causal_rank
        key = key << _ORDER_BITS | min(self.site.order, (1 << _ORDER_BITS) - 1)
        return key << _RANK_BITS | rank


@dataclass(frozen=True)
class NonFiniteTensor:
    """One tensor that a rescan found non-finite: a batch item, a gradient, or a parameter, buffer or optimizer state.

    Attributes:
        name: clean name, or the path in the batch, such as ``["image"]``.
        kind: the worst one in it: ``nan``, ``inf`` or ``-inf``.
        evidence: counts and shape; None for numbers that are no tensor, and where the tensor is gone.
        micro_batch: index in the step; None outside of a batch.
        tensor: the batch item itself, to be compared with the root's inputs by identity; else None.
    """

    name: str
    kind: str
    evidence: Evidence | None
    micro_batch: int | None = None
    tensor: Tensor | None = field(default=None, compare=False, repr=False)


@dataclass
class NonFiniteState:
    """State that is non-finite now, by when it became so.

    Attributes:
        by_update: by the last update.
        before: before the window, though not by the last update; or it was never looked at.
        since: in the window: it was looked at and clean when the window began.
        buffers: buffers that the window's forwards made non-finite; they can be put back from their copies.
    """

    by_update: list[NonFiniteTensor] = field(default_factory=list)
    before: list[NonFiniteTensor] = field(default_factory=list)
    since: list[NonFiniteTensor] = field(default_factory=list)
    buffers: list[NonFiniteTensor] = field(default_factory=list)

    def names(self) -> list[str]:
        """Names of everything that is bad now."""
        return [*self.lasting(), *(bad_tensor.name for bad_tensor in self.buffers)]

    def lasting(self) -> list[str]:
        """Names of what stays bad when the window's buffers are put back."""
        return [bad_tensor.name for bad_tensor in (*self.by_update, *self.before, *self.since)]


@dataclass
class BlameInput:
    """What blame is read from: the slots of the window and the rescans of the fault path.

    Attributes:
        rank: this one.
        step: of the fault.
        slot_stats: the slots of the step in execution order, those of compiled code expanded.
        owner_of: maps a parameter or buffer name to the clean name of the module that owns it.
        sharers_of: maps a parameter name, with the calls of the step, to all modules that hold or took it.
        is_ignored: whether a layer or parameter is never to be blamed.
        losses: the watched losses by (micro-batch, name).
        batch: non-finite batch items, with their path as name.
        nonfinite_state: parameters, buffers and optimizer state that are bad now.
        reduced: non-finite gradients after the reduce, by original parameter.
        changed: gradients that were finite after the backward and non-finite at the update, by original parameter.
        hyper_parameters: bad numbers in the parameter groups.
        known_nonfinite: what was non-finite in clean steps, which only gives sites of low confidence.
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
    changed: list[NonFiniteTensor] = field(default_factory=list)
    hyper_parameters: list[NonFiniteTensor] = field(default_factory=list)
    known_nonfinite: frozenset[KnownNonFinite] = frozenset()


class WorstKinds:
    """The worst kind in each recorded tensor, by the slots of the forward.

    Args:
        slot_stats: of one step; slots that are not of the forward are skipped.
    """

    def __init__(self, slot_stats: list[SlotStats]) -> None:
        # by identity of the record; a tensor has several slots where it has several dense parts, or is the root's
        # output
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
        """Whether the tensor was looked at, or had no element to look at."""
        return id(record) in self._read or record.is_empty

    def worst_of(self, records: list[TensorRecord]) -> str | None:
        """The worst kind among several tensors; None where all were finite or not looked at."""
        return worst(kind for record in records if (kind := self.of(record)) is not None)

    def masks(self, call: ModuleCall, kind: str) -> bool:
        """Whether the outputs of a call show that a bad value inside it never left it.

        They must have been looked at, and be finite; -inf alone, legal in masks, does for a ``kind`` that is worse.
        """
        read = [record for record in call.outputs if id(record) in self._read]
        found = self.worst_of(read)
        return bool(read) and (found is None or (found == "-inf" and kind != "-inf"))

    def was_clean(self, call: ModuleCall) -> bool:
        """Whether the outputs of a call were looked at and finite."""
        return self.masks(call, "-inf")


def worst(kinds: Iterable[str]) -> str | None:
    """The worst of several kinds (NaN, then +inf, then -inf); None of none."""
    return min(kinds, key=KINDS.index, default=None)
