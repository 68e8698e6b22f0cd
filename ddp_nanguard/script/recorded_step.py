"""`RecordedStep`: the dump's step as a script runs it: batches, random states, what it watches, what it gave."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import torch
from torch import Tensor, nn

from ddp_nanguard.capture import rng
from ddp_nanguard.capture.window import MicroBatch
from ddp_nanguard.diagnosis.trace.traced_step import Watcher
from ddp_nanguard.replay.rebuild import (
    Rebuilt,
    apply_settings,
    lay_in_buffers,
    lay_in_model,
    lay_in_numbers,
    lay_in_optimizers,
    lay_in_scaler,
    own_numbers,
)
from ddp_nanguard.replay.run_step import Run
from ddp_nanguard.tensors.containers import tensors_in

from .loss_graph import nodes_of, takes_more


class RecordedStep:
    """The recorded micro-batches, handed out one by one in place of the script's own.

    Args:
        rebuilt: the script's model, optimizers and scaler, with the dump.
        window: the recorded micro-batches.
        cannot: ends the process with a reason.

    Attributes:
        around: contexts in which the step runs; left when the outcome is known.
        watcher: of the trace; None without one.
        losses: watched ones by (micro-batch, name).
        num_served: micro-batches handed out so far.
        outputs: nodes of autograd that made what the model gave last, where the batches are arguments of its calls.
        loss_takes_more: whether a watched loss met tensors that are not in the dump then.
    """

    def __init__(self, rebuilt: Rebuilt, window: list[MicroBatch], cannot: Callable[[str], Any]) -> None:
        self.rebuilt, self.window, self.cannot = rebuilt, window, cannot
        self.around = contextlib.ExitStack()
        self.contexts: list[Callable[[], contextlib.AbstractContextManager[Any]]] = []
        self.watcher: Watcher | None = None
        self.run: Run | None = None
        self.losses: dict[tuple[int, str], Tensor] = {}
        self.notes = own_numbers(rebuilt.dump, rebuilt.optimizers)
        self.num_served = 0
        self.outputs: frozenset[Any] = frozenset()
        self.loss_takes_more = False
        self._marks: list[Any] = []

    # -- state -----------------------------------------------------------------------------------------------------

    def lay_in(self) -> None:
        """Give model, optimizers and scaler what the dump holds; where nothing has changed since, it is not read again.

        A script may load a checkpoint, or change modes, between the making of its guard and its first step.
        """
        rebuilt = self.rebuilt
        apply_settings(rebuilt.dump)
        if self._marks != self._marks_now():
            lay_in_model(rebuilt.dump, rebuilt.rank, rebuilt.wrapper)
            lay_in_optimizers(rebuilt.dump, rebuilt.rank, rebuilt.wrapper, rebuilt.optimizers)
            self._marks = self._marks_now()
        lay_in_buffers(rebuilt.dump, rebuilt.rank, rebuilt.wrapper)
        lay_in_scaler(rebuilt.dump, rebuilt.scaler)

    def _marks_now(self) -> list[Any]:
        """What changes when somebody writes into the weights or loads the state of an optimizer."""
        wrapper, optimizers = self.rebuilt.wrapper, self.rebuilt.optimizers
        versions = [wrapper.local(parameter)._version for _, parameter in wrapper.named_parameters()]
        return [*versions, *(id(state) for optimizer in optimizers for state in optimizer.state.values())]

    def _begin(self) -> None:
        self.lay_in()
        self.lay_in_numbers()
        for context in self.contexts:
            self.around.enter_context(context())

    def lay_in_numbers(self) -> None:
        """The recorded hyper-parameters: a script computes its own from the step that it believes to be in."""
        lay_in_numbers(self.rebuilt.dump, self.rebuilt.rank, self.rebuilt.optimizers)

    # -- batches ---------------------------------------------------------------------------------------------------

    def serve(self) -> Any:
        """The next recorded batch, with the random state that it had; one more than there are is a mismatch."""
        if self.num_served == len(self.window):
            number = len(self.window)
            self.cannot(
                f"the script asks for more micro-batches than the {number} of the step in the dump: "
                "give the command, and the number of micro-batches per step, of that run"
            )
        if self.num_served == 0:
            self._begin()
        micro_batch = self.window[self.num_served]
        self.num_served += 1
        assert self.run is not None
        self.notes += rng.restore(micro_batch.random_state, self.run.context.window.generators, self.rebuilt.device)
        if self.watcher is not None:
            self.watcher.begin(micro_batch.batch)
        return micro_batch.batch

    @property
    def is_of_calls(self) -> bool:
        """Whether the batches are arguments of the model's calls, because training had no ``guard.steps``."""
        return all(micro_batch.is_of_call for micro_batch in self.window)

    def require_batches(self) -> None:
        """End where the dump holds no batches of a loader, but arguments of the model's calls."""
        if self.is_of_calls:
            self.cannot(
                "training called the model without guard.steps, so that the dump holds arguments of its calls: "
                "give the command of that run, and call guard(...) as it did"
            )

    def keep_loss(self, micro_batch: int, name: str, loss: Tensor) -> None:
        """A loss that the script watches."""
        self.losses[micro_batch, name] = loss.detach()
        if self.is_of_calls and loss.grad_fn is not None and takes_more(loss, self.outputs):
            self.loss_takes_more = True
        if self.watcher is not None:
            self.watcher.keep_loss(name, loss)


class RecordedBatches:
    """Stands in for the script's loader; nothing is read from that.

    Args:
        step: hands out the batches.
        loader: of the script, for its length.
    """

    def __init__(self, step: RecordedStep, loader: Iterable[Any]) -> None:
        self._step = step
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        self._step.require_batches()
        while True:
            yield self._step.serve()

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise TypeError(f"the loader, a {type(self._loader).__name__}, has no length")
        return len(self._loader)


class RecordedCall:
    """Hook before the model: a call with grad mode gets the recorded arguments, where training had no ``guard.steps``.

    Args:
        step: hands out the arguments.
        has_loader: whether the script takes its batches from ``guard.steps``.
        begins_micro_batch: whether the call is the first one of a micro-batch.
    """

    def __init__(
        self, step: RecordedStep, has_loader: Callable[[], bool], begins_micro_batch: Callable[[], bool]
    ) -> None:
        self._step = step
        self._has_loader = has_loader
        self._begins = begins_micro_batch

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Arguments in place of the script's own; None where those stay."""
        if self._has_loader() or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return None
        if not self._step.is_of_calls:
            self._step.cannot(
                "the batch does not come through the guard: take it from guard.steps(loader), as training did"
            )
        if not self._begins():
            self._step.cannot(
                "the model is called more than once before the backward, and the dump holds the arguments of the "
                "first call: train with batches from guard.steps(loader)"
            )
        batch = self._step.serve()
        return tuple(batch["args"]), dict(batch["kwargs"])

    def keep_outputs(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook after the model: what the loss may be made of."""
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._step.outputs = nodes_of(tensors_in(output))
