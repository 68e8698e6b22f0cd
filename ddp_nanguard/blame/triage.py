"""What a verdict that is not clean means: an overflow of the scaler, a warning, or a fault. Decides, and does nothing.

What is done about a fault (stop, skip, warn, dump) lies above, in `fault.policy`; a replay asks the same questions and
only writes the answers down.

[Note: confirmed]
The verdict is about what probes saw. By the time of the update a bad gradient may have been dealt with: a scaler that
the guard was not told of has set ``found_inf``, or the loop has cleared or replaced the gradient. Or a norm overflowed
that was made of finite elements ([Note: screens]). Then the step is no fault.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from typing import Protocol

from ddp_nanguard.capture.record import StepRecord
from ddp_nanguard.config import GuardConfig
from ddp_nanguard.context import GuardContext
from ddp_nanguard.probes.gradient import GradientSource, ParameterNormSource
from ddp_nanguard.probes.severity import NORM_OVERFLOWS_AT, Severity
from ddp_nanguard.probes.slot_roles import SlotRole
from ddp_nanguard.probes.slots import SlotStats, is_clean
from ddp_nanguard.report.messages import log_line
from ddp_nanguard.report.types import FaultReport, Phase
from ddp_nanguard.report.wording import listed

from . import local_sites
from .inspect import RankFindings, blame_input, rescan
from .legal import is_bad_state, legal_state
from .report import report_of

HARMLESS = "every gradient is finite, the weights are in no danger (on_loss='warn' lets such steps pass)"
SKIPPED = (
    "gradients were non-finite too, and no update uses them: other code has made them finite or skips the update; if "
    "that is a GradScaler, pass scaler= (on_loss='warn' lets such steps pass)"
)
GROWN = (
    "every gradient is finite, but weights or gradients grow or are very large: letting such steps pass does not help"
)
LARGE = 1e6
"""A gradient or a weight of this size is no sign of a job that only one batch has disturbed."""
GREW = 100.0
"""By which factor the largest gradient of the last clean steps has grown where the cause is not one batch either."""
OVERFLOWED = (
    "gradients or weights are so large (beyond 1e19) that their norm overflows, although every element is finite: the "
    "step goes on; clipping by norm would make all gradients zero (said once)"
)
ON_PURPOSE = "taken for so on purpose"
MAX_LARGE = 4
"""Names of parameters whose gradients are told as large."""
MAX_LEGAL = 4
"""Names of state that are told as non-finite on purpose."""
OVERFLOWS_TOLD = 3
"""Overflows after the first clean step that are logged one by one; from then on every hundredth is."""


class Decision(enum.Enum):
    """Whether the update of a step goes ahead, and whether the step counts as clean."""

    CLEAN = enum.auto()
    """It goes ahead, and the step counts as a clean one."""
    PROCEED = enum.auto()
    """It goes ahead, or a scaler withholds it by itself; the slots do not go into the ring of clean steps."""
    SKIP = enum.auto()
    """It is left out, on all ranks alike."""


class VerdictHandler(Protocol):
    """Acts on the verdicts of a guard. Every rank calls it with the same verdict, in the same order."""

    def on_clean(self) -> None:
        """Called after a step in which nothing was bad on any rank."""

    def on_verdict(self, severity: Severity, record: StepRecord) -> Decision:
        """Decide about the update of a step in which something was bad on some rank.

        Args:
            severity: the verdict, the same on every rank; not clean.
            record: of the step.

        Raises:
            NonFiniteError: on every rank, to stop.
        """


@dataclass(frozen=True)
class Judgement:
    """What a verdict means.

    Attributes:
        decision: None for a fault: whether to stop, skip or go on is for the caller to decide.
        severity: ``LOSS`` or ``FAULT`` where there is no decision.
        cause: what is known of a fault already, such as a scale collapse; "" if nothing is.
        warnings: lines for the log, one each; judging logs nothing itself.
        findings, report: what this rank and what all ranks found; set only after `Triage.examine`, and None where it
            turned out to be no fault.
    """

    decision: Decision | None
    severity: Severity = Severity.CLEAN
    cause: str = ""
    warnings: tuple[str, ...] = ()
    findings: RankFindings | None = None
    report: FaultReport | None = None


class Triage:
    """Tells what verdicts mean. Every rank calls it with the same verdicts in the same order, since it communicates.

    Args:
        context: of the guard.

    Attributes:
        num_overflows: steps that a scaler has skipped so far.
        let_through: the last step whose fault was let through (``on_fault="warn"``); set by the caller, for reports.
    """

    def __init__(self, context: GuardContext) -> None:
        self._context = context
        self.let_through: int | None = None
        self._said: set[str] = set()

        # Counts of overflows. They lead to collectives, so they must be equal on all ranks: they follow the verdict and
        # nothing that one rank alone knows
        self.num_overflows = 0
        self._overflows_in_a_row = 0
        self._later_overflows = 0
        self._has_been_clean = False

    def on_clean(self) -> None:
        """Note that a step was clean: a run of overflows has ended. Collective: none. Host sync: none."""
        self._has_been_clean = True
        self._overflows_in_a_row = 0

    def judge(self, severity: Severity, record: StepRecord) -> Judgement:
        """Tell what a verdict means before anything is looked at again.

        Args:
            severity: the verdict, not clean.
            record: of the step.

        Returns:
            With a decision, or with none where there seems to be a fault: then `examine` comes next.

        Collective: for an overflow one all-reduce of 8 bytes, and the fault round if it is logged, on the fault group;
        else none. Host sync: two for an overflow and many if it is logged, one per page of slots for a warning, else
        none.
        """
        if severity is Severity.OVERFLOW:
            return self._overflow(record)
        self._overflows_in_a_row = 0
        if severity in (Severity.LOSS, Severity.FAULT):
            return Judgement(None, severity)
        self._has_been_clean = self._has_been_clean or record.is_current
        return Judgement(Decision.CLEAN, warnings=tuple(self._new_warnings(record)))

    def examine(self, judgement: Judgement, record: StepRecord) -> Judgement:
        """Look again at what seems to be a fault, and find its origin together with all ranks.

        Args:
            judgement: what `judge` returned.
            record: of the step.

        Returns:
            With findings and report; with a decision instead where it is no fault, see [Note: confirmed].

        Collective: one all-reduce of 64 bytes, for a bad loss alone one of 8 bytes, and the fault round, on the fault
        group. Host sync: many.
        """
        findings = rescan(self._context, record)
        severity, cause, warnings = judgement.severity, judgement.cause, judgement.warnings
        gradients_bad = False
        if not cause:
            severity, told, gradients_bad = self._confirmed(severity, record, findings)
            warnings += told
        if severity is Severity.CLEAN:
            return Judgement(Decision.PROCEED, warnings=warnings)
        if severity is Severity.LOSS:
            (grows,) = self._context.ranks.any_of(self._grows(findings))
            cause = GROWN if grows else (SKIPPED if gradients_bad else HARMLESS)
        report = self.report(record, findings, cause)
        return Judgement(None, severity, cause, warnings, findings, report)

    def _grows(self, findings: RankFindings) -> bool:
        """Whether what this rank saw of weights and gradients says that they are on their way to infinity."""
        sizes = [_largest(past.slot_stats(), _GRADIENTS) for past in self._context.slots.past()]
        has_grown = len(sizes) > 1 and sizes[-1] > GREW * sizes[0]
        return has_grown or findings.norms_overflowed or _largest(findings.slot_stats, _TRAINED) > LARGE

    def report(self, record: StepRecord, findings: RankFindings, cause: str) -> FaultReport:
        """The report of a step, the same on all ranks. Collective: the fault round, on the fault group."""
        return self.noted(report_of(self._context, record, findings, cause, self.let_through))

    def noted(self, report: FaultReport) -> FaultReport:
        """The report with the option that would let such state pass, where it may be so on purpose."""
        name = self._maybe_on_purpose(report)
        remedy = () if name is None else (f"if {name} is infinite on purpose: ignore=[{name!r}]",)
        return replace(report, notes=(*report.notes, *remedy))

    def _maybe_on_purpose(self, report: FaultReport) -> str | None:
        """The buffer or optimizer state that is at fault and infinite, which only its code can know to be right."""
        origin = report.origin
        if origin is None or origin.phase is not Phase.STATE or origin.kind == "nan":
            return None
        return None if origin.slot in dict(self._context.state.parameters()) else origin.slot

    def has_findings(self, record: StepRecord) -> bool:
        """Whether this rank's own slots and state show a fault. Collective: none. Host sync: many."""
        findings = rescan(self._context, record)
        return any(not ranked.low_confidence for ranked in local_sites(blame_input(self._context, record, findings)))

    # -- overflows of a scaler ---------------------------------------------------------------------------------------

    def _overflow(self, record: StepRecord) -> Judgement:
        config = self._context.config
        scale = float((record.scaler_state() or {}).get("scale", 1.0))
        too_small, is_used = self._context.ranks.any_of(scale < config.scale_floor, self._is_used(record))
        if is_used:
            return Judgement(None, Severity.FAULT)
        self.num_overflows += 1
        self._overflows_in_a_row += 1
        too_many = self._overflows_in_a_row >= config.max_consecutive_overflows
        if not too_many and not too_small:
            return Judgement(Decision.PROCEED, warnings=self._about_overflow(record, scale))
        below = f"a scale fell below scale_floor={config.scale_floor:g}"  # on some rank: the text is the same on all
        reason = f"{self._overflows_in_a_row} overflows in a row" if too_many else below
        return Judgement(None, Severity.FAULT, cause=f"scale collapse: {reason}")

    def _is_used(self, record: StepRecord) -> bool:
        """Whether the scaler is about to update with bad gradients: they were finite when it unscaled them."""
        context = self._context
        if context.scaler is None or not record.is_current or not context.scaler.has_found_none(context.optimizers):
            return False
        return rescan(context, record).gradients_bad_now

    def _about_overflow(self, record: StepRecord, scale: float) -> tuple[str, ...]:
        """The line for the log about an overflow, with its origin; empty where it is not worth one.

        Overflows before the first clean step are the scaler's search for its scale.
        """
        if not self._has_been_clean:
            return ()
        self._later_overflows += 1
        if self._later_overflows > OVERFLOWS_TOLD and self._later_overflows % 100:
            return ()
        line = log_line(self.report(record, rescan(self._context, record), "overflow"))
        return (f"{line}; scale {scale:g}: the scaler skips the step (overflow {self.num_overflows})",)

    # -- faults ------------------------------------------------------------------------------------------------------

    def _confirmed(
        self, severity: Severity, record: StepRecord, findings: RankFindings
    ) -> tuple[Severity, tuple[str, ...], bool]:
        """The severity after the second look, a warning where that is lower, and whether gradients were seen bad."""
        context = self._context
        if not record.is_current:
            return severity, (), False  # its gradients are gone, its update has been withheld
        none: dict[str, str] = {}
        legal = context.undone.attempt("state was taken for bad", lambda: legal_state(context, record, findings), none)
        other = bool(findings.nonfinite_state.names() or findings.hyper_parameters) and not legal
        unexplained = not legal and any(map(is_bad_state, findings.slot_stats))
        # with a scaler gradients may overflow beside it, but not the output that they come from
        unexplained = unexplained or (context.scaler is not None and _has_bad_output(findings))
        # a scaler that was not passed to the guard has set found_inf, and the device is going to skip the update
        foreign_skip = any(getattr(optimizer, "found_inf", None) is not None for optimizer in context.optimizers)
        # all ranks must come to the same decision, though only one of them may have seen the gradient
        any_legal, unexplained, other, seen, now, loss, foreign_skip, overflowed = context.ranks.any_of(
            bool(legal),
            unexplained,
            other,
            findings.gradients_bad_seen,
            findings.gradients_bad_now,
            findings.loss_bad,
            foreign_skip,
            findings.norms_overflowed,
        )
        if other:  # what a loss alone would let pass
            severity = max(severity, Severity.FAULT)
        in_gradients = (seen or now) and context.scaler is None
        if any_legal and not (unexplained or other or loss or in_gradients):
            return Severity.CLEAN, self._allowed(legal), False
        if any_legal and not (unexplained or other):
            self._set_aside(legal, findings)
        if overflowed and not (other or seen or now):
            on_loss = Severity.LOSS if context.scaler is None else Severity.FAULT
            return on_loss if loss else Severity.CLEAN, self._once(OVERFLOWED, OVERFLOWED), False
        by_gradients_alone = severity is Severity.FAULT and seen and not other and context.scaler is None
        if not by_gradients_alone or (now and not foreign_skip):
            return severity, (), False
        text = (
            "gradients were non-finite in backward, but no update uses them (other code has made them finite or "
            "skips the update), so the step goes on; if that is a GradScaler, pass scaler= (said once)"
        )
        return Severity.LOSS if loss else Severity.CLEAN, self._once(text, text), True

    def _set_aside(self, legal: dict[str, str], findings: RankFindings) -> None:
        """What else is bad decides, and not infinities that nobody trains. Collective: as `_allowed`."""
        trained = {name for name, parameter in self._context.state.parameters() if parameter.requires_grad}
        infinite = {name: kind for name, kind in legal.items() if kind != "nan" and name not in trained}
        self._allowed(infinite)
        before = findings.nonfinite_state.before
        findings.nonfinite_state.before = [bad_tensor for bad_tensor in before if bad_tensor.name not in infinite]

    def _allowed(self, legal: dict[str, str]) -> tuple[str, ...]:
        """Take state for non-finite on purpose from now on; the warning. Collective: `RankGroup.first_problem`."""
        context = self._context
        context.allow(legal)
        quiet = f"{ON_PURPOSE} (ignore={list(legal)[:MAX_LEGAL]!r} says so beforehand; said once)"
        mine = f"{listed(legal, MAX_LEGAL)}; {quiet}" if legal else None
        text = context.ranks.ask(lambda ranks: ranks.first_problem(mine)) or ""
        context.legal_text = "; ".join(filter(None, (context.legal_text, text.partition(f"; {ON_PURPOSE}")[0])))
        told = "non-finite from the beginning, or filled by the loop, but in no loss and no gradient"
        return (f"{told}: {text}",) if context.ranks.index == 0 else ()

    # -- warnings ----------------------------------------------------------------------------------------------------

    def _new_warnings(self, record: StepRecord) -> list[str]:
        found: list[str] = []
        slot_stats = record.slots.slot_stats()
        for stats in slot_stats:
            text = _warning_for(stats, self._context.config)
            if text is not None:
                found += self._once(text, f"step {record.step}: {text} ({stats.maximum:g}); this is said once")
        return found + self._large_parameters(record.step, slot_stats)

    def _large_parameters(self, step: int, slot_stats: list[SlotStats]) -> list[str]:
        """One line for all parameters whose gradient's norm is beyond ``parameter_norm_warn`` for the first time."""
        limit = self._context.config.parameter_norm_warn
        if limit is None:
            return []
        of_each = [stats for stats in slot_stats if isinstance(stats.source, ParameterNormSource)]
        norms: dict[str, float] = {stats.source.name: stats.maximum for stats in of_each if stats.maximum > limit}
        new = {name: norm for name, norm in norms.items() if self._once(f"{name} exceeds {limit}", name)}
        largest_first: list[str] = sorted(new, key=new.__getitem__, reverse=True)
        names = listed(largest_first, MAX_LARGE)
        exceed = f"exceed parameter_norm_warn={limit:g}" if len(new) > 1 else f"exceeds parameter_norm_warn={limit:g}"
        many = "gradient norms of" if len(new) > 1 else "the gradient norm of"
        largest = max(new.values(), default=0.0)
        return [f"step {step}: {many} {names} {exceed} (up to {largest:g}); said once of each"] if new else []

    def _once(self, key: str, text: str) -> tuple[str, ...]:
        if key in self._said:
            return ()
        self._said.add(key)
        return (text,)


