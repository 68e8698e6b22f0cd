"""Words and lists as every text about a fault writes them."""

from __future__ import annotations

from collections.abc import Iterable

KIND_WORDS = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}
"""Kinds of non-finite values, and how texts write them."""


def layer_text(layer: str | None) -> str:
    """A layer's name as texts write it: ``(root)`` for "", ``the training step`` for None."""
    return "(root)" if layer == "" else (layer or "the training step")


def listed(values: Iterable[object], limit: int = 8, total: int | None = None, separator: str = ", ") -> str:
    """Values as a list of bounded length, such as ``a, b, c and 3 more``; "" for none.

    Args:
        values: all of them, or the first ones.
        limit: number of values that are shown.
        total: number of all values, where ``values`` holds the first ones only.
        separator: between two values.
    """
    found = [str(value) for value in values]
    more = (len(found) if total is None else total) - min(limit, len(found))
    return separator.join(found[:limit]) + (f" and {more} more" if more > 0 else "")


def plural(count: int, noun: str) -> str:
    """A count with its noun, with an "s" for all counts but 1: ``1 rank``, ``2 ranks``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def ranges_text(ranks: list[int]) -> str:
    """Sorted ranks as ranges, such as "0-3, 6"; "none" for an empty list."""
    groups: list[list[int]] = []
    for rank in ranks:
        if groups and rank == groups[-1][1] + 1:
            groups[-1][1] = rank
        else:
            groups.append([rank, rank])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in groups) or "none"
