"""A training script as the recipe of its own dump: started again, it runs the recorded step and ends.

Read in this order: `launch` (the parent, for one rank), `intercept.sitecustomize` and `stand_in` (a script of N ranks
alone in one process), `takeover` (what the guard does in such a process), `monitor` and `recorded_step`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp_nanguard.config import is_replay

if TYPE_CHECKING:
    from .takeover import Takeover

__frame_role__ = "probe"  # see `hooks.frames`


def take_over(*given: Any) -> Takeover | None:
    """What a guard consists of in a script that replays a dump; None in every other process.

    Args:
        given: as `takeover.Takeover` takes them.
    """
    if not is_replay():
        return None
    from .takeover import Takeover  # not before: a job has no use for it

    return Takeover(*given)
