"""Option ``rerun``: the step of a fault once more, before its dump, while the suspect device is still held.

All ranks run their step or none does; each of them alone, so that none waits for another within it. What came of it
is shared in the way of the fault round: a few bytes per rank and one text. A rerun never dumps and never reruns: its
guard has neither option, whatever the environment says.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ddp_nanguard.capture import rng
from ddp_nanguard.capture.window import MicroBatch
from ddp_nanguard.context import GuardContext
from ddp_nanguard.diagnosis.rules.report_rules import ReportFacts, finite_in_place
from ddp_nanguard.distributed.group import RankGroup
from ddp_nanguard.dump.request import DumpRequest
from ddp_nanguard.errors import DumpError
from ddp_nanguard.replay.in_place import InPlaceReplay
from ddp_nanguard.replay.outcome import Result
from ddp_nanguard.report.types import MAX_RANKS_LISTED, FaultReport, Phase, SecondRun
from ddp_nanguard.report.wording import listed

_log = logging.getLogger(__name__)

PATIENCE = 10
"""So many times ``timeout_s`` peers are waited for: one may fail at once where another takes its time."""
OUTCOMES = ("finite", "elsewhere", "failed", "same")
"""Worst first: the first that any rank has is the outcome of all."""
MAX_TEXT = 600
_NAMES = {"same": "same", "elsewhere": "elsewhere", "not_reproduced": "finite"}


@dataclass(frozen=True)
class _Own:
    """What this rank says: an outcome, a text on it, and more for its evidence."""

    outcome: str
    text: str
    evidence: dict[str, Any] = field(default_factory=dict)


def rerun_in_place(context: GuardContext, request: DumpRequest, window: list[MicroBatch]) -> DumpRequest:
    """The request, with what came of the rerun in its report and its evidence; never an exception.

    Args:
        context: of the guard.
        request: of the dump that comes next.
        window: the micro-batches, as they are.

    Collective: on the fault group, at most two MIN and three SUM all-reduces of 8 KiB, 4 bytes per rank, and where
    weights are sharded one MAX all-reduce of each parameter. Waits for at most ``PATIENCE * timeout_s``.
    """
    context.ranks.bound_waiting(PATIENCE * context.config.timeout_s)
    try:
        with _memory_given_back(), rng.kept(context.device, context.window.generators):
            own, second = _run_all(context, request, window)
    except Exception as error:  # a lost peer, or a defect here, which must not replace the fault that is to be told
        context.ranks.peers_lost = True
        own = _Own("failed", _line(error))
        second = SecondRun("failed", {}, "could not be run to the end: peers were lost")
    finally:
        context.ranks.bound_waiting()
    _log.warning("step %d once more in place: %s", request.report.step, second.text)
    said = {"outcome": own.outcome, "reason": own.text, **own.evidence}
    evidence = replace(request.evidence, rerun=said)
    group = None if context.ranks.peers_lost else request.group
    return replace(request, report=_with(request.report, second), evidence=evidence, group=group)


def _with(report: FaultReport, second: SecondRun) -> FaultReport:
    """A step that is finite the second time has another cause than what its values look like."""
    report = replace(report, rerun=second)
    found = finite_in_place(ReportFacts(report))
    if found is None or report.cause.startswith("scale collapse"):
        return report
    more = "" if report.cause in ("", "unknown") else f"; {report.cause}"
    return replace(report, cause=f"{found.text}{more}")


def _run_all(context: GuardContext, request: DumpRequest, window: list[MicroBatch]) -> tuple[_Own, SecondRun]:
    why_not_replayable, live = _why_not(request.report), None
    if why_not_replayable is None:
        live, problem = _attempt(lambda: InPlaceReplay(context, request, window))
        why_not_replayable = context.ranks.first_problem(problem)
    if live is None or why_not_replayable is not None:
        assert why_not_replayable is not None
        return _Own("not_run", why_not_replayable), SecondRun("not_run", {}, f"not rerun: {why_not_replayable}")
    live.held.gather(context.ranks.fault_group.group)
    own = _own(context, live)
    return own, _shared(context.ranks, own, request.report)


@contextlib.contextmanager
def _memory_given_back() -> Iterator[None]:
    """Hooks and FSDP make cycles, and under ``skip`` the job needs their memory; only what is new is collected."""
    is_own = gc.get_freeze_count() == 0  # else the job has frozen things of its own, and thawing would take them too
    if is_own:
        gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if is_own:
            gc.unfreeze()


def _why_not(report: FaultReport) -> str | None:
    """The same on every rank."""
    if report.origin is None:
        return "the fault has no origin that a step could show again"
    if report.origin.phase is Phase.STATE:
        return f"{report.origin.slot} was bad already, and a step from there would be no other"
    if report.origin.phase is Phase.OPTIMIZER:
        return "the update is at fault, and a step ends before it"
    return None


def _attempt(action: Callable[[], Any]) -> tuple[Any, str | None]:
    """What the action gives, or why it gives nothing: code of the user runs in it."""
    try:
        return action(), None
    except (Exception, SystemExit) as error:
        return None, _line(error)


def _line(error: BaseException) -> str:
    text = (str(error).splitlines() or [""])[0][:MAX_TEXT]
    return text if isinstance(error, DumpError) else f"{type(error).__name__}: {text}".rstrip(": ")


def _own(context: GuardContext, live: InPlaceReplay) -> _Own:
    result, problem = _attempt(live.run)
    if problem is not None:
        return _Own("failed", problem)
    outcome = _NAMES[str(result.outcome)]
    text = _finite_text(context, result) if outcome == "finite" else result.reason[:MAX_TEXT]
    return _Own(outcome, text, {**result.to_dict(), "outcome": outcome})


def _finite_text(context: GuardContext, result: Result) -> str:
    from .dump_request import device_of

    device = device_of(context.device)
    suspect = ", ".join(part for part in (device.name, device.uuid, device.type) if part is not None)
    upto = f"identical up to {result.last_same}" if result.last_same else "different from the start"
    return f"suspect device ({socket.gethostname()}, {suspect}) or nondeterminism; {upto}"


def _shared(ranks: RankGroup, own: _Own, report: FaultReport) -> SecondRun:
    marked = ranks.ranks_where(*(own.outcome == outcome for outcome in OUTCOMES))
    found = {outcome: ranks for outcome, ranks in zip(OUTCOMES, marked, strict=True) if ranks}
    worst = next(iter(found))
    text = ranks.text_of(ranks.rank == found[worst][0], own.text)
    listed = {outcome: (len(ranks), tuple(ranks[:MAX_RANKS_LISTED])) for outcome, ranks in found.items()}
    return SecondRun(worst, listed, _sentence(found, text, report))


def _sentence(found: dict[str, list[int]], text: str, report: FaultReport) -> str:
    worst, ranks = next(iter(found.items()))
    others = "".join(f"; {_who(found[other])} {other}" for other in list(found)[1:] if other != "same")
    match worst:
        case "same":
            everywhere = f"same on all {report.world_size} ranks" if report.world_size > 1 else "same"
            is_reduce = report.origin is not None and report.origin.phase is Phase.REDUCE
            return f"{everywhere}: {'up to the communication, which was not run' if is_reduce else 'deterministic'}"
        case "finite":
            return f"{_who(ranks)} finite on the second run, same inputs and random states: {text}{others}"
        case "elsewhere":
            return f"{_who(ranks)} elsewhere on the second run: {text}{others}"
        case _:
            return f"could not be run on {_who(ranks)}: {text}"


def _who(ranks: list[int]) -> str:
    shown = listed(ranks)
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
