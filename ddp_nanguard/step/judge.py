"""`StepJudge`: how bad a step is here, what all ranks say to that, and what the handler decides."""

from __future__ import annotations

from torch import Tensor

from ddp_nanguard.blame.triage import Decision, VerdictHandler
from ddp_nanguard.context import GuardContext
from ddp_nanguard.distributed.verdict import Verdict
from ddp_nanguard.probes.coverage import HookCheck
from ddp_nanguard.probes.severity import Severity, SeverityReducer, warn_limits
from ddp_nanguard.report.types import Phase

from .metrics import MetricsLog


class StepJudge:
    """Turns the slots of a step into a verdict of all ranks, and the verdict into a decision.

    Args:
        context: of the guard.
        handler: acts on verdicts.

    Attributes:
        metrics: for the user's logger; None without one.
    """

    metrics: MetricsLog | None = None

    def __init__(self, context: GuardContext, handler: VerdictHandler) -> None:
        has_scaler, limits = context.scaler is not None, warn_limits(context.config)
        self._context = context
        self._handler = handler
        self._severity = SeverityReducer(context.slots, context.device, has_scaler, limits)
        self._hook_check = HookCheck(context.forward, context.slots) if context.forward.watched.layers else None

    def ask_all_ranks(self, step: int, ran_backward: bool, closes: bool = False, weights_too: bool = False) -> Verdict:
        """The verdict, still on the device.

        Args:
            step: number of the step.
            ran_backward: whether this rank has run a backward since the last verdict.
            closes: whether the guard is being closed.
            weights_too: whether the weights are looked at as they are now.

        Collective: one MAX all-reduce of 16 bytes; every rank must call it. Host sync: none, but for the first step of
        a compiled model.
        """
        context = self._context
        verdict = context.ranks.all_reduce_verdict(self._own_severity(step, weights_too), ran_backward, step, closes)
        # after the all-reduce: what it may read takes time, for which no other rank is to wait
        if ran_backward and self._hook_check is not None:
            self._hook_check.after_backward(step, context.root_is_traced)
        return verdict

    def _own_severity(self, step: int, weights_too: bool) -> Tensor:
        context = self._context
        context.probe_before_verdict(step, weights_too)
        is_bad = Phase.OPTIMIZER in context.config.watched and context.state.probe_hyper_parameters()
        return self._severity.severity(Severity.FAULT if is_bad else Severity.CLEAN)

    def decide(self, severity: Severity, step: int) -> Decision:
        """Have the verdict handled, and file the step: in the history if it was clean, else nowhere.

        Raises:
            NonFiniteError: on every rank, where the handler stops the job.
        """
        context, decision = self._context, Decision.CLEAN
        if severity is Severity.CLEAN:
            self._handler.on_clean()
        else:
            decision = self._handler.on_verdict(severity, context.record(step))
        if self.metrics is not None and self.metrics.is_due(step):
            self.metrics.after_verdict(context.record(step))
        # what was bad must not enter the history: blame takes what is non-finite in there for legitimate
        if decision is Decision.CLEAN:
            context.keep_clean_step(step)
        else:
            context.slots.discard()
        return decision
