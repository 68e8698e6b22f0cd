"""What counts steps and micro-batches for an injected fault: the guard of the model, or hooks of the fault's own."""

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
    """Tells step and micro-batch, and calls hooks with each batch and each watched loss.

    Attributes:
        batch_hooks: called with each batch that the loader has produced.
        loss_hooks: called with each loss that is watched, before it is looked at.
    """

    batch_hooks: list[BatchHook]
    loss_hooks: list[LossHook]

    def entering(self) -> tuple[int, int] | None:
        """Step and micro-batch of the forward that is about to begin; None where nothing is counted."""

    def updating(self) -> int | None:
        """The step of the update that has just been made; None where nothing is counted."""

    def has_loader(self) -> bool:
        """Whether ``batch_hooks`` are called with what the loader produces, before the model gets it."""


_counters: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def register_counter(root: nn.Module, counter: StepCounter) -> None:
    """Make ``counter`` the one that counts for an unwrapped model; it replaces another one and is held weakly."""
    _counters[root] = weakref.ref(counter)


def unregister_counter(root: nn.Module, counter: StepCounter) -> None:
    """Take ``counter`` off an unwrapped model; nothing where another counter has taken over meanwhile."""
    if counter_of(root) is counter:
        del _counters[root]


def counter_of(root: nn.Module) -> StepCounter | None:
    """The counter that counts for an unwrapped model; None where there is none, or where it is gone."""
    reference = _counters.get(root)
    counter: StepCounter | None = reference() if reference is not None else None
    return counter


class HookStepCounter:
    """Counts by hooks of its own: forwards of the model, backward passes through them, and steps of its optimizers.

    A micro-batch begins with the first forward after a backward, and a step ends with the ``step`` of an optimizer.

    Args:
        model: what the training loop calls.
        parameters: ids of its parameters, which tell its optimizers from others.
    """

    def __init__(self, model: nn.Module, parameters: set[int]) -> None:
        self.batch_hooks: list[BatchHook] = []
        self.loss_hooks: list[LossHook] = []
        self._parameters = parameters
        # -1: no forward since the last step, so a further optimizer that steps now does not count as another step
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
        """Take the hooks off the model and the optimizers, so that counting stops."""
        for handle in self._handles:
            handle.remove()

    def watch(self, output: Any) -> None:
        """Put a hook on each output tensor, by which the backward through it is noticed."""
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
    """The hook after the model: hands its output to the counter."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        step_counter: HookStepCounter | None = self.target()
        if step_counter is not None and not torch.compiler.is_compiling():
            step_counter.watch(output)


class NeverFires:
    """The counter of a fault whose guard is gone: it never reaches a step, so the fault never happens."""

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
