"""``verdict="deferred"``: the device withholds a bad update by itself, the host learns of it one step later.

[Note: one step later]
A fused optimizer takes a flag ``found_inf`` and, where it is set, changes neither weights nor state. The verdict is
handed to it as it is on the device, so no step waits for the host. The flag of step n is read when step n + 1 is
judged; by then its gradients are gone, but its slots, micro-batches, random states, buffers and scale were kept in its
`StepRecord`, and the weights are those from before it. The fault path is given that record.

A fused SGD that skips the first step of a parameter reads a momentum later that was never written, so a step is judged
at once where a parameter with a gradient has no state yet: it is new, unfrozen, or its state was cleared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_nanguard.blame.triage import VerdictHandler
from ddp_nanguard.capture.record import StepRecord
from ddp_nanguard.context import GuardContext
from ddp_nanguard.distributed.verdict import Verdict
from ddp_nanguard.probes.severity import Severity
from ddp_nanguard.probes.slots import PastStep
from ddp_nanguard.probes.state import state_of

from .metrics import MetricsLog

_NEVER = 1 << 30


@dataclass
class _PendingStep:
    """A step whose verdict the host has not read yet."""

    record: StepRecord
    slots: PastStep
    verdict: Verdict


class DeferredVerdict:
    """Hands verdicts to optimizers and reads each of them one step later.

    Args:
        context: of the guard.

    Attributes:
        metrics: for the user's logger; None without one.

    Host sync: one read per step of a value that has long arrived.
    """

    metrics: MetricsLog | None = None

    def __init__(self, context: GuardContext) -> None:
        self._context = context
        # - the step before, whose verdict is on its way to the host
        self._pending: _PendingStep | None = None
        self._spare = context.window.empty_copy()  # two windows take turns: one is kept while the other is filled
        # - what the device is told about this step
        self._blocks_from = _blocks_from(context)
        self._flag: Tensor | None = None
        self._theirs: dict[int, Tensor | None] = {}  # by id of the optimizer, what a scaler had put into found_inf
        # - parameters that each optimizer has updated; one that was not may lack the state that its update reads
        self._updated: dict[int, set[int]] = {}

    # -- one step, in order ------------------------------------------------------------------------------------------

    def resolve_previous(self, handler: VerdictHandler) -> None:
        """Read the verdict of the step before and, where it was not clean, have it handled.

        Raises:
            NonFiniteError: on every rank.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            severity, _ = pending.verdict.read()  # it has long arrived: no wait
            if severity is Severity.CLEAN:
                handler.on_clean()
            else:
                # it went there as a clean one; blame takes what is non-finite in the history for legitimate
                self._context.slots.drop_history(pending.slots)
                handler.on_verdict(severity, pending.record)
                # the next window began with the buffers that the bad step left behind
                self._context.window.repair_buffer_copies(pending.record.window)
            if self.metrics is not None:
                self.metrics.after_verdict(pending.record, pending.slots)
        finally:
            pending.record.window.clear()

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
        slots = context.slots.push_history(step)
        record = context.record(step)
        record.slots, record.is_current = slots, False
        record.hyper_parameters = [(name, _kept(value)) for name, value in record.hyper_parameters]
        record.scaler = context.scaler.snapshot() if context.scaler is not None else None
        self._pending = _PendingStep(record, slots, verdict)
        context.window.end_copies()
        self._spare.clear()  # after a raise it holds the step that was reported
        context.window, self._spare = self._spare, context.window

    def set_found_inf(self, optimizer: torch.optim.Optimizer) -> None:
        """The larger of the verdict and of what a scaler has put there becomes the optimizer's ``found_inf``."""
        if self._flag is None:
            return
        theirs: Tensor | None = getattr(optimizer, "found_inf", None)
        flag = self._flag.to(self._context.device)  # gloo's verdict is on the CPU
        self._theirs[id(optimizer)] = theirs
        # exactly 1, for which kernels look: a scaler sums what it finds over several devices
        both = flag if theirs is None else (torch.maximum(theirs, flag.to(theirs.device)) > 0).to(torch.float32)
        optimizer.found_inf = both  # type: ignore[attr-defined]

    def restore_found_inf(self, optimizer: torch.optim.Optimizer, went_on: bool) -> None:
        """The optimizer has stepped: ``found_inf`` as it was.

        Args:
            optimizer: one of the guard's.
            went_on: whether a verdict that was read let the update go on.
        """
        if id(optimizer) not in self._theirs:
            if went_on:
                self._updated.setdefault(id(optimizer), set()).update(_trained(optimizer))
            return
        theirs = self._theirs.pop(id(optimizer))
        if theirs is None:
            del optimizer.found_inf  # type: ignore[attr-defined]
        else:
            optimizer.found_inf = theirs  # type: ignore[attr-defined]

    def resolved_now(self) -> None:
        """This step's verdict is known to the host: the device need not withhold anything."""
        self._flag = None

    def unresolved_fault(self) -> StepRecord | None:
        """The step before, if the host has not read its verdict yet and it was bad: for a rank that ends.

        Host sync: one read; only where a process ends.
        """
        pending = self._pending
        if pending is None or not self._withheld_update(pending):
            return None
        self._pending = None
        self._context.slots.drop_history(pending.slots)
        return pending.record

    def _withheld_update(self, pending: _PendingStep) -> bool:
        try:
            # one that has not come by now waits for a peer
            return pending.verdict.has_arrived() and pending.verdict.read()[0] >= self._blocks_from
        except RuntimeError:
            return False  # the device answers no more


def _kept(value: float | Tensor) -> float | Tensor:
    """A number as it is now: the loop may write into a tensor before its step is known to be bad."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _trained(optimizer: torch.optim.Optimizer) -> set[int]:
    """The parameters that take a gradient, and 0: an optimizer that trains nothing yet has not been updated either."""
    return {0} | {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}


def _has_state(optimizer: torch.optim.Optimizer) -> bool:
    return all(
        any(value is not None for value in state_of(optimizer, parameter).values())
        for group in optimizer.param_groups
        if group.get("momentum") != 0  # without momentum SGD keeps none
        for parameter in group["params"]
        if parameter.grad is not None
    )


def _blocks_from(context: GuardContext) -> int:
    if context.config.on_fault == "warn":
        return _NEVER
    return int(Severity.FAULT if context.config.on_loss == "warn" else Severity.LOSS)
