"""Lockstep stop, blame, dump and replay for non-finite values in PyTorch DDP and FSDP training.

Read in this order: `guard` (what a loop touches), `step.monitor` (the life of one step), `report.types` (what is said
about a fault), `probes` (what is looked at, and where it is left), `distributed.verdict` (the one collective), `blame`
(who did it), `fault.policy` (what is done about it), `dump` and `replay`. docs/design.md has the words and a picture.
"""

from .config import GuardConfig, is_replay
from .errors import DumpError, NonFiniteError, OutOfStepError
from .guard import NanGuard
from .replay.recipe import Recipe
from .report.types import FaultReport, Phase, Site

__frame_role__ = "probe"  # see `hooks.frames`

__all__ = [
    "DumpError",
    "FaultReport",
    "GuardConfig",
    "NanGuard",
    "NonFiniteError",
    "OutOfStepError",
    "Phase",
    "Recipe",
    "Site",
    "is_replay",
]
