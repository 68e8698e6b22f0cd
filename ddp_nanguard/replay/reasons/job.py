"""Reasons that lie in the job, not in one operator: hyper-parameters, updates, communication, growth, chance."""

from __future__ import annotations

from dataclasses import replace

from ddp_nanguard import why
from ddp_nanguard.replay.outcome import EAGER_NOW
from ddp_nanguard.site import Phase, SecondRun

from .facts import WORDS, Facts, Reason, at
from .numbers import is_overflow


def scale_collapse(facts: Facts) -> Reason | None:
    """A scaler has halved its scale for too long."""
    found = why.scale_collapse(facts)
    if found is None or facts.birth is None:
        return found
    return replace(found, evidence=(f"the gradients are not finite since {at(facts.birth)}",))


def compiled_kernel(facts: Facts) -> Reason | None:
    """Bad where torch.compile's code runs, finite where the same step runs eagerly."""
    traced = facts.traced
    if traced is None or not facts.was_compiled or traced.target or traced.birth is not None:
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


def not_reproduced(facts: Facts) -> Reason | None:
    """The same step was finite this time."""
    if facts.birth is not None:
        return None
    if not facts.outcome:
        return why.finite_in_place(facts)
    if facts.outcome != "not_reproduced":
        return None
    in_place = facts.report.rerun if facts.report is not None else None
    where = f"different here: {'; '.join(facts.differs)}" if facts.differs else "on equal software"
    sentence = f"the same step was finite in the replay, {where}: {_chance(in_place)}"
    evidence = () if in_place is None else (f"rerun in place, before the dump: {in_place.text}",)
    return Reason("not reproduced", sentence, evidence)


def _chance(in_place: SecondRun | None) -> str:
    """A step that went bad twice where it ran is no matter of chance."""
    if in_place is not None and in_place.outcome == "same":
        return "it went bad twice where it ran, so suspect that device, its software, or code that has changed"
    return why.CHANCE


def update_overflow(facts: Facts) -> Reason | None:
    """Finite gradients, non-finite weights: an eps that vanishes in the dtype, or an overflow in the update."""
    birth, origin = facts.birth, facts.origin
    found = why.update_overflow(facts)
    if found is not None or birth is None or birth.phase != "update":
        return found
    if origin is None or origin.phase is not Phase.OPTIMIZER or origin.layer is None:
        return None
    return Reason("update overflow", f"{birth.operator} of the update made {WORDS[birth.kind]} in {origin.slot}")


def growth(facts: Facts) -> Reason | None:
    """The values grew over the last steps until one overflowed."""
    birth = facts.birth
    if birth is None:
        return why.growth(facts)
    return why.growth(facts, why.MIN_TOTAL, (f"then overflow in {at(birth)}",)) if is_overflow(birth) else None
