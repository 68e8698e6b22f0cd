"""A monitor's steps and micro-batches, as faults that are injected on purpose count them."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from ddp_nanguard.inject.step_counter import BatchHook, LossHook


class Counted(Protocol):
    """What is counted; a `StepMonitor`."""

    step: int

    @property
    def is_watching(self) -> bool:
        """Whether anything is looked at."""

    @property
    def is_judged(self) -> bool:
        """Whether a verdict was given, and no backward has run since."""

    def next_micro_batch(self) -> int:
        """Index of the micro-batch that a call of the model would belong to."""

    def has_loader(self) -> bool:
        """Whether the loop takes its batches from ``guard.steps``."""


class MonitorStepCounter:
    """A `StepCounter` over a monitor. Its hooks are empty but in a fire drill.

    Args:
        monitor: held weakly: a fault that is kept by the user must not keep the model.
    """

    def __init__(self, monitor: Counted) -> None:
        self.batch_hooks: list[BatchHook] = []
        self.loss_hooks: list[LossHook] = []
        self._monitor: weakref.ref[Any] = weakref.ref(monitor)

    def _watching(self) -> Counted | None:
        monitor: Counted | None = self._monitor()
        return monitor if monitor is not None and monitor.is_watching else None

    def entering(self) -> tuple[int, int] | None:
        """See `StepCounter`."""
        monitor = self._watching()
        return None if monitor is None else (monitor.step, monitor.next_micro_batch())

    def updating(self) -> int | None:
        """See `StepCounter`. The verdict may have been given already: for a scaler, `check` or another optimizer."""
        monitor = self._watching()
        return None if monitor is None else monitor.step - monitor.is_judged

    def has_loader(self) -> bool:
        """See `StepCounter`."""
        monitor = self._watching()
        return monitor is not None and monitor.has_loader()
