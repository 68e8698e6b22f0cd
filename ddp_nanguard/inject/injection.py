"""One planted fault."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from ddp_nanguard.wrappers import wrapper_of

from .spec import InjectionSpec
from .step_counter import NeverFires, StepCounter

if TYPE_CHECKING:
    pass


_log = logging.getLogger(__name__)

LEFT_IN_DUMP = ("input", "state")


REPLAY = "replay"


OVERDUE_STEPS = 3
"""So many steps after the planted one, a job that still runs is told so."""


class Injection:
    """A planted fault; `remove` takes its hooks off. What it has spoilt stays spoilt.

    Attributes:
        spec: what is planted.
        num_fired: how often it was done; 0 on every rank but the planned one.
        active: whether the forward that ran last is the planned one.
    """

    def __init__(self, spec: InjectionSpec, model: nn.Module, source: str) -> None:
        self.spec = spec
        self.num_fired = 0
        self.active = False
        self.step_counter: StepCounter = NeverFires()
        self.on_model: Callable[[], None] = _nothing
        self.model: Callable[[], nn.Module | None] = weakref.ref(model)
        self.source = source
        self._handles: list[Any] = []
        self._calls = [0, 0]
        self._told: set[str] = set()

    def remove(self) -> None:
        """Every hook off; may be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        model = self.model()
        if model is not None and self in (present := _injections.get(wrapper_of(model).root, [])):
            present.remove(self)

    # -- what the hooks ask and tell -----------------------------------------------------------------------------------

    def enter(self) -> None:
        """The model is about to be called in grad mode."""
        now = self.step_counter.entering()
        was, self.active = self.active, now == (self.spec.step, self._micro_batch(now))
        if self.active and not was:
            self._calls = [0, 0]
        if self.active and not self.num_fired:
            self.on_model()
        if now is not None and now[0] >= self.spec.step + OVERDUE_STEPS:
            self.tell(f"{OVERDUE_STEPS} steps later the job still runs; {self._outcome()}")

    def _outcome(self) -> str:
        if self.num_fired:
            return "it was planted, and nobody minded: masked, or skipped by a scaler"
        if self.spec.phase in ("forward", "backward"):
            return "nothing was planted: the layer was not called in that micro-batch, or is compiled"
        return "nothing was planted: there is no such micro-batch, or no watched loss"

    def _micro_batch(self, now: tuple[int, int] | None) -> int:
        """A reduce comes with whichever micro-batch communicates."""
        return now[1] if now is not None and self.spec.phase == "reduce" else self.spec.micro_batch

    def is_first_call(self, recomputed: bool) -> bool:
        """Whether this is the layer's first call in the planned micro-batch, or the recomputation of it."""
        self._calls[recomputed] += self.active
        return self.active and self._calls[recomputed] == 1

    def mark_fired(self) -> None:
        """It was done."""
        self.num_fired += 1
        self.tell("planted")

    def note(self, done: bool, problem: str) -> None:
        """It was done, or why it was not."""
        if done:
            self.mark_fired()
        else:
            self.tell(f"NOT planted: {problem}")

    def tell(self, text: str) -> None:
        """A warning, each text once."""
        if text not in self._told:
            self._told.add(text)
            level = logging.INFO if self.source == REPLAY else logging.WARNING
            _log.log(level, "%s: %s (%s)", self.source, text, self.spec)


_injections: weakref.WeakKeyDictionary[nn.Module, list[Injection]] = weakref.WeakKeyDictionary()


def _nothing() -> None:
    return None
