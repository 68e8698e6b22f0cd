"""Whether the step of an optimizer is running, whether its hooks run inside those of the same step, and for a model.

Torch puts its hooks around ``step`` of each class of which an optimizer was made. A subclass whose ``step`` calls
``super().step()`` then runs them twice, or not, depending on what else was made in the process: one step, two calls.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType

import torch
from torch import nn

_CALL = nn.Module._call_impl.__code__
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


def calls_itself(module: nn.Module) -> bool:
    """Whether the call whose hooks are running was made within another call of the same module."""
    return _num_frames(_CALL, module) > 1


def _num_running(optimizer: torch.optim.Optimizer) -> int:
    return _num_frames(_WRAPPER, optimizer)


def _num_frames(code: CodeType, owner: object) -> int:
    frame: FrameType | None = sys._getframe(1)
    found = 0
    while frame is not None:
        found += frame.f_code is code and frame.f_locals.get("self") is owner
        frame = frame.f_back
    return found
