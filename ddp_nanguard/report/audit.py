"""What a report says against itself: rules over plain data, and what is left of a report where one is broken.

A report is put together from two looks, several ranks and a trace. Each part is right about what it saw; a defect in
how they are joined shows as two statements that cannot both hold. Then neither is told as fact: the claim becomes "not
known", and a note says what contradicts what.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .messages import log_line
from .types import FaultReport, Phase, SecondLook, Site
from .wording import KIND_WORDS

FOUND: list[str] = []
"""Every contradiction that was found in this process; empty in one without a defect. Tests look at it."""

_OF_ONE_RANK = (Phase.INPUT, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)
_COMPUTED = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)  # that a batch item explains it is no more than likely

DEVICE = "that device ("
"""How a text names a device as a suspect."""


class Claim(enum.Enum):
    """What a contradiction takes from a report."""

    ORIGIN = enum.auto()
    """Where the fault began, and all that follows from it."""
    OPERATOR = enum.auto()
    """Which operator made it."""
    LOOK = enum.auto()
    """What came of the second look."""
    CAUSE = enum.auto()
    """Why it became non-finite."""


@dataclass(frozen=True)
class Contradiction:
    """Two statements of one report that cannot both hold.

    Attributes:
        claim: that cannot be kept.
        text: both statements.
    """

    claim: Claim
    text: str


def contradictions(report: FaultReport, own: Sequence[Site] = ()) -> list[Contradiction]:
    """What a report says against itself, and against what a rank has recorded; empty where it is in order.

    Args:
        report: of a fault.
        own: sites that this rank saw with full confidence, in training; none of them may be earlier than the origin.
    """
    found = [Contradiction(claim, text) for claim, rule in RULES if (text := rule(report)) is not None]
    earlier = next((site for site in own if _is_earlier(site, report.origin)), None)
    if earlier is not None and report.origin is not None:
        begins = f"it begins in phase {report.origin.phase}"
        found.append(Contradiction(Claim.ORIGIN, f"{begins}, and {earlier.slot} was bad in phase {earlier.phase}"))
    return found


def settled(report: FaultReport, found: Sequence[Contradiction]) -> FaultReport:
    """The report without the claims that are contradicted, with a note for each; the same where there are none."""
    for each in found:
        FOUND.append(f"{log_line(report)}: {each.text}")
        report = _without(report, each)
    return report


def _without(report: FaultReport, found: Contradiction) -> FaultReport:
    note = f"not known: what was seen contradicts itself: {found.text}"
    report = replace(report, notes=(*report.notes, note))
    look = report.second_look
    if found.claim is Claim.ORIGIN:
        look = replace(look, operator=None) if look is not None else None
        seen = "" if report.origin is None else f"; what was said of it: {log_line(report)}"
        cause = f"not known: what was seen contradicts itself{seen}"
        return replace(report, origin=None, holders=(), cause=cause, second_look=look)
    if found.claim is Claim.CAUSE or look is None:
        return replace(report, cause="unknown")
    if found.claim is Claim.OPERATOR:
        return replace(report, second_look=replace(look, operator=None), cause="unknown")
    return replace(report, second_look=SecondLook("not_done", "not known: what was seen contradicts itself"))


# -- rules: each gives both statements, or None ------------------------------------------------------------------------


def _counts_none(report: FaultReport) -> str | None:
    """The origin is of a kind that its own tensor does not hold."""
    origin = report.origin
    if origin is None or origin.evidence is None:
        return None
    evidence = origin.evidence
    counts = {"nan": evidence.num_nan, "inf": evidence.num_inf, "-inf": evidence.num_neg_inf}
    return None if counts[origin.kind] else f"{origin.slot} is {KIND_WORDS[origin.kind]}, and holds none when counted"


def _operator_counts_none(report: FaultReport) -> str | None:
    """The operator that is said to have made the value has left nothing non-finite."""
    operator = report.second_look.operator if report.second_look is not None else None
    output = operator.output if operator is not None else None
    if operator is None or output is None or output.num_nan + output.num_inf + output.num_neg_inf:
        return None
    return f"{operator.name} made it, and its output holds nothing non-finite"


def _operator_unplaced(report: FaultReport) -> str | None:
    """An operator is named where the text says that none was found, or code without its line."""
    look = report.second_look
    operator = look.operator if look is not None else None
    if look is None or operator is None:
        return None
    if look.outcome == "not_done":
        return f"{operator.name} made it, and no second look was made"
    if "is not known" in look.text:
        return f"{operator.name} made it, and where it began is not known"
    if not operator.name or (operator.code and operator.line is None):
        return f"code {operator.code!r} is shown, and it has no line"
    return None


def _rank_of_reduce(report: FaultReport) -> str | None:
    """A value of the reduce has a rank, or any other one has none."""
    origin = report.origin
    if origin is None or (origin.rank is None) is (origin.phase is Phase.REDUCE):
        return None
    if origin.rank is None and origin.phase is Phase.LOOP:
        return None  # a collective of the loop may have carried it to all
    rank = "no rank" if origin.rank is None else f"rank {origin.rank}"
    return f"it begins on {rank}, in phase {origin.phase}"


def _holders(report: FaultReport) -> str | None:
    """Ranks hold a value of the reduce, and it did not begin there."""
    origin = report.origin
    if not report.holders or (origin is not None and origin.phase is Phase.REDUCE):
        return None
    return "ranks hold what the reduce made, and it did not begin in the reduce"


def _unaffected(report: FaultReport) -> str | None:
    """The fault began on a rank that is not among those that saw it."""
    origin, ranks = report.origin, report.ranks_affected
    if origin is None or origin.rank is None or not ranks or len(ranks) < report.num_ranks_affected:
        return None
    return None if origin.rank in ranks else f"it begins on rank {origin.rank}, and only ranks {list(ranks)} saw it"


def _spread_only(report: FaultReport) -> str | None:
    """All ranks' gradients are said to have been finite, and one rank saw a bad value before."""
    origin = report.origin
    if origin is None or origin.phase not in (Phase.REDUCE, Phase.LOOP):
        return None
    before = [site for site in report.sites if site.phase in _OF_ONE_RANK and site.kind != "-inf"]
    if origin.phase is Phase.LOOP:
        before += [site for site in report.sites if site.phase is Phase.REDUCE]
    return None if not before else f"it begins in phase {origin.phase}, and {before[0].slot} was bad before"


