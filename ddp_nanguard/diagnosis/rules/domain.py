"""Rules for functions at the edge of their domain: the value, its derivative, and the untaken branch of a ``where``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddp_nanguard.diagnosis.trace.events import Event, EventCategory, EventPhase
from ddp_nanguard.diagnosis.trace.traced_step import Traced

from .division import is_derivative, is_division_by_zero
from .facts import Reason, TraceFacts, all_at_hits, at, at_hits, hits, is_zero, operand

Test = Callable[[Tensor], Tensor]

_EDGES: dict[str, list[tuple[str, Test]]] = {
    **{
        name: [(f"{name} of 0", is_zero), (f"{name} of a negative number", lambda x: x < 0)]
        for name in ("log", "log2", "log10")
    },
    "log1p": [("log1p of -1", lambda x: x == -1), ("log1p below -1", lambda x: x < -1)],
    "sqrt": [("sqrt of a negative number", lambda x: x < 0)],
    "rsqrt": [("rsqrt of 0", is_zero), ("rsqrt of a negative number", lambda x: x < 0)],
    "acos": [("acos outside of -1 .. 1", lambda x: x.abs() > 1)],
    "asin": [("asin outside of -1 .. 1", lambda x: x.abs() > 1)],
    "atanh": [("atanh of 1 or -1", lambda x: x.abs() == 1), ("atanh outside of -1 .. 1", lambda x: x.abs() > 1)],
    "acosh": [("acosh below 1", lambda x: x < 1)],
    "erfinv": [("erfinv of 1 or -1", lambda x: x.abs() == 1), ("erfinv outside of -1 .. 1", lambda x: x.abs() > 1)],
    "logit": [
        ("logit of 0 or 1", lambda x: (x == 0) | (x == 1)),
        ("logit outside of 0 .. 1", lambda x: (x < 0) | (x > 1)),
    ],
}  # fmt: skip

_DERIVATIVES = {
    "Sqrt": "the derivative of sqrt at 0 is infinite",
    "Rsqrt": "the derivative of rsqrt at 0 is infinite",
    "Log": "the derivative of log at 0 is infinite",
    "Log2": "the derivative of log2 at 0 is infinite",
    "Log10": "the derivative of log10 at 0 is infinite",
    "Log1P": "the derivative of log1p at -1 is infinite",
    "Pow": "the derivative of a power below 1 at 0 is infinite",
    "Acos": "the derivative of acos at 1 or -1 is infinite",
    "Asin": "the derivative of asin at 1 or -1 is infinite",
    "Atanh": "the derivative of atanh at 1 or -1 is infinite",
    "Acosh": "the derivative of acosh at 1 is infinite",
    "Div": "the derivative of a division by 0 is infinite",
    "Reciprocal": "the derivative of 1/x at 0 is infinite",
    "LinalgVectorNorm": "the derivative of the norm at 0 does not exist",
    "Norm": "the derivative of the norm at 0 does not exist",
    "Std": "the derivative of std at 0 is infinite",
    "Atan2": "the derivative of atan2 at (0, 0) does not exist",
    "Exp": "the derivative of exp is infinite where exp overflowed",
}

# Nodes whose backward sends an exact 0 to the elements that were not selected.
_SELECTS = ("WhereBackward", "MaskedFillBackward", "IndexBackward", "MaskedSelectBackward", "MaskedScatterBackward")


def edge_of_domain(facts: TraceFacts) -> Reason | None:
    """log, sqrt, pow and the like of a number for which they have no finite value."""
    op = facts.first_nonfinite_op
    mask = hits(op) if op is not None else None
    if op is None or mask is None or is_derivative(op):
        return None
    name = _edge_name(op, mask)
    if name is None:
        return None
    found = at_hits(operand(op, 0), mask)
    value = f", such as {found[0].item():.3g}" if found is not None and found.numel() and found[0] != 0 else ""
    evidence = (f"{op.num_hit} of {mask.numel()} elements{value}",)
    return Reason("edge of domain", f"{name} in {at(op)}", evidence)


def _edge_name(op: Event, mask: Tensor) -> str | None:
    if op.base == "pow":
        return _edge_of_pow(op, mask)
    value = operand(op, 0)
    return next((name for name, test in _EDGES.get(op.base, []) if all_at_hits(value, mask, test)), None)


def _edge_of_pow(op: Event, mask: Tensor) -> str | None:
    base, exponent = operand(op, 0), operand(op, 1)
    if all_at_hits(base, mask, is_zero) and all_at_hits(exponent, mask, lambda x: x < 0):
        return "0 to a negative power"
    if all_at_hits(base, mask, lambda x: x < 0) and all_at_hits(exponent, mask, lambda x: x != torch.round(x)):
        return "a fractional power of a negative number"
    return None


# -- in backward -------------------------------------------------------------------------------------------------------


def edge_of_derivative(facts: TraceFacts) -> Reason | None:
    """The value is finite, its derivative is not: the singular operator ran inside autograd's own formula."""
    op = facts.first_nonfinite_op
    if op is None or not is_derivative(op) or op.node is None or not _is_singular(op):
        return None
    text = _DERIVATIVES.get(_node_name(op.node))
    if text is None:
        return None
    return Reason(
        "edge of domain",
        f"{text}: {at(op)}",
        (f"{op.num_hit} elements, in {op.node}",),
    )


def _node_name(node: str) -> str:
    return node.rsplit("::", 1)[-1].partition("Backward")[0]


def _is_singular(event: Event) -> bool:
    """Whether the operator divides by zero, takes 0 to a negative power, or multiplies 0 by infinity."""
    mask = hits(event)
    if mask is None:
        return False
    if is_division_by_zero(event) or _edge_of_pow_or_rsqrt(event, mask):
        return True
    return _times_zero(event, mask)


def _edge_of_pow_or_rsqrt(event: Event, mask: Tensor) -> bool:
    if event.base == "rsqrt":
        return all_at_hits(operand(event, 0), mask, is_zero)
    return event.base == "pow" and _edge_of_pow(event, mask) == "0 to a negative power"


def _times_zero(event: Event, mask: Tensor) -> bool:
    pair = (operand(event, 0), operand(event, 1))
    return event.base == "mul" and any(
        all_at_hits(zero, mask, is_zero) and all_at_hits(infinite, mask, torch.isinf)
        for zero, infinite in (pair, pair[::-1])
    )


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
    return (is_division_by_zero(event) and all_at_hits(operand(event, 0), mask, is_zero)) or _times_zero(event, mask)


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
