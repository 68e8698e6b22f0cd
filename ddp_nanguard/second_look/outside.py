"""Values made by code of the loss that lies outside of what a second look can run: told from the autograd graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddp_nanguard.capture.model_calls import ALIAS_NODE, WatchedLoss
from ddp_nanguard.capture.record import StepRecord
from ddp_nanguard.report.types import FaultReport, Phase, Site

from .place import Place

MAX_NODES = 8


def runs_step(record: StepRecord) -> bool:
    """Whether the loop's step function was recorded, with which the code of the loss runs too."""
    return any(call.is_step for call in record.window.calls.calls)


def is_outside(origin: Site | None) -> bool:
    """Whether a value was made by code of the training loop: the loss, or its backward down to the model's output.

    A loss of -Inf is the model's where its output held -Inf; what a loss makes of masked scores is +Inf or NaN.
    """
    if origin is None or (origin.phase is Phase.LOSS and origin.kind == origin.input_kind == "-inf"):
        return False
    in_loop = origin.inline_code is not None and origin.inline_code.layer is None
    return origin.phase is Phase.LOSS or (origin.phase is Phase.BACKWARD and in_loop)


def outside_place(record: StepRecord, report: FaultReport) -> Place:
    """What can be said of code of the loss that is not run again: the nodes of its graph, where that is still there.

    Args:
        record: of the step.
        report: whose origin lies in that code.
    """
    origin = report.origin
    assert origin is not None
    nodes = _nodes(record, origin)
    graph = f"; its graph, last first: {', '.join(nodes)}" if nodes else ""
    return Place(None, f"{report.cause}{graph}" if graph else "")


def _nodes(record: StepRecord, origin: Site) -> list[str]:
    """Names of autograd's nodes from the loss back to the model's outputs; empty where the loop has let the loss go."""
    for event in record.window.calls.events:
        if isinstance(event, WatchedLoss) and event.name == (origin.slot if origin.phase is Phase.LOSS else event.name):
            loss = event.tensor()
            if loss is not None and loss.grad_fn is not None:
                return list(dict.fromkeys(_named(loss.grad_fn)))[:MAX_NODES]
    return []


def _named(node: Any) -> Iterator[str]:
    """Names of the nodes before the alias that the caller got, see [Note: an alias for the caller]."""
    waiting, seen = [node], {node}
    while waiting:
        node = waiting.pop(0)
        if node.name() == ALIAS_NODE:
            continue
        if not node.name().endswith("AccumulateGrad"):
            yield node.name().removesuffix("0")
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
