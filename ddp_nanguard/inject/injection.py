"""`Injection`: one injected fault with its life in this process, and the list of those of a model."""

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
"""Source of a fault that a replay injects again: the outcome of the replay tells of it, not the log."""
OVERDUE_STEPS = 3
"""Steps after that of the fault at which a job that still runs gets a warning."""


class Injection:
    """One injected fault. `remove` takes its hooks off; what it has made non-finite stays so.

    Args:
        spec: which fault, and where.
        model: what the training loop calls; held weakly.
        source: what asked for it, for the log: ``inject()``, the environment variable, or `REPLAY`.

    Attributes:
        num_fired: how often it has happened; 0 on every rank but that of the fault.
        active: whether the last forward was in the step and micro-batch of the fault.
        on_model: called when a forward of that step and micro-batch is about to run.
        handles: of its hooks.
    """

    def __init__(self, spec: InjectionSpec, model: nn.Module, source: str) -> None:
        self.spec = spec
        self.num_fired = 0
        self.active = False
        self.on_model: Callable[[], None] = _nothing
        self.model: Callable[[], nn.Module | None] = weakref.ref(model)
        self.source = source
        self.handles: list[Any] = []
        # weak, since a guard can be the counter: a fault must not keep one alive that has been closed
        self._counter: Callable[[], StepCounter | None] = _nothing
        # calls of the layer in this forward, original ones and recomputed ones: each first one is corrupted
        self._num_calls = [0, 0]
        self._told: set[str] = set()

    def step_counter(self) -> StepCounter:
        """What counts steps for this fault: a guard, a counter of its own, or one that never reaches any step."""
        return self._counter() or NeverFires()

    def count_by(self, counter: StepCounter) -> None:
        """Follow another counter from now on, for steps as well as for batches and losses. It is held weakly."""
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
        """Take every hook off and leave the model's list of injections; may be called again."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self._leave_counter()
        model = self.model()
        if model is not None and self in (present := injections_of(wrapper_of(model).root)):
            present.remove(self)

    # -- what a step counter calls -----------------------------------------------------------------------------------

    def corrupt_batch(self, batch: Any, step: int, micro_batch: int) -> Any:
        """A batch hook: the loader's item, with its first floating tensor corrupted in the fault's micro-batch."""
        if self.num_fired or (step, micro_batch) != (self.spec.step, self.spec.micro_batch):
            return batch
        batch, done = with_first_corrupted(batch, partial(corrupted, kind=self.spec.kind))
        self.note(done, "the batch holds no floating tensor in a plain container")
        return batch

    def corrupt_loss(self, loss: Tensor, micro_batch: int) -> None:
        """A loss hook: makes the first watched loss of the fault's micro-batch non-finite, in place.

        Autograd does not see it, so all gradients stay finite.
        """
        if not self.active or self.num_fired or self.spec.micro_batch != micro_batch:
            return
        found = [tensor for tensor in tensors_in(loss) if is_plain(tensor)]
        if found:
            corrupt_first(found[0].data, self.spec.kind)
        self.note(bool(found), "the watched loss is no floating tensor")

    # -- what the hooks ask and tell -----------------------------------------------------------------------------------

    def enter(self) -> None:
        """Note that the model is about to be called in grad mode; warn where the fault is overdue."""
        now = self.step_counter().entering()
        was, self.active = self.active, now == (self.spec.step, self._micro_batch(now))
        if self.active and not was:
            self._num_calls = [0, 0]
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
        """Micro-batch of the fault; for a reduce the present one, since any micro-batch may communicate."""
        return now[1] if now is not None and self.spec.phase == Phase.REDUCE else self.spec.micro_batch

    def is_first_call(self, recomputed: bool) -> bool:
        """Count a call of the layer; whether it is the first one in the fault's micro-batch.

        Args:
            recomputed: whether checkpointing runs it again inside backward; such calls count by themselves.
        """
        self._num_calls[recomputed] += self.active
        return self.active and self._num_calls[recomputed] == 1

    def mark_fired(self) -> None:
        """Count that the fault has happened, and log it once."""
        self.num_fired += 1
        self.tell("planted")

    def note(self, done: bool, problem: str) -> None:
        """Count that the fault has happened, or log why it could not.

        Args:
            done: whether it has happened.
            problem: why it could not; for the log.
        """
        if done:
            self.mark_fired()
        else:
            self.tell(f"NOT planted: {problem}")

    def tell(self, text: str) -> None:
        """Log a text as a warning (in a replay as info), each text once."""
        if text not in self._told:
            self._told.add(text)
            level = logging.INFO if self.source == REPLAY else logging.WARNING
            _log.log(level, "%s: %s (%s)", self.source, text, self.spec)


# by unwrapped model, so that a guard finds faults that were injected before it was made, whatever wraps the model
_injections: weakref.WeakKeyDictionary[nn.Module, list[Injection]] = weakref.WeakKeyDictionary()


def injections_of(root: nn.Module) -> list[Injection]:
    """The injections of an unwrapped model in the order in which they were made: the list itself, not a copy."""
    return _injections.setdefault(root, [])


def fired_injections(root: nn.Module) -> list[dict[str, Any]]:
    """The specs of this rank's faults that have happened, for its evidence in a dump; JSON-ready."""
    return [dataclasses.asdict(injection.spec) for injection in _injections.get(root, []) if injection.num_fired]


def _nothing() -> None:
    return None
