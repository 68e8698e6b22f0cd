"""From a dump to the operator, the line and the reason: the plain replay first, then the trace, then the rules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ddp_nanguard.dump.read import Dump
from ddp_nanguard.errors import DumpError
from ddp_nanguard.replay.outcome import Outcome, Result
from ddp_nanguard.replay.session import Session
from ddp_nanguard.report.types import Phase

from .rules import REASON_KINDS, Reason, TraceFacts, reason_for
from .trace.traced_step import Traced, trace_step


@dataclass
class Diagnosis:
    """What a dump and its replay say about the cause.

    Attributes:
        outcome: of the plain replay; None where it was not run.
        traced: the traced step; None where it could not be run.
        reason: the answer of the first rule that has one, or "unknown".
        obstacle: why the step was not run; "" where it was.
    """

    outcome: Result | None
    traced: Traced | None
    reason: Reason
    obstacle: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data: what a plain replay gives, then the trace and the reason."""
        return {
            **(self.outcome.to_dict() if self.outcome is not None else {}),
            "trace": self.traced.to_dict() if self.traced is not None else None,
            "cause": self.reason.to_dict(),
            "not_run": self.obstacle or None,
        }


def diagnose(session: Session, outcome: Result) -> Diagnosis:
    """Trace the session's step and ask the rules; without a trace where the step cannot be run or raises.

    Args:
        session: of one rank, alone.
        outcome: of its plain replay.
    """
    if outcome.outcome is Outcome.CANNOT:
        return without_replay(session.dump, outcome, outcome.reason)
    try:
        return traced_diagnosis(session, outcome)
    # Alone there are no peers that would wait, so the report can still be asked.
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return without_replay(session.dump, outcome, f"the traced step raised {type(error).__name__}: {error}")


def traced_diagnosis(session: Session, outcome: Result) -> Diagnosis:
    """`diagnose`, but an error in the traced step is raised: a rank that continued would leave its peers waiting.

    Collective: those of the training step and of a guard, unless the session is alone.
    """
    return diagnosis_of(session.dump, trace_step(session), outcome)


def diagnosis_of(dump: Dump, traced: Traced, outcome: Result) -> Diagnosis:
    """What the rules say of a traced step; nothing is run."""
    if outcome.outcome is Outcome.ELSEWHERE:
        traced.notes.append("the replay went elsewhere than the record: this is the trace of the replay")
    return Diagnosis(outcome, traced, reason_for(facts_of(dump, traced, outcome)))


def without_replay(dump: Dump, outcome: Result | None, why: str) -> Diagnosis:
    """What the report and the history say by themselves; nothing is run.

    Args:
        dump: the dump.
        outcome: of the plain replay, None where it was not run.
        why: the obstacle, for the reader.
    """
    reason = reason_for(facts_of(dump, None, None))
    looked = _of_second_look(dump)
    # of the same kind: the dump holds the history of every rank, the job knew that of one
    reason = looked if looked is not None and looked.kind != reason.kind else reason
    if reason.kind == "unknown":
        reason = replace(
            reason, evidence=(*reason.evidence, f"the report says: {dump.report.cause}; a replay finds more")
        )
    return Diagnosis(outcome, None, reason, why)


def _of_second_look(dump: Dump) -> Reason | None:
    """The reason that the job itself has found, by the trace of its second look; None where it has none."""
    report = dump.report
    operator = report.second_look.operator if report.second_look is not None else None
    kind = next((kind for kind in REASON_KINDS if report.cause.startswith(f"{kind}:")), None)
    if operator is None or kind is None or report.second_look is None:
        return None
    where = f"{operator.line}: {operator.code}" if operator.line else "a module of torch"
    seen = f"rank {operator.rank}: {operator.name} at {where}"
    return Reason(kind, report.cause, (seen, f"second look in the job: {report.second_look.text}"))


def facts_of(dump: Dump, traced: Traced | None, outcome: Result | None) -> TraceFacts:
    """Collect the facts for the rules.

    Args:
        dump: the dump.
        traced: the traced step, None where it was not run.
        outcome: of the plain replay, None where it was not run.
    """
    dtypes = {
        name.removeprefix("model."): entry.dtype
        for name, entry in dump.manifest.shapes.items()
        if name.startswith("model.")
    }
    return TraceFacts(
        report=dump.report,
        traced=traced,
        histories={rank: dump.history(rank) for rank in dump.ranks},
        optimizers=_optimizers(dump),
        dtypes=dtypes,
        # With a trace the rules take the batch from there: it is the one that the step has just used.
        batch=_batch(dump) if traced is None else None,
        outcome=str(outcome.outcome) if outcome is not None else None,
        differs=tuple(outcome.differs) if outcome is not None else (),
        was_compiled=dump.manifest.wrapper_description.compiled,
        wrapper=dump.manifest.wrapper_description.details,
    )


def _batch(dump: Dump) -> Any:
    """The batch of an input fault; None for other phases, or where it cannot be read."""
    origin = dump.report.origin
    if origin is None or origin.phase is not Phase.INPUT or origin.rank not in dump.ranks:
        return None
    try:
        return next((m.batch for m in dump.window(origin.rank) if m.index == origin.micro_batch), None)
    except DumpError:
        return None


def _optimizers(dump: Dump) -> list[dict[str, Any]]:
    try:
        return list(dump.plain_state()["optimizers"])
    except DumpError:
        return []
