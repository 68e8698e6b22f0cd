"""Words that every text about a fault shares."""

from __future__ import annotations

from collections.abc import Iterable

KIND_WORDS = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}
"""Kinds of non-finite values as people read them."""


def layer_text(layer: str | None) -> str:
    """A layer's name as people read it: ``(root)`` for the model itself, None for code of the training loop."""
    return "(root)" if layer == "" else (layer or "the training step")


def listed(values: Iterable[object], limit: int = 8, total: int | None = None, separator: str = ", ") -> str:
    """``a, b, c and 3 more``.

    Args:
        values: all there are, or the first of them.
        limit: how many are shown.
        total: how many there are in all, where ``values`` holds the first of them only.
        separator: between two of them.
    """
    found = [str(value) for value in values]
    more = (len(found) if total is None else total) - min(limit, len(found))
    return separator.join(found[:limit]) + (f" and {more} more" if more > 0 else "")


def plural(count: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
