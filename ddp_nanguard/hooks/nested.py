"""Whether the step of an optimizer is running, and whether its hooks run inside those of the same step.

Torch puts its hooks around ``step`` of each class of which an optimizer was made. A subclass whose ``step`` calls
``super().step()`` then runs them twice, or not, depending on what else was made in the process: one step, two calls.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch

_WRAPPER = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__
"""Code of what torch puts around ``step``, the same for all classes."""


def is_nested(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step whose hooks are running was called from another step of the same optimizer."""
    num_hooked = sum(hasattr(each.__dict__.get("step"), "hooked") for each in type(optimizer).__mro__)
    return num_hooked > 1 and _num_running(optimizer) > 1


def is_running(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step has been called and has not returned.

    Looked up in the stack, not noted by hooks: a step that raises never gets to its last one.
    """
    return _num_running(optimizer) > 0


def _num_running(optimizer: torch.optim.Optimizer) -> int:
    frame: FrameType | None = sys._getframe(1)
    found = 0
    while frame is not None:
        found += frame.f_code is _WRAPPER and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return found
