"""Why a value became non-finite: one sentence from a closed list, or "unknown". A wrong reason is worse than none.

Each rule is a small function over the facts that gives a `Reason` only where its evidence holds for every element that
is hit. `RULES` is the one place that fixes the order in which they are asked; the first answer is taken.
"""

from __future__ import annotations

from collections.abc import Callable

from . import division, domain, job, masks, numbers, outside
from . import report_rules as why
from .facts import Reason, TraceFacts, at

Rule = Callable[[TraceFacts], Reason | None]

RULES: tuple[Rule, ...] = (
    # what the report alone settles
    why.hyper_parameter,
    job.compiled_kernel,
    job.not_reproduced,
    why.reduce_overflow,
    job.vanishing_eps,
    # a value that came from outside needs no operator to explain it
    outside.state_bad,
    outside.bad_input,
    outside.uninitialised,
    # a selection or a mask says more than the operator that made a NaN of it
    numbers.masked_row,
    domain.where_trap,
    domain.edge_of_derivative,
    division.division_by_zero,
    domain.edge_of_domain,
    numbers.empty_reduction,
    division.zero_times_infinity,
    # growth says why an overflow came
    job.growth,
    job.scale_collapse,
    numbers.overflow,
    # what the code wrote, the least that can be said; torch's own constant before that of the user
    domain.negative_determinant,
    masks.mask_taken_in,
    outside.unnamed,
    outside.constant,
    job.update_overflow,
    # what code of the loop did to gradients is told by its operator, where a trace has one and a rule explains it
    why.changed_by_the_loop,
)

OUTRANKS: dict[Rule, tuple[Rule, ...]] = {
    # what a row of the operator table knows of the numbers says more than how large the result is
    domain.edge_of_derivative: (numbers.overflow,),
    # that a branch is not taken says more than that its derivative is infinite
    domain.where_trap: (domain.edge_of_derivative,),
    # the two factors say more than that a mask's -inf was taken in
    division.zero_times_infinity: (masks.mask_taken_in,),
    # the row that is masked whole says more than that a mask's -inf was taken in
    numbers.masked_row: (masks.mask_taken_in,),
}
"""Which rules may have an answer, too, where one speaks; of all others at most one answers to the values of a trace.

Rules of the job look at the report, and answer beside them: `job.vanishing_eps` comes first, since it says what the
zero is, `job.update_overflow` last, since it says no more than where it was.
"""

REASON_KINDS = (
    "hyper-parameter", "not reproduced", "overflow in the reduce", "update overflow", "state", "bad input",
    "uninitialised memory", "masked row", "where trap", "edge of domain", "division by zero", "empty reduction",
    "0*inf", "growth", "scale collapse", "overflow", "constant", "code after the backward", "unknown",
)  # fmt: skip


def reason_for(facts: TraceFacts) -> Reason:
    """The answer of the first rule that has one, else "unknown" with what is known."""
    found = why.with_unwritten(facts, next((found for rule in RULES if (found := rule(facts)) is not None), None))
    if found is not None:
        return found
    op = facts.first_nonfinite_op
    if op is None:
        return Reason("unknown", "no rule fits what is known")
    if op.outside:
        sentence = f"{at(op)} took in a value from before the step that is no parameter, buffer or batch item"
        return Reason("unknown", sentence)
    return Reason("unknown", f"{op.operator} made it in {at(op)}; no rule says why")


__all__ = ["OUTRANKS", "REASON_KINDS", "RULES", "Reason", "TraceFacts", "reason_for"]
