"""Backward: tensor hooks on the sightings of the forward, and the moment at which a backward pass has ended.

[Note: the end of backward]
An engine callback queued from inside an engine callback runs after the wrapper's own finalisation and so sees reduced
gradients; one queued
only once may run too early. Reentrant checkpointing runs nested backward passes whose callbacks see half of the
gradients: only the
outermost pass counts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Variable

from .calls import ModuleCall, TensorRecord
from .slots import SlotBuffer, SlotRole


class BackwardProbe:
    """Watches gradients of activations, and tells when a backward pass has ended.

    Attributes:
        on_local_end: called when a backward pass has computed all it computes, before the wrapper's own callbacks.
        on_end: called after each backward pass.
        on_begin: called by the first hook of a backward pass, and of each micro-batch that it reaches.
        ran: whether one has run in the micro-batch.
        is_entered: whether one is running.
        graph_task: autograd's number of the one entered last.
        is_closed: whether activations are not watched, or no longer: graphs that outlive the guard hold its hooks.
    """

    def __init__(self, slots: SlotBuffer, probes_activations: bool) -> None:
        self.slots = slots
        self.on_begin: Callable[[], None] = _nothing
        self.on_local_end: Callable[[], None] = _nothing
        self.on_end: Callable[[], None] = _nothing
        self.graph_task = -1
        self.ran = False
        self.is_closed = not probes_activations
        self.is_entered = False

    def watch(self, tensor: Tensor, record: TensorRecord) -> None:
        """Probe the gradient of a non-leaf tensor when backward reaches it."""
        if not self.is_closed:
            tensor.register_hook(GradientHook(self, record))  # type: ignore[no-untyped-call]  # torch's own

    def enter(self) -> None:
        """To be called by the first hook that runs in a backward, or by all; it arranges for the end."""
        self.ran = True
        self.on_begin()
        if not self.is_entered:
            self.is_entered = True
            self.graph_task = torch._C._current_graph_task_id()
            Variable._execution_engine.queue_callback(self._first_callback)

    def reset(self) -> None:
        """A backward pass that raised never ended."""
        self.is_entered = False

    def close(self) -> None:
        """Graphs that are still alive hold the hooks: they must not lead to the guard."""
        self.on_begin = self.on_local_end = self.on_end = _nothing
        self.is_closed = True

    def _first_callback(self) -> None:
        self.on_local_end()
        Variable._execution_engine.queue_callback(self._second_callback)

    def _second_callback(self) -> None:
        self.is_entered = False
        self.on_end()


class GradientHook:
    """Tensor hook that reduces a gradient; it is its own note on the board."""

    __slots__ = ("probe", "record")
    __torch_unserializable__ = True  # saving an activation must not warn about this hook

    def __init__(self, probe: BackwardProbe | None, record: TensorRecord) -> None:
        self.probe = probe
        self.record = record

    def __call__(self, gradient: Tensor) -> None:
        """Backward has reached the tensor."""
        probe = self.probe
        if probe is None or probe.is_closed:
            return
        if not (probe.is_entered and probe.ran):
            probe.enter()
        slots = probe.slots
        if slots.meter is None:
            slots.reduce(SlotRole.EVIDENCE, gradient, self)
        else:
            slots.meter.run(slots.reduce, SlotRole.EVIDENCE, gradient, self)

    @property
    def call(self) -> ModuleCall:
        """The call that gave or first took the tensor."""
        return self.record.call


def _nothing() -> None:
    return None
