"""Lockstep stop, blame, dump and replay for non-finite values in PyTorch DDP and FSDP training.

Read in this order: `guard` (the life of one step), `site` (what is said about a fault), `board` and `probes` (what is
looked at), `verdict` (the
one collective), `blame` and `fault` (who did it), `policy` (what is done about it), `dump` and `replay`.
"""

from .config import GuardConfig
from .errors import DumpError, NonFiniteError
from .guard import NanGuard
from .replay.recipe import Recipe
from .report.types import FaultReport, Phase, Site

__all__ = ["DumpError", "FaultReport", "GuardConfig", "NanGuard", "NonFiniteError", "Phase", "Recipe", "Site"]
