"""What the rules look at, and what they give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddp_nanguard.diagnosis.trace.events import Event, hit_mask
from ddp_nanguard.diagnosis.trace.traced_step import Traced

from .report_rules import Reason, ReportFacts


@dataclass
class TraceFacts(ReportFacts):
    """What is known of a fault, with what its replay showed.

    Attributes:
        traced: the traced step, None where it was not run.
        outcome: of the plain replay (``same``, ``not_reproduced``, ...), None where it was not run.
        differs: what was not as recorded in the replay.
        was_compiled: whether torch.compile had compiled the model in training.
    """

    traced: Traced | None = None
    outcome: str | None = None
    differs: tuple[str, ...] = ()
    was_compiled: bool = False

    @property
    def first_nonfinite_op(self) -> Event | None:
        """The birth, where its values were kept or it took a value from outside."""
        return self.traced.first_nonfinite_op if self.traced is not None else None

    @property
    def path(self) -> list[Event]:
        """From the birth to the fault."""
        return self.traced.path if self.traced is not None else []


def at(event: Event) -> str:
    """Where an event happened, for a sentence: `` `a / b` (loss.py:12)``."""
    line = event.line
    if line is None:
        where = f"in {event.layer}" if event.layer else "in the step"
        return f"{event.base} {where}"
    source = line.expression if line.expression and len(line.expression) <= 80 else line.text
    name = line.file.rsplit("/", 1)[-1]
    return f"`{source if len(source) <= 80 else source[:77] + '...'}` ({name}:{line.number})"


def hits(event: Event) -> Tensor | None:
    """Which elements of a birth's output are of its kind."""
    return None if event.made is None else hit_mask(event.made.output, event.kind)


def operand(event: Event, index: int) -> Any:
    """An argument of a birth by position, None where there is none."""
    if event.made is None or index >= len(event.made.args):
        return None
    return event.made.args[index]


def at_hits(value: Any, mask: Tensor) -> Tensor | None:
    """Elements of an operand, broadcast, where the output is hit; None where the shapes do not fit."""
    tensor = torch.as_tensor(value, dtype=torch.float64) if isinstance(value, (int, float)) else value
    if not isinstance(tensor, Tensor):
        return None
    try:
        return tensor.detach().to(mask.device).expand(mask.shape)[mask]
    except RuntimeError:
        return None


def all_at_hits(value: Any, mask: Tensor, test: Any) -> bool:
    """Whether a test holds for every element of an operand that is under a hit."""
    found = at_hits(value, mask)
    return found is not None and found.numel() > 0 and bool(test(found).all())


def is_zero(value: Tensor) -> Tensor:
    """Exactly zero."""
    return value == 0


__all__ = ["Reason", "TraceFacts"]
