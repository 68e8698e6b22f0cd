"""Activation checkpointing: forwards that run again inside backward.

[Note: recomputation]
They are no forward: nothing is reduced and no call is counted. Non-reentrant checkpointing keeps the graph of the
original forward, whose tensors have their hooks. Reentrant checkpointing ran the original without a graph and builds
one only now: its tensors are hooked here, and what they are put down to are the original calls.

Which calls those are is told by autograd's numbers: the node of a reentrant checkpoint is numbered just before its
block first runs, without grad mode, and from that call on the block's calls come again in the same order. A block
within a block first ran in the recomputation of the outer one, and its backward is a pass inside the outer one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction

from .backward import BackwardProbe
from .calls import ModuleCall, TensorRecord

Gradless = list[tuple[int, ModuleCall]]
"""Calls without grad mode, in order, each with the number that autograd would have given a node then."""


class _Run:
    """The forwards that run again for one node of one backward pass.

    Args:
        backward_pass: autograd's number of the pass.
        node: that runs; only one of a custom function can be a reentrant checkpoint.
        first: what ran without grad mode where the node was made.
    """

    def __init__(self, backward_pass: int, node: torch.autograd.graph.Node | None, first: Gradless) -> None:
        self.backward_pass = backward_pass
        self.node = node
        self.gradless: Gradless = []
        self._stack: list[tuple[str, ModuleCall | None]] = []
        self._counts: Counter[tuple[int, str]] = Counter()
        self._first = first
        self._start = len(first)
        if isinstance(node, BackwardCFunction):
            self._start = bisect_right(first, node._sequence_nr(), key=itemgetter(0))

    def begin(self, layer: str) -> ModuleCall | None:
        """The call that is repeated: the k-th one of a layer is the k-th original one in the same call."""
        call = self._original(layer)
        self._stack.append((layer, call))
        if call is not None and not torch.is_grad_enabled():
            self.gradless.append((_next_number(), call))
        return call

    def end(self, layer: str) -> ModuleCall | None:
        """A call that ended early (non-reentrant checkpointing stops when it has enough) may never get here."""
        while self._stack:
            name, call = self._stack.pop()
            if name == layer:
                return call
        return None

    def _original(self, layer: str) -> ModuleCall | None:
        around = self._stack[-1][1] if self._stack else None
        if self._stack and around is None:
            return None
        originals = (c for c in (self._block() if around is None else around.children) if c.layer == layer)
        key = (id(around), layer)
        self._counts[key] += 1
        return next((c for number, c in enumerate(originals, 1) if number == self._counts[key]), None)

    def _block(self) -> Iterator[ModuleCall]:
        """The calls from the block's first one on that ran where it did."""
        if self._start < len(self._first) and torch.is_grad_enabled():
            around = self._first[self._start][1].parent
            for index in range(self._start, len(self._first)):
                call = self._first[index][1]
                if call.parent is around:
                    yield call


class Recomputation:
    """Follows the forwards inside one backward pass."""

    def __init__(self, backward: BackwardProbe) -> None:
        self._backward = backward
        self._gradless: Gradless = []
        self._runs: list[_Run] = []
        self._seen: dict[int, TensorRecord] = {}

    def release_window(self) -> None:
        """Drop the calls of the original forwards."""
        self._gradless = []

    def reset(self) -> None:
        """A new micro-batch."""
        self._runs = []
        self._seen = {}

    def note(self, call: ModuleCall) -> None:
        """A call of the original forward begins without grad mode, as the blocks of reentrant checkpoints do."""
        self._gradless.append((_next_number(), call))

    def before(self, layer: str, inputs: list[Tensor]) -> None:
        """A module is about to run again.

        Args:
            layer: its name.
            inputs: floating tensors that it takes.
        """
        call = self._run().begin(layer)
        if call is not None:
            for tensor in inputs:
                self._record_input(call, tensor)

    def after(self, layer: str, outputs: list[Tensor]) -> None:
        """It has run."""
        call = self._run().end(layer)
        if call is not None:
            self._record_output(call, outputs)

    def _run(self) -> _Run:
        """The one that goes on, or a new one within what is left of those before it."""
        backward_pass, node = torch._C._current_graph_task_id(), torch._C._current_autograd_node()
        if self._runs and self._runs[-1].backward_pass == backward_pass and self._runs[-1].node is node:
            return self._runs[-1]
        self._end(backward_pass)
        first = self._runs[-1].gradless if self._runs else self._gradless
        self._runs.append(_Run(backward_pass, node, first))
        Variable._execution_engine.queue_callback(partial(self._end, backward_pass))
        return self._runs[-1]

    def _end(self, backward_pass: int) -> None:
        """Of a pass, or of all that it has run so far."""
        while self._runs and self._runs[-1].backward_pass >= backward_pass:
            self._runs.pop()

    def _record_input(self, call: ModuleCall, tensor: Tensor) -> None:
        seen = self._sighting(call, tensor, "input")
        seen.consumers.append(call)
        call.inputs.append(seen)

    def _record_output(self, call: ModuleCall, outputs: list[Tensor]) -> None:
        call.outputs += [self._sighting(call, tensor, "output") for tensor in outputs]

    def _sighting(self, call: ModuleCall, tensor: Tensor, slot: str) -> TensorRecord:
        seen = self._seen.get(id(tensor))
        if seen is None or not seen.is_still(tensor):
            seen = self._seen[id(tensor)] = TensorRecord(tensor, call, slot)
        if not seen.is_watched and tensor.grad_fn is not None:  # a block's output gets its graph after the block
            seen.is_watched = True
            self._backward.watch(tensor, seen)
        return seen


def _next_number() -> int:
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]  # as torch.fx uses it
