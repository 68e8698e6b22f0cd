"""The stages of a step, and how the beginning of the model's forward is noticed."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ddp_nanguard.errors import NonFiniteError


class StepStage(enum.Enum):
    """Where the training loop is in its step: one stage at a time.

    A rank may be a stage ahead of another; what all ranks must agree about, whether a verdict is due, follows from the
    backwards and updates that they all run.
    """

    IDLE = enum.auto()
    """Before the first micro-batch. -> COLLECTING, or BACKWARD where none is marked."""
    COLLECTING = enum.auto()
    """Micro-batches are open, and no backward has run since the last verdict. -> BACKWARD; or JUDGED, by an update
    without a backward or by a check that another rank's backward makes a step."""
    BACKWARD = enum.auto()
    """A backward has run since the last verdict; more micro-batches and more backwards may follow. -> JUDGED."""
    JUDGED = enum.auto()
    """The verdict was given and the window is closed. -> UPDATED by ``optimizer.step``; COLLECTING where the step was
    skipped or a check asked; BACKWARD where a graph is used once more."""
    UPDATED = enum.auto()
    """The weights have changed; the next verdict speaks of them too. -> COLLECTING, BACKWARD or JUDGED."""
    CLOSED = enum.auto()
    """Every hook is off, for good."""


class ModelEntry(enum.Enum):
    """How the beginning of the model's forward is noticed."""

    NOT_YET = enum.auto()
    """It has not been called with grad mode. What is compiled until then is followed. -> SEEN or STOOD_IN."""
    SEEN = enum.auto()
    """Its hooks run; for good."""
    STOOD_IN = enum.auto()
    """A verdict was given without any call being seen: the model is called inside compiled code of the loop's own, and
    the beginning of a micro-batch stands in for its entry. -> SEEN."""


@dataclass
class LastVerdict:
    """What optimizers that step after the same backward share.

    Attributes:
        goes_on: whether the update may go ahead.
        error: raised again where an optimizer steps all the same.
        optimizers: ids of those that have used it.
    """

    goes_on: bool = True
    error: NonFiniteError | None = None
    optimizers: set[int] = field(default_factory=set)
