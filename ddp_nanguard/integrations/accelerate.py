"""accelerate: `watch_accelerator`, for loops that call ``accelerator.backward(loss)``.

``accelerator.save_state`` is not wrapped: many scripts call it on the main process alone, where a verdict would wait
for ranks that never come. Call ``guard.check(checkpoint=path)`` before it, on all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ddp_nanguard.guard import NanGuard

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


class WatchedBackward:
    """``accelerator.backward``, which tells the guard of its loss first, until `undo`."""

    def __init__(self, guard: NanGuard, accelerator: Any) -> None:
        self._guard = guard
        self._accelerator = accelerator
        self._own = accelerator.backward
        self._known: Any = None
        accelerator.backward = self.backward

    def undo(self) -> None:
        """The accelerator's own method, which the one on the object hides; not if it was wrapped once more since."""
        if vars(self._accelerator).get("backward") == self.backward:
            del self._accelerator.backward
            if self._own != self._accelerator.backward:  # somebody had wrapped it before
                self._accelerator.backward = self._own

    def knows(self, loss: Tensor) -> None:
        """The guard has seen this loss: what is backpropagated next is not looked at again if it is that, or a part."""
        self._known = loss.grad_fn

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What is backpropagated, not scaled yet, nor divided by the number of micro-batches."""
        known, self._known = self._known, None  # its graph is to be freed by the backward
        if known is None:
            self._guard.watch(loss=loss)
        elif not _is_share_of(known, loss):
            self._guard.watch(backpropagated=loss)
        del known
        return self._own(loss, *args, **kwargs)


def _is_share_of(known: Any, loss: Tensor) -> bool:
    """Whether a loss is the known one, or that divided by a number, as by that of the micro-batches."""
    node = loss.grad_fn
    if node is known:
        return True
    makers = [each for each, _ in node.next_functions if each is not None] if node is not None else []
    return node is not None and node.name() == "DivBackward0" and len(makers) == 1 and makers[0] is known
