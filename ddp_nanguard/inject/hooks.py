"""How a fault is injected: hooks on the user's model and optimizer, on one rank only, never a write into the guard.

[Note: hooks before the guard's]
Every hook here is put before those that are there already, so that it does not matter whether the guard or the fault
came first: the guard sees the fault as if the layer, the wrapper or the update had made it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp_nanguard.hooks.autograd import in_backward
from ddp_nanguard.hooks.weak import WeakHook
from ddp_nanguard.report.types import Phase
from ddp_nanguard.tensors.containers import tensors_in
from ddp_nanguard.wrappers import wrapper_of

from .corrupt import CorruptedGradient, corrupt_all, corrupt_first, corrupted, with_first_corrupted
from .injection import Injection
from .parameters import held_parts, own_parameters, part_of

__frame_role__ = "injects"  # see `hooks.frames`

# -- hooks, by phase -------------------------------------------------------------------------------------------------


def attach(injection: Injection, model: nn.Module, layer: nn.Module | None) -> list[Any]:
    """Put the hooks of an injection on.

    Args:
        injection: of this rank; the hooks hold it weakly.
        model: what the training loop calls, wrapper included.
        layer: the module that the fault names; None for input and loss.

    Returns:
        Handles, each with ``remove()``.
    """
    handles: list[Any] = [model.register_forward_pre_hook(_Entry(injection), with_kwargs=True, prepend=True)]
    phase = injection.spec.phase
    if phase in (Phase.FORWARD, Phase.BACKWARD):
        assert layer is not None
        handles.append(layer.register_forward_hook(_Output(injection), prepend=True))
    elif phase == Phase.REDUCE:
        handles.append(_AfterReduce(injection))
        handles.append(model.register_forward_hook(_Exit(handles[-1]), always_call=True))
        injection.on_model = handles[-2].install
    elif phase == Phase.OPTIMIZER:
        handles.append(_AfterUpdate(injection))
    return handles


class _Entry(WeakHook):
    """The hook before the model, wrapper included: starts the forward's count, corrupts weights or the batch."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        injection: Injection | None = self.target()
        if injection is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return None
        injection.enter()
        if not injection.active or injection.num_fired:
            return None
        if injection.spec.phase == Phase.STATE:
            _write_state(injection)
        # with a loader the batch is corrupted where the loader gives it, see `Injection.corrupt_batch`
        if injection.spec.phase == Phase.INPUT and not injection.step_counter().has_loader():
            found, done = with_first_corrupted(
                (args, kwargs), lambda tensor: corrupted(tensor.detach(), injection.spec.kind)
            )
            injection.note(done, "the model is called with no floating tensor")
            return found if done else None
        return None


def _write_state(injection: Injection) -> None:
    model = injection.model()
    assert model is not None
    assert injection.spec.layer is not None
    part = next(held_parts(wrapper_of(model), injection.spec.layer), None)
    if part is not None:
        corrupt_all(part, injection.spec.kind)
    injection.note(part is not None, "the layer has no parameter here any more")


class _Output(WeakHook):
    """The hook after the layer, before any other hook: corrupts its output, or the gradient of its output.

    A recomputation under activation checkpointing is corrupted in the same way: its values must equal the original's.
    """

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        injection: Injection | None = self.target()
        if injection is None or torch.compiler.is_compiling() or not injection.is_first_call(in_backward()):
            return None
        spec = injection.spec
        if spec.phase == Phase.FORWARD:
            found, done = with_first_corrupted(output, lambda tensor: corrupted(tensor, spec.kind))
            injection.note(done, "the layer gives no floating tensor")
            return found if done else None
        mark_fired = injection.mark_fired
        return with_first_corrupted(output, lambda tensor: _corrupt_backward(tensor, spec.kind, mark_fired))[0]


def _corrupt_backward(tensor: Tensor, kind: str, mark_fired: Callable[[], None]) -> Tensor:
    if not tensor.requires_grad:
        return tensor
    found: Tensor = CorruptedGradient.apply(tensor, kind, mark_fired)  # type: ignore[no-untyped-call]  # torch's own
    return found


