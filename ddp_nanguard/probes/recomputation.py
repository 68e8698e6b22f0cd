"""Activation checkpointing: forwards that run again inside backward.

[Note: recomputation]
They are no forward: nothing is reduced and no call is counted. Non-reentrant checkpointing keeps the graph of the
original forward, whose tensors have their hooks. Reentrant checkpointing ran the original without a graph and builds
one only now: its tensors are hooked here, and what they are put down to are the original calls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backward import BackwardProbe
from .calls import Call, Sighting


class Recomputation:
    """Follows the forwards inside one backward pass."""

    def __init__(self, backward: BackwardProbe) -> None:
        self._backward = backward
        self._stack: list[tuple[str, Call | None]] = []
        self._seen: dict[int, Sighting] = {}

    def reset(self) -> None:
        """A new micro-batch."""
        self._stack = []
        self._seen = {}

    def before(self, layer: str, calls: list[Call], inputs: list[Tensor]) -> None:
        """A module is about to run again.

        Args:
            layer: its name.
            calls: of the window's original forwards.
            inputs: floating tensors that it takes.
        """
        call = _original(layer, calls) if torch.is_grad_enabled() else None
        self._stack.append((layer, call))
        if call is not None:
            for tensor in inputs:
                self._take(call, tensor)

    def after(self, layer: str, outputs: list[Tensor]) -> None:
        """It has run; one that ended early (non-reentrant checkpointing stops when it has enough) never gets here."""
        while self._stack:
            name, call = self._stack.pop()
            if name == layer:
                if call is not None:
                    self._give(call, outputs)
                return

    def _take(self, call: Call, tensor: Tensor) -> None:
        seen = self._seen.get(id(tensor))
        if seen is None or not seen.is_still(tensor):
            seen = self._sight(call, tensor, "input")
        seen.consumers.append(call)
        call.inputs.append(seen)

    def _give(self, call: Call, outputs: list[Tensor]) -> None:
        for tensor in outputs:
            seen = self._seen.get(id(tensor))
            if seen is None or not seen.is_still(tensor):
                seen = self._sight(call, tensor, "output")
            call.outputs.append(seen)

    def _sight(self, call: Call, tensor: Tensor, slot: str) -> Sighting:
        sighting = self._seen[id(tensor)] = Sighting(tensor, call, slot)
        if tensor.grad_fn is not None:
            self._backward.watch(tensor, sighting)
        return sighting


def _original(layer: str, calls: list[Call]) -> Call | None:
    """The call that is repeated; without a number where there are several, None where its graph is the original one."""
    present = calls[-1].micro_batch if calls else 0
    originals = [c for c in calls if c.layer == layer and c.micro_batch == present and not c.had_graph]
    if len(originals) <= 1:
        return originals[0] if originals else None
    call = Call(layer, None, originals[-1].micro_batch, None)
    call.parent = originals[-1].parent
    return call
