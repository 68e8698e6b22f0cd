"""`look_again`: the second look at the step of a fault, from the question whether it can be had to the new report.

Every rank does the same in the same order. First all tell whether they can run the step at all; then it is run with
every layer watched, and each rank compares what it sees with what training saw; then once more with every operator
traced on the ranks where something is bad, or, where the fault did not come again, with fresh memory filled with NaN.
Nothing that goes wrong in here replaces the fault.
"""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ddp_nanguard.blame.inspect import RankFindings
from ddp_nanguard.blame.report import shared_report
from ddp_nanguard.capture.record import StepRecord
from ddp_nanguard.context import GuardContext
from ddp_nanguard.diagnosis.rules import TraceFacts
from ddp_nanguard.diagnosis.trace.traced_step import Watcher
from ddp_nanguard.distributed.group import RankGroup
from ddp_nanguard.errors import line_of
from ddp_nanguard.report.types import FaultReport, FirstOperator, SecondLook

from .compare import own_sites
from .obstacles import of_the_report, of_this_rank
from .outcome import (
    Concluded,
    as_compiled,
    concluded,
    hinted,
    in_a_hook,
    in_the_step,
    merged,
    on_the_makers_rank,
    taken_in,
)
from .outside import is_outside, outside_place, runs_step
from .place import Place, made_here, own_place, shared_place
from .run import SecondRun, StepAgain
from .signs_of_life import SignsOfLife
from .update import can_update_again, update_again

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

MAX_TEXT = 300


@dataclass(frozen=True)
class Fault:
    """What the fault path knows of a fault when it looks again.

    Attributes:
        context: of the guard.
        record: of the step.
        report: what all ranks say so far.
        findings: what this rank found.
        known: for the rules: ``histories``, ``optimizers`` and ``dtypes`` of `ReportFacts`.
        keep_gradients: whether the job goes on and needs the gradients that are there now.
        on_silence: called on another thread with the report where this rank waits for peers that are gone; it ends the
            process.
    """

    context: GuardContext
    record: StepRecord
    report: FaultReport
    findings: RankFindings
    known: dict[str, Any]
    keep_gradients: bool
    on_silence: Callable[[FaultReport], None]


@dataclass(frozen=True)
class Looked:
    """What a second look gave.

    Attributes:
        report: the same on every rank.
        findings: what this rank saw in it; None where it was not done.
        reason: why the value became non-finite, as its trace tells; "" where that tells nothing.
        must_stop: whether the model was left in a state from which no rank may train on.
    """

    report: FaultReport
    findings: RankFindings | None = None
    reason: str = ""
    must_stop: bool = False


class _NotDoneError(Exception):
    """The second look ends here, on all ranks alike."""


class _PeersGoneError(RuntimeError):
    """Some rank did not come to the end of the step, so that no peer can be asked any more."""


def look_again(fault: Fault) -> Looked:
    """Run the step of a fault once more, and report what is seen; never an exception.

    Collective: those of the model, two or three times, and questions on the fault group; every rank must call it.
    Waits for peers until none has shown a sign of life for ``timeout_s``, see [Note: signs of life].
    """
    look = _Look(fault)
    updates = can_update_again(fault.context, fault.record)
    why = None if updates else of_the_report(fault.report)
    if why is not None:
        return Looked(_not_done(fault.report, why))
    try:
        return look.look_at_update() if updates else look.look()
    except _NotDoneError as error:
        return Looked(look.given_up(str(error)), must_stop=look.must_stop)
    except Exception as error:  # peers were lost, or a defect in here: the fault is to be told all the same
        fault.context.ranks.peers_lost = True
        _log.debug("second look", exc_info=True)
        why = str(error) if isinstance(error, _PeersGoneError) else _line(error)
        return Looked(look.given_up(why), look.findings, must_stop=True)