def _alone_but_on_every_rank(report: FaultReport) -> str | None:
    """One rank's own view tells of the gradients of every rank."""
    origin = report.origin
    is_of_all = origin is not None and origin.phase in (Phase.REDUCE, Phase.LOOP) and origin.input_kind is None
    return "finite on every rank, and no other rank was asked" if is_of_all and report.single_rank_view else None


def _finite_output(report: FaultReport) -> str | None:
    """The loss is said to have come from a finite output, and that output is among what was bad."""
    origin = report.origin
    if origin is None or origin.phase is not Phase.LOSS or origin.input_kind is not None:
        return None
    outputs = [s for s in report.sites if s.phase is Phase.FORWARD and s.layer == "" and s.slot == "output"]
    same = [s for s in outputs if (s.rank, s.micro_batch) == (origin.rank, origin.micro_batch) and s.kind != "-inf"]
    return "the model's output was finite, and it was bad" if same else None


def _step(report: FaultReport) -> str | None:
    """The report is of another step than its origin."""
    origin = report.origin
    if origin is None or origin.step == report.step:
        return None
    return f"the fault is of step {report.step}, and begins in step {origin.step}"


def _not_first(report: FaultReport) -> str | None:
    """The origin is not the first of the sites."""
    if report.origin is None or not report.sites or report.sites[0] == report.origin:
        return None
    return "the origin is another site than the first one"


def _same_and_finite(report: FaultReport) -> str | None:
    """The second run was the same, and finite; or it was finite, and is not said to be."""
    look = report.second_look
    if look is None:
        return None
    is_finite = "finite on the second run" in look.text or "the update alone is finite" in look.text
    if look.outcome == "finite" and not is_finite:
        return "the second run was finite, and its text does not say so"
    return f"the second run was {look.outcome}, and finite" if look.outcome != "finite" and is_finite else None


def _device_suspected(report: FaultReport) -> str | None:
    """A device is suspected beside inputs that differ, or that were not compared."""
    look = report.second_look
    if look is None or DEVICE not in look.text:
        return None
    if look.outcome != "finite":
        return f"a device is suspected, and the second run was {look.outcome}"
    gaps = [words for words in ("not compared", "not given the same") if words in look.text]
    return f"a device is suspected, and inputs were {gaps[0]}" if gaps else None


def _hardware(report: FaultReport) -> str | None:
    """The cause is hardware, and no second look has ruled out the rest."""
    suspected = report.second_look is not None and DEVICE in report.second_look.text
    return (
        "the cause is hardware, and inputs were not compared" if "hardware" in report.cause and not suspected else None
    )


RULES: tuple[tuple[Claim, Callable[[FaultReport], str | None]], ...] = (
    (Claim.ORIGIN, _counts_none),
    (Claim.ORIGIN, _rank_of_reduce),
    (Claim.ORIGIN, _holders),
    (Claim.ORIGIN, _unaffected),
    (Claim.ORIGIN, _spread_only),
    (Claim.ORIGIN, _alone_but_on_every_rank),
    (Claim.ORIGIN, _finite_output),
    (Claim.ORIGIN, _step),
    (Claim.ORIGIN, _not_first),
    (Claim.OPERATOR, _operator_counts_none),
    (Claim.OPERATOR, _operator_unplaced),
    (Claim.LOOK, _same_and_finite),
    (Claim.LOOK, _device_suspected),
    (Claim.CAUSE, _hardware),
)


def _is_earlier(site: Site, origin: Site | None) -> bool:
    """Whether a site of one rank lies before the origin, by micro-batch and phase."""
    if origin is None or site.step != origin.step or site.micro_batch is None or site.phase not in _COMPUTED:
        return False
    if origin.phase in (Phase.REDUCE, Phase.LOOP):
        return True
    if origin.micro_batch is None:
        return False
    mine, its = (site.micro_batch, site.phase.causal_rank), (origin.micro_batch, origin.phase.causal_rank)
    return mine < its
