"""``verdict="deferred"``: the device withholds a bad update by itself, the host learns of it one step later.

[Note: one step later]
A fused optimizer takes a flag ``found_inf`` and, where it is set, changes neither weights nor state. The verdict is
handed to it as it is on the device, so no step waits for the host. The flag of step n is read when step n + 1 is
judged; by then its gradients are gone, but its slots, micro-batches, random states, buffers and scale were kept, and
the weights are those from before it. The fault path then runs with all that put in place of the present step's.

A fused SGD that skips its very first step reads a momentum that was never written, so steps are judged at once until
every parameter has been updated once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .parts import Parts
from .policy import FaultPolicy
from .probes.calls import Call
from .verdict import Answer, Severity
from .window import Window

_NEVER = 1 << 30


@dataclass
class Pending:
    """A step whose verdict the host has not read yet, and what it will need if that is not clean."""

    step: int
    answer: Answer
    window: Window
    reduced_in: set[int]
    calls: list[Call]


class Deferral:
    """Hands verdicts to optimizers and learns of them one step later.

    Args:
        parts: of the guard.

    Host sync: one read per step of a value that has long arrived.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._pending: Pending | None = None
        self._spare = parts.window.twin()
        self._flag: Tensor | None = None
        self._handed: dict[int, Tensor | None] = {}
        self._updated: dict[int, int] = {}
        self._blocks_from = _blocks_from(parts)

    # -- one step, in order ------------------------------------------------------------------------------------------

    def learn(self, policy: FaultPolicy) -> None:
        """What became of the step before.

        Raises:
            NonFiniteError: on every rank.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        severity, _, share = pending.answer.read()
        self._parts.budget.heard(share)
        if severity is Severity.CLEAN:
            policy.note_clean()
        else:
            with self._as_it_was(pending):
                policy.go_on(severity, pending.step)
        pending.window.clear()

    def can_wait(self) -> bool:
        """Whether each parameter that has a gradient has been updated before."""
        return all(_num_gradients(each) <= self._updated.get(id(each), 0) for each in self._parts.optimizers)

    def put_off(self, step: int, answer: Answer) -> None:
        """Keep the step until its verdict is known; the window is a new one. Host sync: none."""
        parts = self._parts
        self._flag = answer.at_least(self._blocks_from)
        parts.board.keep(step)
        if parts.scaler is not None:
            parts.scaler.remember()
        self._pending = Pending(step, answer, parts.window, parts.reduced_in, parts.forward.calls)
        self._spare.clear()  # after a raise it holds the step that was told of
        parts.window, self._spare = self._spare, parts.window

    def hand_over(self, optimizer: torch.optim.Optimizer) -> None:
        """The larger of the verdict and of what a scaler has put there becomes the optimizer's ``found_inf``."""
        if self._flag is None:
            return
        theirs: Tensor | None = getattr(optimizer, "found_inf", None)
        flag = self._flag.to(self._parts.device)
        self._handed[id(optimizer)] = theirs
        optimizer.found_inf = flag if theirs is None else torch.maximum(theirs, flag)  # type: ignore[attr-defined]

    def take_back(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has stepped: ``found_inf`` as it was."""
        if id(optimizer) not in self._handed:
            self._updated[id(optimizer)] = max(self._updated.get(id(optimizer), 0), _num_gradients(optimizer))
            return
        theirs = self._handed.pop(id(optimizer))
        if theirs is None:
            del optimizer.found_inf  # type: ignore[attr-defined]
        else:
            optimizer.found_inf = theirs  # type: ignore[attr-defined]

    def judged_at_once(self) -> None:
        """This step's verdict is known to the host: the device need not withhold anything."""
        self._flag = None

    @contextlib.contextmanager
    def _as_it_was(self, pending: Pending) -> Iterator[None]:
        parts = self._parts
        present = (parts.window, parts.reduced_in, parts.forward.calls)
        parts.window, parts.reduced_in, parts.forward.calls = pending.window, pending.reduced_in, pending.calls
        parts.is_late = True
        parts.board.recall(pending.step)
        try:
            yield
        finally:
            parts.board.forget_recalled()
            parts.is_late = False
            parts.window, parts.reduced_in, parts.forward.calls = present


def _num_gradients(optimizer: torch.optim.Optimizer) -> int:
    return sum(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def _blocks_from(parts: Parts) -> int:
    if parts.config.on_fault == "warn":
        return _NEVER
    return int(Severity.FAULT if parts.config.on_loss == "warn" else Severity.LOSS)
