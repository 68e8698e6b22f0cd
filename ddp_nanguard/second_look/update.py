"""A bad update once more, where ``keep_previous`` has put everything back to before it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ddp_nanguard.capture.record import PreviousStep, StepRecord
from ddp_nanguard.context import GuardContext
from ddp_nanguard.diagnosis.trace.traced_step import Traced, TracedJob, Watcher
from ddp_nanguard.errors import Undone


def can_update_again(context: GuardContext, record: StepRecord) -> bool:
    """Whether the weights from before the update and its gradients are there."""
    previous = context.previous
    return previous is not None and previous.record is record and bool(record.gradients)


def update_again(context: GuardContext, record: StepRecord, watcher: Watcher) -> Traced:
    """Make the update under a trace, and undo it again.

    Args:
        context: of the guard; its copy from before the update has been restored.
        record: of the step whose update it is.
        watcher: of the trace.

    Collective: those of the optimizer. Host sync: many.
    """
    previous = context.previous
    assert previous is not None
    job = TracedJob(context.wrapper, context.optimizers, has_scaler=False, is_compiled=False)
    with _undone_after(previous, context.undone), _gradients_of(record), _hooks_off(context.optimizers):
        with torch.inference_mode(False), watcher.following(job, []):
            for optimizer in context.optimizers:
                optimizer.step()
        return watcher.result([])


@contextlib.contextmanager
def _undone_after(previous: PreviousStep, undone: Undone) -> Iterator[None]:
    try:
        yield
    finally:
        previous.restore(undone)


@contextlib.contextmanager
def _gradients_of(record: StepRecord) -> Iterator[None]:
    now = [(parameter, parameter.grad) for parameter, _ in record.gradients.values()]
    for parameter, gradient in record.gradients.values():
        parameter.grad = gradient.clone()
    try:
        yield
    finally:
        for parameter, gradient in now:  # type: ignore[assignment]  # None where there was none
            parameter.grad = gradient


@contextlib.contextmanager
def _hooks_off(optimizers: list[torch.optim.Optimizer]) -> Iterator[None]:
    """The guard's own hooks would ask for a verdict, and the job's are not part of the update."""
    tables: list[Any] = [t for o in optimizers for t in (o._optimizer_step_pre_hooks, o._optimizer_step_post_hooks)]
    before = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.update(hooks)
