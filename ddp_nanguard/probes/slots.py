"""Slots of the current step and the ring of the last steps, on the device.

A probe reduces one tensor into the next free slot, a (minimum, maximum) pair, and leaves a note beside it on the host
that says what was looked at. Slots lie in pages, one per device and dtype, because ``aminmax`` writes its result in the
dtype of its input. Nothing is read by the host until `SlotBuffer.readings`, which only the fault path calls.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ddp_nanguard.tensors.minmax import dense_parts, in_memory_order, is_plain

_FIRST_CAPACITY = 64
_aminmax = torch.aminmax
_T = TypeVar("_T")


class SlotRole(enum.IntEnum):
    """What a slot counts for in the verdict."""

    EVIDENCE = 0
    """Never a trigger."""
    OUTPUT = 1
    """Outputs of the root: with a scaler they tell a bad forward from an overflow. -inf is allowed (masked logits)."""
    LOSS = 2
    GRADIENT = 3
    STATE = 4
    """Parameters and optimizer state."""
    BUFFER = 5
    """Buffers, where -inf is allowed."""
    LEFT_OUT = 8
    """Gradients of parameters that no optimizer holds: no scaler looks at them."""
    NORM = 7
    """The gradient norm; only its size counts."""
    WARN = 6
    """Worth a warning, never a trigger; -inf is allowed."""


ONE_SIDED = frozenset({SlotRole.OUTPUT, SlotRole.BUFFER, SlotRole.WARN})
"""Where -inf is allowed: NaN and +inf are bad."""


class SlotStats(NamedTuple):
    """One slot on the host: execution order in the window, the note, the region and the two values."""

    order: int
    source: Any
    role: SlotRole
    minimum: float
    maximum: float


class SlotTable(NamedTuple):
    """Filled slots: values, shape (slots or more, 2), and beside each its execution order, region and note.

    Lists side by side and no object per slot, which the garbage collector would have to follow.
    """

    values: Tensor
    orders: list[int]
    roles: list[SlotRole]
    sources: list[Any]


class SlotPage:
    """Slots of one device and dtype, in the order in which they were filled; grows by doubling.

    Attributes:
        values: the slots, shape (capacity, 2).
        sources: of the slots in use.
        layout: changes whenever a slot gets another region than it had in the step before.
    """

    __slots__ = ("_orders", "_outs", "_ring", "_roles", "layout", "sources", "values")

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.values = torch.zeros(_FIRST_CAPACITY, 2, device=device, dtype=dtype)
        self.sources: list[Any] = []
        self.layout = 0
        self._orders: list[int] = []
        self._outs = _slot_views(self.values)
        self._roles: list[SlotRole] = []
        self._ring: dict[int, Tensor] = {}

    def reduce(self, plain: Tensor, order: int, role: SlotRole, source: Any) -> None:
        """One kernel."""
        sources, roles = self.sources, self._roles
        index = len(sources)
        if index == len(self._outs):
            self._grow()
        _aminmax(plain, out=self._outs[index])
        sources.append(source)
        self._orders.append(order)
        if index == len(roles):
            roles.append(role)
            self.layout += 1
        elif roles[index] is not role:
            roles[index] = role
            self.layout += 1

    def fill(self, values: Tensor, order: int, sources: list[Any]) -> None:
        """Slots that were filled elsewhere; a page holds such or its own."""
        first = len(self.sources)
        while first + len(values) > len(self.values):
            self._grow()
        self.values[first : first + len(values)].copy_(values)
        self.sources += sources
        self._orders += [order] * len(sources)
        self._roles = [SlotRole.EVIDENCE] * len(self.sources)

    def roles(self) -> list[SlotRole]:
        """Of the slots in use."""
        return self._roles[: len(self.sources)]

    def _grow(self) -> None:
        larger = torch.zeros(2 * len(self._outs), 2, device=self.values.device, dtype=self.values.dtype)
        larger[: len(self._outs)].copy_(self.values)
        self.values, self._outs = larger, _slot_views(larger)

    def slots(self) -> SlotTable:
        """Those in use."""
        return SlotTable(self.values, self._orders, self.roles(), self.sources)

    def push_history(self, turn: int) -> SlotTable:
        """Copy the used slots into place ``turn`` of the ring and start afresh."""
        used = len(self.sources)
        place = self._ring.get(turn)
        if place is None or len(place) < used:
            place = self._ring[turn] = torch.zeros_like(self.values)
        place[:used].copy_(self.values[:used])
        kept = self.slots()._replace(values=place)
        self.discard()
        return kept

    def discard(self) -> None:
        """Start afresh."""
        self.sources, self._orders = [], []


def _slot_views(values: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(row[0], row[1]) for row in values.unbind()]


class Meter(Protocol):
    """Times what it runs."""

    def run(self, probe: Callable[..., _T], *args: Any) -> _T:
        """Run a probe and add its time."""
        ...

    def count_hook(self) -> None:
        """Add the time of a hook that does next to nothing."""
        ...


@dataclass(frozen=True)
class PastStep:
    """Slots of a step with a clean verdict, still on the device."""

    step: int
    pages: tuple[SlotTable, ...]
    expand_compiled: Callable[[list[SlotStats]], list[SlotStats]]

    def slot_stats(self) -> list[SlotStats]:
        """The slots in execution order. Host sync: one per page."""
        return self.expand_compiled(_sorted_stats(self.pages))


class SlotBuffer:
    """All slots of the window now open, and those of the last ``history`` clean steps.

    Attributes:
        meter: times the probes in a step that is measured, see `probes.budget`.
        order: execution order of the last thing seen in the window.
        history: number of clean steps whose slots are kept.
        num_kept: clean steps so far.
        expand_compiled: makes readings like the others of those that compiled code left, see `probes.compiled`.

    Memory: 2 values per slot and step, on the device where the probed tensor lives.
    """

    def __init__(self, history: int) -> None:
        self._pages: dict[object, SlotPage] = {}
        self.expand_compiled: Callable[[list[SlotStats]], list[SlotStats]] = _as_they_are
        self.meter: Meter | None = None
        self.order = 0
        self.history = history
        self.num_kept = 0
        self._turn = 0
        self._past: dict[int, PastStep] = {}

    def reduce(self, role: SlotRole, tensor: Tensor, source: Any, order: int | None = None) -> int | None:
        """Reduce a tensor into the next slot; one kernel per dense part, no host read.

        Args:
            role: what the slot counts for.
            tensor: of any kind, shape and dtype.
            source: what the probe says of it.
            order: execution order of what is looked at later than it happened; default the next one.

        Returns:
            The execution order of the slot, or None where the kind of tensor cannot be checked. Tensors that hold
            nothing to check (integers, empty) take no slot and get an order all the same.
        """
        if order is None:
            self.order = order = self.order + 1
        if is_plain(tensor):
            page = self._pages.get((tensor.device, tensor.dtype)) or self._page(tensor)
            plain = tensor.detach() if tensor.requires_grad else tensor
            page.reduce(plain if plain.is_contiguous() else in_memory_order(plain), order, role, source)
            return order
        parts = dense_parts(tensor)
        if parts is None:
            return None
        for part in parts:
            self._page(part).reduce(part, order, role, source)
        return order

    def fill(self, values: Tensor, sources: list[Any]) -> None:
        """Take slots over that were filled elsewhere, as evidence; one copy.

        Args:
            values: float64, shape (slots, 2).
            sources: one per slot.
        """
        page = self._pages.get(values.device)
        if page is None:
            page = self._pages[values.device] = SlotPage(values.device, values.dtype)
        page.fill(values, self.order, sources)

    def _page(self, tensor: Tensor) -> SlotPage:
        key = (tensor.device, tensor.dtype)
        page = self._pages.get(key)
        if page is None:
            page = self._pages[key] = SlotPage(*key)
        return page

    def pages(self) -> list[SlotPage]:
        """Those in use."""
        return [page for page in self._pages.values() if page.sources]

    def slot_stats(self) -> list[SlotStats]:
        """The slots of the open window, in execution order. Host sync: one per page."""
        return self.expand_compiled(_sorted_stats(page.slots() for page in self._pages.values()))

    def push_history(self, step: int) -> PastStep:
        """Move the slots of a clean step into the ring; one device copy per page, no host read."""
        tables = tuple(page.push_history(self._turn) for page in self.pages())
        past = self._past[self._turn] = PastStep(step, tables, self.expand_compiled)
        self._turn = (self._turn + 1) % self.history
        self.num_kept += 1
        self.order = 0
        return past

    def drop_history(self, past: PastStep) -> None:
        """A step that was taken for clean is no longer one of the clean ones."""
        self._past = {turn: other for turn, other in self._past.items() if other is not past}

    def discard(self) -> None:
        """Forget the slots of the open window."""
        for page in self._pages.values():
            page.discard()
        self.order = 0

    def past(self) -> list[PastStep]:
        """The clean steps in the ring, oldest first."""
        return sorted(self._past.values(), key=lambda past: past.step)


def _sorted_stats(pages: Iterable[SlotTable]) -> list[SlotStats]:
    found = [
        SlotStats(order, source, role, low, high)
        for values, orders, roles, sources in pages
        for order, role, source, (low, high) in zip(
            orders, roles, sources, values[: len(sources)].tolist(), strict=True
        )
    ]
    return sorted(found, key=lambda stats: stats.order)


def _as_they_are(slot_stats: list[SlotStats]) -> list[SlotStats]:
    return slot_stats


def is_clean(stats: SlotStats) -> bool:
    """Whether a slot shows only finite values; -inf is allowed in buffers."""
    if stats.role in (SlotRole.BUFFER, SlotRole.WARN):
        return stats.maximum < math.inf
    return math.isfinite(stats.minimum) and math.isfinite(stats.maximum)