_GRADIENTS = frozenset({SlotRole.GRADIENT})
_TRAINED = frozenset({SlotRole.GRADIENT, SlotRole.STATE})


def _largest(slot_stats: list[SlotStats], roles: frozenset[SlotRole]) -> float:
    """The largest finite value, or norm, in slots of these roles; 0 where there is none."""
    sizes = [max(-stats.minimum, stats.maximum) for stats in slot_stats if stats.role in roles]
    return max(filter(math.isfinite, sizes), default=0.0)


def _has_bad_output(findings: RankFindings) -> bool:
    return any(stats.role is SlotRole.OUTPUT and not is_clean(stats) for stats in findings.slot_stats)


def _warning_for(stats: SlotStats, config: GuardConfig) -> str | None:
    norm_limit, loss_limit = config.grad_norm_warn, config.loss_warn
    if stats.role is SlotRole.WARN and not is_clean(stats):
        return f"buffer {stats.source.name} was non-finite on this rank only; DDP has overwritten it with rank 0's"
    if stats.role is SlotRole.NORM and norm_limit is not None and stats.maximum > norm_limit:
        return f"the gradient norm exceeds grad_norm_warn={norm_limit:g}"
    if stats.role is SlotRole.LOSS and loss_limit is not None and stats.maximum > loss_limit:
        return f"{stats.source.name} exceeds loss_warn={loss_limit:g}"
    is_gradient = stats.role is SlotRole.GRADIENT and isinstance(stats.source, GradientSource)
    if is_gradient and NORM_OVERFLOWS_AT < max(-stats.minimum, stats.maximum) < float("inf"):
        name = stats.source.name
        return f"the gradient of {name} is so large that its norm overflows float32: clipping would zero all"
    return None
