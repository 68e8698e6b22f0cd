"""Backward: tensor hooks on the activations that the forward recorded, and the moment at which a backward pass ends.

[Note: the end of backward]
An engine callback queued from inside an engine callback runs after the wrapper's own finalisation and so sees reduced
gradients; one queued only once may run too early. Reentrant checkpointing runs nested backward passes whose callbacks
see half of the gradients: only the outermost pass counts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Variable

from .calls import ModuleCall, TensorRecord
from .slot_roles import SlotRole
from .slots import SlotBuffer


class BackwardProbe:
    """Watches gradients of activations, and tells when a backward pass has ended.

    Args:
        slots: where the hooks leave their results.
        probes_activations: whether gradients of activations are watched at all.

    Attributes:
        on_local_end: called when a backward pass has computed all its gradients, before the wrapper's own callbacks.
        on_end: called after each backward pass, behind the wrapper's callbacks: gradients are reduced by then.
        on_begin: called by the first hook of a backward pass, and again by the first one in each micro-batch.
        ran: whether a backward pass has run in this micro-batch; the owner of the probe sets it back.
        is_entered: whether a backward pass is running.
        graph_task: autograd's id of the outermost backward pass that was entered last; -1 before the first.
        is_closed: True where activations are not watched, and after `close`.
    """

    def __init__(self, slots: SlotBuffer, probes_activations: bool) -> None:
        self.slots = slots

        # - Listeners: attributes and not arguments, since their owner is built from this probe. `close` replaces them,
        # for autograd graphs that outlive the guard still hold the hooks and, through them, this probe.
        self.on_begin: Callable[[], None] = _nothing
        self.on_local_end: Callable[[], None] = _nothing
        self.on_end: Callable[[], None] = _nothing
        self.is_closed = not probes_activations

        # - State of the backward pass that is running: the callbacks are queued once per pass, by whichever hook is
        # first. A nested pass finds `is_entered` set and queues none.
        self.graph_task = -1
        self.ran = False
        self.is_entered = False

    def watch(self, tensor: Tensor, record: TensorRecord) -> None:
        """Probe the gradient of a non-leaf tensor when backward reaches it.

        Args:
            tensor: has a ``grad_fn``; leaf tensors would collect one hook per call.
            record: of that tensor; becomes the source of the slot.
        """
        if not self.is_closed:
            tensor.register_hook(GradientHook(self, record))  # type: ignore[no-untyped-call]  # torch's own

    def enter(self) -> None:
        """Note that a backward pass is running, and queue the callbacks that tell its end.

        To be called from inside the pass by the first hook that runs, or by all: later calls queue nothing. Nor does
        one whose pass is being captured into a graph: `is_entered` stays False.
        """
        if self.slots.is_capturing():
            return
        self.ran = True
        self.on_begin()
        if not self.is_entered:
            self.is_entered = True
            self.graph_task = torch._C._current_graph_task_id()
            Variable._execution_engine.queue_callback(self._first_callback)

    def reset(self) -> None:
        """Forget a backward pass that raised: the engine drops its callbacks, so its end was never told."""
        self.is_entered = False

    def close(self) -> None:
        """Stop watching. Graphs that are still alive hold the hooks, which must no longer lead to the guard."""
        self.on_begin = self.on_local_end = self.on_end = _nothing
        self.is_closed = True

    # The first callback is queued before the wrapper's, since our hook runs first; the second, queued from inside it,
    # comes behind the wrapper's. See [Note: the end of backward].

    def _first_callback(self) -> None:
        self.on_local_end()
        Variable._execution_engine.queue_callback(self._second_callback)

    def _second_callback(self) -> None:
        self.is_entered = False
        self.on_end()


class GradientHook:
    """Tensor hook that reduces the gradient of an activation; the hook object itself is the source of its slot.

    Args:
        probe: that it reports to; None for a slot that compiled code filled, of which only the source is needed.
        record: of the tensor.
    """

    __slots__ = ("probe", "record")
    __torch_unserializable__ = True  # saving an activation must not warn about this hook

    def __init__(self, probe: BackwardProbe | None, record: TensorRecord) -> None:
        self.probe = probe
        self.record = record

    def __call__(self, gradient: Tensor) -> None:
        """Reduce the gradient into a slot. Called by autograd when backward reaches the tensor."""
        probe = self.probe
        if probe is None or probe.is_closed:
            return
        if not (probe.is_entered and probe.ran):
            probe.enter()
            if not probe.is_entered:
                return
        probe.slots.reduce(SlotRole.EVIDENCE, gradient, self)

    @property
    def call(self) -> ModuleCall:
        """The module call that returned the tensor, or that first took it as an input."""
        return self.record.call


def _nothing() -> None:
    return None
