"""The facts that the rules decide on, and access to the values of an event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddp_nanguard.diagnosis.trace.events import Event, hit_mask
from ddp_nanguard.diagnosis.trace.source_lines import SourceLine
from ddp_nanguard.diagnosis.trace.traced_step import Traced
from ddp_nanguard.report.wording import listed

from .report_rules import Reason, ReportFacts


@dataclass
class TraceFacts(ReportFacts):
    """What is known of a fault, with what its replay and its trace showed.

    Attributes:
        traced: the traced step, None where it was not run.
        outcome: of the plain replay (``same``, ``not_reproduced``, ...), None where it was not run.
        differs: what differed from the record in the replay.
        was_compiled: whether torch.compile had compiled the model in training.
    """

    traced: Traced | None = None
    outcome: str | None = None
    differs: tuple[str, ...] = ()
    was_compiled: bool = False

    @property
    def first_nonfinite_op(self) -> Event | None:
        """The event where the fault's value began; None without a trace, or where no operator leads to the fault."""
        return self.traced.first_nonfinite_op if self.traced is not None else None

    @property
    def path(self) -> list[Event]:
        """The events from `first_nonfinite_op` to the fault, both included; empty without a trace."""
        return self.traced.path if self.traced is not None else []


def at(event: Event) -> str:
    """Where an event happened, for a sentence: `` `a / b` (loss.py:12)``."""
    line = event.line
    if line is None:
        where = f"in {event.layer}" if event.layer else "in the step"
        return f"{event.base} {where}"
    return code_text(line)


def code_text(line: SourceLine) -> str:
    """A line of the user's code, for a sentence: `` `a / b` (loss.py:12)``."""
    source = line.expression if line.expression and len(line.expression) <= 80 else line.text
    name = line.file.rsplit("/", 1)[-1]
    return f"`{source if len(source) <= 80 else source[:77] + '...'}` ({name}:{line.number})"


def hits(event: Event) -> Tensor | None:
    """Marks the elements of an event's output that are of its kind: bool; None where its values were not kept."""
    return None if event.made is None else hit_mask(event.made.output, event.kind)


def operand(event: Event, index: int) -> Any:
    """A positional argument of an event; None where there is none or its values were not kept."""
    if event.made is None or index >= len(event.made.args):
        return None
    return _item(event, event.made.args[index])


def argument(event: Event, name: str) -> Any:
    """An argument of an event by its name in the schema, or its default; None where there is none."""
    if event.made is None:
        return None
    if name in event.made.kwargs:
        return _item(event, event.made.kwargs[name])
    declared = event.made.function._schema.arguments
    index = next((index for index, each in enumerate(declared) if each.name == name), None)
    if index is None:
        return None
    is_given = index < len(event.made.args)
    return operand(event, index) if is_given else declared[index].default_value


def _item(event: Event, value: Any) -> Any:
    """The one item of a ``_foreach`` operator's list, see `NumberCall`; any other argument as it is."""
    is_list = isinstance(value, (list, tuple)) and len(value) == 1 and "._foreach_" in event.operator
    return value[0] if is_list else value


def at_hits(value: Any, mask: Tensor) -> Tensor | None:
    """The elements of an operand, broadcast to the output, where the output is hit; None where the shapes do not fit.

    Args:
        value: a tensor or a number; anything else gives None.
        mask: from `hits`, on the device of the output.
    """
    tensor = torch.as_tensor(value, dtype=torch.float64, device="cpu") if isinstance(value, (int, float)) else value
    if not isinstance(tensor, Tensor):
        return None
    try:
        return tensor.detach().to(mask.device).expand(mask.shape)[mask]
    except RuntimeError:
        return None


def all_at_hits(value: Any, mask: Tensor, test: Any) -> bool:
    """Whether ``test`` holds for every element of an operand where the output is hit; False without any."""
    found = at_hits(value, mask)
    return found is not None and found.numel() > 0 and bool(test(found).all())


def place_of(mask: Tensor) -> str:
    """Where a mask is set, for a sentence: ``, at index (2, 1)``; "" where that says nothing."""
    if mask.numel() == 1 or bool(mask.all()):
        return ""
    count = int(mask.sum())
    if mask.numel() > MAX_SEARCHED:  # the positions of all would take more memory than the mask
        return f", first at {_unravelled(mask)}"
    shown = [index[0] if len(index) == 1 else tuple(index) for index in mask.nonzero()[:MAX_SHOWN].tolist()]
    return f", at {'index' if count == 1 else 'indices'} {listed(shown, MAX_SHOWN, count)}"


MAX_SEARCHED, MAX_SHOWN = 1 << 20, 3


def _unravelled(mask: Tensor) -> tuple[int, ...]:
    first = mask.reshape(-1).to(torch.uint8).argmax()
    return tuple(int(index) for index in torch.unravel_index(first, mask.shape))


def is_zero(value: Tensor) -> Tensor:
    """Marks the elements that are exactly zero: bool."""
    return value == 0


__all__ = ["Reason", "TraceFacts"]
