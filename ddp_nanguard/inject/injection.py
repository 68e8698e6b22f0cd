"""One injected fault, and all that are there."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from ddp_nanguard.report.types import Phase
from ddp_nanguard.tensors.containers import tensors_in
from ddp_nanguard.tensors.minmax import is_plain
from ddp_nanguard.wrappers import wrapper_of

from .corrupt import corrupt_first, corrupted, with_first_corrupted
from .spec import InjectionSpec
from .step_counter import NeverFires, StepCounter

_log = logging.getLogger(__name__)

REPLAY = "replay"
"""Source of what a replay injects again: it is told in the outcome, not in the log."""
OVERDUE_STEPS = 3
"""A job that still runs so many steps after the planned one is told so."""


class Injection:
    """An injected fault; `remove` takes its hooks off. What it has made non-finite stays so.

    Args:
        spec: which fault, and where.
        model: what the training loop calls; held weakly.
        source: who asked for it, for the log.

    Attributes:
        num_fired: how often it was done; 0 on every rank but the planned one.
        active: whether the forward that ran last is the planned one.
        on_model: called when the planned forward is about to run.
    """

    def __init__(self, spec: InjectionSpec, model: nn.Module, source: str) -> None:
        self.spec = spec
        self.num_fired = 0
        self.active = False
        self.on_model: Callable[[], None] = _nothing
        self.model: Callable[[], nn.Module | None] = weakref.ref(model)
        self.source = source
        self.handles: list[Any] = []
        self._counter: Callable[[], StepCounter | None] = _nothing
        self._calls = [0, 0]
        self._told: set[str] = set()

    def step_counter(self) -> StepCounter:
        """Whose steps count."""
        return self._counter() or NeverFires()

    def count_by(self, counter: StepCounter) -> None:
        """From now on these steps count, and batches and losses are met there. The counter is held weakly."""
        self._leave_counter()
        self._counter = weakref.ref(counter)
        if self.spec.phase == Phase.INPUT:
            counter.batch_hooks.append(self.corrupt_batch)
        elif self.spec.phase == Phase.LOSS:
            counter.loss_hooks.append(self.corrupt_loss)

    def _leave_counter(self) -> None:
        counter = self.step_counter()
        for hooks, own in ((counter.batch_hooks, self.corrupt_batch), (counter.loss_hooks, self.corrupt_loss)):
            if own in hooks:
                hooks.remove(own)  # type: ignore[arg-type]

    def remove(self) -> None:
        """Every hook off; may be called again."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self._leave_counter()
        model = self.model()
        if model is not None and self in (present := injections_of(wrapper_of(model).root)):
            present.remove(self)

    # -- what a step counter calls -----------------------------------------------------------------------------------

    def corrupt_batch(self, batch: Any, step: int, micro_batch: int) -> Any:
        """What the loader has produced, made non-finite where that is planned."""
        if self.num_fired or (step, micro_batch) != (self.spec.step, self.spec.micro_batch):
            return batch
        batch, done = with_first_corrupted(batch, partial(corrupted, kind=self.spec.kind))
        self.note(done, "the batch holds no floating tensor in a plain container")
        return batch

    def corrupt_loss(self, loss: Tensor, micro_batch: int) -> None:
        """A watched loss, made non-finite in place where that is planned, unseen by autograd."""
        if not self.active or self.num_fired or self.spec.micro_batch != micro_batch:
            return
        found = [tensor for tensor in tensors_in(loss) if is_plain(tensor)]
        if found:
            corrupt_first(found[0].data, self.spec.kind)
        self.note(bool(found), "the watched loss is no floating tensor")

    # -- what the hooks ask and tell -----------------------------------------------------------------------------------

    def enter(self) -> None:
        """The model is about to be called in grad mode."""
        now = self.step_counter().entering()
        was, self.active = self.active, now == (self.spec.step, self._micro_batch(now))
        if self.active and not was:
            self._calls = [0, 0]
        if self.active and not self.num_fired:
            self.on_model()
        if now is not None and now[0] >= self.spec.step + OVERDUE_STEPS:
            self.tell(f"{OVERDUE_STEPS} steps later the job still runs; {self._outcome()}")

    def _outcome(self) -> str:
        if self.num_fired:
            return "it was planted, and had no effect: masked, or skipped by a scaler"
        if self.spec.phase in (Phase.FORWARD, Phase.BACKWARD):
            return "nothing was planted: the layer was not called in that micro-batch, or is compiled"
        return "nothing was planted: there is no such micro-batch, or no watched loss"

    def _micro_batch(self, now: tuple[int, int] | None) -> int:
        """A reduce comes with whichever micro-batch communicates."""
        return now[1] if now is not None and self.spec.phase == Phase.REDUCE else self.spec.micro_batch

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


def injections_of(root: nn.Module) -> list[Injection]:
    """Those of an unwrapped model, in the order in which they were made; the list itself."""
    return _injections.setdefault(root, [])


def fired_injections(root: nn.Module) -> list[dict[str, Any]]:
    """This rank's faults that have happened, for its evidence; JSON-ready."""
    return [dataclasses.asdict(injection.spec) for injection in _injections.get(root, []) if injection.num_fired]


def _nothing() -> None:
    return None
