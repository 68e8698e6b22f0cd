"""Runs a step under `Trace` and follows a bad loss, gradient or weight back to the operator that made it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ddp_nanguard.capture.window import MicroBatch
from ddp_nanguard.replay.rebuild import Rebuilt
from ddp_nanguard.replay.session import Session, eager, is_compiled
from ddp_nanguard.report.wording import KIND_WORDS
from ddp_nanguard.tensors.batch import batch_arrays, batch_size, batch_tensors
from ddp_nanguard.wrappers import Wrapper

from .events import Event, quick_kind
from .module_stack import ModuleStack
from .trace import Trace

MAX_PATH = 64
"""Largest number of events of a path in JSON."""


@dataclass
class Traced:
    """The result of a traced step.

    Attributes:
        target: what was non-finite in the end, in words; "" where nothing was.
        first_nonfinite_op: where its value began; None where no recorded operator leads to the target.
        path: events from `first_nonfinite_op` to the target, both included.
        micro_batch: window index of the target's micro-batch; None where it is not known.
        batch: of that micro-batch.
        batch_size: length of dim 0 of its tensors.
        num_operators: how many operators ran.
        notes: what differed from training.
        trace: the trace itself.
        losses: of that micro-batch, with their graph.
    """

    target: str
    first_nonfinite_op: Event | None
    path: list[Event]
    micro_batch: int | None
    batch: Any
    batch_size: int | None
    num_operators: int
    notes: list[str] = field(default_factory=list)
    trace: Trace | None = field(default=None, repr=False)
    losses: list[Tensor] = field(default_factory=list, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data, with at most `MAX_PATH` events of the path."""
        return {
            "target": self.target,
            "first_nonfinite_op": self.first_nonfinite_op.to_dict() if self.first_nonfinite_op is not None else None,
            "path": [event.place() for event in self.path[:MAX_PATH]],
            "path_length": len(self.path),
            "micro_batch": self.micro_batch,
            "num_operators": self.num_operators,
            "notes": self.notes,
        }


@dataclass(frozen=True)
class TracedJob:
    """What a trace has to know of the job whose step it follows.

    Attributes:
        wrapper: of the model.
        optimizers: whose state has names.
        has_scaler: whether a GradScaler skips overflows.
        is_compiled: whether training runs compiled code.
        root_is_step: as of `ForwardProbe`.
    """

    wrapper: Wrapper
    optimizers: list[torch.optim.Optimizer]
    has_scaler: bool
    is_compiled: bool
    root_is_step: bool = False


@dataclass
class _Seen:
    """One micro-batch of the traced step.

    Attributes:
        index: in the window.
        batch: as the step got it.
        size: length of dim 0 of its tensors.
        losses: by name, as the step returned them.
        gradients: names of parameters with a bad gradient, and the event that wrote it last.
    """

    index: int
    batch: Any
    size: int | None
    losses: dict[str, Tensor] = field(default_factory=dict)
    gradients: list[tuple[str, Event]] = field(default_factory=list)


def trace_step(session: Session, on_event: Callable[[Event, FrameType], None] | None = None) -> Traced:
    """Run the session's step once under a trace.

    Args:
        session: without an obstacle.
        on_event: called with each operator that leaves something non-finite, and the frame below it.

    Collective: those of the training step and of a guard, unless the session is alone.
    """
    watcher = Watcher(on_event)
    again = session.run(step=watcher.watched, around=watcher.around)
    return watcher.result(again.notes)


