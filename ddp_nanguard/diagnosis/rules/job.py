"""Reasons that lie in the job, not in one operator: the update, communication, growth, compiled code, chance."""

from __future__ import annotations

from dataclasses import replace

from ddp_nanguard.diagnosis.trace.events import EventPhase
from ddp_nanguard.replay.outcome import EAGER_NOW
from ddp_nanguard.report.types import Phase, SecondLook
from ddp_nanguard.report.wording import KIND_WORDS

from . import report_rules as why
from .facts import Reason, TraceFacts, all_at_hits, argument, at, hits, is_zero
from .numbers import is_overflow


def scale_collapse(facts: TraceFacts) -> Reason | None:
    """A GradScaler has halved its scale in too many steps in a row."""
    found = why.scale_collapse(facts)
    if found is None or facts.first_nonfinite_op is None:
        return found
    return replace(found, evidence=(f"the gradients are not finite since {at(facts.first_nonfinite_op)}",))


def compiled_kernel(facts: TraceFacts) -> Reason | None:
    """The step failed where torch.compile's code ran, and is finite when it runs eagerly."""
    traced, origin = facts.traced, facts.origin
    if origin is not None and origin.phase in (Phase.STATE, Phase.OPTIMIZER):
        return None  # no kernel of the step made it
    if traced is None or not facts.was_compiled or traced.target or traced.first_nonfinite_op is not None:
        return None
    if EAGER_NOW in facts.differs:
        compiled = "compiled: the recorded step, which failed; the replay's model is not compiled"
    elif facts.outcome in ("same", "elsewhere"):
        compiled = "compiled: the recorded step, which failed, and the replay, which failed too"
    else:
        return None  # it was finite compiled, too: chance
    sentence = "the same step is finite when it runs eagerly: suspect the kernel that torch.compile made"
    eager = f"eager: every output of {traced.num_operators} operators is finite"
    return Reason("not reproduced", sentence, (compiled, eager))


def not_reproduced(facts: TraceFacts) -> Reason | None:
    """The same step was finite when it was run again."""
    if facts.first_nonfinite_op is not None:
        return None
    if not facts.outcome:
        return why.finite_in_place(facts)
    if facts.outcome != "not_reproduced":
        return None
    again = facts.report.second_look if facts.report is not None else None
    where = f"different here: {'; '.join(facts.differs)}" if facts.differs else "on equal software"
    sentence = f"the same step was finite in the replay, {where}: {_chance(again)}"
    evidence = () if again is None else (f"second look: {again.text}",)
    return Reason("not reproduced", sentence, evidence)


def _chance(again: SecondLook | None) -> str:
    """What to suspect; a step that failed twice where it ran did not fail by chance."""
    if again is not None and again.outcome == "same" and again.operator is not None:
        return (
            "it went bad twice where it ran, so suspect what may differ here: counters, schedules and environment "
            "variables of the script, collectives with other ranks, or code that has changed"
        )
    return why.CHANCE


def vanishing_eps(facts: TraceFacts) -> Reason | None:
    """Finite gradients, non-finite weights: an eps that is 0 in the dtype, or beside a second moment of 0."""
    op, slot = facts.first_nonfinite_op, _updated(facts)
    found = why.update_overflow(facts)
    if op is None or op.base.startswith("_fused"):  # whose divisor is inside of the kernel
        return found
    mask, divisor = hits(op), argument(op, "tensor2" if op.base == "addcdiv" else "other")
    if slot is None or mask is None or op.base not in {"addcdiv", "div"} or not all_at_hits(divisor, mask, is_zero):
        return None
    if found is not None or op.base == "div":
        return found
    return Reason("update overflow", f"the update of {slot} divides by zero: {op.operator}, eps is too small")


def update_overflow(facts: TraceFacts) -> Reason | None:
    """An operator of the optimizer's step made it, and no rule says how."""
    op, slot = facts.first_nonfinite_op, _updated(facts)
    if op is None or slot is None:
        return None
    return Reason("update overflow", f"{op.operator} of the update made {KIND_WORDS[op.kind]} in {slot}")


def _updated(facts: TraceFacts) -> str | None:
    """The parameter whose update is the fault; None for other faults."""
    op, origin = facts.first_nonfinite_op, facts.origin
    if op is None or op.phase is not EventPhase.UPDATE or origin is None or origin.phase is not Phase.OPTIMIZER:
        return None
    return origin.slot if origin.layer is not None else None


def growth(facts: TraceFacts) -> Reason | None:
    """The values grew over the last steps until one overflowed."""
    op = facts.first_nonfinite_op
    if op is None:
        return why.growth(facts)
    return why.growth(facts, why.MIN_TOTAL, (f"then overflow in {at(op)}",)) if is_overflow(op) else None
