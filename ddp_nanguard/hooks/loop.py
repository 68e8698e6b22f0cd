"""Where the guard meets the training loop: the loader, the call of the model, the step of the optimizer, the losses."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from ddp_nanguard.tensors.containers import tensors_in

from .autograd import in_backward
from .weak import WeakHook

_log = logging.getLogger(__name__)


class StepEvents(Protocol):
    """What happens in a training loop, in order; `StepMonitor` tells the story."""

    @property
    def is_watching(self) -> bool:
        """Whether anything is looked at."""

    def has_open_window(self) -> bool:
        """Whether a micro-batch is open."""

    def begin_micro_batch(self, batch: Any) -> Any:
        """The loader has produced an item; what is returned goes to the loop."""

    def is_inside_scaler(self) -> bool:
        """Whether ``scaler.step`` is running, whose entry has been judged."""

    def before_update(self, optimizer: torch.optim.Optimizer) -> bool:
        """``optimizer.step`` is entered: may the update go ahead?"""

    def begin_update(self, optimizer: torch.optim.Optimizer) -> None:
        """The update is about to use its gradients."""

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """The weights have changed."""


class ModelEvents(Protocol):
    """What happens around the forward of the whole model."""

    def before_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model, wrapper included, is about to run."""

    def after_model(self, output: Any) -> None:
        """The model has run."""


class ModelHooks:
    """Hooks around the forward of the whole model, wrapper included.

    Args:
        events: told of what happens; held weakly by the hooks.
        model: what the loop calls.
    """

    def __init__(self, events: ModelEvents, model: nn.Module) -> None:
        self._events: Callable[[], Any] = weakref.ref(events)
        self._model = model
        self._handles: list[Any] = []

    def put(self, before_others: bool, sees_output: bool) -> None:
        """A hook before the model and, where asked for, one after it; those that were there go.

        Args:
            before_others: put before the hooks that the model carries already.
            sees_output: whether its output is to be reported.
        """
        self.remove()
        is_compiled = getattr(self._model, "_compiled_call_impl", None) is not None
        entry, leaving = (UncompiledEntryHook, UncompiledExitHook) if is_compiled else (EntryHook, ExitHook)
        register = self._model.register_forward_pre_hook
        self._handles = [register(entry(self._events()), with_kwargs=True, prepend=before_others)]
        if sees_output:
            self._handles.append(self._model.register_forward_hook(leaving(self._events())))

    def remove(self) -> None:
        """Take them off; may be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class OptimizerHooks:
    """Hooks around ``optimizer.step``.

    Args:
        events: told of what happens; held weakly by the hooks.
        optimizers: of the loop.
    """

    def __init__(self, events: StepEvents, optimizers: list[torch.optim.Optimizer]) -> None:
        self._events: Callable[[], Any] = weakref.ref(events)
        self._optimizers = optimizers
        self._handles: list[Any] = []

    def put(self) -> None:
        """One before and one after each ``step``."""
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(BeforeStepHook(self._events())))
            self._handles.append(optimizer.register_step_post_hook(AfterStepHook(self._events())))

    def remove(self) -> None:
        """Take them off; may be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class Steps:
    """A loader whose items begin micro-batches."""

    def __init__(self, loader: Iterable[Any], events: StepEvents) -> None:
        self._loader = loader
        self._events = events

    def __iter__(self) -> Iterator[Any]:
        self._warn_of_open_window()
        for batch in self._loader:
            if self._events.is_watching:
                batch = self._events.begin_micro_batch(batch)
            yield batch

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise TypeError(f"the loader, a {type(self._loader).__name__}, has no length")
        return len(self._loader)

    def _warn_of_open_window(self) -> None:
        if self._events.is_watching and self._events.has_open_window() and not _warned:
            _warned.append(True)
            _log.warning("a window was still open when the loader began again: it goes on, its micro-batches count on")


_warned: list[bool] = []


class EntryHook(WeakHook):
    """Before the model, wrapper included."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is about to be called."""
        events = self.target()
        if events is not None and not torch.compiler.is_compiling():
            events.before_model(args, kwargs)


class UncompiledEntryHook(EntryHook):
    """Of a model whose own call is compiled: it is not to be compiled by itself."""

    __slots__ = ()
    __call__ = _disable_dynamo(EntryHook.__call__)


class ExitHook(WeakHook):
    """After the model, wrapper included."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The model has been called."""
        events = self.target()
        if events is not None and not torch.compiler.is_compiling():
            events.after_model(output)


class UncompiledExitHook(ExitHook):
    """See `UncompiledEntryHook`."""

    __slots__ = ()
    __call__ = _disable_dynamo(ExitHook.__call__)


class BeforeStepHook(WeakHook):
    """Before ``optimizer.step``; a closure is wrapped, so that the verdict is given when it has returned."""

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """The optimizer is about to step."""
        events = self.target()
        if events is None:
            return None
        if in_backward():
            raise ValueError(
                f"{type(optimizer).__name__}.step() inside the backward leaves no moment before the update for a "
                "verdict; step after the backward, or set enabled=False"
            )
        if events.is_inside_scaler():
            events.begin_update(optimizer)
            return None
        closure = _closure_of(args, kwargs)
        if closure is None:
            events.before_update(optimizer)
            events.begin_update(optimizer)
            return None
        wrapped = _JudgedClosure(events, optimizer, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs


class AfterStepHook(WeakHook):
    """After ``optimizer.step``."""

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The optimizer has stepped."""
        events = self.target()
        if events is not None:
            events.after_update(optimizer)


class CountHook(WeakHook):
    """After ``optimizer.step`` of a guard that is switched off."""

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The optimizer has stepped."""
        events = self.target()
        if events is not None:
            events.step += 1


class _JudgedClosure:
    def __init__(self, events: StepEvents, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> None:
        self._events = weakref.ref(events)
        self._optimizer = optimizer
        self._closure = closure

    def __call__(self) -> Any:
        result = self._closure()
        events = self._events()
        if events is not None:
            events.before_update(self._optimizer)
            events.begin_update(self._optimizer)
        return result


def _closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure given to ``step``; the optimizer itself comes first in ``args``."""
    closure: Callable[[], Any] | None = (
        kwargs["closure"] if "closure" in kwargs else (args[1] if len(args) > 1 else None)
    )
    return closure


def named_losses(losses: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Each loss with its name: a dict names its terms ``loss.cls``, numbers are taken too, None is ignored."""
    for name, value in losses.items():
        if isinstance(value, dict):
            yield from named_losses({f"{name}.{key}": item for key, item in value.items()})
        elif isinstance(value, (int, float, np.number)):
            yield name, torch.tensor(float(value), dtype=torch.float64, device="cpu")
        elif isinstance(value, np.ndarray):
            yield name, torch.as_tensor(value)
        elif value is not None:
            for index, tensor in enumerate(tensors_in(value)):
                yield (name if index == 0 else f"{name}[{index}]"), tensor