class Watcher:
    """Marks the micro-batches of a traced run and records their bad losses, gradients and updated weights.

    Args:
        on_event: handed to `Trace.on_event`.
        is_lenient: handed to `Trace.is_lenient`.
    """

    def __init__(self, on_event: Callable[[Event, FrameType], None] | None = None, *, is_lenient: bool = False) -> None:
        self._on_event = on_event
        self._is_lenient = is_lenient
        self._seen: list[_Seen] = []
        self._sources: list[str] = []
        self._updated: list[tuple[str, Event]] = []

    def watched(self, step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """The recipe's step, wrapped so that each call begins a micro-batch of the trace and keeps its losses."""

        def watched_step(model: Any, batch: Any) -> Any:
            self.begin(batch)
            losses = step(model, batch)
            for name, loss in (losses if isinstance(losses, dict) else {"loss": losses}).items():
                self.keep_loss(name, loss)
            return losses

        return watched_step

    def around(self, rebuilt: Rebuilt, window: list[MicroBatch]) -> contextlib.AbstractContextManager[None]:
        """`following` a rebuilt job.

        Args:
            rebuilt: model, optimizers and scaler of the run.
            window: its micro-batches.
        """
        compiled = is_compiled(rebuilt.wrapper.model) or is_compiled(rebuilt.recipe.model)
        root = rebuilt.dump.manifest.options.root
        job = TracedJob(rebuilt.wrapper, rebuilt.optimizers, rebuilt.scaler is not None, compiled, root == "step")
        return self.following(job, [micro_batch.index for micro_batch in window])

    @contextlib.contextmanager
    def following(self, job: TracedJob, indices: list[int]) -> Iterator[None]:
        """Run the step under the trace; look for bad gradients and weights when it has ended.

        Compiled code runs eagerly, since a dispatch mode does not see inside it.

        Args:
            job: whose step it is.
            indices: of its micro-batches.
        """
        self._job, self._indices = job, indices
        if job.is_compiled:
            self._sources.append("the model is compiled in training; the trace ran it eagerly")
        self._modules = ModuleStack(job.wrapper.named_modules(), job.root_is_step)
        self._trace = Trace(self._modules)
        self._trace.on_event, self._trace.is_lenient = self._on_event, self._is_lenient
        self._name_state()
        with self._modules, eager(), self._trace:
            yield
        self._look_at_gradients()
        self._look_at_weights()

    def _name_state(self) -> None:
        memory, wrapper = self._trace.memory, self._job.wrapper
        find_gathered = wrapper.find_gathered()
        if find_gathered is not None:
            memory.look_up = find_gathered
        for name, parameter in wrapper.named_parameters():
            memory.name(wrapper.local(parameter), name)
            for optimizer in self._job.optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        memory.name(wrapper.local(value), f"{name}.{key}")
        for name, buffer in wrapper.named_buffers():
            memory.name(buffer, name)

    @property
    def num_operators(self) -> int:
        """How many operators have run so far: a sign of life."""
        return self._trace.num_operators

    def name(self, tensor: Tensor, name: str) -> None:
        """Name a tensor from before the step, for what is said of its values."""
        self._trace.memory.name(tensor, name)

    def begin(self, batch: Any) -> None:
        """A micro-batch begins, with this batch."""
        self._look_at_gradients()
        self._modules.begin_micro_batch()
        size = batch_size(batch)
        index = self._indices[len(self._seen)]
        self._seen.append(_Seen(index, batch, size))
        self._trace.micro_batch, self._trace.batch_size = index, size
        self._trace.is_after_backward = False
        for name, tensor in batch_tensors(batch).items():
            self._trace.memory.name(tensor, name)
        for name, array in batch_arrays(batch).items():
            self._trace.memory.name_address(array, name)

    def keep_loss(self, name: str, loss: Tensor) -> None:
        """A loss of the micro-batch that has begun last, or what stands for one; kept with its graph."""
        if self._seen:
            self._seen[-1].losses[name] = loss

    def _look_at_gradients(self) -> None:
        """Record which operators made the bad gradients of the micro-batch that has just ended."""
        if not self._seen:
            return
        wrapper = self._job.wrapper
        for name, parameter in wrapper.named_parameters():
            if parameter.grad is not None and quick_kind(parameter.grad) is not None:
                writer = self._trace.memory.writer(wrapper.local(parameter.grad))
                if writer is not None:
                    self._seen[-1].gradients.append((name, writer))

    def _look_at_weights(self) -> None:
        wrapper = self._job.wrapper
        for name, parameter in wrapper.named_parameters():
            writer = self._trace.memory.writer(wrapper.local(parameter))
            if writer is not None and quick_kind(parameter) is not None:
                self._updated.append((f"{name} is {KIND_WORDS[writer.kind]} after the update", writer))
        for name, buffer in wrapper.named_buffers():
            writer = self._trace.memory.writer(buffer)
            if writer is not None and writer.kind != "-inf":  # the guard has put it back
                self._updated.append((f"the buffer {name} is {KIND_WORDS[writer.kind]}", writer))

    # -- what it showed ----------------------------------------------------------------------------------------------

    def result(self, notes: list[str]) -> Traced:
        """Follow the bad loss, else the first bad gradient, else the first bad weight, back to where it began."""
        if self._trace.was_compiled and not self._sources:
            self._sources.append("the step calls compiled code; the trace ran it eagerly")
        seen, target, event = self._target()
        first = self._trace.first_nonfinite_op_of(event) if event is not None else None
        path = self._trace.path(first, event) if first is not None and event is not None else []
        return Traced(
            target=target,
            first_nonfinite_op=first,
            path=path,
            micro_batch=seen.index if seen is not None else None,
            batch=seen.batch if seen is not None else None,
            batch_size=seen.size if seen is not None else None,
            num_operators=self._trace.num_operators,
            notes=self._sources + notes,
            trace=self._trace,
            losses=list(seen.losses.values()) if seen is not None else [],
        )

    def _target(self) -> tuple[_Seen | None, str, Event | None]:
        for seen in self._seen:
            for name, loss in seen.losses.items():
                kind = quick_kind(loss) if isinstance(loss, Tensor) else None
                if kind is not None:
                    event = self._trace.memory.writer(loss)
                    return seen, f"{name} is {KIND_WORDS[kind]}", event
            # Under a scaler a bad gradient may be a mere overflow that is skipped; a bad loss in a later micro-batch
            # says more.
            if seen.gradients and not self._job.has_scaler:
                return self._gradient_target(seen)
        scaled = next((seen for seen in self._seen if seen.gradients), None)
        if scaled is not None:
            return self._gradient_target(scaled)
        for text, event in sorted(self._updated, key=lambda pair: pair[1].order):
            return next((seen for seen in self._seen if seen.index == event.micro_batch), None), text, event
        return self._anything()

    def _gradient_target(self, seen: _Seen) -> tuple[_Seen, str, Event]:
        name, event = min(seen.gradients, key=lambda pair: (min(pair[1].roots), pair[1].order))
        return seen, f"the gradient of {name} is {KIND_WORDS[event.kind]}", event

    def _anything(self) -> tuple[_Seen | None, str, Event | None]:
        """The last non-finite value that is no mask, where loss, gradients and weights are all finite."""
        events = [event for event in self._trace.events if event.kind != "-inf"]
        if not events:
            return None, "", None
        event = events[-1]
        seen = next((seen for seen in self._seen if seen.index == event.micro_batch), None)
        return seen, f"a value in the step is {KIND_WORDS[event.kind]}; loss, gradients and weights are finite", event
