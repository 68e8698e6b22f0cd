"""Slots of the current step and the ring of the last steps, on the device.

A probe reduces one tensor into the next free slot, a (minimum, maximum) pair, and leaves a source beside it on the host
that says what was looked at. Slots lie in pages, one per device and dtype, because ``aminmax`` writes its result in the
dtype of its input. Slots of screens (`screens`) hold one number, a norm, and lie in pages of their own. The host reads
nothing until `SlotBuffer.slot_stats`, which is for the fault path.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ddp_nanguard.tensors.minmax import dense_parts, in_memory_order, is_plain

_FIRST_CAPACITY = 64  # slots of a new page; it doubles when full, so this bounds nothing
_aminmax = torch.aminmax


class SlotRole(enum.IntEnum):
    """What a slot counts for in the verdict."""

    EVIDENCE = 0
    """Never a trigger: what blame reads, such as activations and their gradients."""
    OUTPUT = 1
    """Outputs of the root: under a scaler they tell a bad forward from an overflow. -inf is allowed (masked logits)."""
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
    OPEN = 9
    """State that is infinite on purpose: only NaN is bad."""


ONE_SIDED = frozenset({SlotRole.OUTPUT, SlotRole.BUFFER, SlotRole.WARN})
"""Roles in which -inf is allowed: only NaN and +inf are bad."""


class SlotStats(NamedTuple):
    """One slot, read by the host.

    Attributes:
        order: execution order in the window, from 1.
        source: what it was taken from: a `TensorRecord`, a `GradientHook`, or one of the dataclasses ``...Source``.
        role: what it counts for.
        minimum, maximum: over all elements; NaN if any element is. Of a screen its norm, negated and as it is: no
            element is beyond these, and they are non-finite whenever an element is.
        is_screen: whether it is a norm, which finite elements can overflow.
    """

    order: int
    source: Any
    role: SlotRole
    minimum: float
    maximum: float
    is_screen: bool = False


class SlotGroup(NamedTuple):
    """What lies in slots that follow each other; no object per slot, which the garbage collector would have to follow.

    Attributes:
        orders: execution orders.
        picked: the positions in ``orders`` of these slots; None: ``orders`` has one for each.
        roles, sources: one per slot.
    """

    orders: Sequence[int]
    picked: Sequence[int] | None
    roles: list[SlotRole]
    sources: list[Any]

    def in_slots(self) -> Iterable[tuple[int, SlotRole, Any]]:
        """Order, role and source of each slot."""
        orders = self.orders if self.picked is None else [self.orders[index] for index in self.picked]
        return zip(orders, self.roles, self.sources, strict=True)


class SlotTable(NamedTuple):
    """Filled slots, still on the device: values, shape (slots or more, 2 or 1), and what lies in them."""

    values: Tensor
    groups: list[SlotGroup]


class SlotPage:
    """Slots of one device and dtype, in the order in which they were filled; grows by doubling.

    Args:
        device: of the tensors that are reduced into it.
        dtype: of these tensors, and so of the slots.

    Attributes:
        values: the slots, shape (capacity, width): minimum and maximum, or of a `ScreenPage` one number.
        used: number of slots in use.
        kind: device and dtype.
        layout: a number that changes whenever a slot gets another role than it had in the step before.
    """

    __slots__ = (
        "_firsts",
        "_orders",
        "_outs",
        "_ranges",
        "_ring",
        "_roles",
        "_sources",
        "kind",
        "layout",
        "used",
        "values",
    )
    width: ClassVar[int] = 2

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        # - Slots in use. New lists after each step, since the ring keeps the old ones
        self.kind = (device, dtype)
        self.used = 0
        self._sources: list[Any] = []
        self._orders: list[int] = []

        # - Made once, not per step: views into `values`, and the roles, which are mostly those of the step before.
        # `layout` lets `SeverityReducer` see that they are not, without comparing them
        self._use(torch.zeros(_FIRST_CAPACITY, self.width, device=device, dtype=dtype))
        self._roles: list[SlotRole] = []
        self.layout = 0

        # - Values of earlier steps by their position in the ring
        self._ring: dict[int, Tensor] = {}

    def _use(self, values: Tensor) -> None:
        """Take this memory; views into it are made when they are first needed: each slot, the first ones, a range."""
        self.values = values
        self._outs: list[tuple[Tensor, Tensor]] = []
        self._firsts: dict[int, Tensor] = {}
        self._ranges: dict[tuple[int, int], Tensor] = {}

    def reduce(self, plain: Tensor, order: int, role: SlotRole, source: Any) -> None:
        """Reduce a tensor into the next slot: one kernel, no host read, no temporary of the tensor's size.

        Args:
            plain: dense, not empty, of the page's device and dtype, without grad.
            order: execution order.
            role: what the slot counts for.
            source: what the tensor is.
        """
        roles, index = self._roles, self.used
        if index == len(self._outs):
            self._add_out(index)
        _aminmax(plain, out=self._outs[index])
        self.used = index + 1
        self._sources.append(source)
        self._orders.append(order)
        if index == len(roles):
            roles.append(role)
            self.layout += 1
        elif roles[index] is not role:
            roles[index] = role
            self.layout += 1

    def fill(self, values: Tensor, order: int, sources: list[Any]) -> None:
        """Take over slots that were filled elsewhere, as evidence; one copy.

        A page holds slots of this kind or reduces its own, never both: the roles of all are overwritten here.

        Args:
            values: shape (slots, 2).
            order: execution order, the same for all.
            sources: one per slot.
        """
        first = self.used
        while first + len(values) > len(self.values):
            self._grow()
        self.values[first : first + len(values)].copy_(values)
        self.used += len(sources)
        self._sources += sources
        self._orders += [order] * len(sources)
        self._roles = [SlotRole.EVIDENCE] * self.used

    def filled(self) -> Tensor:
        """The slots in use, shape (used * width,): a view that is made once."""
        found = self._firsts.get(self.used)
        if found is None:
            found = self._firsts[self.used] = self.values.view(-1)[: self.used * self.width]
        return found

    def roles(self) -> list[SlotRole]:
        """The role of each slot in use."""
        return self._roles[: self.used]

    def _add_out(self, index: int) -> None:
        if index == len(self.values):
            self._grow()
        self._outs += [(row[0], row[1]) for row in self.values[len(self._outs) : index + 1].unbind()]

    def _grow(self) -> None:
        larger = self.values.new_zeros(2 * len(self.values), self.width)
        larger[: len(self.values)].copy_(self.values)
        self._use(larger)

    def slots(self) -> SlotTable:
        """The slots in use; ``values`` is not copied and is overwritten by the next step."""
        return SlotTable(self.values, self._groups())

    def _groups(self) -> list[SlotGroup]:
        return [SlotGroup(self._orders, None, self.roles(), self._sources)]

    def push_history(self, turn: int) -> SlotTable:
        """Copy the slots in use to position ``turn`` of the ring and empty the page; one device copy."""
        table = SlotTable(self._copied(turn).view(-1, self.width), self._groups())
        self.discard()
        return table

    def _copied(self, turn: int) -> Tensor:
        """A copy of the values in use. Handing the memory over instead would make each step begin in cold memory."""
        filled = self.filled()
        copied = self._ring.get(turn)
        if copied is None or len(copied) != len(filled):
            copied = self._ring[turn] = torch.zeros_like(
                filled
            )  # kept from round to round: a steady loop allocates none
        copied.copy_(filled)
        return copied

    def discard(self) -> None:
        """Empty the page; its memory and the roles of its slots stay for the next step."""
        self.used = 0
        self._sources, self._orders = [], []


class ScreenPage(SlotPage):
    """Slots of screens: one number each, written by the caller."""

    __slots__ = ("_last_roles", "_screens")
    width: ClassVar[int] = 1

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        # - Groups in use, and the roles of those of the step before. A screen hands in the same list in each step, so
        # that no step has to compare them one by one
        self._screens: list[SlotGroup] = []
        self._last_roles: list[list[SlotRole]] = []

    def reserve(self, count: int) -> Tensor:
        """The next slots, shape (count,), for the caller to write into; then `take` them."""
        found = self._ranges.get((self.used, count))
        if found is None:
            while self.used + count > len(self.values):
                self._grow()
            found = self._ranges[self.used, count] = self.values.view(-1)[self.used : self.used + count]
        return found

    def take(self, group: SlotGroup) -> None:
        """Put the slots that `reserve` gave in use."""
        index, roles, last = len(self._screens), group.roles, self._last_roles
        self._screens.append(group)
        self.used += len(roles)
        if index == len(last):
            last.append(roles)
            self.layout += 1
        elif last[index] is not roles:
            self.layout += len(last[index]) != len(roles) or last[index] != roles
            last[index] = roles

    def roles(self) -> list[SlotRole]:
        """The role of each slot in use."""
        return [role for group in self._screens for role in group.roles]

    def _groups(self) -> list[SlotGroup]:
        return self._screens

    def discard(self) -> None:
        """As of any page."""
        self.used, self._screens = 0, []


@dataclass(frozen=True)
class PastStep:
    """Slots of a step with a clean verdict, still on the device.

    Attributes:
        step: its number.
        pages: its slots, one table per page.
        expand_compiled: that of the `SlotBuffer`.
    """

    step: int
    pages: tuple[SlotTable, ...]
    expand_compiled: Callable[[list[SlotStats]], list[SlotStats]]

    def slot_stats(self) -> list[SlotStats]:
        """The slots of the step in execution order. Host sync: one per page."""
        return self.expand_compiled(_sorted_stats(self.pages))


class SlotBuffer:
    """All slots of the window now open, and those of the last ``history`` clean steps.

    Args:
        history: number of clean steps whose slots are kept, at least 1.
        exact: whether no screen may overflow on finite elements, see `screens`.

    Attributes:
        order: execution order of the last tensor that a probe has met in the window; 0 before the first.
        num_kept: number of steps that went into the ring since the beginning.
        expand_compiled: turns slots that compiled code filled into slots of calls, see `probes.compiled_calls`.

    Memory: at most 2 values per slot and step, on the device where the probed tensor lives.
    """

    def __init__(self, history: int, exact: bool = False) -> None:
        self.exact = exact
        # - The open window: pages by (device, dtype), and with "screen" those of screens; by device alone for slots
        # that compiled code filled: those are float64 whatever the dtype of what they saw
        self._pages: dict[object, SlotPage] = {}
        self._screen_pages: dict[tuple[torch.device, torch.dtype], ScreenPage] = {}
        self.order = 0

        # - Set from outside: most jobs compile nothing
        self.expand_compiled: Callable[[list[SlotStats]], list[SlotStats]] = _as_they_are

        # - The ring of clean steps: a step takes the position of the one that is `history` steps older
        self.history = history
        self.num_kept = 0
        self._turn = 0
        self._past: dict[int, PastStep] = {}

    def reduce(self, role: SlotRole, tensor: Tensor, source: Any, order: int | None = None) -> int | None:
        """Reduce a tensor into the next slot; one kernel per dense part, no host read.

        Args:
            role: what the slot counts for.
            tensor: of any kind, shape and dtype.
            source: what the tensor is, for blame and reports.
            order: execution order of a tensor that is looked at later than it came up; default the next one.

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
        """Take over slots that were filled elsewhere, as evidence; one copy, no host read.

        Args:
            values: float64, shape (slots, 2).
            sources: one per slot.
        """
        page = self._pages.get(values.device)
        if page is None:
            page = self._pages[values.device] = SlotPage(values.device, values.dtype)
        page.fill(values, self.order, sources)

    def take_norms(self, norms: Tensor, roles: list[SlotRole], sources: list[Any]) -> None:
        """Take over norms that were made elsewhere, shape (slots,), as screens; one copy, no host read."""
        page = self.screen_page(norms.device, norms.dtype)
        page.reserve(len(sources)).copy_(norms)
        page.take(SlotGroup(range(self.order + 1, self.order + 1 + len(sources)), None, roles, sources))
        self.order += len(sources)

    def screen_page(self, device: torch.device, dtype: torch.dtype) -> ScreenPage:
        """The page for norms of this dtype."""
        key = (device, dtype)
        page = self._screen_pages.get(key)
        if page is None:
            page = self._pages[key, "screen"] = self._screen_pages[key] = ScreenPage(device, dtype)
        return page

    def _page(self, tensor: Tensor) -> SlotPage:
        key = (tensor.device, tensor.dtype)
        page = self._pages.get(key)
        if page is None:
            page = self._pages[key] = SlotPage(*key)
        return page

    def pages(self) -> list[SlotPage]:
        """The pages that have slots in use."""
        return [page for page in self._pages.values() if page.used]

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
        """Take a step out of the ring that was held for clean until its deferred verdict came."""
        self._past = {turn: other for turn, other in self._past.items() if other is not past}

    def discard(self) -> None:
        """Forget the slots of the open window, as after a fault; the ring stays."""
        for page in self._pages.values():
            page.discard()
        self.order = 0

    def past(self) -> list[PastStep]:
        """The clean steps in the ring, oldest first."""
        return sorted(self._past.values(), key=lambda past: past.step)


def _sorted_stats(pages: Iterable[SlotTable]) -> list[SlotStats]:
    return sorted((stats for page in pages for stats in _stats(page)), key=lambda stats: stats.order)


def _stats(page: SlotTable) -> Iterator[SlotStats]:
    slots = [slot for group in page.groups for slot in group.in_slots()]
    for (order, role, source), numbers in zip(slots, page.values[: len(slots)].tolist(), strict=True):
        yield SlotStats(order, source, role, *(numbers if len(numbers) == 2 else (-numbers[0], numbers[0], True)))


def _as_they_are(slot_stats: list[SlotStats]) -> list[SlotStats]:
    return slot_stats


def is_clean(stats: SlotStats) -> bool:
    """Whether a slot shows only finite values; -inf is allowed in buffers."""
    if stats.role is SlotRole.OPEN:
        return not math.isnan(stats.maximum)
    if stats.role in (SlotRole.BUFFER, SlotRole.WARN):
        return stats.maximum < math.inf
    return math.isfinite(stats.minimum) and math.isfinite(stats.maximum)
