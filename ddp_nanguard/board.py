"""Slots of the current step and the ring of the last steps, on the device.

A probe reduces one tensor into the next free slot, a (minimum, maximum) pair, and leaves a note beside it on the host
that says what was looked at. Slots lie in pages, one per region, device and dtype, because ``aminmax`` writes its
result in the dtype of its input. Nothing is read by the host until `Board.readings`, which only the fault path calls.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .scan import dense_parts, is_plain

_FIRST_CAPACITY = 64


class Region(enum.IntEnum):
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
    WIDE = 9
    """Gradients in float64, whose norm does not overflow; only `Board.extremes` tells them apart."""
    LEFT_OUT = 8
    """Gradients of parameters that no optimizer holds: no scaler looks at them."""
    NORM = 7
    """The gradient norm; only its size counts."""
    REMARK = 6
    """Worth a warning, never a trigger; -inf is allowed."""


class Reading(NamedTuple):
    """One slot on the host: execution order in the window, the note, the region and the two values."""

    order: int
    note: Any
    region: Region
    minimum: float
    maximum: float


class _Page:
    """Slots of one region, device and dtype; grows by doubling."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.values = torch.zeros(_FIRST_CAPACITY, 2, device=device, dtype=dtype)
        self.outs = _slot_views(self.values)
        self.notes: list[tuple[int, Any]] = []
        self.ring: dict[int, Tensor] = {}

    def reduce(self, plain: Tensor, order: int, note: Any) -> None:
        index = len(self.notes)
        if index == len(self.outs):
            self._grow()
        torch.aminmax(plain, out=self.outs[index])
        self.notes.append((order, note))

    def _grow(self) -> None:
        larger = torch.zeros(2 * len(self.outs), 2, device=self.values.device, dtype=self.values.dtype)
        larger[: len(self.outs)].copy_(self.values)
        self.values, self.outs = larger, _slot_views(larger)

    def keep(self, turn: int) -> tuple[Tensor, list[tuple[int, Any]]]:
        """Copy the used slots into place ``turn`` of the ring and start afresh."""
        used, notes = len(self.notes), self.notes
        place = self.ring.get(turn)
        if place is None or len(place) < used:
            place = self.ring[turn] = torch.zeros_like(self.values)
        place[:used].copy_(self.values[:used])
        self.notes = []
        return place, notes


def _slot_views(values: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(row[0], row[1]) for row in values.unbind()]


@dataclass(frozen=True)
class PastStep:
    """Slots of a step with a clean verdict, still on the device."""

    step: int
    pages: tuple[tuple[Region, Tensor, list[tuple[int, Any]]], ...]

    def readings(self) -> list[Reading]:
        """The slots in execution order. Host sync: one per page."""
        return _sorted_readings(self.pages)


class Board:
    """All slots of the window now open, and those of the last ``history`` clean steps.

    Memory: 2 values per slot and step, on the device where the probed tensor lives.
    """

    def __init__(self, history: int) -> None:
        self._pages: dict[tuple[Region, torch.device, torch.dtype], _Page] = {}
        self._order = 0
        self._history = history
        self._turn = 0
        self._past: dict[int, PastStep] = {}

    def reduce(self, region: Region, tensor: Tensor, note: Any) -> int | None:
        """Reduce a tensor into the next slot; one kernel per dense part, no host read.

        Returns:
            The execution order of the slot, or None where the kind of tensor cannot be checked. Tensors that hold
            nothing to check (integers, empty) take no slot and get an order all the same.
        """
        self._order += 1
        if is_plain(tensor):
            self._page(region, tensor).reduce(tensor.detach(), self._order, note)
            return self._order
        parts = dense_parts(tensor)
        if parts is None:
            return None
        for part in parts:
            self._page(region, part).reduce(part, self._order, note)
        return self._order

    def _page(self, region: Region, tensor: Tensor) -> _Page:
        key = (region, tensor.device, tensor.dtype)
        page = self._pages.get(key)
        if page is None:
            page = self._pages[key] = _Page(tensor.device, tensor.dtype)
        return page

    def extremes(self, regions: frozenset[Region], device: torch.device) -> tuple[list[Region], list[Tensor]]:
        """One float64 (min, max) row per page in use, on ``device``; no host read.

        In float64 because a float64 slot may hold finite values beyond float32.
        """
        found: list[Region] = []
        rows: list[Tensor] = []
        for (region, _, dtype), page in self._pages.items():
            if region in regions and page.notes:
                found.append(Region.WIDE if region is Region.GRADIENT and dtype is torch.float64 else region)
                rows.append(_row(page.values[: len(page.notes)], region).to(device, torch.float64))
        return found, rows

    def readings(self) -> list[Reading]:
        """The slots of the open window, in execution order. Host sync: one per page."""
        return _sorted_readings((key[0], page.values, page.notes) for key, page in self._pages.items())

    def keep(self, step: int) -> None:
        """Move the slots of a clean step into the ring; one device copy per page, no host read."""
        pages = tuple((key[0], *page.keep(self._turn)) for key, page in self._pages.items() if page.notes)
        self._past[self._turn] = PastStep(step, pages)
        self._turn = (self._turn + 1) % self._history
        self._order = 0

    def discard(self) -> None:
        """Forget the slots of the open window."""
        for page in self._pages.values():
            page.notes = []
        self._order = 0

    def past(self) -> list[PastStep]:
        """The clean steps in the ring, oldest first."""
        return sorted(self._past.values(), key=lambda past: past.step)


def _row(slots: Tensor, region: Region) -> Tensor:
    if region in (
        Region.BUFFER,
        Region.OUTPUT,
        Region.REMARK,
    ):  # -inf is allowed: only the maximum speaks, NaN or +inf where it is bad
        low, high = torch.aminmax(slots[:, 1])
        return torch.stack((low, high)).clamp(min=0.0)
    return torch.stack(torch.aminmax(slots))


def _sorted_readings(pages: Iterator[Any] | tuple[Any, ...]) -> list[Reading]:
    found = [
        Reading(order, note, region, low, high)
        for region, values, notes in pages
        for (order, note), (low, high) in zip(notes, values[: len(notes)].tolist(), strict=True)
    ]
    return sorted(found, key=lambda reading: reading.order)


def is_clean(reading: Reading) -> bool:
    """Whether a slot shows only finite values; -inf is allowed in buffers."""
    if reading.region in (Region.BUFFER, Region.REMARK):
        return reading.maximum < math.inf
    return math.isfinite(reading.minimum) and math.isfinite(reading.maximum)
