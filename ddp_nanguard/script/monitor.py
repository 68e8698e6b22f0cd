"""`ScriptMonitor`: follows the script's loop through one step, and ends the process where training was stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddp_nanguard.blame.triage import VerdictHandler
from ddp_nanguard.context import GuardContext
from ddp_nanguard.replay.run_step import is_update, lay_in_gradients
from ddp_nanguard.step.monitor import StepMonitor
from ddp_nanguard.step.stage import StepStage

from .recorded_step import RecordedStep


class ScriptMonitor(StepMonitor):
    """A monitor for which the first verdict is the last one.

    The step is judged where training judged it: on entry to the update, so that what the script does to gradients after
    the backward (clipping, unscaling) is part of it.

    Args:
        context: of the guard.
        handler: writes the verdict down.
        recorded: the step.
        alone: whether this process stands for its rank.
        finish: ends the process with the outcome.
    """

    def __init__(
        self,
        context: GuardContext,
        handler: VerdictHandler,
        recorded: RecordedStep,
        alone: bool,
        finish: Callable[[], Any],
    ) -> None:
        super().__init__(context, handler)
        self._recorded = recorded
        self._alone = alone
        self._finish = finish
        self._stepped: set[int] = set()
        self.is_clean = True

    def begins_micro_batch(self) -> bool:
        """Whether a call of the model would begin one."""
        return self._needs_micro_batch()

    @property
    def is_in_step(self) -> bool:
        """Whether the loop's step function is running, which got the recorded batch."""
        return self._context.window.calls.is_in_step

    def run_step(self, step: Callable[[Any, Any], Any], batch: Any) -> Any:
        """As in training; without ``guard.steps`` it is here that the recorded batch is handed out."""
        if not self.has_loader() and self._needs_micro_batch():
            batch = self._recorded.serve()
        return super().run_step(step, batch)

    def watch_loss(self, name: str, value: Tensor) -> None:
        """Keep the loss for the comparison."""
        super().watch_loss(name, value)
        self._recorded.keep_loss(self._context.window.micro_batches[-1].index, name, value)

    def check(self) -> bool:
        """End after the verdict, unless it is one between two steps."""
        before = self._last
        self._prepare()
        goes_on = super().check()
        if self._last is not before:
            self._judged()
        return goes_on

    def before_update(self, optimizer: torch.optim.Optimizer) -> bool:
        """End after the verdict, unless the recorded fault is one of the update."""
        if not self._has_begun():
            return super().before_update(optimizer)
        self._prepare()
        shared = self._last is not None and self.is_judged
        goes_on = super().before_update(optimizer)
        if not shared:
            self._judged()
        return goes_on

    def _has_begun(self) -> bool:
        """Whether the step runs; a script may step its optimizer before, to please a schedule."""
        if self._recorded.num_served:
            return True
        if self.stage is StepStage.BACKWARD:
            self._recorded.cannot(
                "the script updates before any batch came through the guard: take batches from guard.steps(loader), "
                "or call guard(...) in place of the model"
            )
        return False

    def _prepare(self) -> None:
        """The verdict is due: was the whole window run?"""
        recorded = self._recorded
        if recorded.num_served and self.stage is StepStage.BACKWARD:
            if recorded.num_served < len(recorded.window):
                recorded.cannot(
                    f"the script updates after {recorded.num_served} micro-batches, the step in the dump has "
                    f"{len(recorded.window)}: give the command, and the number of micro-batches per step, of that run"
                )
            recorded.lay_in_numbers()

    def _judged(self) -> None:
        if not self._recorded.num_served:
            return
        if self._has_fault() or not is_update(self._recorded.rebuilt.dump.report.origin):
            self._finish()

    def _has_fault(self) -> bool:
        run = self._recorded.run
        return run is not None and run.collector.fault is not None

    # -- the update, where it was the fault ------------------------------------------------------------------------

    def begin_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Alone, the update uses the recorded gradients: this rank's own are those from before the reduce."""
        super().begin_update(optimizer)
        if self._recorded.num_served and self._alone and not self._stepped:
            lay_in_gradients(self._recorded.rebuilt)

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Judge the new weights once each optimizer has stepped."""
        super().after_update(optimizer)
        if not self._recorded.num_served:
            return
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._context.optimizers):
            super().check()
            self._finish()
