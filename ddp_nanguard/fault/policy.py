"""What is done about a verdict that is not clean: count, warn, skip, or dump and stop. The same on every rank."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ddp_nanguard.blame.audit import audited
from ddp_nanguard.blame.inspect import RankFindings, rescan
from ddp_nanguard.blame.triage import Decision, Judgement, Triage
from ddp_nanguard.capture.command import command
from ddp_nanguard.capture.record import StepRecord
from ddp_nanguard.context import GuardContext
from ddp_nanguard.distributed.exit import exit_process
from ddp_nanguard.distributed.launcher import tell_launcher
from ddp_nanguard.dump.manifest import amend_report
from ddp_nanguard.dump.write import write_dump
from ddp_nanguard.errors import NonFiniteError, line_of
from ddp_nanguard.probes.severity import Severity
from ddp_nanguard.report.command_text import script_text
from ddp_nanguard.report.text import error_text, replay_lacks
from ddp_nanguard.report.types import CALLS_ONLY, FaultReport, Phase
from ddp_nanguard.report.wording import listed
from ddp_nanguard.second_look.look import Fault, Looked, look_again
from ddp_nanguard.second_look.obstacles import of_the_report
from ddp_nanguard.step.metrics import Counters
from ddp_nanguard.wrappers.grad_scaler import ScalerSnapshot

from .cause import explained, known_before, told_why
from .dump_request import dump_request
from .notices import Notices
from .skip_lists import SkipLists
from .told import say, say_fault
from .unheard import Meet, report_without_collective

_log = logging.getLogger(__name__)

LOOKS_WHILE_SKIPPING = 3
"""Steps of one kind that are looked at again under ``on_fault="skip"``."""


class FaultPolicy:
    """Acts on verdicts as ``on_fault`` and ``on_loss`` say; a `VerdictHandler`.

    Args:
        context: of the guard.

    Attributes:
        triage: tells what a verdict means.
        num_skips: steps that ``skip`` has skipped so far.
        num_warned: faults that ``warn`` has let through, by phase and layer.
        skip_lists: what ``guard.steps`` passes over; a stop makes them longer.
    """

    def __init__(self, context: GuardContext) -> None:
        self.context = context
        self.triage = Triage(context)
        self.num_skips = 0
        self.num_warned: dict[tuple[str, str | None], int] = {}
        self._looked_at: dict[tuple[str, int | None], int] = {}
        self._notices = Notices(context)
        self.skip_lists = SkipLists(context)
        self._whole: tuple[Path, bool] | None = None  # the dump of this fault, and whether its report is this rank's
        # held while a fault is handled: the thread that hears of a peer's abort must not dump the same step once more
        self._busy = threading.Lock()

    def counters(self) -> Counters:
        """What has been skipped so far."""
        return Counters(self.num_skips, self.triage.num_overflows)

    def on_clean(self) -> None:
        """See `VerdictHandler`."""
        with self._busy:  # for good where the other thread writes this rank's part: nothing may change under it
            self.triage.on_clean()

    def on_verdict(self, severity: Severity, record: StepRecord) -> Decision:
        """See `VerdictHandler`. Nothing that goes wrong in here replaces the fault.

        Collective: those of `Triage`; for a fault also those of the dump. All on the fault group.
        """
        try:
            return self._on_verdict(severity, record)
        except NonFiniteError:
            raise
        except Exception as error:
            return self._given_up(severity, record, error)

    def _given_up(self, severity: Severity, record: StepRecord, error: Exception) -> Decision:
        """What is left where the fault path itself failed on this rank: the fault, without its place."""
        say(logging.ERROR, f"step {record.step}: the guard could not look at it: {line_of(error)}")
        _log.debug("fault path", exc_info=error)
        if severity is Severity.WARN:  # which issues no collective
            return Decision.CLEAN
        # peers are in a collective by now, at most timeout_s: none of this rank's may meet those
        ranks, config = self.context.ranks, self.context.config
        ranks.peers_lost = True
        report = FaultReport(
            record.step,
            ranks.world_size,
            self.context.wrapper.kind,
            origin=None,
            cause=f"unknown: the guard could not look at it: {line_of(error)}",
            single_rank_view=True,
        )
        seconds, text = config.timeout_s if ranks.world_size > 1 else 0.0, error_text(report, "", "")
        self._notices.tell("stop", report, record, text)
        raise NonFiniteError(text, report, config.exit_code, lambda: time.sleep(seconds))

    def _on_verdict(self, severity: Severity, record: StepRecord) -> Decision:
        judgement = self.triage.judge(severity, record)
        if judgement.decision is None:
            with self._busy:
                judgement = self.triage.examine(judgement, record)
                _log_warnings(judgement)
                return self._handle(judgement, record) if judgement.decision is None else judgement.decision
        _log_warnings(judgement)
        return judgement.decision

    # -- faults ------------------------------------------------------------------------------------------------------

    def _handle(self, judgement: Judgement, record: StepRecord) -> Decision:
        report, findings, config = judgement.report, judgement.findings, self.context.config
        assert report is not None
        assert findings is not None
        warns = config.on_fault == "warn" or (judgement.severity is Severity.LOSS and config.on_loss == "warn")
        if warns and not self.context.ranks.peers_lost:
            return self._warn(report, judgement, record)
        # before anything slow or breakable: this line is what is left if the rest fails
        say_fault(logging.ERROR, report, is_first_sign=self._looks(report))
        report = explained(self.context, record, findings, report, judgement.cause)
        # without peers nobody knows whether they would skip too, and ranks that part train different models
        if config.on_fault == "skip" and not self.context.ranks.peers_lost:
            if self._may_skip(findings):
                return self._skip(report, judgement, record)
            report = replace(report, notes=(*report.notes, self._why_no_skip()))
        return self._stop(report, judgement, record)

    def _looks(self, report: FaultReport) -> bool:
        """Whether a second look is going to tell more than the first sign."""
        context = self.context
        return context.config.look_again and not context.ranks.peers_lost and of_the_report(report) is None

    def _warn(self, report: FaultReport, judgement: Judgement, record: StepRecord) -> Decision:
        self.triage.let_through = record.step
        if self._is_new(report):
            after = " (let through; further ones of this layer and phase are counted)"
            told = say_fault(logging.WARNING, report, after=after)
            looked = self._looked(report, judgement, record, keep_gradients=True)
            if looked.must_stop:
                return self._raise(_cannot_go_on(looked.report), record)
            self._notices.tell("warn", looked.report, record, told)
        return Decision.PROCEED

    def _is_new(self, report: FaultReport) -> bool:
        """Count the fault by phase and layer; whether it is the first of its kind."""
        origin = report.origin
        key = (str(origin.phase), origin.layer) if origin is not None else ("unknown", None)
        self.num_warned[key] = self.num_warned.get(key, 0) + 1
        return self.num_warned[key] == 1

    def _may_skip(self, findings: RankFindings) -> bool:
        (is_lasting,) = self.context.ranks.any_of(bool(findings.nonfinite_state.lasting()))
        return not is_lasting and self.num_skips < self.context.config.max_skips

    def _why_no_skip(self) -> str:
        max_skips = self.context.config.max_skips
        if self.num_skips >= max_skips:
            skipped = "1 step was" if self.num_skips == 1 else f"{self.num_skips} steps were"
            return f"{skipped} skipped before this one: max_skips={max_skips}"
        return "not skipped: state is damaged, and skipping this step would not heal it"

    def _skip(self, report: FaultReport, judgement: Judgement, record: StepRecord) -> Decision:
        context, findings = self.context, judgement.findings
        assert findings is not None
        self.num_skips += 1
        # where the next step has run meanwhile, its own updates of the buffers stay unless they are bad too
        if record.is_current or context.ranks.any_of(bool(findings.nonfinite_state.buffers))[0]:
            report = self._restore_buffers(report, findings, record)
        report = self._dumped(report, findings, record)
        if self._looks_at_skipped(report):
            looked = self._looked(report, judgement, record, keep_gradients=not record.is_current)
            report = looked.report
            if looked.must_stop:
                return self._raise(_cannot_go_on(report), record)
        if record.is_current:  # else the gradients are those of the next step
            self._clear_gradients()
        done = f"step {report.step} skipped on all ranks ({self.num_skips} of at most {context.config.max_skips})"
        told = f"{done}; dump {report.dump_path}" if report.dump_path else done
        say(logging.WARNING, told, report)
        self._notices.tell("skip", report, record, told)
        return Decision.SKIP

    def _looks_at_skipped(self, report: FaultReport) -> bool:
        """The first few of a kind are looked at again; what comes in every step is known by then."""
        origin = report.origin
        key = (str(origin.phase), origin.rank) if origin is not None else ("unknown", None)
        self._looked_at[key] = self._looked_at.get(key, 0) + 1
        return self._looked_at[key] <= LOOKS_WHILE_SKIPPING

    def _clear_gradients(self) -> None:
        # this is what leaves the step out: an optimizer changes no parameter that has no gradient
        for optimizer in self.context.optimizers:
            clear = partial(optimizer.zero_grad, set_to_none=True)
            self.context.undone.attempt(f"{type(optimizer).__name__}.zero_grad()", clear, None)
            for _, parameter in self.context.state.named_parameters_of(optimizer):
                parameter.grad = None
        for _, parameter in self.context.wrapper.named_parameters():
            parameter.grad = None

    def _stop(self, report: FaultReport, judgement: Judgement, record: StepRecord) -> Decision:
        findings = judgement.findings
        assert findings is not None
        undone = self._undone(report)
        if undone is not None:
            report, record = self._undo_update(report, undone), undone
        else:
            report = self._restore_buffers(report, findings, record)
        report = self._dumped(report, findings, record)
        # a loop may catch the error, so the gradients stay where they cost nothing: not where they are sharded
        keeps = not (self.context.wrapper.is_sharded and record.is_current)
        return self._raise(self._looked(report, judgement, record, keeps).report, record)

    def _raise(self, report: FaultReport, record: StepRecord) -> Decision:
        context, config = self.context, self.context.config
        if isinstance(record.scaler, ScalerSnapshot):  # the scaler has been updated since
            context.undone.attempt("the scaler was not put back", record.scaler.restore, None)
        report = self._with_undone(report)
        text = self._text(report)
        self.skip_lists.forget()
        self._notices.tell("stop", report, record, text)
        raise NonFiniteError(text, report, config.exit_code, context.ranks.barrier)

    def _with_undone(self, report: FaultReport) -> FaultReport:
        """The report with what a rank could not do. Collective: `RankGroup.first_problem` on the fault group."""
        mine = self.context.undone.take()
        found = self.context.ranks.ask(lambda ranks: ranks.first_problem(mine))
        return report if found is None else _with_notes(report, [f"not done: {found}"])

    def _text(self, report: FaultReport) -> str:
        context, config = self.context, self.context.config
        line = context.undone.attempt("the command of this job was not read", lambda: script_text(command()), "")
        script = line if context.recipe is None else ""
        lacks = replay_lacks(context.recipe, script, redact=config.redact, dump_weights=config.dump_weights)
        return error_text(report, lacks, script)

    def _undone(self, report: FaultReport) -> StepRecord | None:
        """The step whose update is to be undone; None where it was not the update, or there is no copy."""
        previous, origin = self.context.previous, report.origin
        is_update = origin is not None and origin.phase is Phase.OPTIMIZER and origin.layer is not None
        if not is_update or previous is None or previous.record is None or previous.record.step != report.step:
            return None
        return previous.record

    def _undo_update(self, report: FaultReport, undone: StepRecord) -> FaultReport:
        """``keep_previous``: everything is again as it was before the bad update."""
        assert self.context.previous is not None
        self.context.previous.restore(self.context.undone)
        undone.window.restore_buffers(self.context.named_buffers(), self.context.undone)
        names = listed(report.nonfinite_state, 4)
        note = f"the update of step {report.step} made {names} non-finite; all was put back to before that update"
        return replace(report, nonfinite_state=(), notes=(*report.notes, note))

    def _restore_buffers(self, report: FaultReport, findings: RankFindings, record: StepRecord) -> FaultReport:
        """No update happens, so the buffers too are to be those from before the window."""
        # on every rank, also where none is bad: a loop that catches the error may save a checkpoint
        record.window.restore_buffers(self.context.named_buffers(), self.context.undone)
        (any_bad,) = self.context.ranks.any_of(bool(findings.nonfinite_state.buffers))
        if not any_bad:
            return report
        note = "buffers that this step's forward had made non-finite were put back"
        return replace(report, notes=(*report.notes, note))

    def _dumped(self, report: FaultReport, findings: RankFindings, record: StepRecord) -> FaultReport:
        context = self.context
        self._whole = None
        report = self._with_undone(report)
        if context.config.dump_dir is None:
            return report
        (calls_only,) = context.ranks.any_of(record.window.is_of_calls)
        if calls_only and context.recipe is None:
            report = replace(report, notes=(*report.notes, CALLS_ONLY))
        try:
            request = dump_request(context, record, findings, report)
        except Exception as error:  # a defect here must not replace the fault
            # peers are in the dump's collectives by now, at most timeout_s: none of this rank's may meet those
            context.ranks.peers_lost = True
            context.ranks.close()
            return _with_notes(report, [f"dump: this rank has no part of it: {line_of(error)}"])
        result = write_dump(request)
        notes = [f"dump: {problem}" for problem in result.problems]
        if result.replicas_disagree:
            notes.append(f"replicas disagree: {', '.join(result.replicas_disagree[:4])}")
        path = _as_given(result.path, context.config.dump_dir)
        if result.is_partial:
            notes.append(f"dump: {path} cannot be read, since it was not finished")
            path = None
        elif result.path is not None:
            self._whole = Path(result.path), result.leads
        return _with_notes(replace(report, dump_path=path), notes)

    # -- the second look ---------------------------------------------------------------------------------------------

    def _looked(self, report: FaultReport, judgement: Judgement, record: StepRecord, keep_gradients: bool) -> Looked:
        """The report after a second look, and in the dump too; the same as before where there is none."""
        context, findings = self.context, judgement.findings
        if not context.config.look_again or context.ranks.peers_lost or findings is None:
            return Looked(report)
        silent = partial(self._end_in_silence, record)
        looked = look_again(
            Fault(context, record, report, findings, known_before(context, record, findings), keep_gradients, silent)
        )
        report = self._with_undone(audited(context.ranks, told_why(context, record, looked, judgement.cause), findings))
        if report.second_look is not None:
            say_fault(logging.ERROR, report)
        self._amend(report, alone=context.ranks.writes_alone)
        return replace(looked, report=report)

    def _amend(self, report: FaultReport, alone: bool) -> None:
        """Put the report into the dump: one rank does, or, where it may be gone, each that is left."""
        if self._whole is None or not (self._whole[1] or alone):
            return
        try:
            amend_report(self._whole[0], report, self.context.ranks.rank)
        except Exception as error:
            say(
                logging.ERROR,
                f"dump: {self._whole[0]} keeps the report from before the second look: {line_of(error)}",
            )

    def _end_in_silence(self, record: StepRecord, report: FaultReport) -> None:
        """Peers are gone, and this rank's main thread waits for them in the second look: end the process."""
        report = report if self.context.config.on_fault == "stop" else _cannot_go_on(report)
        self._amend(report, alone=True)
        config, text = self.context.config, self._text(report)
        line = f"{NonFiniteError.__name__}: {text}"
        sys.stderr.write(f"{line}\n")
        self._notices.tell("stop", report, record, text)
        tell_launcher(line, report.origin_rank, config.exit_code)
        exit_process(config.exit_code)

    # -- without peers -----------------------------------------------------------------------------------------------

    def has_findings(self, record: StepRecord, error: BaseException) -> bool:
        """Whether this rank's slots and state, or what its exception left behind, show a fault.

        Collective: none. Host sync: many.
        """
        try:
            return self._finds(record, error)
        except torch.OutOfMemoryError:  # the job's own, most likely: its tensors may be gone by now
            torch.accelerator.empty_cache()
        except RuntimeError as failure:
            say(logging.ERROR, f"slots cannot be read any more: {line_of(failure)}")
            return False
        try:
            return self._finds(record, error)
        except RuntimeError as failure:
            say(logging.ERROR, f"not looked at, for lack of memory on {self.context.device}: {line_of(failure)}")
            return False

    def _finds(self, record: StepRecord, error: BaseException) -> bool:
        if record.is_current:
            self.context.look_at_last_outputs()
        if self.triage.has_findings(record):
            return True
        if not record.is_current:
            return False
        self.context.look_at_raise(error)
        return self.triage.has_findings(record)

    def sees_damage(self, record: StepRecord) -> bool:
        """Whether this rank's state is bad, as it is now; False where it cannot be read. Collective: none."""
        try:
            with torch.no_grad():
                return bool(rescan(self.context, record).nonfinite_state.lasting())
        except Exception as failure:  # nothing may take the place of the exception that is on its way
            say(logging.ERROR, f"state cannot be read any more: {line_of(failure)}")
            return False

    def dump_single_rank(self, record: StepRecord, raised: str, meet: Meet) -> FaultReport | None:
        """Write this rank's part without any collective; the log line first, and at last the text of the fault.

        Args:
            record: of the step.
            raised: as in `report_without_collective`.
            meet: likewise.

        Returns:
            None where another thread is handling a fault.
        """
        if not self._busy.acquire(blocking=False):
            return None
        self.context.ranks.peers_lost = True  # from here on no question is asked of any peer
        with torch.no_grad():
            findings = rescan(self.context, record)
            report = self.triage.noted(
                report_without_collective(self.context, record, findings, raised, meet, self.triage.let_through)
            )
            say_fault(logging.ERROR, report)
            report = self._dumped(report, findings, record)
            text = self._text(report)
            say(logging.ERROR, text, report)
            tell_launcher(f"{NonFiniteError.__name__}: {text}", report.origin_rank, self.context.config.exit_code)
            self._notices.tell("stop", report, record, text)
            return report

    def dump_with_peer(self, record: StepRecord, text: str, meet: Meet) -> bool:
        """Write this rank's part after a peer has raised; False where the main thread is handling a fault itself."""
        say(logging.ERROR, f"{text}: this rank writes its part of the dump and ends too")
        return self.dump_single_rank(record, "", meet) is not None


def _cannot_go_on(report: FaultReport) -> FaultReport:
    note = "no rank trains on: the second look did not end on all of them, and what it left behind cannot be trusted"
    return replace(report, notes=(*report.notes, note))


def _log_warnings(judgement: Judgement) -> None:
    for text in judgement.warnings:
        say(logging.WARNING, text)


def _with_notes(report: FaultReport, notes: list[str]) -> FaultReport:
    """The report with more notes, which go to the log too."""
    for note in notes:
        say(logging.ERROR, note)
    return replace(report, notes=(*report.notes, *notes))


def _as_given(path: str | None, dump_dir: str | None) -> str | None:
    """The dump's path as the user wrote dump_dir, so that the text is the same on ranks that run elsewhere."""
    return None if path is None or dump_dir is None else os.path.join(dump_dir, os.path.basename(path))
