"""Activation checkpointing: forwards that run again inside backward.

[Note: recomputation]
A forward that runs again is no forward of its own: nothing is reduced and no call is counted. Non-reentrant
checkpointing keeps the graph of the original forward, whose tensors have their hooks. Reentrant checkpointing ran the
original without a graph and builds one only now: its tensors get their hooks here, and their records name the original
calls.

Autograd's sequence numbers tell which calls those are: the node of a reentrant checkpoint is numbered just before its
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
"""Calls without grad mode, in order, each with the sequence number that autograd would have given a node then."""


class _RecomputedBlock:
    """The checkpointed block that runs again for one node of one backward pass.

    Args:
        backward_pass: autograd's id of the pass.
        node: that is running; only a node of a custom function can be a reentrant checkpoint.
        first: the calls without grad mode among which the block first ran.

    Attributes:
        gradless: calls without grad mode inside this recomputation, for the blocks within this one.
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
        """Enter a module; returns the original call, None where it is not known.

        The k-th call of a layer inside a call is the k-th original call of that layer there.
        """
        call = self._original(layer)
        self._stack.append((layer, call))
        if call is not None and not torch.is_grad_enabled():
            self.gradless.append((_next_number(), call))
        return call

    def end(self, layer: str) -> ModuleCall | None:
        """Leave a module; returns the original call, None where it is not known.

        Calls above it on the stack ended without their hook: non-reentrant checkpointing stops when it has enough.
        """
        while self._stack:
            name, call = self._stack.pop()
            if name == layer:
                return call
        return None

    def _original(self, layer: str) -> ModuleCall | None:
        around = self._stack[-1][1] if self._stack else None
        if self._stack and around is None:
            return None
        originals = (c for c in (self._block_calls() if around is None else around.children) if c.layer == layer)
        key = (id(around), layer)
        self._counts[key] += 1
        return next((c for number, c in enumerate(originals, 1) if number == self._counts[key]), None)

    def _block_calls(self) -> Iterator[ModuleCall]:
        """The original calls of the block itself, without those inside them, from its first one on."""
        if self._start < len(self._first) and torch.is_grad_enabled():
            around = self._first[self._start][1].parent
            for index in range(self._start, len(self._first)):
                call = self._first[index][1]
                if call.parent is around:
                    yield call


class Recomputation:
    """Follows the forwards that activation checkpointing runs again inside backward, see [Note: recomputation].

    Args:
        backward: watches the gradients of the tensors that only now get a graph.
    """

    def __init__(self, backward: BackwardProbe) -> None:
        self._backward = backward
        self._gradless: Gradless = []
        # innermost last: a block within a block runs again inside the recomputation of the outer one
        self._running: list[_RecomputedBlock] = []
        self._records: dict[int, TensorRecord] = {}

    def release_window(self) -> None:
        """Drop the calls of the original forwards."""
        self._gradless = []

    def reset(self) -> None:
        """Begin a micro-batch: no block is running again, and no tensor has a record."""
        self._running = []
        self._records = {}

    def note(self, call: ModuleCall) -> None:
        """Remember a call of the original forward without grad mode: a reentrant checkpoint's block may hold it."""
        self._gradless.append((_next_number(), call))

    def before(self, layer: str, inputs: list[Tensor]) -> None:
        """Record the inputs of a module that is about to run again.

        Args:
            layer: clean name of the module.
            inputs: its floating and complex tensors.
        """
        call = self._current_block().begin(layer)
        if call is not None:
            for tensor in inputs:
                self._record_input(call, tensor)

    def after(self, layer: str, outputs: list[Tensor]) -> None:
        """Record the outputs of a module that has run again.

        Args:
            layer: clean name of the module.
            outputs: its floating and complex tensors.
        """
        call = self._current_block().end(layer)
        if call is not None:
            self._record_output(call, outputs)

    def _current_block(self) -> _RecomputedBlock:
        """The block of the node that autograd is running: the innermost one so far, or a new one within that."""
        backward_pass, node = torch._C._current_graph_task_id(), torch._C._current_autograd_node()
        if self._running and self._running[-1].backward_pass == backward_pass and self._running[-1].node is node:
            return self._running[-1]
        self._end(backward_pass)
        # a block within a block first ran in the recomputation of the outer one, so its calls are found there
        first = self._running[-1].gradless if self._running else self._gradless
        self._running.append(_RecomputedBlock(backward_pass, node, first))
        Variable._execution_engine.queue_callback(partial(self._end, backward_pass))
        return self._running[-1]

    def _end(self, backward_pass: int) -> None:
        """Forget the blocks of a backward pass and of the passes inside it, whose ids are larger."""
        while self._running and self._running[-1].backward_pass >= backward_pass:
            self._running.pop()

    def _record_input(self, call: ModuleCall, tensor: Tensor) -> None:
        record = self._record(call, tensor, "input")
        record.consumers.append(call)
        call.inputs.append(record)

    def _record_output(self, call: ModuleCall, outputs: list[Tensor]) -> None:
        call.outputs += [self._record(call, tensor, "output") for tensor in outputs]

    def _record(self, call: ModuleCall, tensor: Tensor, slot: str) -> TensorRecord:
        record = self._records.get(id(tensor))
        if record is None or not record.is_still(tensor):
            record = self._records[id(tensor)] = TensorRecord(tensor, call, slot)
        if not record.is_watched and tensor.grad_fn is not None:  # a block's output gets its graph after the block
            record.is_watched = True
            self._backward.watch(tensor, record)
        return record


def _next_number() -> int:
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]  # as torch.fx uses it
