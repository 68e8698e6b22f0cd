"""Lockstep stop, blame, dump and replay for non-finite values in PyTorch DDP and FSDP training.

Read in this order: `guard` (what a loop touches), `step.monitor` (the life of one step), `report.types` (what is said
about a fault), `probes` (what is looked at, and where it is left), `distributed.verdict` (the one collective), `blame`
(who did it), `fault.policy` (what is done about it), `dump` and `replay`. docs/design.md has the words and a picture.

A name is imported when it is first asked for, so that ``ddp-nanguard list`` need not import torch.
"""

from typing import TYPE_CHECKING, Any

from .lazy import resolved

if TYPE_CHECKING:
    from .config import GuardConfig, is_replay
    from .distributed.exit import record
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
    "record",
]

_WHERE = {
    "DumpError": "errors",
    "FaultReport": "report.types",
    "GuardConfig": "config",
    "NanGuard": "guard",
    "NonFiniteError": "errors",
    "OutOfStepError": "errors",
    "Phase": "report.types",
    "Recipe": "replay.recipe",
    "Site": "report.types",
    "is_replay": "config",
    "record": "distributed.exit",
}


if not TYPE_CHECKING:  # a type checker would take any name at all for one of this package

    def __getattr__(name: str) -> Any:
        return resolved(__name__, _WHERE, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
