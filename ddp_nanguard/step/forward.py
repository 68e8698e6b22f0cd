"""What is done where the loop calls the model: hooks on and off, buffers and initial state, compilation."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ddp_nanguard.context import GuardContext
from ddp_nanguard.hooks.loop import ModelHooks
from ddp_nanguard.hooks.nested import calls_itself
from ddp_nanguard.tensors.containers import tensors_in

from .stage import ModelEntry


class ModelForward:
    """The beginning and the end of the model's forward.

    Args:
        context: of the guard.
        at_model: called with the arguments of a forward in grad mode, before anything is kept of it.
    """

    def __init__(
        self,
        context: GuardContext,
        at_model: Callable[[tuple[Any, ...], dict[str, Any]], None],
    ) -> None:
        self._context = context
        self._hooks = ModelHooks(self, context.wrapper.model)
        self._at_model = at_model
        self._entry = ModelEntry.NOT_YET
        self._is_open = False  # the model was called and has not returned; stays so where it raised
        self._has_nested = False  # since then it has called itself

    def attach(self) -> None:
        """Put the hooks on the model."""
        context = self._context
        context.forward.on_root = self._before_root
        context.forward.on_idle = context.remove_hooks
        context.follow_compilation()
        self._hook_model()
        context.install_hooks()  # after the entry hook, which on a plain module has to run before the root's own

    def _hook_model(self) -> None:
        come_late = self._context.has_hooks or any(self._context.compiled)
        self._hooks.put(before_others=come_late)

    def follow_compilation(self) -> None:
        """The model may be compiled between the making of the guard and the first step."""
        if self._entry is ModelEntry.NOT_YET:
            before = self._context.compiled
            self._context.follow_compilation()
            if before != self._context.compiled:
                self._hook_model()

    def before_call(self) -> None:
        """Without grad mode hooks come off before the call, so that no layer chooses another kernel."""
        self.follow_compilation()
        if not torch.is_grad_enabled():
            self._context.remove_hooks()

    def before_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model, wrapper included, is about to run."""
        context = self._context
        if context.slots.is_capturing():
            return  # the capture records what the model does, not what is done about it
        if self._is_open and calls_itself(context.wrapper.model):
            self._has_nested = True
            return
        self._is_open, self._has_nested = torch.is_grad_enabled(), False
        self.follow_compilation()
        if not torch.is_grad_enabled():
            context.remove_hooks()
            return
        context.wrapper.refuse_join()
        is_first, self._entry = self._entry is ModelEntry.NOT_YET, ModelEntry.SEEN
        root_hook_missed = context.install_hooks() and context.wrapper.root is context.wrapper.model
        self._hooks.leave_last()
        context.forward.begin_root()
        context.gradient.begin_root()
        context.backward.reset()
        num_open = len(context.window.micro_batches)
        self._at_model(args, kwargs)
        if context.root_is_traced:
            context.window.snapshot_buffers(context.named_buffers())
        if is_first:
            context.probe_initial_state()
        context.probe_buffers_before_broadcast()
        if root_hook_missed:  # hooks put on a module from one of its own hooks begin with its next call
            context.forward.before_root(args, kwargs)
        calls, micro_batches = context.window.calls, context.window.micro_batches
        if self._is_recorded():
            is_new = len(micro_batches) > num_open  # begun by this call, with the random states of this moment
            state = micro_batches[-1].random_state if is_new else None
            calls.begin(context.wrapper.model, args, kwargs, len(micro_batches) - 1, is_step=False, random_state=state)

    def _before_root(self) -> None:
        """Inside the wrapper, after its broadcast: keep the buffers before the model changes them."""
        context = self._context
        context.window.snapshot_buffers(context.named_buffers())
        context.probe_initial_buffers()

    def after_model(self, output: Any) -> Any:
        """The model has run. The output of a root whose own hooks do not look at it is looked at here."""
        context = self._context
        if not torch.is_grad_enabled() or context.slots.is_capturing():
            return output
        if self._has_nested and calls_itself(context.wrapper.model):
            return output
        self._is_open = False
        if context.sees_output_outside:
            context.forward.probe_root_output(output)
        calls = context.window.calls
        given = calls.end(output) if self._is_recorded() else output
        context.outputs = [weakref.ref(tensor) for tensor in tensors_in(given)]
        return given

    def _is_recorded(self) -> bool:
        """Whether this call can be made again: one within the step comes with that, and one that is the step, not."""
        config = self._context.config
        return config.look_again and config.root == "layer" and not self._context.window.calls.is_in_step

    def remove(self) -> None:
        """Take the hooks around the model off."""
        self._hooks.remove()

    def resume(self) -> None:
        """Put the hooks around the model on again, as at first."""
        self._hook_model()
        self._context.install_hooks()

    def stand_in(self) -> None:
        """A micro-batch begins after a verdict: do what the model's entry would have done, if that is never seen."""
        if self._entry is ModelEntry.SEEN:
            return
        context = self._context
        context.window.snapshot_buffers(context.named_buffers())
        if self._entry is ModelEntry.NOT_YET:
            self._entry = ModelEntry.STOOD_IN
            context.probe_initial_state()
            context.probe_initial_buffers()
