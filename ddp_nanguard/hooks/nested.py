"""Whether an optimizer's hooks run inside those of the same step.

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
    """Whether the step whose hooks are running was called from another step of the same optimizer.

    Args:
        optimizer: whose hooks run. Looked up in the stack, not counted: a step that raises never gets to its last hook.
    """
    if sum(hasattr(each.__dict__.get("step"), "hooked") for each in type(optimizer).__mro__) < 2:
        return False
    frame: FrameType | None = sys._getframe(1)
    active = 0
    while frame is not None:
        if frame.f_code is _WRAPPER and frame.f_locals.get("self") is optimizer:
            active += 1
        frame = frame.f_back
    return active > 1
