"""What the host can say about a value without its tensor: a watched loss, a value known to be non-finite."""

from __future__ import annotations

from dataclasses import dataclass

KnownNonFinite = tuple[str, str, str]
"""Layer, slot (``output``, ``input``) and kind (``nan``, ``inf``) of a value that is non-finite in clean steps too."""
STATE_SLOT = "state "
"""Begins the slot of a parameter, buffer or optimizer state in a `KnownNonFinite`; its name follows."""


@dataclass(frozen=True, slots=True)
class LossSource:
    """Source of a slot: a loss that was handed to `NanGuard.watch`.

    Attributes:
        name: ``loss`` or what the caller named it.
        micro_batch: index in the step.
    """

    name: str
    micro_batch: int
