"""Rules for operators at the edge of their domain: the value, its derivative, and the untaken branch of a ``where``."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor

from ddp_nanguard.diagnosis.trace.events import Event, EventCategory, EventPhase
from ddp_nanguard.diagnosis.trace.traced_step import Traced

from .calls import Test, example, is_division_by_zero, is_zero_times_infinity
from .division import is_derivative
from .facts import Reason, TraceFacts, all_at_hits, at, hits, is_zero, operand
from .table import ROWS, Direction, Row

# Nodes whose backward sends an exact 0 to the elements that were not selected.
_SELECTS = ("WhereBackward", "MaskedFillBackward", "IndexBackward", "MaskedSelectBackward", "MaskedScatterBackward")


def edge_of_domain(facts: TraceFacts) -> Reason | None:
    """A row of the operator table: log, sqrt, a layer or a loss of numbers for which it has no finite value."""
    op = facts.first_nonfinite_op
    if op is None or is_derivative(op):
        return None
    found = row_of(op, op.base, Direction.FORWARD)
    if found is None:
        return None
    row, rest = found
    name = op.base.removeprefix("special_").removesuffix("_forward")
    return _reason(op, row, f"{row.said.format(name=name)} in {at(op)}{rest}", "")


def edge_of_derivative(facts: TraceFacts) -> Reason | None:
    """The value is finite, its derivative is not: the singular operator ran inside autograd's own formula."""
    op = facts.first_nonfinite_op
    if op is None or not is_derivative(op) or op.node is None:
        return None
    node = _node_name(op.node)
    found = row_of(op, node, Direction.BACKWARD)
    if found is None:
        return None
    row, rest = found
    return _reason(op, row, f"{row.said.format(name=node.lower())}: {at(op)}{rest}", f", in {op.node}")


def _reason(op: Event, row: Row, sentence: str, where: str) -> Reason:
    assert op.made is not None
    numbers = example(op) if not where else ""
    evidence = f"{op.num_hit} of {op.made.output.numel()} elements{numbers}{where}"
    return Reason(row.kind, f"{sentence}; {row.remedy}" if row.remedy else sentence, (evidence,))


def row_of(op: Event, name: str, direction: Direction) -> tuple[Row, str] | None:
    """The row of the operator table that holds for an event, with the end of its sentence; None where none does."""
    mask = hits(op)
    if mask is None or op.category is not EventCategory.PRODUCED:
        return None
    for row in ROWS:
        if row.direction is direction and row.test is not None and name in row.operators:
            found = _asked(row.test, op, mask)
            if found is not None:
                return row, found
    return None


def _asked(test: Test, op: Event, mask: Tensor) -> str | None:
    try:
        return test(op, mask)
    except (
        RuntimeError,
        TypeError,
        IndexError,
    ):  # complex numbers have no order, and kernels take arguments in many forms
        return None


def _node_name(node: str) -> str:
    return node.rsplit("::", 1)[-1].partition("Backward")[0]


def where_trap(facts: TraceFacts) -> Reason | None:
    """The untaken branch of a ``where``: it gets a gradient of exactly 0, and 0 times an infinite derivative is NaN."""
    traced = facts.traced
    event = next(
        (
            e
            for e in facts.path
            if e.phase is EventPhase.BACKWARD and e.category is EventCategory.PRODUCED and e.kind == "nan"
        ),
        None,
    )
    if traced is None or event is None or event.sequence is None or not _is_zero_gradient(event):
        return None
    selector = _selector(traced, event.sequence)
    if selector is None:
        return None
    source = (
        facts.first_nonfinite_op
        if facts.first_nonfinite_op is not None and facts.first_nonfinite_op.line is not None
        else event
    )
    sentence = (
        f"the `where` trap: {at(source)} is not finite where it is not taken, "
        "and its gradient there is 0 times infinity, or 0/0"
    )
    return Reason("where trap", sentence, (f"{event.num_hit} elements, in {event.node}", f"selected by {selector}"))


def _is_zero_gradient(event: Event) -> bool:
    mask = hits(event)
    if mask is None:
        return False
    is_over_zero = is_division_by_zero(event) and all_at_hits(operand(event, 0), mask, is_zero)
    return is_over_zero or is_zero_times_infinity(event)


def _selector(traced: Traced, sequence: int) -> str | None:
    """The selecting node through which the node ``sequence`` is reached within 6 edges; None if there is none."""
    queue: deque[tuple[Any, tuple[str, int] | None]] = deque()
    seen: set[tuple[int, bool]] = set()
    queue.extend((loss.grad_fn, None) for loss in traced.losses if loss.grad_fn is not None)
    while queue:
        node, selected = queue.popleft()
        # Once with and once without a selector above it: a node may be reached both ways.
        if (id(node), selected is not None) in seen:
            continue
        seen.add((id(node), selected is not None))
        if selected is not None and node._sequence_nr() == sequence:
            return selected[0]
        if node.name().startswith(_SELECTS):
            selected = (node.name(), 6)
        elif selected is not None:
            selected = (selected[0], selected[1] - 1) if selected[1] > 1 else None
        queue.extend((following, selected) for following, _ in node.next_functions if following is not None)
    return None


def negative_determinant(facts: TraceFacts) -> Reason | None:
    """The NaN that `torch.logdet` writes for a matrix whose determinant is below 0."""
    op = facts.first_nonfinite_op
    if op is None or op.kind != "nan" or op.base != "scalar_tensor" or "_linalg_slogdet" not in op.before:
        return None
    return Reason("edge of domain", f"logdet of a matrix with a negative determinant in {at(op)}")
