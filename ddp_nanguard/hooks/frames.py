"""Whose code a Python frame runs: the user's, torch's, or this package's, and what it means there.

[Note: frame roles]
A trace names the user's line, so it has to tell the user's frames from ours and from torch's. For ours that is a
property of the module, not of its file name: each folder of this package says in its ``__init__`` what its frames mean
(``__frame_role__``), and a module may say otherwise for itself.
"""

from __future__ import annotations

import enum
import functools
import sys
from types import FrameType

_PACKAGE = __name__.partition(".")[0]


class FrameRole(enum.StrEnum):
    """What a frame of this package means in a stack."""

    PROBE = "probe"
    """The package looks at something: operators that it calls are not part of the step."""
    PASSES_ON = "passes on"
    """The package only hands a call on, from the loop to the model or back."""
    STARTS_STEP = "starts step"
    """The package runs a step by itself, as in a replay: frames above it are not part of the step."""
    INJECTS = "injects"
    """An injected fault, which is to be found as one in the user's code would be."""


def role_of(module: str) -> FrameRole | None:
    """The role of a module's frames: its own, else that of the nearest folder around it; None outside this package.

    Args:
        module: dotted name, as in a frame's ``__name__``.
    """
    if module.partition(".")[0] != _PACKAGE:
        return None
    while module:
        loaded = sys.modules.get(module)
        role = getattr(loaded, "__frame_role__", None)
        if role is not None:
            return FrameRole(role)
        module = module.rpartition(".")[0]
    return FrameRole.PROBE


def module_of(frame: FrameType) -> str:
    """Dotted name of the module whose code a frame runs; "" where it has none, as in ``exec``."""
    return str(frame.f_globals.get("__name__", ""))


def is_users_own(frame: FrameType) -> bool:
    """Whether a frame runs neither this package's code nor torch's."""
    return not _is_machinery(module_of(frame))


@functools.cache  # asked for several frames in each call of a model
def _is_machinery(module: str) -> bool:
    return module.partition(".")[0] in (_PACKAGE, "torch")
