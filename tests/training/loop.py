"""The training loop of the tests: what a user writes, with places to look in and to plant in.

    loop = Loop(model, optimizer, step, guard=guard)
    error = loop.until_fault(batches)  # the `NonFiniteError` that ended it, or None

The order within a step is fixed: next batch, ``before_batch``, forward, ``guard.watch``, ``on_losses``, backward; after
the last micro-batch ``before_update``, unscaling and clipping, the optimizer's step, ``zero_grad``, ``after_update``.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddp_nanguard import NonFiniteError

_END = object()


def summed(losses: Any) -> Tensor:
    """What is differentiated: the loss, or the sum of named losses."""
    return sum(losses.values()) if isinstance(losses, dict) else losses  # type: ignore[return-value]  # not empty


def _nothing(*_: Any) -> None:
    pass


def _always(_: int) -> bool:
    return True


def _no_context(_: int) -> AbstractContextManager[object]:
    return contextlib.nullcontext()


@dataclass
class Loop:
    """One training loop. Batches are counted from 0 over all steps; so are the indices given to the hooks.

    Attributes:
        model: what is trained.
        optimizer: of the model.
        step: ``step(call, batch)``: the loss, or a dict of named losses.
        guard: whose ``steps`` and ``watch`` are used; None trains without one.
        scaler: a GradScaler.
        accumulation: micro-batches per step.
        runs_step: whether ``guard.run`` calls ``step``, so that a second look has the code of the loss.
        call: what ``step`` gets; the guard, or without one the model, where none is given.
        total: from what ``step`` gave to what is differentiated.
        clip: clips the gradients of the model.
        around_step: context of a step, from the fetching of its first batch on, by the number of the step.
        around_silent: the same for all micro-batches but the last.
        around_batch: context of forward and backward, by the index.
        before_batch: called with index and batch.
        on_losses: called with what ``step`` gave.
        before_update: called with the index of the step's last micro-batch.
        updates: whether there is an update at all, by the same index.
        after_update: likewise, after the gradients were cleared.
        caught: called with index and error for each `NonFiniteError` of an update; training goes on. Where there is
            none, the first error ends the loop.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[Any, Any], Any]
    guard: Any = None
    scaler: Any = None
    accumulation: int = 1
    runs_step: bool = False
    call: Any = None
    total: Callable[[Any], Tensor] = summed
    clip: Callable[[nn.Module], object] | None = None
    around_step: Callable[[int], AbstractContextManager[object]] = _no_context
    around_silent: Callable[[int], AbstractContextManager[object]] = _no_context
    around_batch: Callable[[int], AbstractContextManager[object]] = _no_context
    before_batch: Callable[[int, Any], object] = _nothing
    on_losses: Callable[[Any], object] = _nothing
    before_update: Callable[[int], object] = _nothing
    updates: Callable[[int], bool] = _always
    after_update: Callable[[int], object] = _nothing
    caught: Callable[[int, NonFiniteError], object] | None = None

    def until_fault(self, batches: Iterable[Any]) -> NonFiniteError | None:
        """Runs all batches; the error that ended it, if one did."""
        try:
            self.run(batches)
        except NonFiniteError as error:
            return error
        return None

    def run(self, batches: Iterable[Any]) -> None:
        """Runs all batches; errors go to the caller. A last step that is not full has no update."""
        items = iter(batches if self.guard is None else self.guard.steps(batches))
        index = 0
        is_full = True
        while is_full:
            with self.around_step(index // self.accumulation):
                is_full = self._run_step(items, index)
            index += self.accumulation

    def _run_step(self, items: Iterator[Any], first: int) -> bool:
        """Whether there were batches for all of the step."""
        last = first + self.accumulation - 1
        with self.around_silent(first // self.accumulation):
            for index in range(first, last):
                if not self._run_batch(items, index):
                    return False
        if not self._run_batch(items, last):
            return False
        self._run_update(last)
        return True

    def _run_batch(self, items: Iterator[Any], index: int) -> bool:
        batch = next(items, _END)
        if batch is _END:
            return False
        self.before_batch(index, batch)
        with self.around_batch(index):
            losses = self._losses(batch)
            self.on_losses(losses)
            self._scaled(self.total(losses)).backward()  # type: ignore[no-untyped-call]  # torch's own
        return True

    def _losses(self, batch: Any) -> Any:
        if self.runs_step:
            return self.guard.run(self.step, batch)
        losses = self.step(self._called(), batch)
        if self.guard is not None:
            self.guard.watch(loss=losses)
        return losses

    def _called(self) -> Any:
        if self.call is not None:
            return self.call
        return self.model if self.guard is None else self.guard

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)  # type: ignore[no-any-return]

    def _run_update(self, index: int) -> None:
        try:
            self.before_update(index)
            if self.updates(index):
                self._update()
        except NonFiniteError as error:
            if self.caught is None:
                raise
            self.caught(index, error)
        self.optimizer.zero_grad()
        self.after_update(index)

    def _update(self) -> None:
        if self.clip is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            self.clip(self.model)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


class _Said(logging.Handler):
    """Keeps what the guard logs."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def listening(level: int = logging.WARNING) -> Iterator[list[str]]:
    """The lines that the guard logs within the block."""
    handler, logger = _Said(level), logging.getLogger("ddp_nanguard")
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
