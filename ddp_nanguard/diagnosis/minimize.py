"""Finds the smallest set of samples of the window that still fails, by delta debugging.

Method: ddmin of Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002, over the samples of
all micro-batches, then over the micro-batches that are left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ddp_nanguard.capture.window import MicroBatch
from ddp_nanguard.replay.session import Session
from ddp_nanguard.tensors.batch import batch_size

from .experiments import ExperimentResult

MAX_RUNS = 200

Sample = tuple[int, int]
"""Position of a micro-batch in the window, and of a sample in that micro-batch."""
T = TypeVar("T")


class _BoundReached(Exception):  # noqa: N818  # no error: it ends the search
    pass


class Minimizer:
    """Runs the step on subsets of its window.

    Args:
        session: without an obstacle.
        on_run: called after each subset that fails, with the number of runs and of samples.
        max_runs: bound on the number of runs.

    Attributes:
        session: the session.
        num_runs: runs so far.
        sizes: number of samples of each micro-batch, 0 where unknown.
        smallest: the smallest failing set of samples so far.
    """

    def __init__(self, session: Session, on_run: Callable[[int, int], None], max_runs: int) -> None:
        self.session = session
        self.num_runs = 0
        window = session.window(session.recipe())
        # A micro-batch of unknown size, 0 here, counts as one sample: it is kept or left out as a whole.
        self.sizes = [batch_size(m.batch) or 0 for m in window]
        self.smallest: list[Sample] = [(n, row) for n, size in enumerate(self.sizes) for row in range(max(size, 1))]
        self._on_run = on_run
        self._max_runs = max_runs
        self._phase: str | None = None

    def fails(self, samples: list[Sample]) -> bool:
        """Whether the step fails in the same phase on these samples alone. A step that raises counts as not failing."""
        if self.num_runs >= self._max_runs:
            raise _BoundReached
        self.num_runs += 1
        try:
            again = self.session.run(keep=lambda window: self._part(window, samples))
        except Exception:  # the user's step on a batch it was not made for: undecided, as ddmin calls it
            return False
        origin = again.report.origin if again.report is not None else None
        if origin is None or str(origin.phase) != (self._phase or str(origin.phase)):
            return False
        # The first failing run, on the whole window, fixes the phase: a subset that fails elsewhere is another fault.
        self._phase = str(origin.phase)
        self.smallest = samples
        self._on_run(self.num_runs, len(samples))
        return True

    def search(self) -> bool:
        """Make `smallest` as small as the bound on runs allows; False where not even the whole window fails."""
        if not self.fails(self.smallest):
            return False
        _ddmin(self.smallest, self.fails)
        numbers = sorted({number for number, _ in self.smallest})
        if len(numbers) > 1:
            kept = self.smallest
            _ddmin(numbers, lambda some: self.fails([sample for sample in kept if sample[0] in some]))
        return True

    def _part(self, window: list[MicroBatch], samples: list[Sample]) -> list[MicroBatch]:
        rows: dict[int, list[int]] = {}
        for number, row in samples:
            rows.setdefault(number, []).append(row)
        return [
            replace(window[number], batch=rows_of(window[number].batch, kept, self.sizes[number]))
            for number, kept in sorted(rows.items())
        ]


def minimize(session: Session, on_run: Callable[[int, int], None], max_runs: int = MAX_RUNS) -> ExperimentResult:
    """The smallest set of samples, then of micro-batches, that still fails in the same phase.

    Args:
        session: without an obstacle.
        on_run: called after each smaller set that fails, with the number of runs and of samples.
        max_runs: bound on the number of runs.
    """
    minimizer = Minimizer(session, on_run, max_runs)
    whole = len(minimizer.smallest)
    try:
        found = minimizer.search()
        bound = ""
    except _BoundReached:
        found, bound = True, f" (stopped after {max_runs} runs; it may be possible with fewer)"
    if not found:
        return ExperimentResult("--minimize", "the whole window was finite this time", False)
    window = session.window(session.recipe())
    parts: dict[int, list[int]] = {}
    for number, row in minimizer.smallest:
        parts.setdefault(window[number].index, []).append(row)
    text = "; ".join(f"micro-batch {index}: {_samples(rows)}" for index, rows in parts.items())
    details = {"micro_batches": {str(i): rows for i, rows in parts.items()}, "runs": minimizer.num_runs}
    return ExperimentResult(
        "--minimize", f"{len(minimizer.smallest)} of {whole} samples still fail: {text}{bound}", True, details
    )


def _samples(rows: list[int]) -> str:
    return f"sample{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows))}"


def _ddmin(items: list[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """A failing list from which no chunk, at any granularity, can be removed."""
    parts = 2
    while len(items) >= 2:
        size = -(-len(items) // parts)
        chunks = [items[start : start + size] for start in range(0, len(items), size)]
        smaller = next((chunk for chunk in chunks if fails(chunk)), None)
        if smaller is not None:
            items, parts = smaller, 2
            continue
        rests = ([i for other in chunks if other is not chunk for i in other] for chunk in chunks)
        rest = next((rest for rest in rests if len(chunks) > 2 and fails(rest)), None)
        if rest is not None:
            items, parts = rest, max(parts - 1, 2)
        elif parts >= len(items):
            break
        else:
            parts = min(2 * parts, len(items))
    return items


def rows_of(value: Any, rows: list[int], size: int) -> Any:
    """A batch reduced to some rows: tensors, arrays and lists whose length is the batch size; all else is kept.

    Args:
        value: the batch, or an item of it.
        rows: indices of the samples to keep.
        size: number of samples in the batch.
    """
    if isinstance(value, Tensor):
        if not value.dim() or value.shape[0] != size:
            return value
        return value[torch.tensor(rows, dtype=torch.int64, device=value.device)]
    if isinstance(value, np.ndarray):
        return value[rows] if value.ndim and value.shape[0] == size else value
    if isinstance(value, dict):
        return {key: rows_of(item, rows, size) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(rows_of(item, rows, size) for item in value))
    if isinstance(value, (list, tuple)):
        is_column = len(value) == size and not any(isinstance(item, (Tensor, dict, list, tuple)) for item in value)
        return (
            type(value)(value[row] for row in rows) if is_column else type(value)(rows_of(i, rows, size) for i in value)
        )
    return value
