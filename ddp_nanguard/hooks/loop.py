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


class Guard(Protocol):
    """What happens in a step, in order; `NanGuard` tells the story."""

    def _is_watching(self) -> bool: ...

    def _has_open_window(self) -> bool: ...

    def _begin_micro_batch(self, batch: Any) -> Any: ...

    def _before_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    def _after_model(self, output: Any) -> None: ...

    def _before_update(self, optimizer: torch.optim.Optimizer) -> bool: ...

    def _begin_update(self, optimizer: torch.optim.Optimizer) -> None: ...

    def _after_update(self, optimizer: torch.optim.Optimizer) -> None: ...

    def _is_inside_scaler(self) -> bool: ...

    def _count_step(self) -> None: ...


class Steps:
    """A loader whose items begin micro-batches."""

    def __init__(self, loader: Iterable[Any], guard: Guard) -> None:
        self._loader = loader
        self._guard = guard

    def __iter__(self) -> Iterator[Any]:
        self._warn_of_open_window()
        for batch in self._loader:
            if self._guard._is_watching():
                batch = self._guard._begin_micro_batch(batch)
            yield batch

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise TypeError(f"the loader, a {type(self._loader).__name__}, has no length")
        return len(self._loader)

    def _warn_of_open_window(self) -> None:
        if self._guard._is_watching() and self._guard._has_open_window() and not _warned:
            _warned.append(True)
            _log.warning("a window was still open when the loader began again: it goes on, its micro-batches count on")


_warned: list[bool] = []


class EntryHook(WeakHook):
    """Before the model, wrapper included."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is about to be called."""
        guard = self.target()
        if guard is not None and not torch.compiler.is_compiling():
            guard._before_model(args, kwargs)


class UncompiledEntryHook(EntryHook):
    """Of a model whose own call is compiled: it is not to be compiled by itself."""

    __slots__ = ()
    __call__ = _disable_dynamo(EntryHook.__call__)


class ExitHook(WeakHook):
    """After the model, wrapper included."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The model has been called."""
        guard = self.target()
        if guard is not None and not torch.compiler.is_compiling():
            guard._after_model(output)


class UncompiledExitHook(ExitHook):
    """See `UncompiledEntryHook`."""

    __slots__ = ()
    __call__ = _disable_dynamo(ExitHook.__call__)


class BeforeStepHook(WeakHook):
    """Before ``optimizer.step``; a closure is wrapped, so that the verdict falls when it has returned."""

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """The optimizer is about to step."""
        guard = self.target()
        if guard is None:
            return None
        if in_backward():
            raise ValueError(
                f"{type(optimizer).__name__}.step() inside the backward leaves no moment before the update for a "
                "verdict; step after the backward, or set enabled=False"
            )
        if guard._is_inside_scaler():
            guard._begin_update(optimizer)
            return None
        closure = _closure_of(args, kwargs)
        if closure is None:
            guard._before_update(optimizer)
            guard._begin_update(optimizer)
            return None
        wrapped = _JudgedClosure(guard, optimizer, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs


class AfterStepHook(WeakHook):
    """After ``optimizer.step``."""

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The optimizer has stepped."""
        guard = self.target()
        if guard is not None:
            guard._after_update(optimizer)


class CountHook(WeakHook):
    """After ``optimizer.step`` of a guard that is switched off."""

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The optimizer has stepped."""
        guard = self.target()
        if guard is not None:
            guard._count_step()


class _JudgedClosure:
    def __init__(self, guard: Guard, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> None:
        self._guard = weakref.ref(guard)
        self._optimizer = optimizer
        self._closure = closure

    def __call__(self) -> Any:
        result = self._closure()
        guard = self._guard()
        if guard is not None:
            guard._before_update(self._optimizer)
            guard._begin_update(self._optimizer)
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
