"""What the rules look at, and what they give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_nanguard.replay.events import Event, hit_mask
from ddp_nanguard.replay.traced import Traced
from ddp_nanguard.site import FaultReport, Site

WORDS = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}


@dataclass(frozen=True)
class Reason:
    """Why a value went bad.

    Attributes:
        kind: from the closed list of `KINDS`.
        sentence: one, without a full stop.
        evidence: what it rests on.
    """

    kind: str
    sentence: str
    evidence: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {"kind": self.kind, "sentence": self.sentence, "evidence": list(self.evidence)}


@dataclass
class Facts:
    """What is known of a fault.

    Attributes:
        report: of the dump; None in a trace without one.
        traced: the traced step, None where it was not run.
        histories: rank -> arrays of ``history.npz``.
        optimizers: class and groups, as in the dump's ``state.json``.
        dtypes: dtype of each parameter.
        outcome: of the plain replay (``same``, ``not_reproduced``, ...), None where it was not run.
        differs: what was not as recorded in the replay.
        was_compiled: whether torch.compile had compiled the model in training.
    """

    report: FaultReport | None = None
    traced: Traced | None = None
    histories: Mapping[int, Mapping[str, np.ndarray[Any, Any]]] = field(default_factory=dict)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    outcome: str | None = None
    differs: tuple[str, ...] = ()
    was_compiled: bool = False

    @property
    def origin(self) -> Site | None:
        """The origin of the report."""
        return self.report.origin if self.report is not None else None

    @property
    def birth(self) -> Event | None:
        """The birth, where its values were kept or it took a value from outside."""
        return self.traced.birth if self.traced is not None else None

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


def listed(values: list[Any], limit: int = 5) -> str:
    """``3, 17, ... (9 in all)``."""
    shown = ", ".join(str(value) for value in values[:limit])
    return shown if len(values) <= limit else f"{shown}, ... ({len(values)} in all)"
