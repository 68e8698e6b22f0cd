"""Steps and micro-batches as an injected fault counts them: those of a guard, or its own count."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_nanguard.hooks.weak import WeakHook
from ddp_nanguard.tensors.containers import tensors_in

BatchHook = Callable[[Any, int, int], Any]
"""(batch, step, micro-batch) -> the batch that the loop gets."""
LossHook = Callable[[Tensor, int], None]
"""(watched loss, micro-batch)."""


class StepCounter(Protocol):
    """Tells step and micro-batch, and calls hooks where it meets a batch or a loss.

    Attributes:
        batch_hooks: called with each batch that the loader has produced.
        loss_hooks: called with each loss that is watched, before it is looked at.
    """

    batch_hooks: list[BatchHook]
    loss_hooks: list[LossHook]

    def entering(self) -> tuple[int, int] | None:
        """Step and micro-batch of the forward that is about to begin; None where nothing is counted."""

    def updating(self) -> int | None:
        """The step of the update that is about to begin; None where nothing is counted."""

    def has_loader(self) -> bool:
        """Whether batches are met as the loader gives them, before the model takes them."""


_counters: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def register_counter(root: nn.Module, counter: StepCounter) -> None:
    """From now on these steps count for an unwrapped model. The counter is held weakly."""
    _counters[root] = weakref.ref(counter)


def unregister_counter(root: nn.Module, counter: StepCounter) -> None:
    """They no longer count; nothing where another counter has taken over."""
    if counter_of(root) is counter:
        del _counters[root]


def counter_of(root: nn.Module) -> StepCounter | None:
    """Whose steps count for an unwrapped model."""
    reference = _counters.get(root)
    counter: StepCounter | None = reference() if reference is not None else None
    return counter


class HookStepCounter:
    """Counts by itself: forwards of the model, backwards through them, and steps of its optimizers."""

    def __init__(self, model: nn.Module, parameters: set[int]) -> None:
        self.batch_hooks: list[BatchHook] = []
        self.loss_hooks: list[LossHook] = []
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
        """Notice the backward through the output of the model."""
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
    """After the model: its output leads to the backward."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        step_counter: HookStepCounter | None = self.target()
        if step_counter is not None and not torch.compiler.is_compiling():
            step_counter.watch(output)


class NeverFires:
    """A fault that is never due: nobody counts."""

    def __init__(self) -> None:
        self.batch_hooks: list[BatchHook] = []
        self.loss_hooks: list[LossHook] = []

    def entering(self) -> tuple[int, int] | None:
        """See `StepCounter`."""
        return None

    def updating(self) -> int | None:
        """See `StepCounter`."""
        return None

    def has_loader(self) -> bool:
        """See `StepCounter`."""
        return False
