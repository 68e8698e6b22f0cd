"""Hooks where the guard meets the training loop: loader, call of the model, step of the optimizer, watched losses."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sized
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from ddp_nanguard.tensors.containers import tensors_in

from .autograd import in_backward
from .nested import is_nested, is_running
from .optimizers import inner_optimizers
from .positions import LoaderPosition, Position
from .weak import WeakHook

_log = logging.getLogger(__name__)


class StepEvents(Protocol):
    """What the hooks report of a training loop, in the order of a step. `StepMonitor` implements it."""

    @property
    def is_watching(self) -> bool:
        """Whether anything is looked at; False for a guard that is switched off or closed."""

    def has_open_window(self) -> bool:
        """Whether a micro-batch has begun since the last verdict."""

    def begin_micro_batch(self, batch: Any) -> Any:
        """Called with each item of the loader; the loop gets what is returned."""

    def is_inside_scaler(self) -> bool:
        """Whether ``scaler.step`` is running. Its verdict was given on entry, so ``optimizer.step`` gets none."""

    def before_update(self, optimizer: torch.optim.Optimizer) -> bool:
        """Called on entry to ``optimizer.step``, outside of a scaler: gives the verdict.

        Returns:
            Whether the update goes ahead.

        Raises:
            NonFiniteError: on every rank, to stop before the update.
        """

    def begin_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when the update is about to use the gradients, after the verdict."""

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when ``optimizer.step`` has returned: the weights may have changed."""


class ModelEvents(Protocol):
    """What happens around the forward of the whole model."""

    def before_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before the model, wrapper included, runs."""

    def after_model(self, output: Any) -> Any:
        """Called with what the model returned; the caller gets what this returns."""


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

    def put(self, before_others: bool) -> None:
        """Put a hook before the model and one after it; they replace those of an earlier call.

        Args:
            before_others: whether the first one runs before the hooks that the model carries already.
        """
        self.remove()
        is_compiled = getattr(self._model, "_compiled_call_impl", None) is not None
        entry, leaving = (UncompiledEntryHook, UncompiledExitHook) if is_compiled else (EntryHook, ExitHook)
        register = self._model.register_forward_pre_hook
        self._handles = [
            register(entry(self._events()), with_kwargs=True, prepend=before_others),
            self._model.register_forward_hook(leaving(self._events())),
        ]

    def leave_last(self) -> None:
        """Have the hook after the model run behind all others, which are to see its own output, not what replaces it.

        To be called before the model runs: hooks come and go.
        """
        present: Any = self._model._forward_hooks  # an OrderedDict
        if next(reversed(present)) != self._handles[1].id:
            present.move_to_end(self._handles[1].id)

    def remove(self) -> None:
        """Take the hooks off; may be called again."""
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
        """Put a hook before and one after ``step`` of each optimizer."""
        for optimizer in self._optimizers:
            self._register(optimizer, BeforeStepHook(self._events()), AfterStepHook(self._events()))
            for inner in inner_optimizers(optimizer):
                if all(inner is not other for other in self._optimizers):
                    before = BeforeInnerStepHook(self._events(), optimizer)
                    self._register(inner, before, AfterInnerStepHook(self._events(), optimizer))

    def _register(self, optimizer: torch.optim.Optimizer, before: BeforeStepHook, after: AfterStepHook) -> None:
        self._handles.append(optimizer.register_step_pre_hook(before))
        self._handles.append(optimizer.register_step_post_hook(after))

    def remove(self) -> None:
        """Take the hooks off; may be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class Steps:
    """A loader whose items begin micro-batches: what `NanGuard.steps` returns.

    It can be iterated again and has the loader's length, if that has one.

    Args:
        loader: any iterable.
        events: told of each item.
        progress: told of the position of each item.
        epoch: number of the first iteration over it; None counts on.
        start: index of the first item of that iteration.
        passed_over: positions whose items are drawn and not handed out.

    Raises:
        ValueError: an argument does not fit.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        events: StepEvents,
        progress: LoaderPosition | None = None,
        epoch: int | None = None,
        start: int = 0,
        passed_over: Container[Position] = (),
    ) -> None:
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            raise ValueError(f"guard.steps({type(loader).__name__}): give the loader, which is iterated for batches")
        for name, number in (("epoch", epoch), ("start", start)):
            if not (number is None and name == "epoch") and (type(number) is not int or number < 0):
                raise ValueError(f"guard.steps({name}={number!r}) does not fit; give a whole number of at least 0")
        self._loader = loader
        self._events = events
        self._progress = progress if progress is not None else LoaderPosition()
        self._epoch, self._start = epoch, start
        self._passed_over = passed_over

    def __iter__(self) -> Iterator[Any]:
        self._warn_of_open_window()
        epoch, start = self._progress.begin_epoch(self._loader, self._epoch), self._start
        self._epoch, self._start = None, 0  # the next iteration is the next epoch, from its beginning
        for index, batch in enumerate(self._loader, start):
            position = Position(epoch, index)
            if position in self._passed_over:
                continue
            if self._events.is_watching:
                self._progress.now = position
                batch = self._events.begin_micro_batch(batch)
            yield batch

    @property
    def position(self) -> Position | None:
        """Epoch and index of the batch that was handed out last by the guard; None before the first one."""
        return self._progress.now

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise TypeError(f"the loader, a {type(self._loader).__name__}, has no length")
        return len(self._loader)

    def _warn_of_open_window(self) -> None:
        if self._events.is_watching and self._events.has_open_window() and not _warned:
            _warned.append(True)
            _log.warning("a window was still open when the loader began again: it goes on, its micro-batches count on")


_warned: list[bool] = []  # not empty once the warning was given: one per process, not one per epoch


