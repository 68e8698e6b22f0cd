"""Memory of slots: the numbers of one window on one device and of one dtype, and those of the last clean steps.

[Note: one copy of all]
Numbers are left where their kernel has written them until the verdict. Then one kernel puts all of a page into a row,
from which the verdict is reduced; where that is clean, the row becomes the step's place in the ring. So the ring costs
no copy of its own. Memory that a kernel may still write to is neither moved nor freed while the guard lives: a hook can
run on another stream than the one on which the memory would be given back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .slot_roles import SlotRole

_CHUNK = 64  # slots of the first piece of memory; each further one has as many as all before it
_aminmax = torch.aminmax


class SlotGroup(NamedTuple):
    """What lies in slots that follow each other; no object per slot, which the garbage collector would have to follow.

    Attributes:
        orders: execution orders.
        picked: the positions in ``orders`` of these slots; None: ``orders`` has one for each.
        roles, sources: one per slot.
        width: numbers per slot: minimum and maximum, or a norm alone.
    """

    orders: Sequence[int]
    picked: Sequence[int] | None
    roles: list[SlotRole]
    sources: list[Any]
    width: int = 1

    def in_slots(self) -> Iterable[tuple[int, SlotRole, Any]]:
        """Order, role and source of each slot."""
        orders = self.orders if self.picked is None else [self.orders[index] for index in self.picked]
        return zip(orders, self.roles, self.sources, strict=True)


class SlotTable(NamedTuple):
    """Filled slots, still on the device: all their numbers in a row, shape (numbers,), and what lies in them."""

    values: Tensor
    groups: list[SlotGroup]


class MinMaxSlots:
    """Minima and maxima of tensors, in the order in which these were looked at.

    Args:
        device: of the tensors.
        dtype: of the tensors, and so of the slots, because ``aminmax`` writes its result in the dtype of its input.

    Attributes:
        used: number of slots in use.
        layout: a number that changes whenever a slot gets another role than it had in the step before.
    """

    __slots__ = ("_chunks", "_kind", "_orders", "_outs", "_pieces", "_roles", "_sources", "layout", "used")

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        # - Slots in use. New lists after each step, since the ring keeps the old ones
        self.used = 0
        self._sources: list[Any] = []
        self._orders: list[int] = []

        # - Made once, not per step: memory, views of each slot, and the roles, which are mostly those of the step
        # before. `layout` lets `SeverityReducer` see that they are not, without comparing them
        self._kind = (device, dtype)
        self._chunks: list[Tensor] = []
        self._outs: list[tuple[Tensor, Tensor]] = []
        self._pieces: dict[int, list[Tensor]] = {}
        self._roles: list[SlotRole] = []
        self.layout = 0

    def reduce(self, plain: Tensor, order: int, role: SlotRole, source: Any) -> None:
        """Reduce a tensor into the next slot: one kernel, no host read, no temporary of the tensor's size.

        Args:
            plain: dense, not empty, of the right device and dtype, without grad.
            order: execution order.
            role: what the slot counts for.
            source: what the tensor is.
        """
        roles, index = self._roles, self.used
        if index == len(self._outs):
            self._add_chunk()
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

    def _add_chunk(self) -> None:
        device, dtype = self._kind
        chunk = torch.empty(max(len(self._outs), _CHUNK), 2, device=device, dtype=dtype)
        self._chunks.append(chunk)
        self._outs += [(row[0], row[1]) for row in chunk.unbind()]

    def pieces(self) -> list[Tensor]:
        """The numbers in use, in pieces of shape (numbers,); views that are made once."""
        found = self._pieces.get(self.used)
        if found is None:
            left, found = self.used, []
            for chunk in self._chunks:
                found += [chunk[:left].view(-1)] if left else []
                left -= min(left, len(chunk))
            self._pieces[self.used] = found
        return found

    def group(self) -> SlotGroup:
        """What lies in the slots in use."""
        return SlotGroup(self._orders, None, self.roles(), self._sources, 2)

    def roles(self) -> list[SlotRole]:
        """The role of each slot in use."""
        return self._roles[: self.used]

    def discard(self) -> None:
        """Empty it; memory and roles stay for the next step."""
        self.used = 0
        self._sources, self._orders = [], []


class SlotPage:
    """All slots of one device and dtype.

    Args:
        device: of the tensors that are looked at.
        dtype: of the numbers.

    Attributes:
        kind: device and dtype.
        is_on_cpu: whether the device is a CPU.
        evidence: what no verdict looks at.
        judged: the other minima and maxima.
        num_norms: norms in use.
    """

    __slots__ = (
        "_filled",
        "_groups_of_norms",
        "_kept",
        "_last_roles",
        "_layout",
        "_norms",
        "_ring",
        "_row",
        "_row_holds",
        "_spare",
        "evidence",
        "is_on_cpu",
        "judged",
        "kind",
        "num_norms",
    )

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.kind = (device, dtype)
        self.is_on_cpu = device.type == "cpu"
        self.evidence = MinMaxSlots(device, dtype)
        self.judged = MinMaxSlots(device, dtype)
        # - evidence that compiled code has piled up itself
        self._filled: list[tuple[Tensor, SlotGroup]] = []
        # - norms, of shape () or (slots,); what stands for them, and the roles of those of the step before
        self.num_norms = 0
        self._norms: list[Tensor] = []
        self._groups_of_norms: list[SlotGroup] = []
        self._last_roles: list[list[SlotRole]] = []
        self._layout = 0
        self._kept: list[Tensor] = []
        # - see [Note: one copy of all]: this window's row, how much it holds, one to be written, and those of the ring
        self._row: Tensor | None = None
        self._row_holds = (0, 0, 0, 0)
        self._spare: Tensor | None = None
        self._ring: dict[int, Tensor] = {}

    # -- filling it ----------------------------------------------------------------------------------------------------

    def take_norms(self, norms: Sequence[Tensor], group: SlotGroup) -> None:
        """Put norms in use as they are; no kernel.

        Args:
            norms: of the page's device and dtype, each of shape () or (slots,); nothing else may write to them.
            group: what they are norms of.
        """
        index, roles, last = len(self._groups_of_norms), group.roles, self._last_roles
        self._norms += norms
        self._groups_of_norms.append(group)
        self.num_norms += len(roles)
        # a screen hands in the same list in each step, so that no step has to compare roles one by one
        if index == len(last):
            last.append(roles)
            self._layout += 1
        elif last[index] is not roles:
            self._layout += len(last[index]) != len(roles) or last[index] != roles
            last[index] = roles

    def fill(self, values: Tensor, order: int, sources: list[Any]) -> None:
        """Take over slots that were filled elsewhere, as evidence; one copy.

        Args:
            values: shape (slots, 2).
            order: execution order, the same for all.
            sources: one per slot.
        """
        count = len(sources)
        group = SlotGroup([order] * count, None, [SlotRole.EVIDENCE] * count, sources, 2)
        self._filled.append((values.clone().view(-1), group))

    # -- what is in it -------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether no slot is in use."""
        return not (self.evidence.used or self.judged.used or self.num_norms or self._filled)

    @property
    def layout(self) -> int:
        """A number that changes whenever a slot that is judged has another role than in the step before."""
        return self.judged.layout + self._layout

    def judged_roles(self) -> list[tuple[SlotRole, int]]:
        """Role and width of each slot that is judged, in the order of `judged_numbers`."""
        pairs = [(role, 2) for role in self.judged.roles()]
        return pairs + [(role, 1) for group in self._groups_of_norms for role in group.roles]

    def judged_numbers(self) -> Tensor:
        """The numbers of the slots that are judged, shape (numbers,). One kernel, none the second time."""
        row, count = self._gathered(), 2 * self.judged.used + self.num_norms
        return row if len(row) == count else row[len(row) - count :]

    def table(self) -> SlotTable:
        """The slots in use. One kernel, or none: the memory is that of the next step."""
        return SlotTable(self._gathered(), self._groups())

    def _groups(self) -> list[SlotGroup]:
        filled = [group for _, group in self._filled]
        return [self.evidence.group(), *filled, self.judged.group(), *self._groups_of_norms]

    def _gathered(self) -> Tensor:
        holds = (self.evidence.used, len(self._filled), self.judged.used, self.num_norms)
        if self._row is None or holds != self._row_holds:
            filled = [values for values, _ in self._filled]
            pieces = [*self.evidence.pieces(), *filled, *self.judged.pieces(), *self._norms]
            self._row, self._row_holds = self._written(pieces), holds
        return self._row

    def _written(self, pieces: list[Tensor]) -> Tensor:
        filled = sum(len(values) for values, _ in self._filled)
        count = 2 * (self.evidence.used + self.judged.used) + filled + self.num_norms
        row = self._row if self._row is not None else self._spare
        if row is None or len(row) != count:
            device, dtype = self.kind
            row = torch.empty(count, device=device, dtype=dtype)  # kept from round to round: a steady loop makes none
        if pieces:
            # on a CPU each piece is a row of numbers by itself
            torch.cat(pieces, out=row) if self.is_on_cpu else torch.hstack(pieces, out=row)
        return row

    # -- the end of a window -------------------------------------------------------------------------------------------

    def push_history(self, turn: int) -> SlotTable:
        """Keep the slots in use at position ``turn`` of the ring and empty the page; no kernel after a verdict."""
        table = self.table()
        self._spare, self._row = self._ring.get(turn), None
        self._ring[turn] = table.values
        self.discard()
        return table

    def discard(self) -> None:
        """Empty the page; its memory and the roles of its slots stay for the next step."""
        self.evidence.discard()
        self.judged.discard()
        self._spare, self._row = self._spare if self._row is None else self._row, None
        self._filled, self._groups_of_norms, self.num_norms = [], [], 0
        # for one more step: they may have been made on another stream than the one that has put them into the row
        self._kept, self._norms = self._norms, []