class _Exit(WeakHook):
    """The hook after the model: takes off the global hooks that were on for its forward."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        after: _AfterReduce | None = self.target()
        if after is not None:
            after.remove()


class _AfterReduce:
    """Corrupts a gradient after the wrapper has communicated it, and before the guard looks at it.

    It finds the end of backward as the guard does, see [Note: the end of backward], by a hook that backward reaches
    before the guard's: torch's global module hooks run before those of a module.
    """

    def __init__(self, injection: Injection) -> None:
        self._injection = weakref.ref(injection)
        self._handles: list[Any] = []
        # whether a backward has begun whose end is awaited: its callback is queued once, by the first hook
        self._is_waiting = False

    def install(self) -> None:
        """Put global module hooks on for one forward of the model."""
        self.remove()
        self._is_waiting = False
        register: Any = nn.modules.module
        self._handles = [
            register.register_module_forward_pre_hook(lambda module, args: self._watch(args)),
            register.register_module_forward_hook(lambda module, args, output: self._watch(output)),
        ]

    def remove(self) -> None:
        """Take the global module hooks off; hooks on tensors stay with their graph."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _watch(self, value: Any) -> None:
        if not torch.compiler.is_compiling() and not in_backward():
            for tensor in tensors_in(value):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._on_gradient)  # type: ignore[no-untyped-call]  # torch's own

    def _on_gradient(self, gradient: Tensor) -> None:
        if not self._is_waiting:
            self._is_waiting = True
            Variable._execution_engine.queue_callback(self._first_callback)

    def _first_callback(self) -> None:
        Variable._execution_engine.queue_callback(self._second_callback)

    def _second_callback(self) -> None:
        self._is_waiting = False
        injection = self._injection()
        model = injection.model() if injection is not None else None
        if injection is None or model is None or injection.num_fired:
            return
        wrapper = wrapper_of(model)
        if not wrapper.will_reduce():
            return  # the next micro-batch may communicate
        assert injection.spec.layer is not None
        for own in own_parameters(wrapper, injection.spec.layer, trained=True):
            part = None if own.parameter.grad is None else part_of(wrapper, own, own.parameter.grad)
            if part is not None:
                corrupt_first(wrapper.local(part), injection.spec.kind)
                injection.mark_fired()
                return
        injection.note(False, "no parameter of the layer has a gradient here")


class _AfterUpdate:
    """Corrupts a weight after ``optimizer.step``, before the guard looks at the updated weights.

    Which optimizer holds the weight shows only when one steps, so a global hook waits for that.
    """

    def __init__(self, injection: Injection) -> None:
        self._injection = weakref.ref(injection)
        self._handle: Any = register_optimizer_step_pre_hook(self._before)
        self._after: Any = None

    def remove(self) -> None:
        """Take the global hook off, and that on the optimizer if there is one."""
        for handle in (self._handle, self._after):
            if handle is not None:
                handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        injection = self._injection()
        if injection is None or self._after is not None:
            return
        if self._own_of(injection, optimizer) is not None:
            # first of the post hooks, so that the guard's, which probes the weights, comes after it
            self._after = optimizer.register_step_post_hook(self._corrupt_weight)
            optimizer._optimizer_step_post_hooks.move_to_end(self._after.id, last=False)  # type: ignore[attr-defined]  # an OrderedDict

    def _corrupt_weight(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        injection = self._injection()
        if injection is None or injection.num_fired:
            return  # a hook cannot take itself off while it runs
        if injection.step_counter().updating() != injection.spec.step:  # not on entry: a closure runs the backward
            return
        found = self._own_of(injection, optimizer)
        if found is not None:
            corrupt_first(found, injection.spec.kind)
            injection.mark_fired()

    def _own_of(self, injection: Injection, optimizer: torch.optim.Optimizer) -> Tensor | None:
        model, layer = injection.model(), injection.spec.layer
        if model is None or layer is None:
            return None
        wrapper = wrapper_of(model)
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        found = (own for own in own_parameters(wrapper, layer, trained=True) if id(own.parameter) in held)
        return next((part for own in found if (part := part_of(wrapper, own, own.parameter)) is not None), None)
