"""What a slot counts for in the verdict."""

from __future__ import annotations

import enum


class SlotRole(enum.IntEnum):
    """What a slot counts for in the verdict."""

    EVIDENCE = 0
    """Never a trigger: what blame reads, such as activations and their gradients."""
    OUTPUT = 1
    """Outputs of the root: under a scaler they tell a bad forward from an overflow. -inf is allowed (masked logits)."""
    LOSS = 2
    GRADIENT = 3
    STATE = 4
    """Parameters and optimizer state."""
    BUFFER = 5
    """Buffers, where -inf is allowed."""
    LEFT_OUT = 8
    """Gradients of parameters that no optimizer holds: no scaler looks at them."""
    NORM = 7
    """The gradient norm; only its size counts."""
    PARAMETER_NORM = 10
    """That of one parameter."""
    WARN = 6
    """Worth a warning, never a trigger; -inf is allowed."""
    OPEN = 9
    """State that is infinite on purpose: only NaN is bad."""


ONE_SIDED = frozenset({SlotRole.OUTPUT, SlotRole.BUFFER, SlotRole.WARN})
"""Roles in which -inf is allowed: only NaN and +inf are bad."""
