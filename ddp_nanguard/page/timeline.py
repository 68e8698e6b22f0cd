"""`Timeline`: loss, gradients and outputs of the last steps of one rank, and the largest number of the dtype."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ddp_nanguard.report.slot_key import SlotKey
from ddp_nanguard.report.types import KINDS, FaultReport, Phase
from ddp_nanguard.report.wording import KIND_WORDS
from ddp_nanguard.tensors.dtypes import dtype_named

from .magnitudes import Slots


@dataclass(frozen=True)
class Series:
    """One line of the timeline.

    Attributes:
        name: what it is of.
        values: one per step, the faulty one last; None where there is none.
    """

    name: str
    values: tuple[float | None, ...]

    @property
    def legend(self) -> str:
        """The name beside a logarithmic axis, which has no room for signs."""
        is_negative = any(value is not None and value < 0 for value in self.values)
        return f"{self.name}, absolute" if is_negative else self.name

    @property
    def texts(self) -> tuple[str, ...]:
        """The values as a table shows them."""
        return tuple(number_text(value) for value in self.values)


@dataclass(frozen=True)
class Timeline:
    """What the history of one rank says of the last steps.

    Attributes:
        steps: their numbers, the faulty one last.
        series: the lines; those without any value are left out.
        limit: dtype and its largest finite number; None where the dtype is not known.
    """

    steps: tuple[int, ...]
    series: tuple[Series, ...]
    limit: tuple[str, float] | None


def number_text(value: float | None) -> str:
    """A number with four digits, NaN and Inf in the words of every text; a dash for none."""
    if value is None:
        return "–"
    if math.isfinite(value):
        return f"{value:.4g}"
    return KIND_WORDS[KINDS[0] if math.isnan(value) else KINDS[1 if value > 0 else 2]]


def timeline(clean: Mapping[int, Slots], faulty: Slots, step: int, norms: Sequence[float], dtype: str) -> Timeline:
    """The lines of one rank.

    Args:
        clean: slots of the clean steps by their number.
        faulty: slots of the step of the fault.
        step: its number.
        norms: the gradient norm of each clean step, NaN where it was not taken.
        dtype: whose largest number is the limit; "" where it is not known.
    """
    columns = [_by_phase(slots) for slots in (*clean.values(), faulty)]
    series = [
        Series("loss", tuple(_last(column.get(Phase.LOSS, ())) for column in columns)),
        Series("largest output", tuple(_largest(column.get(Phase.FORWARD, ())) for column in columns)),
        Series("largest gradient", tuple(_largest(_gradients(column)) for column in columns)),
        Series("gradient norm", (*(None if math.isnan(norm) else norm for norm in norms), None)),
    ]
    shown = tuple(line for line in series if any(value is not None for value in line.values))
    return Timeline((*clean, step), shown, limit_of(dtype))


def limit_of(dtype: str) -> tuple[str, float] | None:
    """A dtype with its largest finite number; None where it has none."""
    try:
        found = dtype_named(dtype)
    except ValueError:
        return None
    is_real = found is not None and found.is_floating_point
    return (dtype, float(torch.finfo(found).max)) if found is not None and is_real else None


def dtype_of(report: FaultReport, dtypes: Mapping[str, str]) -> str:
    """The dtype in which the value began, else that of most parameters; "" where neither is known."""
    operator = report.second_look.operator if report.second_look is not None else None
    evidence = [operator.output if operator is not None else None, report.origin.evidence if report.origin else None]
    found = next((each.dtype for each in evidence if each is not None), "")
    named = list(dtypes.values())
    return found or max(sorted(set(named)), key=named.count, default="")


_Ranges = Iterable[tuple[float, float]]


def _by_phase(slots: Slots) -> dict[Phase, list[tuple[float, float]]]:
    found: dict[Phase, list[tuple[float, float]]] = {}
    for label, values in slots.items():
        found.setdefault(SlotKey.from_label(label).phase, []).append(values)
    return found


def _gradients(column: Mapping[Phase, list[tuple[float, float]]]) -> list[tuple[float, float]]:
    return [values for phase in (Phase.BACKWARD, Phase.REDUCE, Phase.LOOP) for values in column.get(phase, ())]


def _last(ranges: Sequence[tuple[float, float]] | tuple[()]) -> float | None:
    return ranges[-1][1] if ranges else None


def _largest(ranges: _Ranges) -> float | None:
    """The largest absolute value; NaN where any is NaN, None of none."""
    values = [abs(value) for both in ranges for value in both]
    if any(map(math.isnan, values)):
        return math.nan
    return max(values, default=None)
