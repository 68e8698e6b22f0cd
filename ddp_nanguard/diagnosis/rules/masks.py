"""Rules for the -Inf of a mask, which is legal until an operator that is no softmax makes +Inf or NaN of it."""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_nanguard.diagnosis.trace.events import Event, EventCategory
from ddp_nanguard.report.wording import KIND_WORDS, listed

from .facts import Reason, TraceFacts, argument, at

_WEIGHTS = {"mul", "neg", "div"}


def mask_taken_in(facts: TraceFacts) -> Reason | None:
    """An operator took in -Inf, and nothing worse, and made something worse of it."""
    op = facts.first_nonfinite_op
    if op is None or op.category is not EventCategory.PRODUCED:
        return None
    if {operand.kind for operand in op.inputs} - {None} != {"-inf"}:
        return None
    chain = _chain(facts, op)
    return Reason("constant", _masked_labels(op, chain[-1]) or _smoothing(chain) or _plain(op, chain[-1]))


def _chain(facts: TraceFacts, op: Event) -> list[Event]:
    """The events from one back to where its -Inf began."""
    trace = facts.traced.trace if facts.traced is not None else None
    found = [op]
    while trace is not None and found[-1].parents:
        found.append(trace.event(found[-1].parents[0]))
    return found


def _plain(op: Event, mask: Event) -> str:
    return f"{at(op)} makes {KIND_WORDS[op.kind]} of -Inf{_written(mask)}"


def _written(mask: Event) -> str:
    """Where a mask's -Inf is from; "" where that is not known."""
    names = [name for name in mask.outside if name]
    if mask.category is EventCategory.CONSTANT:
        return f", which the code writes in {at(mask)}"
    return f", which {listed(names, 3)} holds" if names else ""


def _masked_labels(op: Event, mask: Event) -> str:
    """The sentence for samples whose own class is masked; "" where the loss is none of labels."""
    scores, labels = argument(op, "self"), argument(op, "target")
    if not op.base.startswith("nll_loss") or not isinstance(labels, Tensor) or scores.dim() != 2:
        return ""
    is_known = (labels != argument(op, "ignore_index")) & (labels >= 0) & (labels < scores.shape[1])
    own = scores.gather(1, labels.clamp(0, scores.shape[1] - 1)[:, None])[:, 0]
    rows = (torch.isneginf(own) & is_known).nonzero().reshape(-1).tolist()
    if not rows:
        return ""
    samples = "sample" if len(rows) == 1 else "samples"
    which = (
        f"the labelled class of {samples} {listed(rows, 3)} is masked (sample {rows[0]}: class {int(labels[rows[0]])})"
    )
    return f"{which} in {at(op)}: its log-probability is -Inf{_written(mask)}"


def _smoothing(chain: list[Event]) -> str:
    """The sentence for a sum over all classes; "" where the way of the -Inf goes through none.

    That is a sum of what a log-softmax gave, at most weighted in between.
    """
    bases = [event.base for event in chain]
    after = bases[bases.index("sum") + 1 :] if "sum" in bases else []
    if "_log_softmax" not in after or not set(after[: after.index("_log_softmax")]) <= _WEIGHTS:
        return ""
    return (
        f"{at(chain[0])} sums the log-probabilities of all classes, as label smoothing does, and those of masked "
        f"classes are -Inf{_written(chain[-1])}; mask with a finite number, or do not smooth over masked classes"
    )
