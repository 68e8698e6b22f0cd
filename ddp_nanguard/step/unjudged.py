"""Updates that no verdict has judged: the loop changes the weights by something else than the optimizer's ``step``."""

from __future__ import annotations

import logging

from ddp_nanguard.context import GuardContext

_log = logging.getLogger(__name__)

TOLERATED = 2
"""Such updates in one window before it is said: one may be a step of two passes, or a batch that is given up."""


class UnjudgedUpdates:
    """Notices them at the beginning of the next micro-batch, without a host read.

    Attributes:
        num_seen: in the open window.
    """

    def __init__(self) -> None:
        self.num_seen = 0
        self._is_told = False

    def look(self, context: GuardContext, step: int, ran_backward: bool) -> None:
        """A micro-batch begins in a window that is open: have its gradients been used, or given up?

        Args:
            context: of the guard.
            step: that is running.
            ran_backward: whether a backward has run in the window; not so where ``torch.autograd.grad`` did.
        """
        is_used = (ran_backward and _are_gone(context)) or context.window.calls.weights_were_updated()
        if self._is_told or not is_used:
            return
        self.num_seen += 1
        if self.num_seen < TOLERATED:
            return
        self._is_told = True
        names = ", ".join(type(optimizer).__name__ for optimizer in context.optimizers)
        _log.error(
            "step %d: NOTHING IS JUDGED: gradients were used or cleared %d times since the last verdict, without "
            "step() of the optimizer that the guard was given (%s); give it the optimizer whose step() changes the "
            "weights, or call guard.check() before each update",
            step,
            self.num_seen,
            names,
        )


def _are_gone(context: GuardContext) -> bool:
    """Whether no parameter that is trained has a gradient any more, nor one that waits to be reduced."""
    trained = (p for optimizer in context.optimizers for group in optimizer.param_groups for p in group["params"])
    return all(parameter.grad is None for parameter in trained) and next(context.wrapper.unreduced(), None) is None
