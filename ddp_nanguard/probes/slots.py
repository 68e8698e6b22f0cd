"""Slots of the current step and the ring of the last steps, on the device.

A probe reduces one tensor into the next free slot, a (minimum, maximum) pair, and leaves a source beside it on the host
that says what was looked at; slots of screens (`screens`) hold one number, a norm. Slots lie in pages (`slot_pages`),
one per device and dtype. The host reads nothing until `SlotBuffer.slot_stats`, which is for the fault path.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_nanguard.tensors.accelerator import StreamMark, is_capturing
from ddp_nanguard.tensors.minmax import arrived, compact, dense_parts, is_plain

from .slot_pages import SlotGroup, SlotPage, SlotTable
from .slot_roles import SlotRole

_CPU = torch.device("cpu")
_UNAWAITED = (SlotRole.EVIDENCE, SlotRole.OUTPUT)


class SlotStats(NamedTuple):
    """One slot, read by the host.

    Attributes:
        order: execution order in the window, from 1.
        source: what it was taken from: a `TensorRecord`, a `GradientHook`, or one of the dataclasses ``...Source``.
        role: what it counts for.
        minimum, maximum: over all elements; NaN if any element is. Of a screen its norm, negated and as it is: no
            element is beyond these, and they are non-finite whenever an element is.
        is_screen: whether it is a norm, which finite elements can overflow.
        kind: device and dtype of its numbers; of a minimum and maximum also those of what was looked at. None where
            that is not known: in compiled code.
    """

    order: int
    source: Any
    role: SlotRole
    minimum: float
    maximum: float
    is_screen: bool = False
    kind: tuple[torch.device, torch.dtype] | None = None

    @property
    def is_euclidean(self) -> bool:
        """Whether it is a 2-norm: on an accelerator a screen is the largest element, see [Note: screens]."""
        return self.is_screen and self.kind is not None and self.kind[0].type == "cpu"


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
        device: on which the model computes.

    Attributes:
        order: execution order of the last tensor that a probe has met in the window; 0 before the first.
        num_kept: number of steps that went into the ring since the beginning.
        expand_compiled: turns slots that compiled code filled into slots of calls, see `probes.compiled_calls`.

    Memory: at most 2 values per slot and step, on the device where the probed tensor lives.
    """

    def __init__(self, history: int, exact: bool = False, device: torch.device = _CPU) -> None:
        self.exact = exact
        self._device = device
        # - where the stream was when this rank's own gradients had been looked at, in the last step that had any
        self._mark: StreamMark | None = None
        self._marked_order = 0
        # - The open window: pages by (device, dtype); by device alone for slots that compiled code filled: those are
        # float64 whatever the dtype of what they saw
        self._pages: dict[object, SlotPage] = {}
        self.order = 0

        # - Set from outside: most jobs compile nothing
        self.expand_compiled: Callable[[list[SlotStats]], list[SlotStats]] = _as_they_are

        # - The ring of clean steps: a step takes the position of the one that is `history` steps older
        self.history = history
        self.num_kept = 0
        self._turn = 0
        self._past: dict[int, PastStep] = {}

    def mark(self) -> None:
        """Note that what was launched so far is what `finished_up_to` may be asked about; one event, none on a CPU."""
        if self._device.type != "cpu":
            self._mark, self._marked_order = StreamMark(self._device), self.order

    def finished_up_to(self, within_s: float, others: Sequence[torch.device] = ()) -> int | None:
        """The execution order up to which slots have been written for sure; None: all of them.

        For a rank whose stream may wait for a peer that never comes. Host sync: none; it looks for up to ``within_s``.

        Args:
            within_s: how long a stream is given to end its work.
            others: further devices of the model, of which no mark is kept: nothing is known of slots while one is busy.
        """
        if self._device.type == "cpu":
            return None
        mark = self._mark or StreamMark(self._device)
        are_idle = all(StreamMark(other).is_idle(within_s) for other in others if other.type != "cpu")
        if are_idle and mark.is_idle(within_s):
            return None
        return self._marked_order if are_idle and mark.is_reached() else 0

    def is_capturing(self) -> bool:
        """Whether a graph is being captured: what is launched now would run again in every replay."""
        return is_capturing(self._device)

    def reduce(self, role: SlotRole, tensor: Tensor, source: Any, order: int | None = None) -> int | None:
        """Reduce a tensor into the next slot; one kernel per dense part, no host read.

        Args:
            role: what the slot counts for.
            tensor: of any kind, shape and dtype.
            source: what the tensor is, for blame and reports.
            order: execution order of a tensor that is looked at later than it came up; default the next one.

        Returns:
            The execution order of the slot, or None where the kind of tensor cannot be checked. Tensors that hold
            nothing to check (integers, empty) take no slot and get an order all the same, and so do all while a graph
            is being captured: a replay would write to a slot that stands for something else by then.
        """
        if order is None:
            self.order = order = self.order + 1
        if is_plain(tensor):
            page = self._pages.get((tensor.device, tensor.dtype)) or self.page(tensor.device, tensor.dtype)
            plain = tensor.detach() if tensor.requires_grad else tensor
            self._reduce(page, plain if plain.is_contiguous() else compact(plain), order, role, source)
            return order
        # evidence is not worth a wait: what uses it is looked at, once that has waited
        parts = dense_parts(tensor if role in _UNAWAITED else arrived(tensor))
        if parts is None:
            return None
        for part in parts:
            self._reduce(self.page(part.device, part.dtype), part, order, role, source)
        return order

    def _reduce(self, page: SlotPage, plain: Tensor, order: int, role: SlotRole, source: Any) -> None:
        if page.is_on_cpu or not is_capturing(page.kind[0]):
            (page.evidence if role is SlotRole.EVIDENCE else page.judged).reduce(plain, order, role, source)

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
        """Take over norms that were made elsewhere, shape (slots,), as screens; no host read, no kernel."""
        group = SlotGroup(range(self.order + 1, self.order + 1 + len(sources)), None, roles, sources)
        self.page(norms.device, norms.dtype).take_norms([norms], group)
        self.order += len(sources)

    def page(self, device: torch.device, dtype: torch.dtype) -> SlotPage:
        """The page for numbers of this dtype, made where there is none."""
        page = self._pages.get((device, dtype))
        if page is None:
            page = self._pages[device, dtype] = SlotPage(device, dtype)
        return page

    def pages(self) -> list[SlotPage]:
        """The pages that have slots in use."""
        return [page for page in self._pages.values() if not page.is_empty]

    def slot_stats(self) -> list[SlotStats]:
        """The slots of the open window, in execution order. Host sync: one per page."""
        return self.expand_compiled(_sorted_stats(page.table() for page in self.pages()))

    def push_history(self, step: int) -> PastStep:
        """Move the slots of a clean step into the ring; no host read."""
        tables = tuple(page.push_history(self._turn) for page in self.pages())
        past = self._past[self._turn] = PastStep(step, tables, self.expand_compiled)
        self._turn = (self._turn + 1) % self.history
        self.num_kept += 1
        self.order = self._marked_order = 0
        return past

    def drop_history(self, past: PastStep) -> None:
        """Take a step out of the ring that was held for clean until its deferred verdict came."""
        self._past = {turn: other for turn, other in self._past.items() if other is not past}

    def discard(self) -> None:
        """Forget the slots of the open window, as after a fault; the ring stays."""
        for page in self._pages.values():
            page.discard()
        self.order = self._marked_order = 0

    def past(self) -> list[PastStep]:
        """The clean steps in the ring, oldest first."""
        return sorted(self._past.values(), key=lambda past: past.step)


