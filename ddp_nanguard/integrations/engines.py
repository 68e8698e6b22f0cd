"""Engines that own backward and step, as DeepSpeed's: `guard_engine`; and what all trainers have in common.

That is methods wrapped on an object, a loss that is seen as it is backpropagated, and a trainer's step as the guard
runs it. Read on in: `lightning`, `transformers`, `accelerate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ddp_nanguard.config import GuardConfig
from ddp_nanguard.guard import NanGuard


def guard_engine(guard: NanGuard, engine: Any) -> WatchedEngine:
    """Let the verdict fall before ``engine.step`` updates, and see the loss that ``engine.backward`` is given.

    Args:
        guard: made of the engine (or its module) and its optimizer.
        engine: with ``backward(loss)`` and ``step()``. Where ``is_gradient_accumulation_boundary()`` is there and
            False, ``step()`` updates nothing, and there is no verdict.

    Returns:
        What takes it back: ``watched.undo()``. A guard that is closed looks at nothing, so there is no need.

    Raises:
        ValueError: with ``on_fault="skip"``: gradients that an engine has taken over cannot be taken out again.

    Collective: one verdict per update, which an optimizer of torch that the engine steps shares.
    """
    return WatchedEngine(guard, engine)


_OF_THE_GUARD = ("scaler", "replay", "group", "on_event", "on_metrics")


def require_options(options: Mapping[str, Any]) -> None:
    """Refuse options of a guard that do not fit when they are given, and not only when training starts.

    Raises:
        ValueError: names the option, the value and the valid ones.
    """
    GuardConfig.from_code_and_environment({name: each for name, each in options.items() if name not in _OF_THE_GUARD})


class OnObject:
    """Methods of an object that are wrapped on it, until `undo`.

    Args:
        target: whose attributes hide the methods of its class.
        wrapped: by name what stands there from now on.

    Attributes:
        own: what was there before.
    """

    def __init__(self, target: Any, **wrapped: Any) -> None:
        self._target = target
        self.own = {name: getattr(target, name) for name in wrapped}
        self._hidden = {name: vars(target)[name] for name in wrapped if name in vars(target)}
        self._wrapped = wrapped
        for name, method in wrapped.items():
            setattr(target, name, method)

    def undo(self) -> None:
        """The object's own methods; not one that somebody has wrapped once more since."""
        for name, method in self._wrapped.items():
            if vars(self._target).get(name) != method:
                continue
            delattr(self._target, name)
            if name in self._hidden:
                setattr(self._target, name, self._hidden[name])


class WatchedBackward:
    """``backward(loss)`` of an object, which tells the guard of its loss first, until `undo`."""

    def __init__(self, guard: NanGuard, target: Any) -> None:
        self._guard = guard
        self._known: Any = None
        self._methods = OnObject(target, backward=self.backward)

    def undo(self) -> None:
        """The object's own method."""
        self._methods.undo()

    def knows(self, loss: Tensor) -> None:
        """The guard has seen this loss: if that is backpropagated next, or a share of it, it is not looked at again."""
        self._known = loss.grad_fn

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What is backpropagated, not scaled yet."""
        known, self._known = self._known, None  # its graph is to be freed by the backward
        if known is None:
            self._guard.watch(loss=loss)
        elif not _is_share_of(known, loss):
            self._guard.watch(backpropagated=loss)
        del known
        return self._methods.own["backward"](loss, *args, **kwargs)


def _is_share_of(known: Any, loss: Tensor) -> bool:
    """Whether a loss is the known one, or that divided by a number, as by that of the micro-batches."""
    node = loss.grad_fn
    if node is None or node is known:
        return node is known
    makers = [each for each, _ in node.next_functions if each is not None]
    return node.name() == "DivBackward0" and len(makers) == 1 and makers[0] is known


class WatchedEngine:
    """``backward`` and ``step`` of an engine, which ask the guard first, until `undo`."""

    def __init__(self, guard: NanGuard, engine: Any) -> None:
        if guard._context.config.on_fault == "skip":
            raise ValueError(
                f"option on_fault='skip' with {type(engine).__name__}, which owns its step: the gradients that it has "
                "taken over cannot be taken out again; give 'stop' or 'warn'"
            )
        self._guard = guard
        self._engine = engine
        self._backward = WatchedBackward(guard, engine)
        self._methods = OnObject(engine, step=self.step)

    def undo(self) -> None:
        """The engine's own methods."""
        self._backward.undo()
        self._methods.undo()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The verdict, and then the update."""
        is_boundary = getattr(self._engine, "is_gradient_accumulation_boundary", None)
        if is_boundary is None or is_boundary():
            self._guard.check()
        return self._methods.own["step"](*args, **kwargs)


class TrainerStep:
    """One step of a trainer as `NanGuard.run` takes it: it gives the loss, and can be run a second time.

    Args:
        call: ``call(batch, is_again)`` runs it and gives what the trainer takes.
        loss_of: finds the loss in that; what is no tensor means that there is none.
        with_loss: ``with_loss(output, loss)`` is what the trainer gets, once the guard knows its loss.
    """

    def __init__(
        self,
        call: Callable[[Any, bool], Any],
        loss_of: Callable[[Any], Any],
        with_loss: Callable[[Any, Tensor], Any],
    ) -> None:
        self._call, self._loss_of, self._with_loss = call, loss_of, with_loss
        self._output: Any = None
        self._has_run = False

    def run(self, guard: NanGuard, batch: Any) -> tuple[Any, Tensor | None]:
        """What the trainer gets, and the loss in it; None where there is none, which is the trainer's own affair."""
        try:
            loss = guard.run(self._loss, guard.begin(batch))
        except _NoLossError:
            return self._output, None
        finally:
            output, self._output = self._output, None
        return self._with_loss(output, loss), loss

    def _loss(self, model: Any, batch: Any) -> Tensor:
        output = self._call(batch, self._has_run)
        if not self._has_run:
            self._has_run, self._output = True, output
        loss = self._loss_of(output)
        if not isinstance(loss, Tensor):
            raise _NoLossError
        return loss


class _NoLossError(Exception):
    """The step gave no tensor."""
