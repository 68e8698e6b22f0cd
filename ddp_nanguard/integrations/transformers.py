"""transformers' Trainer, and those that derive from it (TRL): `NanGuardCallback`, `guard_trainer`.

A callback of transformers is given neither the model that the loop calls, nor the batch, nor the loss, and is not told
of exceptions. So this one takes the trainer, as TRL's own do, and while training runs wraps two methods on the
trainer's own object, ``compute_loss`` and ``_save_checkpoint``, and one of its accelerator, ``backward``; ``train`` is
wrapped for good, to see what it raises.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

from ddp_nanguard.config import ENV_REPLAY
from ddp_nanguard.guard import NanGuard

from .engines import OnObject, TrainerStep, WatchedBackward, WatchedEngine, require_options

NUMBER = "num_items_in_batch"
"""Of the labels in the whole window, on all ranks: an argument of ``training_step`` and ``compute_loss``."""


def guard_trainer(trainer: Trainer, **options: Any) -> Trainer:
    """Add a `NanGuardCallback` to a trainer.

    Args:
        trainer: of any class; it is changed, not copied.
        options: of `NanGuardCallback`.

    Returns:
        ``trainer``.
    """
    callback = NanGuardCallback(trainer, **options)
    trainer.add_callback(callback)
    return trainer


class NanGuardCallback(TrainerCallback):
    """Guards ``trainer.train`` with a `NanGuard`: ``trainer.add_callback(NanGuardCallback(trainer))``.

    A dump needs no recipe: ``ddp-nanguard replay DUMP -- python train.py`` runs the step in the script's own trainer,
    as the rank where it began, alone in one process.

    Args:
        trainer: that it is a callback of.
        replay_from: a dump whose step this trainer runs instead of training, on as many ranks as it is of; the process
            ends with its outcome. None trains.
        options: of `NanGuard`: ``dump_dir=``, ``on_fault=`` and so on.

    Attributes:
        guard: while training runs, else None.

    Raises:
        ValueError: where it is made, for what is no trainer and for an option that does not fit; on every rank when
            training starts, as from `NanGuard`.
        NonFiniteError: on every rank, out of ``trainer.train``.

    Collective: those of `NanGuard`, and those of ``guard.check()`` before each checkpoint.
    """

    def __init__(
        self, trainer: Trainer | None = None, *, replay_from: str | os.PathLike[str] | None = None, **options: Any
    ) -> None:
        if not isinstance(trainer, Trainer):
            raise ValueError(
                f"NanGuardCallback({type(trainer).__name__}): give the trainer that it is a callback of, as in "
                "trainer.add_callback(NanGuardCallback(trainer)) or guard_trainer(trainer); Lightning's is "
                "ddp_nanguard.integrations.lightning.NanGuardCallback"
            )
        require_options(options)
        self.guard: NanGuard | None = None
        self._trainer: Any = trainer
        self._replay_from = replay_from
        self._options = options
        self._wrapped: _WrappedTrainer | None = None
        self._train = self._trainer.train
        trainer.train = self._watched_train  # type: ignore[method-assign]  # on the object

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prepared, and restored from a checkpoint: only now is all there that is guarded."""
        self._leave(_TrainsAgain())
        if self._replay_from is not None:
            os.environ.setdefault(ENV_REPLAY, os.fspath(self._replay_from))
        trainer = self._trainer
        options = {"first_step": state.global_step, **self._options}
        self.guard = NanGuard(trainer.model_wrapped, trainer.optimizer, scaler=trainer.accelerator.scaler, **options)
        self._wrapped = _WrappedTrainer(self.guard, trainer)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Judge the last update."""
        guard = self.guard
        self._unwrap()
        if guard is not None:
            guard.close()
        self.guard = None

    def _watched_train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._train(*args, **kwargs)
        except BaseException as error:
            self._leave(error)
            raise

    def _leave(self, error: BaseException) -> None:
        """Now, since nobody may ask again: a notebook, or a launcher that catches what its processes raise."""
        guard, self.guard = self.guard, None
        self._unwrap()
        if guard is not None:
            guard.on_exception(error)

    def _unwrap(self) -> None:
        if self._wrapped is not None:
            self._wrapped.undo()
            self._wrapped = None


class _TrainsAgain(BaseException):
    """The guard of a training that was given up, without a word to its peers: ``auto_find_batch_size``."""


class _WrappedTrainer:
    """Methods of a trainer that tell the guard, until `undo`."""

    def __init__(self, guard: NanGuard, trainer: Any) -> None:
        self._guard = guard
        self._trainer = trainer
        self._is_inside = False
        owns = _owns_its_step(type(trainer))
        step = {"training_step": self.training_step} if owns else {"compute_loss": self.compute_loss}
        self._methods = OnObject(trainer, _save_checkpoint=self.save_checkpoint, **step)
        self._backward = WatchedBackward(guard, trainer.accelerator)
        self._engine = WatchedEngine(guard, trainer.model_wrapped) if trainer.is_deepspeed_enabled else None

    def undo(self) -> None:
        """The trainer's own methods, which those on the object hide."""
        self._backward.undo()
        self._methods.undo()
        if self._engine is not None:
            self._engine.undo()

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The trainer's loss on a batch that the guard knows; evaluation and other models are not looked at."""
        is_step = torch.is_grad_enabled() and model is self._trainer.model_wrapped and model.training
        if not is_step or self._is_inside:
            return self._methods.own["compute_loss"](model, inputs, *args, **kwargs)
        batch = _Batch(inputs, args, kwargs, position=1)

        def own(kept: Any, is_again: bool) -> Any:
            given, more, named = batch.arguments(kept)
            return self._own_loss(model, given, *more, **named)

        result, loss = TrainerStep(own, _loss_of, _with_loss).run(self._guard, batch.kept)
        if loss is not None:
            self._backward.knows(loss)
        return result

    def _own_loss(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's, also in a second look; one that calls itself is one loss."""
        self._is_inside = True
        try:
            return self._methods.own["compute_loss"](*args, **kwargs)
        finally:
            self._is_inside = False

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """A step that makes its loss itself; ``backward`` sees it."""
        batch = _Batch(inputs, args, kwargs, position=0)
        begun = self._guard.begin(batch.kept)
        inputs, args, kwargs = batch.arguments(begun)
        return self._methods.own["training_step"](model, inputs, *args, **kwargs)

    def save_checkpoint(self, model: Any, trial: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Only weights that are known to be good are written down."""
        trainer = self._trainer
        path = os.path.join(trainer._get_output_dir(trial=trial), f"checkpoint-{trainer.state.global_step}")
        self._guard.check(checkpoint=path)
        return self._methods.own["_save_checkpoint"](model, trial, *args, **kwargs)


def _loss_of(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) and output else output


def _with_loss(output: Any, loss: Tensor) -> Any:
    return (loss, *output[1:]) if isinstance(output, tuple) else loss


def _owns_its_step(kind: type) -> bool:
    """Whether a class of trainer has a ``training_step`` that neither calls ``compute_loss`` nor its parent's."""
    for each in kind.__mro__:
        code = getattr(inspect.unwrap(vars(each).get("training_step", _nothing)), "__code__", None)
        if code is None or code is _nothing.__code__:
            continue
        if "training_step" not in code.co_names:
            return "compute_loss" not in code.co_names
    return False


def _nothing() -> None:
    return None


class _Batch:
    """What a method of the trainer is given: ``inputs``, and the number of items if it is among the arguments.

    Args:
        inputs: of the micro-batch.
        args, kwargs: what follows it.
        position: among ``args``, of the number of items.

    Attributes:
        kept: what the guard keeps of it, of plain containers.
    """

    def __init__(self, inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any], position: int) -> None:
        self._inputs, self._args, self._kwargs, self._position = inputs, args, kwargs, position
        self._kind: Any = type(inputs)
        self.kept = {"inputs": dict(inputs) if isinstance(inputs, Mapping) else inputs}
        # all ranks have counted it together, which one alone in a replay cannot
        if NUMBER in kwargs:
            self.kept[NUMBER] = kwargs[NUMBER]
        elif len(args) > position:
            self.kept[NUMBER] = args[position]

    def arguments(self, batch: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Inputs, positional and keyword arguments, of this batch or of another one that was kept.

        The first time the trainer's own object is handed on: a loss may take labels out of it, or add to it.
        """
        inputs, self._inputs = self._inputs, None
        if batch is not self.kept or inputs is None:
            given = batch["inputs"]
            inputs = self._kind(given) if issubclass(self._kind, Mapping) else given
        args, kwargs, at = self._args, self._kwargs, self._position
        if NUMBER in kwargs:
            kwargs = {**kwargs, NUMBER: batch[NUMBER]}
        elif len(args) > at:
            args = (*args[:at], batch[NUMBER], *args[at + 1 :])
        return inputs, args, kwargs
