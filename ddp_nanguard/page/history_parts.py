"""What a page shows of the numbers in a dump: the last steps of one rank, the faulty step of all, the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ddp_nanguard.dump.history import FAULT, slots_in, step_prefix
from ddp_nanguard.dump.read import Dump
from ddp_nanguard.errors import DumpError
from ddp_nanguard.report.text import human_size
from ddp_nanguard.report.wording import ranges_text

from .magnitudes import Grid, grid
from .timeline import Timeline, dtype_of, number_text, timeline

MAX_WEIGHT_BYTES = 2**28
"""Weights beyond this size are not read for a page."""


@dataclass(frozen=True)
class Part:
    """A part of the page that a dump may not hold.

    Attributes:
        found: what it shows; None where there is nothing.
        remark: in a sentence why there is nothing, or what to know about it; "" for nothing to say.
    """

    found: Any
    remark: str = ""


def history_parts(dump: Dump, rank: int | None, weights_remark: str) -> tuple[Part, Part, int]:
    """Of one rank the timeline, the heat map by step, and the step whose values are kept as those of the fault.

    Args:
        dump: open.
        rank: None where the dump holds none.
        weights_remark: a sentence to say with the timeline.
    """
    step = dump.report.step
    if rank is None:
        nothing = Part(None, "The dump holds no rank's files.")
        return nothing, nothing, step
    try:
        arrays, dtypes = dump.history(rank), dump.evidence(rank).dtypes
    except DumpError as error:
        nothing = Part(None, f"The history of rank {rank} cannot be read: {error}.")
        return nothing, nothing, step
    clean = {each: slots_in(arrays, step_prefix(each)) for each in arrays["steps"].tolist()}
    faulty = slots_in(arrays, FAULT)
    if step in clean:  # a bad update, whose own step was clean: kept twice, or met by the next step
        step = _step_of_update(clean, faulty, step)
    norms = dict(zip(arrays["steps"].tolist(), arrays["gradient_norm"].tolist(), strict=True))
    line = timeline(clean, faulty, step, [norms[each] for each in clean], dtype_of(dump.report, dtypes))
    origin = dump.report.origin
    is_here = origin is not None and origin.rank in (rank, None)
    found = grid({**clean, step: faulty}, origin if is_here else None, dump.report.step)
    if step != dump.report.step:
        weights_remark = f"Step {step} met what the update of step {dump.report.step} had left. {weights_remark}"
    return _timeline_part(line, weights_remark), _map_part(found, is_here), step


def _step_of_update(clean: dict[int, dict[str, tuple[float, float]]], faulty: object, step: int) -> int:
    """The number of the step whose slots are kept as those of the fault; it is no clean one then."""
    if str(clean[step]) != str(faulty):  # as text, in which a NaN equals a NaN
        return max(clean) + 1
    del clean[step]
    return step


def _timeline_part(line: Timeline, weights_remark: str) -> Part:
    if len(line.steps) == 1:
        return Part(None, f"The history holds no clean step before the fault: no line to draw. {weights_remark}")
    if not line.series:
        return Part(None, f"The steps of the history hold no loss, gradient or output. {weights_remark}")
    return Part(line, weights_remark)


def _map_part(found: Grid, is_here: bool) -> Part:
    """A heat map, and whether the place where the fault began is in it, where it may be."""
    if not found.rows:
        return Part(None, "Nothing was watched by layer or parameter in these steps.")
    is_missing = is_here and found.origin is None
    where_it_began = "The place where it began is none of these rows." if is_missing else ""
    return Part(found, " ".join(text for text in (found.remark, where_it_began) if text))


def ranks_part(dump: Dump, ranks: list[int]) -> Part:
    """The heat map of the faulty step by rank.

    Args:
        dump: open.
        ranks: which of them.
    """
    if dump.world_size == 1:
        return Part(None, "One rank trained, so there are no others to compare it with.")
    columns, unread = {}, []
    for rank in ranks:
        try:
            columns[rank] = dump.fault_slots(rank)
        except DumpError:
            unread.append(rank)
    origin = dump.report.origin
    part = _map_part(grid(columns, origin, origin.rank if origin is not None else None), False)
    missing = f"Without a readable history: ranks {ranges_text(unread)}." if unread else ""
    return Part(part.found, " ".join(text for text in (part.remark, missing) if text))


def weights_known(dump: Dump) -> tuple[float | None, str]:
    """The largest absolute value of the weights in the dump, and a sentence about them."""
    shapes = {name: known for name, known in dump.manifest.shapes.items() if name.startswith("model.")}
    size_bytes = sum(4 * math.prod(known.shape) for known in shapes.values())
    if not dump.manifest.has_weights or not shapes or dump.missing_ranks:
        return None, "Weights are not kept over time, and the dump here does not hold them whole."
    if size_bytes > MAX_WEIGHT_BYTES:
        return None, f"Weights are not kept over time; those of the dump, {human_size(size_bytes)}, were not read."
    try:
        largest = max(map(_largest, dump.load_state(shapes).values()), default=0.0)
    except DumpError as error:
        return None, f"Weights are not kept over time, and those of the dump cannot be read: {error}."
    return largest, f"Weights are not kept over time; the largest finite one in the dump is {number_text(largest)}."


def _largest(tensor: torch.Tensor) -> float:
    """The largest finite absolute value; 0 where there is none."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    values = values.to(torch.float64).abs()
    return float(values[values.isfinite()].max()) if values.isfinite().any() else 0.0
