"""``verdict="deferred"``: the device withholds a bad update by itself, the host learns of it one step later.

[Note: one step later]
A fused optimizer takes a flag ``found_inf`` and, where it is set, changes neither weights nor state. The verdict is
handed to it as it is on the device, so no step waits for the host. The flag of step n is read when step n + 1 is
judged; by then its gradients are gone, but its slots, micro-batches, random states, buffers and scale were kept, and
the weights are those from before it. The fault path then runs with all that put in place of the present step's.

A fused SGD that skips the first step of a parameter reads a momentum later that was never written, so a step is judged
at once where a parameter with a gradient has no state yet: it is new, unfrozen, or its state was cleared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .capture.window import AccumulationWindow
from .context import GuardContext
from .distributed.verdict import Verdict
from .fault.policy import FaultPolicy
from .probes.calls import ModuleCall
from .probes.severity import Severity

_NEVER = 1 << 30


@dataclass
class Pending:
    """A step whose verdict the host has not read yet, and what it will need if that is not clean."""

    step: int
    verdict: Verdict
    window: AccumulationWindow
    reduced_in: set[int]
    calls: list[ModuleCall]
    hyper_parameters: list[tuple[str, float | Tensor]]


class DeferredVerdict:
    """Hands verdicts to optimizers and learns of them one step later.

    Args:
        context: of the guard.

    Host sync: one read per step of a value that has long arrived.
    """

    def __init__(self, context: GuardContext) -> None:
        self._context = context
        self._pending: Pending | None = None
        self._spare = context.window.empty_like_this()
        self._flag: Tensor | None = None
        self._handed: dict[int, Tensor | None] = {}
        self._updated: dict[int, set[int]] = {}
        self._blocks_from = _blocks_from(context)

    # -- one step, in order ------------------------------------------------------------------------------------------

    def resolve_previous(self, policy: FaultPolicy) -> None:
        """What became of the step before.

        Raises:
            NonFiniteError: on every rank.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            severity, _, share = pending.verdict.read()
            self._context.budget.heard(share)
            if severity is Severity.CLEAN:
                policy.on_clean_step()
            else:
                with self._as_it_was(pending):
                    policy.act_on(severity, pending.step)
                self._context.window.repair_buffer_copies(pending.window)
        finally:
            pending.window.clear()

    def can_defer(self) -> bool:
        """Whether each parameter that is trained has been updated, and has the state that its update reads.

        The first half goes by what is trained, the same on every rank: one that holds no part of any parameter would
        else be the only one not to read its first verdict.
        """
        optimizers = self._context.optimizers
        return all(_trained(each) <= self._updated.get(id(each), set()) and _has_state(each) for each in optimizers)

    def defer(self, step: int, verdict: Verdict) -> None:
        """Keep the step until its verdict is known; the window is a new one. Host sync: none."""
        context = self._context
        self._flag = verdict.as_found_inf(self._blocks_from)
        context.slots.push_history(step)
        if context.scaler is not None:
            context.scaler.remember()
        numbers = [(name, _kept(value)) for name, value in context.state.hyper_parameters()]
        self._pending = Pending(step, verdict, context.window, context.reduced_in, context.forward.calls, numbers)
        self._spare.clear()  # after a raise it holds the step that was told of
        context.window, self._spare = self._spare, context.window

    def set_found_inf(self, optimizer: torch.optim.Optimizer) -> None:
        """The larger of the verdict and of what a scaler has put there becomes the optimizer's ``found_inf``."""
        if self._flag is None:
            return
        theirs: Tensor | None = getattr(optimizer, "found_inf", None)
        flag = self._flag.to(self._context.device)
        self._handed[id(optimizer)] = theirs
        optimizer.found_inf = flag if theirs is None else torch.maximum(theirs, flag)  # type: ignore[attr-defined]

    def restore_found_inf(self, optimizer: torch.optim.Optimizer, went_on: bool) -> None:
        """The optimizer has stepped: ``found_inf`` as it was.

        Args:
            optimizer: one of the guard's.
            went_on: whether a verdict that was read let the update go on.
        """
        if id(optimizer) not in self._handed:
            if went_on:
                self._updated.setdefault(id(optimizer), set()).update(_trained(optimizer))
            return
        theirs = self._handed.pop(id(optimizer))
        if theirs is None:
            del optimizer.found_inf  # type: ignore[attr-defined]
        else:
            optimizer.found_inf = theirs  # type: ignore[attr-defined]

    def resolved_now(self) -> None:
        """This step's verdict is known to the host: the device need not withhold anything."""
        self._flag = None

    @contextlib.contextmanager
    def unresolved_fault(self) -> Iterator[int | None]:
        """For a rank that ends before it learns of the step before: that step, put in place, if it was bad.

        Host sync: one read; only where a process ends.
        """
        pending = self._pending
        if pending is None or not self._withheld_update(pending):
            yield None
            return
        self._pending = None
        with self._as_it_was(pending):
            yield pending.step

    def _withheld_update(self, pending: Pending) -> bool:
        try:
            return pending.verdict.read()[0] >= self._blocks_from
        except RuntimeError:
            return False  # the device answers no more

    @contextlib.contextmanager
    def _as_it_was(self, pending: Pending) -> Iterator[None]:
        context = self._context
        present = (context.window, context.reduced_in, context.forward.calls)
        context.window, context.reduced_in, context.forward.calls = pending.window, pending.reduced_in, pending.calls
        context.is_late, context.late_hyper_parameters = True, pending.hyper_parameters
        context.slots.restore_step(pending.step)
        try:
            yield
        finally:
            context.slots.release_step()
            context.is_late, context.late_hyper_parameters = False, []
            context.window, context.reduced_in, context.forward.calls = present


def _kept(value: float | Tensor) -> float | Tensor:
    """A number as it is now: the loop may write into a tensor before its step is known to be bad."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _trained(optimizer: torch.optim.Optimizer) -> set[int]:
    """The parameters that take a gradient, and 0: an optimizer that trains nothing yet has not been updated either."""
    return {0} | {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}


def _has_state(optimizer: torch.optim.Optimizer) -> bool:
    return all(
        any(value is not None for value in optimizer.state.get(parameter, {}).values())
        for group in optimizer.param_groups
        if group.get("momentum") != 0  # without momentum SGD keeps none
        for parameter in group["params"]
        if parameter.grad is not None
    )


def _blocks_from(context: GuardContext) -> int:
    if context.config.on_fault == "warn":
        return _NEVER
    return int(Severity.FAULT if context.config.on_loss == "warn" else Severity.LOSS)
