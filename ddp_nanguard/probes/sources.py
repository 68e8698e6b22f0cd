"""What a slot was taken from."""

from __future__ import annotations

from dataclasses import dataclass

KnownNonFinite = tuple[str, str, str]
"""Layer, slot and kind of a value that is non-finite in clean steps."""


@dataclass(frozen=True, slots=True)
class LossSource:
    """Note of a watched loss."""

    name: str
    micro_batch: int