def _sorted_stats(pages: Iterable[SlotTable]) -> list[SlotStats]:
    return sorted(
        (stats for page in pages for stats in _stats(page, page.values.tolist())), key=lambda stats: stats.order
    )


def stats_together(tables: Sequence[SlotTable], more: Sequence[Tensor] = ()) -> tuple[list[SlotStats], list[float]]:
    """The slots of several tables in execution order, and further numbers of shape (), by one read of each device.

    Host sync: one per accelerator; one per table on a device that has no float64.
    """
    values = [table.values for table in tables] + [number.detach().view(1) for number in more]
    rows = _read(values)
    found = [stats for table, row in zip(tables, rows, strict=False) for stats in _stats(table, row)]
    return sorted(found, key=lambda stats: stats.order), [number for row in rows[len(tables) :] for number in row]


def _read(values: list[Tensor]) -> list[list[float]]:
    """Each tensor of shape (numbers,) as a list."""
    rows: dict[int, list[float]] = {}
    for device in {tensor.device for tensor in values}:
        indices = [index for index, tensor in enumerate(values) if tensor.device == device]
        rows |= zip(indices, _read_together([values[index] for index in indices]), strict=True)
    return [rows[index] for index in range(len(values))]


def _read_together(values: list[Tensor]) -> list[list[float]]:
    if len(values) < 2:
        return [tensor.tolist() for tensor in values]
    try:
        together = torch.cat([tensor.to(torch.float64) for tensor in values]).tolist()
    except TypeError:  # what a device says that has no float64
        return [tensor.tolist() for tensor in values]
    ends = itertools.accumulate(map(len, values), initial=0)
    return [together[start:end] for start, end in itertools.pairwise(ends)]


def _stats(table: SlotTable, row: list[float]) -> Iterator[SlotStats]:
    numbers, kind = iter(row), (table.values.device, table.values.dtype)
    for group in table.groups:
        for order, role, source in group.in_slots():
            first = next(numbers)
            if group.width == 2:
                yield SlotStats(order, source, role, first, next(numbers), False, kind)
            else:
                yield SlotStats(order, source, role, -first, first, True, kind)


def _as_they_are(slot_stats: list[SlotStats]) -> list[SlotStats]:
    return slot_stats


def is_clean(stats: SlotStats) -> bool:
    """Whether a slot shows only finite values; -inf is allowed in buffers."""
    if stats.role is SlotRole.OPEN:
        return not math.isnan(stats.maximum)
    if stats.role in (SlotRole.BUFFER, SlotRole.WARN):
        return stats.maximum < math.inf
    return math.isfinite(stats.minimum) and math.isfinite(stats.maximum)
