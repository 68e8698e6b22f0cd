"""What is done about a verdict: go on, count, warn, skip, or dump and stop. The same on every rank."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace

import torch

from ddp_nanguard.blame import local_sites
from ddp_nanguard.blame.inspect import RankFindings, blame_input, rescan
from ddp_nanguard.blame.report import report_of
from ddp_nanguard.context import GuardContext
from ddp_nanguard.dump.write import write_dump
from ddp_nanguard.errors import NonFiniteError
from ddp_nanguard.probes.gradient import GradientSource
from ddp_nanguard.probes.severity import NORM_OVERFLOWS_AT, Severity
from ddp_nanguard.probes.slots import SlotRole, SlotStats, is_finite
from ddp_nanguard.report.messages import error_text, log_line
from ddp_nanguard.report.types import FaultReport, Phase

from .cause import explained
from .dump_request import Moment, before_update, dump_request, present
from .rerun import rerun_in_place

_log = logging.getLogger(__name__)


HARMLESS = "every gradient is finite, the weights are in no danger (on_loss='warn' lets such steps pass)"
TOLD_OVERFLOWS = 3
"""Overflows after the first clean step that are told one by one; from then on every hundredth."""


class FaultPolicy:
    """Acts on verdicts.

    Attributes:
        num_overflows: steps that a scaler has skipped so far.
        num_skips: steps that ``skip`` has skipped so far.
        num_warned: faults that ``warn`` has let through, by phase and layer.
        is_quiet: no log line, for a replay that tells in its own way.
        last_findings: what this rank saw of the last fault.
    """

    def __init__(self, context: GuardContext) -> None:
        self.context = context
        self.num_overflows = 0
        self.num_skips = 0
        self.num_warned: dict[tuple[str, str | None], int] = {}
        self.is_quiet = False
        self.last_findings: RankFindings | None = None
        self._overflows_in_a_row = 0
        self._told_of_scaler = False
        self._has_been_clean = False
        self._later_overflows = 0
        self._warned: set[str] = set()
        self._busy = threading.Lock()

    def act_on(self, severity: Severity, step: int) -> bool:
        """Whether the update may go ahead.

        Args:
            severity: the verdict.
            step: number of the step.

        Raises:
            NonFiniteError: on every rank.

        Collective: none after a clean verdict; else the fault round and the dump, on the fault group.
        """
        if severity is Severity.OVERFLOW:
            return self._overflow(step)
        self._overflows_in_a_row = 0
        if severity is Severity.WARN:
            self._warn_once(step)
        if severity in (Severity.LOSS, Severity.FAULT):
            with self._busy:
                return self._fault(severity, step, cause="")
        self._clean(step)
        return True

    def on_clean_step(self) -> None:
        """A step has turned out to be clean, whose slots are in the ring already."""
        self._has_been_clean = True
        self._overflows_in_a_row = 0

    def _clean(self, step: int) -> None:
        if self.context.is_late:
            return  # a remark on a step that is no longer the present one
        self._has_been_clean = True
        context = self.context
        if context.previous is not None:
            tensors = [context.wrapper.local(parameter) for _, parameter in context.state.parameters()]
            context.previous.snapshot(step, context.window, context.reduced_in, tensors, context.optimizers)
        context.slots.push_history(step)

    def _warn_once(self, step: int) -> None:
        """Say once per subject what is worth a warning. Host sync: one per page of slots."""
        for stats in self.context.slots.slot_stats():
            text = _warning_for(stats, self.context.config.grad_norm_warn)
            if text is not None and text not in self._warned:
                self._warned.add(text)
                _log.warning("step %d: %s (%g); this is said once", step, text, stats.maximum)

    # -- overflows of a scaler ---------------------------------------------------------------------------------------

    def _overflow(self, step: int) -> bool:
        self.num_overflows += 1
        self._overflows_in_a_row += 1
        config, scaler = self.context.config, self.context.scaler
        assert scaler is not None
        scale = float(scaler.state(self.context.is_late).get("scale", 1.0))
        too_many = self._overflows_in_a_row >= config.max_consecutive_overflows
        (too_small,) = self._any_of(scale < config.scale_floor)
        if not too_many and not too_small:
            if self._has_been_clean:
                self._tell_of_overflow(step, scale)
            self.context.slots.discard()
            return True
        below = f"a scale fell below scale_floor={config.scale_floor:g}"  # on some rank: the text is the same on all
        reason = f"{self._overflows_in_a_row} overflows in a row" if too_many else below
        with self._busy:
            return self._fault(Severity.FAULT, step, cause=f"scale collapse: {reason}")

    def _tell_of_overflow(self, step: int, scale: float) -> None:
        """The first ones are the scaler's search for a scale; later ones are worth a line, and where they began."""
        self._later_overflows += 1
        if self._later_overflows > TOLD_OVERFLOWS and self._later_overflows % 100:
            return
        report = report_of(self.context, rescan(self.context), step, "overflow")
        _log.warning(
            "%s; scale %g: the scaler skips the step (overflow %d)", log_line(report), scale, self.num_overflows
        )

    # -- faults ------------------------------------------------------------------------------------------------------

    def _fault(self, severity: Severity, step: int, cause: str) -> bool:
        findings = self.last_findings = rescan(self.context)
        if not cause:
            severity = self._confirmed(severity, findings)
        if severity is Severity.CLEAN:
            self.context.slots.discard()
            return True
        if severity is Severity.LOSS:
            cause = HARMLESS
        report = report_of(self.context, findings, step, cause)
        lets_through = self.context.config.on_fault == "warn" or (
            severity is Severity.LOSS and self.context.config.on_loss == "warn"
        )
        if lets_through and not self.context.ranks.peers_lost:
            return self._warn(report, step)
        self._say(log_line(report))
        report = explained(self.context, findings, report, cause)
        if self.context.ranks.peers_lost:
            return self._stop(report, findings)
        if self.context.config.on_fault == "skip":
            if self._may_skip(findings):
                return self._skip(report, findings)
            report = replace(report, notes=(*report.notes, self._why_no_skip()))
        return self._stop(report, findings)

    def _say(self, text: str) -> None:
        if not self.is_quiet:
            _log.error("%s", text)

    def _confirmed(self, severity: Severity, findings: RankFindings) -> Severity:
        """Gradients that were bad in backward and are finite now are no fault: somebody has dealt with them."""
        if self.context.is_late:
            return severity  # its gradients are gone, its update has been withheld
        other = bool(findings.nonfinite_state.names() or findings.hyper_parameters)
        # a scaler that nobody told us of has set found_inf, and the device is going to skip the update
        unasked = any(getattr(optimizer, "found_inf", None) is not None for optimizer in self.context.optimizers)
        other, seen, now, loss, unasked = self._any_of(
            other, findings.gradients_bad_seen, findings.gradients_bad_now, findings.loss_bad, unasked
        )
        by_gradients_alone = severity is Severity.FAULT and seen and not other and self.context.scaler is None
        if not by_gradients_alone or (now and not unasked):
            return severity
        if not self._told_of_scaler:
            self._told_of_scaler = True
            _log.warning(
                "gradients were non-finite in backward and somebody has dealt with them, so the step goes on; "
                "if that is a GradScaler, pass scaler= (this is said once)"
            )
        return Severity.LOSS if loss else Severity.CLEAN

    def _any_of(self, *flags: bool) -> list[bool]:
        try:
            return self.context.ranks.any_of(*flags)
        except RuntimeError:
            self.context.ranks.peers_lost = True
            return list(flags)

    def _warn(self, report: FaultReport, step: int) -> bool:
        self.context.let_through = step
        origin = report.origin
        key = (str(origin.phase), origin.layer) if origin is not None else ("unknown", None)
        self.num_warned[key] = self.num_warned.get(key, 0) + 1
        if self.num_warned[key] == 1:
            _log.warning("%s (let through; further ones of this layer and phase are counted)", log_line(report))
        self.context.slots.discard()
        return True

    def _may_skip(self, findings: RankFindings) -> bool:
        (damaged,) = self._any_of(bool(findings.nonfinite_state.lasting()))
        return not damaged and self.num_skips < self.context.config.max_skips

    def _why_no_skip(self) -> str:
        if self.num_skips >= self.context.config.max_skips:
            return f"{self.num_skips} steps were skipped before this one: max_skips={self.context.config.max_skips}"
        return "not skipped: state is damaged, and skipping this step would not heal it"

    def _skip(self, report: FaultReport, findings: RankFindings) -> bool:
        context = self.context
        self.num_skips += 1
        if not context.is_late or self._any_of(bool(findings.nonfinite_state.buffers))[0]:
            report = self._heal_buffers(report, findings)
        report = self._dumped(report, findings, present(context, findings))
        if not context.is_late:  # else the gradients are those of the next step
            self._clear_gradients()
        context.slots.discard()
        done = f"step {report.step} skipped on all ranks ({self.num_skips} of at most {context.config.max_skips})"
        _log.warning("%s%s", done, f"; dump {report.dump_path}" if report.dump_path else "")
        return False

    def _clear_gradients(self) -> None:
        context = self.context
        for optimizer in context.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for _, parameter in context.wrapper.named_parameters():
            parameter.grad = None

    def _stop(self, report: FaultReport, findings: RankFindings) -> bool:
        context = self.context
        moment = present(context, findings)
        if context.previous is not None and _is_bad_update(report) and context.previous.step == report.step:
            report = self._put_back(report)
            moment = before_update(context, context.previous)
        else:
            report = self._heal_buffers(report, findings)
        report = self._dumped(report, findings, moment)
        if context.is_late and context.scaler is not None:  # it has been updated since
            context.scaler.put_back()
        context.slots.discard()
        text = error_text(report, can_replay=context.recipe is not None and not context.config.redact)
        raise NonFiniteError(text, report, context.config.exit_code, context.ranks.barrier)

    def _heal_buffers(self, report: FaultReport, findings: RankFindings) -> FaultReport:
        """No update happens, so the buffers too are to be those from before the window."""
        names = [finding.name for finding in findings.nonfinite_state.buffers]
        self.context.window.restore_buffers(self.context.named_buffers())
        (any_bad,) = self._any_of(bool(names))
        if not any_bad:
            return report
        return replace(report, notes=(*report.notes, "buffers that this step's forward had spoilt were put back"))

    def _put_back(self, report: FaultReport) -> FaultReport:
        """``keep_previous``: everything is again as it was before the bad update."""
        context = self.context
        assert context.previous is not None
        context.previous.restore()
        context.window.put_buffers(context.named_buffers(), context.previous.buffers)
        names = ", ".join(report.state[:4]) + (", ..." if len(report.state) > 4 else "")
        note = f"the update of step {report.step} made {names} non-finite; all was put back to before that update"
        return replace(report, state=(), notes=(*report.notes, note))

    def _dumped(self, report: FaultReport, findings: RankFindings, moment: Moment) -> FaultReport:
        context = self.context
        runs_again = context.config.rerun and not context.ranks.peers_lost
        if context.config.dump_dir is None and not runs_again:
            return report
        group = None if context.ranks.peers_lost else context.ranks.fault_group
        request = dump_request(context, report, findings, moment, group)
        if runs_again:
            request = rerun_in_place(context, request, moment.window)
            report = request.report
        result = write_dump(request)
        notes = [f"dump: {problem}" for problem in result.problems]
        if result.replicas_disagree:
            notes.append(f"replicas disagree: {', '.join(result.replicas_disagree[:4])}")
        for note in notes:
            _log.error("%s", note)
        return replace(report, dump_path=_as_given(result.path, context.config.dump_dir), notes=(*report.notes, *notes))

    # -- without peers -----------------------------------------------------------------------------------------------

    def has_findings(self) -> bool:
        """Whether this rank's own slots show a fault. Host sync: many."""
        try:
            findings = rescan(self.context)
            return any(not ranked.low_confidence for ranked in local_sites(blame_input(self.context, findings, 0)))
        except RuntimeError as error:
            _log.error("slots cannot be read any more: %s", error)
            return False

    def dump_single_rank(self, step: int, cause: str) -> FaultReport | None:
        """This rank's local part, without any collective; the log line first. None where another thread is at it."""
        if not self._busy.acquire(blocking=False):
            return None
        context = self.context
        context.ranks.peers_lost = True
        findings = rescan(context)
        report = report_of(context, findings, step, cause)
        _log.error("%s", log_line(report))
        report = explained(context, findings, report, cause)
        return self._dumped(report, findings, present(context, findings))

    def dump_with_fallen_peer(self, step: int, text: str) -> bool:
        """This rank's local part after a peer's call; False where the main thread is in the fault path itself."""
        _log.error("a peer has fallen, this rank writes its part and ends: %s", text)
        with torch.no_grad():
            return self.dump_single_rank(step, f"ended with a peer: {text}") is not None


def _as_given(path: str | None, dump_dir: str | None) -> str | None:
    """The dump's path as the user wrote dump_dir, so that the text is the same on ranks that run elsewhere."""
    return None if path is None or dump_dir is None else os.path.join(dump_dir, os.path.basename(path))


def _warning_for(stats: SlotStats, norm_limit: float | None) -> str | None:
    if stats.role is SlotRole.WARN and not is_finite(stats):
        return f"buffer {stats.source.name} was non-finite on this rank only; DDP has overwritten it with rank 0's"
    if stats.role is SlotRole.NORM and norm_limit is not None and stats.maximum > norm_limit:
        return f"the gradient norm exceeds grad_norm_warn={norm_limit:g}"
    is_gradient = stats.role is SlotRole.GRADIENT and isinstance(stats.source, GradientSource)
    if is_gradient and NORM_OVERFLOWS_AT < max(-stats.minimum, stats.maximum) < float("inf"):
        return (
            f"the gradient of {stats.source.name} is so large that its norm overflows float32: clipping would zero all"
        )
    return None


def _is_bad_update(report: FaultReport) -> bool:
    origin = report.origin
    return origin is not None and origin.phase is Phase.OPTIMIZER and origin.layer is not None