class _Look:
    """One second look of one rank."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.context = fault.context
        self.step = StepAgain(fault.context, fault.record, fault.keep_gradients)
        self.must_stop = False
        self.shown: FaultReport | None = None  # by the run that was done, while another one goes on
        self.findings: RankFindings | None = None

    def look(self) -> Looked:
        fault, ranks = self.fault, self.context.ranks
        why = _first_obstacle(ranks, of_this_rank(self.context, fault.record))
        if why is not None:
            raise _NotDoneError(why)
        compiled = self._run(eager=False, everything=False) if self.step.is_compiled else None
        second = self._run()
        seen = shared_report(second.context, second.record, second.findings, "")
        found = hinted(self._concluded(second, compiled), seen, fault.record)
        self.shown, self.findings = _with_look(merged(fault.report, seen, found), found), second.findings
        found, place = self._placed(second, self.shown, found)
        if place.is_taken_in:
            found = taken_in(found, self.shown)
            self.shown = merged(fault.report, seen, found)
        report = in_a_hook(on_the_makers_rank(_with_look(self.shown, found, place.operator)), place.hooked)
        report = in_the_step(report, place.is_of_step)
        return Looked(report, second.findings, place.reason, self.must_stop)

    def _placed(self, second: SecondRun, shown: FaultReport, found: Concluded) -> tuple[Concluded, Place]:
        """What one more run adds: operator, line and reason; or whether memory that nobody wrote is read."""
        try:
            if found.outcome == "finite":
                return self._with_filled_memory(found)
            if found.is_placed:
                return found, self._place(second, shown, found)
        except _NotDoneError as error:
            self.shown = self.given_up(str(error))
        return found, Place()

    def given_up(self, why: str) -> FaultReport:
        """What is reported where a run did not come to its end: what one before it has shown, if there was one."""
        if self.shown is None:
            return _not_done(self.fault.report, why)
        return replace(self.shown, notes=(*self.shown.notes, f"the operator was not looked for: {why}"))

    def look_at_update(self) -> Looked:
        """The update alone, where its weights and gradients from before are there; the step before it was clean."""
        fault, ranks = self.fault, self.context.ranks
        watcher = Watcher()
        traced = self._together(
            lambda: update_again(self.context, fault.record, watcher), lambda: watcher.num_operators
        )
        (is_bad,) = ranks.any_of(bool(traced.target))
        facts = TraceFacts(report=fault.report, traced=traced, outcome="same", **fault.known)
        mine = own_place(facts, [], ranks.rank) if traced.target else Place()
        place = shared_place(ranks, fault.report, mine, made_here(traced))
        everywhere = f" on all {ranks.world_size} ranks" if ranks.world_size > 1 else ""
        text = f"same{everywhere}: the update alone" if is_bad else "the update alone is finite: code since changed it"
        look = SecondLook("same" if is_bad else "finite", text, place.operator)
        return Looked(replace(fault.report, second_look=look), None, place.reason)

    def _concluded(self, second: SecondRun, compiled: SecondRun | None) -> Concluded:
        fault = self.fault
        if compiled is None:
            return concluded(fault.context, fault.record, fault.report, fault.findings, second)
        # bits are those of the compiled step; an eager one rounds otherwise, and draws other dropout masks
        found = concluded(fault.context, fault.record, fault.report, fault.findings, compiled)
        (is_bad,) = self.context.ranks.any_of(second.is_bad)
        return as_compiled(found, is_bad)

    # -- the runs ------------------------------------------------------------------------------------------------------

    def _run(self, traced: bool = False, eager: bool = True, everything: bool = True) -> SecondRun:
        """The step once more, as `_together`."""
        return self._together(
            lambda: self.step.run(traced=traced, eager=eager, everything=everything), lambda: self.step.progress()
        )

    def _together(self, run: Callable[[], _T], progress: Callable[[], int]) -> _T:
        """What a run gives, made on all ranks at the same time.

        Args:
            run: of this rank.
            progress: a number that changes as it goes on.

        Raises:
            _NotDoneError: some rank could not run it to its end.
            _PeersGoneError: some rank did not come to its end.
        """
        context, found, problem = self.context, None, None
        ranks, timeout_s = context.ranks, context.config.timeout_s
        context.num_looks += 1
        name = f"{ranks.name}/{context.num_looks}"
        with SignsOfLife(name, ranks.index, ranks.members, timeout_s, progress, self._on_silence) as life:
            try:
                found = run()
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # the step may raise what no job should, and the fault is to be told
                problem = _line(error)
                _log.debug("second look", exc_info=True)
            met = life.met(problem)
        if not met:
            raise _PeersGoneError(life.why_silent())
        shared = ranks.first_problem(problem)
        if shared is not None or found is None:
            self.must_stop = context.wrapper.is_sharded
            raise _NotDoneError(f"{shared}")
        return found

    def _on_silence(self, why: str) -> None:
        self.fault.on_silence(self.given_up(why))

    def _place(self, second: SecondRun, report: FaultReport, found: Concluded) -> Place:
        """Operator, line and reason, from one more run with a trace on the ranks where something is bad."""
        # a compiled step that failed may be finite eagerly, which its trace shows
        was_bad = self.step.is_compiled and bool(own_sites(self.fault.findings))
        traced = self._run(traced=was_bad or second.is_bad)
        return self._told(traced, report, found.outcome)

    def _told(self, traced: SecondRun, report: FaultReport, outcome: str) -> Place:
        ranks = self.context.ranks
        trace = traced.traced.trace if traced.traced is not None else None
        why = ranks.first_problem(trace.failure if trace is not None else None)
        if why is not None:
            raise _NotDoneError(why)
        facts = TraceFacts(
            report=report,
            traced=traced.traced,
            outcome=outcome,
            was_compiled=self.step.is_compiled,
            **self.fault.known,
        )
        if is_outside(report.origin) and not runs_step(self.fault.record):
            # the code that made it was not run: what the trace met first is only what came of it
            mine = outside_place(self.fault.record, report)
            return shared_place(ranks, report, mine, made=False)
        mine = Place()
        if traced.traced is not None:
            mine = own_place(facts, self.fault.record.window.calls.calls, ranks.rank)
        return shared_place(ranks, report, mine, made_here(traced.traced))

    def _with_filled_memory(self, found: Concluded) -> tuple[Concluded, Place]:
        """A fault that did not come again: does it, where memory that nobody has written holds NaN?"""
        is_suspect = self.context.ranks.rank in found.finite_ranks
        with _memory_filled():
            again = self._run(traced=is_suspect)
        (is_bad,) = self.context.ranks.any_of(is_suspect and again.is_bad)
        if not is_bad:
            return found, Place()
        place = self._told(again, self.fault.report, "same")
        text = f"{found.text}; bad again with fresh memory filled with NaN: something reads memory that nobody wrote"
        return replace(found, text=text), place


def _first_obstacle(ranks: RankGroup, mine: str | None) -> str | None:
    """Why a rank cannot run the step again; without a rank where all have the same reason, as in a loop of one program.

    Collective: one MAX all-reduce of 16 bytes, and where ranks differ `RankGroup.first_problem`, on the fault group.
    """
    mark = zlib.crc32((mine or "").encode())
    largest, smallest = ranks.fault_group.largest(mark, -mark)
    return mine if largest == -smallest else ranks.first_problem(mine)


@contextlib.contextmanager
def _memory_filled() -> Iterator[None]:
    """Within, torch fills what it allocates with NaN; that also chooses deterministic kernels."""
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(enabled, warn_only=warns)


def _with_look(report: FaultReport, found: Concluded, operator: FirstOperator | None = None) -> FaultReport:
    return replace(report, second_look=SecondLook(found.outcome, found.text, operator))


def _not_done(report: FaultReport, why: str) -> FaultReport:
    return replace(report, second_look=SecondLook("not_done", f"not done: {why}"))


def _line(error: BaseException) -> str:
    return line_of(error).partition(". This is typically")[0][:MAX_TEXT]  # gloo's advice
