"""What is done about a verdict: go on, count, warn, skip, or dump and stop. The same on every rank."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace

import torch

from .blame import local_sites
from .board import Reading, Region, is_clean
from .cause import explained
from .dump.write import write_dump
from .errors import NonFiniteError
from .fault import LocalView, look, report_of, step_view
from .message import error_text, log_line
from .parts import Parts
from .probes.gradient import GradientNote
from .record import Moment, before_update, dump_request, present
from .rerun import rerun_in_place
from .severity import NORM_OVERFLOWS_AT, Severity
from .site import FaultReport, Phase

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
        last_view: what this rank saw of the last fault.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.num_overflows = 0
        self.num_skips = 0
        self.num_warned: dict[tuple[str, str | None], int] = {}
        self.is_quiet = False
        self.last_view: LocalView | None = None
        self._overflows_in_a_row = 0
        self._told_of_scaler = False
        self._has_been_clean = False
        self._later_overflows = 0
        self._remarks: set[str] = set()
        self._busy = threading.Lock()

    def go_on(self, severity: Severity, step: int) -> bool:
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
        if severity is Severity.REMARK:
            self._remark(step)
        if severity in (Severity.LOSS, Severity.FAULT):
            with self._busy:
                return self._fault(severity, step, cause="")
        self._clean(step)
        return True

    def note_clean(self) -> None:
        """A step has turned out to be clean, whose slots are in the ring already."""
        self._has_been_clean = True
        self._overflows_in_a_row = 0

    def _clean(self, step: int) -> None:
        if self.parts.is_late:
            return  # a remark on a step that is no longer the present one
        self._has_been_clean = True
        parts = self.parts
        if parts.previous is not None:
            tensors = [parts.wrapper.local(parameter) for _, parameter in parts.state.parameters()]
            parts.previous.keep(step, parts.window, parts.reduced_in, tensors, parts.optimizers)
        parts.board.keep(step)

    def _remark(self, step: int) -> None:
        """Say once per subject what is worth a warning. Host sync: one per page of slots."""
        for reading in self.parts.board.readings():
            text = _remark_on(reading, self.parts.config.grad_norm_warn)
            if text is not None and text not in self._remarks:
                self._remarks.add(text)
                _log.warning("step %d: %s (%g); this is said once", step, text, reading.maximum)

    # -- overflows of a scaler ---------------------------------------------------------------------------------------

    def _overflow(self, step: int) -> bool:
        self.num_overflows += 1
        self._overflows_in_a_row += 1
        config, scaler = self.parts.config, self.parts.scaler
        assert scaler is not None
        scale = float(scaler.state(self.parts.is_late).get("scale", 1.0))
        too_many = self._overflows_in_a_row >= config.max_consecutive_overflows
        (too_small,) = self._any_of(scale < config.scale_floor)
        if not too_many and not too_small:
            if self._has_been_clean:
                self._tell_of_overflow(step, scale)
            self.parts.board.discard()
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
        report = report_of(self.parts, look(self.parts), step, "overflow")
        _log.warning(
            "%s; scale %g: the scaler skips the step (overflow %d)", log_line(report), scale, self.num_overflows
        )

    # -- faults ------------------------------------------------------------------------------------------------------

    def _fault(self, severity: Severity, step: int, cause: str) -> bool:
        view = self.last_view = look(self.parts)
        if not cause:
            severity = self._confirmed(severity, view)
        if severity is Severity.CLEAN:
            self.parts.board.discard()
            return True
        if severity is Severity.LOSS:
            cause = HARMLESS
        report = report_of(self.parts, view, step, cause)
        lets_through = self.parts.config.on_fault == "warn" or (
            severity is Severity.LOSS and self.parts.config.on_loss == "warn"
        )
        if lets_through and not self.parts.peers.lost:
            return self._warn(report, step)
        self._say(log_line(report))
        report = explained(self.parts, view, report, cause)
        if self.parts.peers.lost:
            return self._stop(report, view)
        if self.parts.config.on_fault == "skip":
            if self._may_skip(view):
                return self._skip(report, view)
            report = replace(report, notes=(*report.notes, self._why_no_skip()))
        return self._stop(report, view)

    def _say(self, text: str) -> None:
        if not self.is_quiet:
            _log.error("%s", text)

    def _confirmed(self, severity: Severity, view: LocalView) -> Severity:
        """Gradients that were bad in backward and are finite now are no fault: somebody has dealt with them."""
        if self.parts.is_late:
            return severity  # its gradients are gone, its update has been withheld
        other = bool(view.damage.names() or view.hyper_parameters)
        # a scaler that nobody told us of has set found_inf, and the device is going to skip the update
        unasked = any(getattr(optimizer, "found_inf", None) is not None for optimizer in self.parts.optimizers)
        other, seen, now, loss, unasked = self._any_of(
            other, view.gradients_bad_seen, view.gradients_bad_now, view.loss_bad, unasked
        )
        by_gradients_alone = severity is Severity.FAULT and seen and not other and self.parts.scaler is None
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
            return self.parts.peers.any_of(*flags)
        except RuntimeError:
            self.parts.peers.lost = True
            return list(flags)

    def _warn(self, report: FaultReport, step: int) -> bool:
        self.parts.let_through = step
        origin = report.origin
        key = (str(origin.phase), origin.layer) if origin is not None else ("unknown", None)
        self.num_warned[key] = self.num_warned.get(key, 0) + 1
        if self.num_warned[key] == 1:
            _log.warning("%s (let through; further ones of this layer and phase are counted)", log_line(report))
        self.parts.board.discard()
        return True

    def _may_skip(self, view: LocalView) -> bool:
        (damaged,) = self._any_of(bool(view.damage.lasting()))
        return not damaged and self.num_skips < self.parts.config.max_skips

    def _why_no_skip(self) -> str:
        if self.num_skips >= self.parts.config.max_skips:
            return f"{self.num_skips} steps were skipped before this one: max_skips={self.parts.config.max_skips}"
        return "not skipped: state is damaged, and skipping this step would not heal it"

    def _skip(self, report: FaultReport, view: LocalView) -> bool:
        parts = self.parts
        self.num_skips += 1
        if not parts.is_late or self._any_of(bool(view.damage.buffers))[0]:
            report = self._heal_buffers(report, view)
        report = self._dumped(report, view, present(parts, view))
        if not parts.is_late:  # else the gradients are those of the next step
            self._clear_gradients()
        parts.board.discard()
        done = f"step {report.step} skipped on all ranks ({self.num_skips} of at most {parts.config.max_skips})"
        _log.warning("%s%s", done, f"; dump {report.dump_path}" if report.dump_path else "")
        return False

    def _clear_gradients(self) -> None:
        parts = self.parts
        for optimizer in parts.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for _, parameter in parts.wrapper.named_parameters():
            parameter.grad = None

    def _stop(self, report: FaultReport, view: LocalView) -> bool:
        parts = self.parts
        moment = present(parts, view)
        if parts.previous is not None and _is_bad_update(report) and parts.previous.step == report.step:
            report = self._put_back(report)
            moment = before_update(parts, parts.previous)
        else:
            report = self._heal_buffers(report, view)
        report = self._dumped(report, view, moment)
        if parts.is_late and parts.scaler is not None:  # it has been updated since
            parts.scaler.put_back()
        parts.board.discard()
        text = error_text(report, can_replay=parts.recipe is not None and not parts.config.redact)
        raise NonFiniteError(text, report, parts.config.exit_code, parts.peers.meet)

    def _heal_buffers(self, report: FaultReport, view: LocalView) -> FaultReport:
        """No update happens, so the buffers too are to be those from before the window."""
        names = [finding.name for finding in view.damage.buffers]
        self.parts.window.restore_buffers(self.parts.named_buffers())
        (any_bad,) = self._any_of(bool(names))
        if not any_bad:
            return report
        return replace(report, notes=(*report.notes, "buffers that this step's forward had spoilt were put back"))

    def _put_back(self, report: FaultReport) -> FaultReport:
        """``keep_previous``: everything is again as it was before the bad update."""
        parts = self.parts
        assert parts.previous is not None
        parts.previous.restore()
        parts.window.put_buffers(parts.named_buffers(), parts.previous.buffers)
        names = ", ".join(report.state[:4]) + (", ..." if len(report.state) > 4 else "")
        note = f"the update of step {report.step} made {names} non-finite; all was put back to before that update"
        return replace(report, state=(), notes=(*report.notes, note))

    def _dumped(self, report: FaultReport, view: LocalView, moment: Moment) -> FaultReport:
        parts = self.parts
        runs_again = parts.config.rerun and not parts.peers.lost
        if parts.config.dump_dir is None and not runs_again:
            return report
        group = None if parts.peers.lost else parts.peers.fault_group
        request = dump_request(parts, report, view, moment, group)
        if runs_again:
            request = rerun_in_place(parts, request, moment.window)
            report = request.report
        result = write_dump(request)
        notes = [f"dump: {problem}" for problem in result.problems]
        if result.replicas_disagree:
            notes.append(f"replicas disagree: {', '.join(result.replicas_disagree[:4])}")
        for note in notes:
            _log.error("%s", note)
        return replace(report, dump_path=_as_given(result.path, parts.config.dump_dir), notes=(*report.notes, *notes))

    # -- without peers -----------------------------------------------------------------------------------------------

    def saw_something(self) -> bool:
        """Whether this rank's own slots show a fault. Host sync: many."""
        try:
            view = look(self.parts)
            return any(not ranked.weak for ranked in local_sites(step_view(self.parts, view, 0)))
        except RuntimeError as error:
            _log.error("slots cannot be read any more: %s", error)
            return False

    def dump_alone(self, step: int, cause: str) -> FaultReport | None:
        """This rank's local part, without any collective; the log line first. None where another thread is at it."""
        if not self._busy.acquire(blocking=False):
            return None
        parts = self.parts
        parts.peers.lost = True
        view = look(parts)
        report = report_of(parts, view, step, cause)
        _log.error("%s", log_line(report))
        report = explained(parts, view, report, cause)
        return self._dumped(report, view, present(parts, view))

    def dump_with_fallen_peer(self, step: int, text: str) -> bool:
        """This rank's local part after a peer's call; False where the main thread is in the fault path itself."""
        _log.error("a peer has fallen, this rank writes its part and ends: %s", text)
        with torch.no_grad():
            return self.dump_alone(step, f"ended with a peer: {text}") is not None


def _as_given(path: str | None, dump_dir: str | None) -> str | None:
    """The dump's path as the user wrote dump_dir, so that the text is the same on ranks that run elsewhere."""
    return None if path is None or dump_dir is None else os.path.join(dump_dir, os.path.basename(path))


def _remark_on(reading: Reading, norm_limit: float | None) -> str | None:
    if reading.region is Region.REMARK and not is_clean(reading):
        return f"buffer {reading.note.name} was non-finite on this rank only; DDP has overwritten it with rank 0's"
    if reading.region is Region.NORM and norm_limit is not None and reading.maximum > norm_limit:
        return f"the gradient norm exceeds grad_norm_warn={norm_limit:g}"
    is_gradient = reading.region is Region.GRADIENT and isinstance(reading.note, GradientNote)
    if is_gradient and NORM_OVERFLOWS_AT < max(-reading.minimum, reading.maximum) < float("inf"):
        return (
            f"the gradient of {reading.note.name} is so large that its norm overflows float32: clipping would zero all"
        )
    return None


def _is_bad_update(report: FaultReport) -> bool:
    origin = report.origin
    return origin is not None and origin.phase is Phase.OPTIMIZER and origin.layer is not None
