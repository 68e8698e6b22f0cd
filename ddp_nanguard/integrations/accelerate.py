"""accelerate: `watch_accelerator`, for loops that call ``accelerator.backward(loss)``.

``accelerator.save_state`` is not wrapped: many scripts call it on the main process alone, where a verdict would wait
for ranks that never come. Call ``guard.check(checkpoint=path)`` before it, on all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_nanguard.guard import NanGuard

from .engines import WatchedBackward

if TYPE_CHECKING:
    from accelerate import Accelerator


def watch_accelerator(guard: NanGuard, accelerator: Accelerator) -> WatchedBackward:
    """Let the guard see each loss that ``accelerator.backward`` is given, in place of ``guard.watch``.

    Args:
        guard: made of what ``accelerator.prepare`` gave, and ``scaler=accelerator.scaler``.
        accelerator: of the loop; its own object is changed, not its class.

    Returns:
        What takes it back: ``watched.undo()``. A guard that is closed looks at nothing, so there is no need.

    Collective: none. Host sync: none.
    """
    return WatchedBackward(guard, accelerator)
