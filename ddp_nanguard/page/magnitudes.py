"""`Grid`: the largest absolute value of each watched layer, by step or by rank, as one byte per cell.

[Note: bins] A byte holds half a decade: bin b stands for absolute values from 10^(b/2) to 10^((b+1)/2). Five bytes are
no bins: a cell without a value, a zero, a NaN, an Inf of either sign. 512 ranks by 250 layers are 130 kB that way, and
compress; as numbers in text they would be ten times as many.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddp_nanguard.report.slot_key import PARAMETER_GRADIENT, SlotKey
from ddp_nanguard.report.types import Phase, Site
from ddp_nanguard.report.wording import layer_text

MAX_CELLS, MAX_ROWS = 2**17, 1024
"""Of one heat map: as many as a page of 2.5 MB has room for."""
MISSING, ZERO, NAN, INF = -128, -127, 127, 126
MAX_BIN = 120
BINS_PER_DECADE = 2

Slots = Mapping[str, tuple[float, float]]
"""Smallest and largest value by label, see `SlotKey.to_label`."""
Bins = np.ndarray[Any, np.dtype[np.int8]]


@dataclass(frozen=True, order=True)
class Row:
    """What one row of a heat map is of; micro-batches and calls are taken together.

    Attributes:
        phase: of its slots.
        name: of the layer, the parameter or the loss.
        slot: as in `SlotKey`.
    """

    phase: Phase
    name: str
    slot: str

    @property
    def text(self) -> str:
        """The whole name: ``forward · layers.2.act · output``."""
        name = self.name if self.phase is Phase.LOSS or self.slot == PARAMETER_GRADIENT else layer_text(self.name)
        return " · ".join(part for part in (str(self.phase), name, self.slot) if part)

    def short(self, limit: int) -> str:
        """The name as an axis shows it, with ``limit`` characters for that of the layer."""
        return f"{self.kind} {shortened(self.name or layer_text(self.name), limit)}".lstrip()

    @property
    def kind(self) -> str:
        """What stands before the name on an axis, in a word or two; "" for the output of a layer, and for a loss."""
        if self.slot == PARAMETER_GRADIENT:
            return {Phase.BACKWARD: "grad", Phase.REDUCE: "reduced"}.get(self.phase, str(self.phase))
        return _KINDS.get(self.slot, "")


_KINDS = {"gradient of output": "grad out", "gradient of input": "grad in", "input": "input"}


@dataclass(frozen=True)
class Grid:
    """A heat map.

    Attributes:
        rows: in execution order.
        columns: steps or ranks.
        bins: (rows, columns), see [Note: bins].
        origin: row and column of the place where the fault began; None where that is none of them.
        remark: what of it was left out, in a sentence; "" where nothing was.
    """

    rows: tuple[Row, ...]
    columns: tuple[int, ...]
    bins: Bins
    origin: tuple[int, int] | None = None
    remark: str = ""

    @property
    def num_nonfinite(self) -> int:
        """Number of cells that hold a NaN or an Inf."""
        return int((self.bins >= INF).sum())


def shortened(name: str, limit: int) -> str:
    """A dotted name in at most ``limit`` characters: ``m.d.layers.20.attention.weight``.

    Parts shrink to their first letter, the outermost first; numbers stay, since they tell layers apart.
    """
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        if len(".".join(parts)) > limit and part and not part.isdigit():
            parts[index] = part[0]
    text = ".".join(parts)
    outer = len(text) - len(parts[-1])
    head = limit - 1 if 0 < outer < limit else (limit - 1) // 2
    return text if len(text) <= limit else f"{text[:head]}…{text[len(text) + head + 1 - limit :]}"


def grid(columns: Mapping[int, Slots], origin: Site | None, origin_column: int | None) -> Grid:
    """A heat map of slots.

    Args:
        columns: slots by step or by rank.
        origin: of the fault.
        origin_column: the step or rank in which it began; None where it is none of them.
    """
    rows, of_label = _rows_of(columns)
    bins = np.full((len(rows), len(columns)), MISSING, dtype=np.int8)
    for number, slots in enumerate(columns.values()):
        _fill(bins[:, number], slots, of_label)
    kept = _kept_rows(bins, min(MAX_ROWS, MAX_CELLS // max(1, len(columns))))
    left_out = len(rows) - len(kept)
    remark = (
        f"{len(kept)} of {len(rows)} rows: those that went bad first, others at equal distances." if left_out else ""
    )
    shown, names = tuple(rows[index] for index in kept), tuple(columns)
    return Grid(shown, names, bins[kept], _origin_cell(shown, names, origin, origin_column), remark)


def _rows_of(columns: Mapping[int, Slots]) -> tuple[list[Row], dict[str, int]]:
    """The rows, and for each label the number of its row; the last column, that of the fault, gives the order."""
    number_of: dict[Row, int] = {}
    of_label: dict[str, int] = {}
    for slots in reversed(list(columns.values())):
        for label in slots:
            if label not in of_label:
                of_label[label] = number_of.setdefault(_row_of(label), len(number_of))
    return list(number_of), of_label


def _row_of(label: str) -> Row:
    key = SlotKey.from_label(label)
    return Row(key.phase, key.name, key.slot)


def _fill(column: Bins, slots: Slots, of_label: Mapping[str, int]) -> None:
    for label, (low, high) in slots.items():
        row = of_label[label]
        column[row] = max(int(column[row]), bin_of(low, high))  # NaN over Inf over what is finite over nothing


def bin_of(low: float, high: float) -> int:
    """The bin of the largest absolute value between two values, see [Note: bins]."""
    if math.isnan(low) or math.isnan(high):
        return NAN
    largest = max(abs(low), abs(high))
    if math.isinf(largest):
        return INF
    if largest == 0.0:
        return ZERO
    return max(-MAX_BIN, min(MAX_BIN, math.floor(BINS_PER_DECADE * math.log10(largest))))


def _kept_rows(bins: Bins, limit: int) -> list[int]:
    count = len(bins)
    if count <= limit:
        return list(range(count))
    bad = np.flatnonzero((bins >= INF).any(1))[: limit // 2].tolist()
    others = sorted(set(range(count)) - set(bad))
    return sorted([*bad, *evenly(others, limit - len(bad))])


def evenly(values: Sequence[int], limit: int) -> list[int]:
    """At most ``limit`` of the values, at equal distances, the first and the last of them among these."""
    if len(values) <= limit:
        return list(values)
    return [values[int(index)] for index in np.linspace(0, len(values) - 1, max(1, limit)).round()]


def _origin_cell(
    rows: Iterable[Row], columns: Sequence[int], origin: Site | None, column: int | None
) -> tuple[int, int] | None:
    if origin is None or column not in columns:
        return None
    found = (number for number, row in enumerate(rows) if _is_of(row, origin))
    row = next(found, None)
    return None if row is None else (row, columns.index(column))


def _is_of(row: Row, origin: Site) -> bool:
    """Whether a row is that of the fault's origin, as far as their names tell."""
    if row.phase is not origin.phase or origin.inline_code is not None:
        return False
    if origin.phase is Phase.FORWARD:
        return (row.name, row.slot) == (origin.layer, origin.slot)
    if origin.phase is Phase.BACKWARD and origin.slot == "grad":
        return row.name == origin.layer and row.slot == "gradient of input"
    return row.name == origin.slot
