"""From the trace of a second look to operator, line and reason, which one rank finds and all are told."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass, replace
from typing import Any

from ddp_nanguard.capture.model_calls import ModelCall
from ddp_nanguard.diagnosis.rules import TraceFacts, reason_for
from ddp_nanguard.diagnosis.rules.outside import is_another_fault, is_mask, reads_bad_batch
from ddp_nanguard.diagnosis.trace.events import Event, EventPhase, Operand
from ddp_nanguard.diagnosis.trace.operators import is_communication
from ddp_nanguard.diagnosis.trace.source_lines import CodeLocation, SourceLine
from ddp_nanguard.diagnosis.trace.traced_step import Traced
from ddp_nanguard.distributed.group import RankGroup
from ddp_nanguard.report.types import Evidence, FaultReport, FirstOperator, Phase

_log = logging.getLogger(__name__)

SEED_NAME = "the gradient of the model's output"
"""As recorded in training: the loss is code outside of what is run again."""
MAX_CODE = 200
MAX_REASON = 900


@dataclass(frozen=True)
class Place:
    """Where a value began, and why.

    Attributes:
        operator: None where no trace leads to one.
        reason: one sentence; "" where no rule has one.
        is_taken_in: whether the value was there before the step was run again, in memory that the step only reads.
        hooked: where a hook of the job on a tensor made it, the layer whose own code made that tensor; else None.
        is_of_step: whether the backward of code of the training step made it, outside every module.
    """

    operator: FirstOperator | None = None
    reason: str = ""
    is_taken_in: bool = False
    hooked: str | None = None
    is_of_step: bool = False


def own_place(facts: TraceFacts, calls: list[ModelCall], rank: int) -> Place:
    """What the trace of this rank tells; nothing where it tells nothing, and never an exception.

    Args:
        facts: with the trace.
        calls: of the step, whose lines stand for those of torch's own modules.
        rank: this one.
    """
    try:
        event = facts.first_nonfinite_op
        if event is not None and _reads_gradient_of_output(event):
            return Place()
        if event is not None and _is_taken_in(event, facts):
            return Place(is_taken_in=True)  # what reads it first has not made it
        reason = reason_for(facts)
        event = None if event is not None and is_another_fault(event, facts.origin) else event
        text = "" if reason.kind == "unknown" else reason.text[:MAX_REASON]
        operator = None if event is None else _operator(event, calls, rank)
        hooked = event.layer if event is not None and _is_in_hook(event) else None
        return Place(operator, text, hooked=hooked, is_of_step=event is not None and _is_of_step(event))
    except Exception as error:  # a defect here must not replace the fault that is to be told
        _log.debug("second look: no place: %s: %s", type(error).__name__, error)
        return Place()


def _is_taken_in(event: Event, facts: TraceFacts) -> bool:
    """Whether an operator only meets a value that the model or the loop has kept, or was given."""
    names = [name for name in event.outside if name != SEED_NAME]
    origin = facts.origin
    is_known = origin is not None and origin.phase in (Phase.INPUT, Phase.STATE, Phase.OPTIMIZER)
    if (
        is_known
        or reads_bad_batch(facts)
        or not names
        or event.parents
        or is_mask(event)
        or is_communication(event.operator)
    ):
        return False
    return not any(name.startswith("uninitialised memory") for name in names)


def _is_in_hook(event: Event) -> bool:
    """Whether code of the job ran where a node of torch's own was due: a hook on the tensor that the node made."""
    is_own = event.node is not None and re.search(r"Backward\d+$", event.node) is not None
    return event.phase is EventPhase.BACKWARD and bool(event.lines) and is_own


def _is_of_step(event: Event) -> bool:
    """Whether the node that ran was made by code outside every module; of other nodes it is not known."""
    is_known = event.phase is EventPhase.BACKWARD and event.forward_operator is not None
    return is_known and event.layer is None and not _is_in_hook(event)


def _operator(event: Event, calls: list[ModelCall], rank: int) -> FirstOperator:
    lines = event.lines or event.forward_lines or _lines_of_call(event, calls)
    line = f"{lines[0].place()} in {lines[0].function}" if lines else None
    code = lines[0].text[:MAX_CODE] if lines else ""
    in_backward = event.phase is EventPhase.BACKWARD and not event.lines
    return FirstOperator(rank, event.operator, line, code, in_backward, _evidence(event.output))


def _lines_of_call(event: Event, calls: list[ModelCall]) -> tuple[SourceLine, ...]:
    """Where the model was called, for what runs in modules of torch and no others."""
    call = next((c for c in calls if c.micro_batch == event.micro_batch and c.caller is not None), None)
    return () if call is None or call.caller is None else (CodeLocation(*call.caller).line(),)


def _evidence(operand: Operand | None) -> Evidence | None:
    if operand is None:
        return None
    extremes = [abs(value) for value in (operand.minimum, operand.maximum) if value is not None]
    return Evidence(
        operand.shape,
        operand.dtype,
        operand.num_nan,
        operand.num_inf,
        operand.num_neg_inf,
        operand.numel,
        max(extremes, default=None),
    )


def made_here(traced: Traced | None) -> bool:
    """Whether the value began in this rank's own arithmetic, not in a collective."""
    event = traced.first_nonfinite_op if traced is not None else None
    return event is not None and not is_communication(event.operator) and not _reads_gradient_of_output(event)


def _reads_gradient_of_output(event: Event) -> bool:
    """Whether it only takes over what the loss has made, outside of what was run again."""
    return SEED_NAME in event.outside and not event.parents


def shared_place(ranks: RankGroup, report: FaultReport, mine: Place, made: bool) -> Place:
    """The place that all ranks are told: that of the origin's rank, or of the first rank that made the value.

    Args:
        ranks: that are asked.
        report: whose origin has a rank, or has none.
        mine: what this rank found.
        made: see `made_here`.

    Collective: two SUM all-reduces on the fault group.
    """
    made = made and not mine.is_taken_in
    makers, knowing = ranks.ranks_where(made, mine.operator is not None or bool(mine.reason) or mine.is_taken_in)
    named = report.origin.rank if report.origin is not None else None
    chosen = named if named in makers or not makers else makers[0]
    if chosen is None or chosen not in (*makers, *knowing):
        chosen = next(iter((*makers, *knowing)), None)
    if chosen is None:
        return Place()
    return _read(ranks.text_of(ranks.rank == chosen, _written(mine)))


def _written(place: Place) -> str:
    operator = place.operator
    while True:
        data: dict[str, Any] = {
            "operator": operator.to_dict() if operator is not None else None,
            "reason": place.reason,
        }
        data |= {"is_taken_in": place.is_taken_in, "hooked": place.hooked, "is_of_step": place.is_of_step}
        text = json.dumps(data)
        if len(text.encode()) < 8000 or operator is None:
            return text
        operator = replace(operator, code="", line=None)


def _read(text: str) -> Place:
    data: dict[str, Any] = json.loads(text)
    operator = data["operator"]
    return Place(**{**data, "operator": FirstOperator.from_dict(operator) if operator else None})
