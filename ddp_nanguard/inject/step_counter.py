"""Steps and micro-batches as a planted fault counts them: by a guard, or by itself."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_nanguard.hooks.weak import WeakHook
from ddp_nanguard.tensors.containers import tensors_in

if TYPE_CHECKING:
    from ddp_nanguard.guard import NanGuard


class StepCounter(Protocol):
    """Tells the step and the micro-batch."""

    def entering(self) -> tuple[int, int] | None:
        """Those of the forward that is about to begin."""

    def updating(self) -> int | None:
        """The step of the update that is about to begin."""

    def has_loader(self) -> bool:
        """Whether batches are seen as the loader gives them, by ``guard.steps``."""


class GuardClock:
    """Steps and micro-batches of a guard; none once it is closed."""

    def __init__(self, guard: NanGuard) -> None:
        self._guard = weakref.ref(guard)

    def entering(self) -> tuple[int, int] | None:
        """See `StepCounter`."""
        guard = self._guard()
        if guard is None or not guard._is_watching():
            return None
        num_open = len(guard._context.window.micro_batches)
        return guard.step, num_open if guard._needs_micro_batch() else num_open - 1

    def updating(self) -> int | None:
        """See `StepCounter`. The verdict may have fallen already: by a scaler, by ``check``, by another optimizer."""
        guard = self._guard()
        if guard is None or not guard._is_watching():
            return None
        has_fallen = guard._has_verdict and not guard._context.backward.ran_since_verdict
        return guard.step - has_fallen

    def has_loader(self) -> bool:
        """See `StepCounter`."""
        guard = self._guard()
        return guard is not None and guard._has_batch


class HookStepCounter:
    """Counts by itself: forwards of the model, backwards through them, and steps of its optimizers."""

    def __init__(self, model: nn.Module, parameters: set[int]) -> None:
        self._parameters = parameters
        self._step, self._micro_batch = 0, -1
        self._ran_backward = True
        post: Any = register_optimizer_step_post_hook(self._stepped)
        self._handles: list[Any] = [post, model.register_forward_hook(_OutputHook(self), prepend=True)]

    def entering(self) -> tuple[int, int] | None:
        """See `StepCounter`."""
        self._micro_batch += self._ran_backward
        self._ran_backward = False
        return self._step, self._micro_batch

    def updating(self) -> int | None:
        """See `StepCounter`; a further optimizer that steps after the same forward belongs to the step before."""
        return self._step - (self._micro_batch < 0)

    def has_loader(self) -> bool:
        """See `StepCounter`."""
        return False

    def remove(self) -> None:
        """Stop counting."""
        for handle in self._handles:
            handle.remove()

    def watch(self, output: Any) -> None:
        """Notice the backward through what the model gave."""
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._backward)  # type: ignore[no-untyped-call]  # torch's own

    def _backward(self, gradient: Tensor) -> None:
        self._ran_backward = True

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        holds = any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"])
        if holds and self._micro_batch >= 0:
            self._step, self._micro_batch, self._ran_backward = self._step + 1, -1, True


class _OutputHook(WeakHook):
    """After the model: what it gave leads to the backward."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        step_counter: HookStepCounter | None = self.target()
        if step_counter is not None and not torch.compiler.is_compiling():
            step_counter.watch(output)


class NeverFires:
    """No time at all: a fault that is never due."""

    def entering(self) -> tuple[int, int] | None:
        """See `StepCounter`."""
        return None

    def updating(self) -> int | None:
        """See `StepCounter`."""
        return None

    def has_loader(self) -> bool:
        """See `StepCounter`."""
        return False