class EntryHook(WeakHook):
    """The hook before the model, wrapper included."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Report the call. Nothing while the hook itself is being traced by `torch.compile`."""
        events = self.target()
        if events is not None and not torch.compiler.is_compiling():
            events.before_model(args, kwargs)


class UncompiledEntryHook(EntryHook):
    """The hook before a model whose own call is compiled: runs as Python, since Dynamo would compile it by itself."""

    __slots__ = ()
    __call__ = _disable_dynamo(EntryHook.__call__)


class ExitHook(WeakHook):
    """The hook after the model, wrapper included."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Report the output. Nothing while the hook itself is being traced by `torch.compile`."""
        events = self.target()
        if events is None or torch.compiler.is_compiling():
            return output
        return events.after_model(output)


class UncompiledExitHook(ExitHook):
    """See `UncompiledEntryHook`."""

    __slots__ = ()
    __call__ = _disable_dynamo(ExitHook.__call__)


class BeforeStepHook(WeakHook):
    """The hook before ``optimizer.step``; a closure is wrapped, so that the verdict is given when it has returned."""

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Give the verdict, or have the closure give it; returns new arguments of ``step`` with a closure, else None.

        Raises:
            ValueError: the step runs inside a backward pass.
            NonFiniteError: on every rank, to stop before the update.
        """
        events = self.target()
        if events is None or is_nested(optimizer):
            return None
        if in_backward():
            raise ValueError(
                f"{type(optimizer).__name__}.step() inside the backward leaves no moment before the update for a "
                "verdict; step after the backward, or set enabled=False"
            )
        # the scaler's entry was judged; a second verdict in the same step would be one collective too many
        if events.is_inside_scaler():
            events.begin_update(optimizer)
            return None
        # with a closure the gradients of the update do not exist yet
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
    """The hook after ``optimizer.step``, when the weights may have changed."""

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Report that the optimizer has stepped."""
        events = self.target()
        if events is not None and not is_nested(optimizer):
            events.after_update(optimizer)


class BeforeInnerStepHook(BeforeStepHook):
    """The hook before the step of an optimizer inside another one: a step of that, unless that is running already.

    Args:
        target: told of the step.
        outer: the optimizer that the loop has.
    """

    __slots__ = ("outer",)

    def __init__(self, target: object, outer: torch.optim.Optimizer) -> None:
        super().__init__(target)
        self.outer = weakref.ref(outer)

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Give the verdict of the outer optimizer."""
        outer = self.outer()
        return None if outer is None or is_running(outer) else super().__call__(outer, args, kwargs)


class AfterInnerStepHook(AfterStepHook):
    """The hook after it; arguments as of `BeforeInnerStepHook`."""

    __slots__ = ("outer",)

    def __init__(self, target: object, outer: torch.optim.Optimizer) -> None:
        super().__init__(target)
        self.outer = weakref.ref(outer)

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Report that the outer optimizer has stepped, if it was by this one alone."""
        outer = self.outer()
        if outer is not None and not is_running(outer):
            super().__call__(outer, args, kwargs)


class CountHook(WeakHook):
    """The hook after ``optimizer.step`` for a guard that is switched off and only counts steps."""

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Report that the optimizer has stepped."""
        events = self.target()
        if events is not None and not is_nested(optimizer):
            events.step += 1


class _JudgedClosure:
    """A closure for ``optimizer.step``, with the verdict after it and before the update."""

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


CLOSURE_CODE = _JudgedClosure.__call__.__code__
"""Code between ``optimizer.step`` and the closure that it runs: what is above it in the stack is no update."""


def _closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure given to ``step``, None without one; the optimizer itself comes first in ``args``."""
    closure: Callable[[], Any] | None = (
        kwargs["closure"] if "closure" in kwargs else (args[1] if len(args) > 1 else None)
    )
    return closure


def require_losses(step: Callable[..., Any], losses: Any) -> Any:
    """What a step function returned, if it is a loss or a dict of losses.

    Args:
        step: the function, for the message.
        losses: what it returned.

    Raises:
        ValueError: it is neither.
    """
    values = list(losses.values()) if isinstance(losses, dict) else [losses]
    if values and all(isinstance(value, Tensor) for value in values):
        return losses
    name = getattr(step, "__name__", type(step).__name__)
    raise ValueError(
        f"guard.run({name}, batch): the step function returned a {_kind_of(losses)}; "
        "return the loss that is backpropagated, a tensor, or a dict of named losses"
    )


def _kind_of(value: Any) -> str:
    if not isinstance(value, dict):
        return type(value).__name__
    return f"dict of {', '.join(type(item).__name__ for item in value.values()) or 'nothing'}"


def named_losses(losses: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Each watched loss as (name, tensor).

    Args:
        losses: by name: tensors, containers of tensors, numbers, NumPy arrays, or dicts of these, whose terms are named
            ``loss.cls``. None is ignored; the second tensor of a container is ``loss[1]``.
    """
    for name, value in losses.items():
        if isinstance(value, dict):
            yield from named_losses({f"{name}.{key}": item for key, item in value.items()})
        elif isinstance(value, (int, float, np.number)):
            yield name, torch.tensor(float(value), dtype=torch.float64, device="cpu")
        elif isinstance(value, np.ndarray):
            yield name, torch.as_tensor(value, device="cpu")
        elif value is not None:
            tensors = tensors_in(value)
            if not tensors and (isinstance(value, (str, bytes)) or not hasattr(value, "__len__")):
                what = f"guard.watch({name}={type(value).__name__})"
                raise ValueError(f"{what} holds no loss; give a tensor, a number, or a dict of them")
            for index, tensor in enumerate(tensors):
                yield (name if index == 0 else f"{name}[{index}]"), tensor
