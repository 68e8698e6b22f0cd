"""``history.npz``: the arrays that it holds, with dtype and shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ddp_nanguard.errors import DumpError
from ddp_nanguard.report.slot_key import SlotKey

from .json_files import AGAIN

SERIES = ("loss", "gradient_norm", "gradient_max")
"""One number per step, in the order of ``steps``."""
FAULT = "fault"
"""Prefix of the faulty step's slots; those of a clean step begin with `step_prefix`."""


def step_prefix(step: int) -> str:
    """Prefix of the names of a clean step's slots: ``step.<number>``."""
    return f"step.{step}"


def require_history(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Check names, dtypes and shapes, and that every label is one.

    Args:
        path: of the file, for the message.
        arrays: by name.

    Raises:
        DumpError: an array is missing or is not what it should be, or a label is none.
    """
    _require(path, arrays, _expected(arrays))


def require_fault(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """`require_history` for the arrays of the faulty step alone."""
    _require(path, arrays, _expected_slots(arrays, FAULT))


def _require(
    path: Path,
    arrays: Mapping[str, np.ndarray[Any, Any]],
    expected: Iterator[tuple[str, str, tuple[int, ...]]],
) -> None:
    for name, kind, shape in expected:
        array = arrays.get(name)
        found = "missing" if array is None else f"{array.dtype} {array.shape}"
        if array is None or array.dtype.kind != kind or array.shape != shape:
            raise DumpError(f"{path} is damaged: array {name!r} is {found}; {AGAIN}")
    for name, labels in arrays.items():
        if name.endswith(".labels"):
            try:
                for label in labels.tolist():
                    SlotKey.from_label(label)
            except ValueError as error:
                raise DumpError(f"{path} is damaged: array {name!r}: {error}; {AGAIN}") from None


def _expected(arrays: Mapping[str, np.ndarray[Any, Any]]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, kind of dtype and shape of each array; sizes are those of the arrays that the others go with."""
    num_steps = _length(arrays, "steps")
    yield "steps", "i", (num_steps,)
    for name in SERIES:
        yield name, "f", (num_steps,)
    for prefix in (*(step_prefix(int(step)) for step in arrays["steps"]), FAULT):
        yield from _expected_slots(arrays, prefix)


def _expected_slots(
    arrays: Mapping[str, np.ndarray[Any, Any]], prefix: str
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    num_slots = _length(arrays, f"{prefix}.labels")
    yield f"{prefix}.labels", "U", (num_slots,)
    yield f"{prefix}.values", "f", (num_slots, 2)


def slots_in(arrays: Mapping[str, np.ndarray[Any, Any]], prefix: str) -> dict[str, tuple[float, float]]:
    """Smallest and largest value of each slot by its label, in execution order.

    Args:
        arrays: of a history that was checked.
        prefix: `FAULT`, or that of a clean step.
    """
    labels, values = arrays[f"{prefix}.labels"].tolist(), arrays[f"{prefix}.values"].tolist()
    return {label: (low, high) for label, (low, high) in zip(labels, values, strict=True)}


def _length(arrays: Mapping[str, np.ndarray[Any, Any]], name: str) -> int:
    return arrays[name].size if name in arrays else 0
