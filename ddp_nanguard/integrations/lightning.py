"""PyTorch Lightning: `NanGuardCallback`, for ``Trainer(callbacks=[...])``.

Lightning tells callbacks when training begins and ends, and of exceptions. What the guard needs beyond that, the batch,
the step, the loss and what is about to be saved, passes through four methods of the strategy, which are wrapped on the
trainer's own object from the first batch to the last.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ddp_nanguard.config import ENV_REPLAY
from ddp_nanguard.guard import NanGuard

from .engines import OnObject, TrainerStep, require_options

if TYPE_CHECKING or "pytorch_lightning" not in sys.modules or "lightning.pytorch" in sys.modules:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:  # the same code under its other name
    from pytorch_lightning import Callback, LightningModule, Trainer


_log = logging.getLogger(__name__)


class NanGuardCallback(Callback):
    """Guards ``Trainer.fit`` with a `NanGuard`.

    A dump needs no recipe: ``ddp-nanguard replay DUMP -- python train.py`` runs the step in the script's own Trainer,
    as the rank where it began, alone in one process.

    Args:
        replay_from: a dump whose step this trainer runs instead of training, on as many ranks as it is of; the process
            ends with its outcome. None trains.
        options: of `NanGuard`: ``dump_dir=``, ``on_fault=`` and so on. With ``log_every=`` and no ``on_metrics=``
            numbers go to the trainer's loggers.

    Attributes:
        guard: while training runs, else None.

    Raises:
        ValueError: on every rank when training starts, as from `NanGuard`.
        NonFiniteError: on every rank, out of ``Trainer.fit``.

    Collective: those of `NanGuard`, and those of ``guard.check()`` before each checkpoint.
    """

    def __init__(self, *, replay_from: str | os.PathLike[str] | None = None, **options: Any) -> None:
        self.guard: NanGuard | None = None
        require_options(options)
        self._replay_from = replay_from
        self._options = options
        self._wrapped: _WrappedStrategy | _NothingSaved | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrapped, restored from a checkpoint, and past the sanity check: only now is all there that is guarded."""
        self._let_go()
        if self._replay_from is not None:
            os.environ.setdefault(ENV_REPLAY, os.fspath(self._replay_from))
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        model: Any = trainer.strategy.model
        # a wrapper's forward is given the step to run, or DDP and FSDP would not see it
        root = "step" if model is not pl_module else "layer"
        options = {
            "first_step": trainer.global_step,
            "scaler": scaler,
            "root": root,
            **_logging_to(trainer, self._options),
            **self._options,
        }
        self.guard = NanGuard(model, trainer.optimizers, **options)
        self._wrapped = _WrappedStrategy(self.guard, trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judge the last update, before the last checkpoint is written."""
        guard = self.guard
        self._unwrap()
        if guard is not None:
            guard.close()
        self.guard = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Now, since the trainer goes on to take the model apart, and may save in a collective."""
        guard, self.guard = self.guard, None
        self._unwrap()
        # None in the parent of spawned ranks, and before the first batch
        if guard is not None and not guard.on_exception(exception):
            self._wrapped = _NothingSaved(trainer)

    def _unwrap(self) -> None:
        if self._wrapped is not None:
            self._wrapped.undo()
            self._wrapped = None

    def _let_go(self) -> None:
        """Of a fit that an exception ended, and that was caught."""
        self._unwrap()
        self.guard = None

    def __getstate__(self) -> dict[str, Any]:  # for ranks that are spawned, which have no guard yet
        return {**self.__dict__, "guard": None, "_wrapped": None}


def _logging_to(trainer: Trainer, options: dict[str, Any]) -> dict[str, Any]:
    """With ``log_every=`` alone, numbers go to the trainer's loggers, on the rank where these write.

    Not by ``self.log``, which would change what the trainer keeps, monitors and saves.
    """
    if not options.get("log_every") or "on_metrics" in options or not trainer.is_global_zero:
        return {}

    def log(step: int, numbers: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=step)

    return {"on_metrics": log}


class _WrappedStrategy:
    """Methods of a strategy that tell the guard, until `undo`."""

    def __init__(self, guard: NanGuard, trainer: Trainer, module: LightningModule) -> None:
        self._guard = guard
        self._module = module
        self._has_watched = False  # the loss of the step that runs
        self._methods = OnObject(
            trainer.strategy,
            training_step=self.training_step,
            backward=self.backward,
            save_checkpoint=self.save_checkpoint,
        )

    def undo(self) -> None:
        """The strategy's own methods, which those on the object hide."""
        self._methods.undo()

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's step on a batch that the guard knows; ``automatic_optimization`` decides whose loss it is."""
        own = self._methods.own["training_step"]
        self._has_watched = False
        if isinstance(batch, Iterator):  # training_step(self, dataloader_iter): the batch is not known here
            return own(batch, *args, **kwargs)
        if not self._module.automatic_optimization:  # it steps on its own: `backward` sees its losses
            return own(self._guard.begin(batch), *args, **kwargs)
        self._has_watched = True

        def step(given: Any, is_again: bool) -> Any:
            with _no_log(self._module) if is_again else contextlib.nullcontext():
                return own(given, *args, **kwargs)

        return TrainerStep(step, _loss_of, _with_loss).run(self._guard, batch)[0]

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What is backpropagated, not scaled yet; the loss of a step that was run by the guard is known already."""
        if not self._has_watched:
            self._guard.watch(loss=closure_loss)
        return self._methods.own["backward"](closure_loss, *args, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, *args: Any, **kwargs: Any) -> Any:
        """Only weights that are known to be good are written down."""
        self._guard.check(checkpoint=filepath)
        return self._methods.own["save_checkpoint"](checkpoint, filepath, *args, **kwargs)


class _NothingSaved:
    """Refuses what callbacks save because of an exception, until the trainer is taken apart: the state is damaged."""

    def __init__(self, trainer: Trainer) -> None:
        self._methods = OnObject(trainer.strategy, save_checkpoint=self.save_checkpoint, teardown=self.teardown)

    def undo(self) -> None:
        """The strategy's own methods, which those on the object hide."""
        self._methods.undo()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, *_: Any, **__: Any) -> None:
        """Say that it is not."""
        _log.error("%s is not saved: the state is damaged by non-finite values", filepath)

    def teardown(self) -> None:
        """As the strategy's own."""
        self.undo()
        self._methods.own["teardown"]()


def _loss_of(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else output


def _with_loss(output: Any, loss: Tensor) -> Any:
    return {**output, "loss": loss} if isinstance(output, Mapping) else loss


@contextlib.contextmanager
def _no_log(module: LightningModule) -> Iterator[None]:
    """What is logged in a second look was logged already."""
    module.__dict__["log"] = _ignored
    try:
        yield
    finally:
        module.__dict__.pop("log", None)


def _ignored(*_: Any, **__: Any) -> None:
    return None
