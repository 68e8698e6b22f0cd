"""Gradients of parameters: on this rank before the reduce, after it, and those that no hook has covered.

[Note: waiting gradients]
Between two large operators a hook that reduces costs ten times what it costs in a loop: code and data have left the
cache. Where `.grad` stays what this rank has accumulated until the backward ends, the hooks note its order alone, and
all are reduced together in the engine's first callback, which comes before the wrapper's own. What the wrapper would
have freed meanwhile waits up to a limit; at the limit they are looked at. A pass inside the pass may end with the
wrapper's callback: its gradients do not wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddp_nanguard.tensors.minmax import is_plain

from .backward import BackwardProbe
from .calls import version_of
from .slots import SlotBuffer, SlotRole

_current_graph_task = torch._C._current_graph_task_id


@dataclass(frozen=True, slots=True)
class GradientSource:
    """Note of a parameter's gradient; ``micro_batch`` is None after the reduce and where it is not known."""

    name: str
    micro_batch: int | None
    reduced: bool


@dataclass(frozen=True, slots=True)
class NormSource:
    """Note of the gradient norm after a backward pass."""


class GradientProbe:
    """Watches the gradients of all parameters.

    Args:
        parameters: clean name and parameter, as the optimizer holds them.
        local: gives the local tensor of a sharded one, without communication.
        is_ignored: whether a name gets no probe.
        left_out: parameters that no optimizer holds: no scaler looks at their gradients.
        pending_bytes: of local gradients that may wait, see [Note: waiting gradients]; None is no limit.
    """

    def __init__(
        self,
        parameters: list[tuple[str, nn.Parameter]],
        slots: SlotBuffer,
        backward: BackwardProbe,
        local: Callable[[Tensor], Tensor],
        is_ignored: Callable[[str], bool],
        left_out: frozenset[str] = frozenset(),
        pending_bytes: int | None = 0,
    ) -> None:
        self._left_out = left_out
        self._pending_bytes = pending_bytes
        self._room = pending_bytes or 0
        self._pending: list[tuple[int, str, Tensor]] = []
        self.slots = slots
        self.backward = backward
        self.micro_batch: int | None = 0
        self._parameters = [(name, parameter) for name, parameter in parameters if not is_ignored(name)]
        self._reduced = {name: GradientSource(name, None, reduced=True) for name, _ in self._parameters}
        self._local_sources: dict[int | None, dict[str, tuple[SlotRole, GradientSource]]] = {}
        self._local = local
        self._is_ignored = is_ignored
        self._checked: dict[int, weakref.ref[Tensor]] = {}
        self._versions: dict[int, int] = {}

    def probe_local(self, name: str, gradient: Tensor) -> None:
        """Backward gave a rank-local gradient, before any communication; looked at now or a little later.

        Called by hooks in every micro-batch; see [Note: waiting gradients].
        """
        backward, slots = self.backward, self.slots
        if not (backward.is_entered and backward.ran):
            backward.enter()
        slots.order = order = slots.order + 1
        if _current_graph_task() == backward.graph_task and (self._pending_bytes is None or self._has_room(gradient)):
            self._pending.append((order, name, gradient))
            if slots.meter is not None:
                slots.meter.count_hook()
        elif slots.meter is None:
            self._probe_now(order, name, gradient)
        else:
            slots.meter.run(self._probe_now, order, name, gradient)

    def flush_pending(self) -> None:
        """Look at what `probe_local` has put off, see [Note: waiting gradients]."""
        waiting, self._pending, self._room = self._pending, [], self._pending_bytes or 0
        for order, name, gradient in waiting:
            self._probe_local(order, name, gradient)

    def _has_room(self, gradient: Tensor) -> bool:
        if not self._room or gradient.layout is not torch.strided or gradient.nbytes > self._room:
            return False
        self._room -= gradient.nbytes
        return True

    def _probe_now(self, order: int, name: str, gradient: Tensor) -> None:
        self._probe_local(order, name, gradient)
        self.flush_pending()

    def _probe_local(self, order: int, name: str, gradient: Tensor) -> None:
        known = self._local_sources.get(self.micro_batch)
        if known is None:
            known = self._local_sources[self.micro_batch] = {}
        if name not in known:
            if self._is_ignored(name):
                return
            known[name] = (self._role(name), GradientSource(name, self.micro_batch, reduced=False))
        role, source = known[name]
        self.slots.reduce(role, gradient, source, order)

    def probe_reduced(self) -> None:
        """The gradients have been communicated: look at what the optimizer will use."""
        for name, parameter in self._parameters:
            if parameter.grad is not None:
                self._probe(self._reduced[name], parameter.grad)

    def mark_checked(self) -> None:
        """Gradients were not communicated: the local ones are what the optimizer will use."""
        for _, parameter in self._parameters:
            if parameter.grad is not None:
                self._mark_checked(parameter.grad)

    def probe_norm(self) -> None:
        """L2 norm of this rank's gradients, or of its shards of them, as it is before anything clips. No host read."""
        gradients = [self._local(parameter.grad) for _, parameter in self._parameters if parameter.grad is not None]
        dense = [g if g.dtype is torch.float64 else g.float() for g in gradients if is_plain(g)]
        if dense:
            norms = torch._foreach_norm(dense, 2.0)
            self.slots.reduce(SlotRole.NORM, torch.linalg.vector_norm(torch.stack(norms)), NormSource())

    def probe_unhooked(self) -> None:
        """Look at gradients that no hook has seen as they are: assigned by hand, or changed in place (clipped)."""
        for name, parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None and not self._is_checked(gradient):
                self._probe(GradientSource(name, None, reduced=False), gradient)

    def release_window(self) -> None:
        """Nothing is covered any more, nothing waits."""
        self._checked, self._versions, self._pending = {}, {}, []

    def _probe(self, source: GradientSource, gradient: Tensor) -> None:
        self.slots.reduce(self._role(source.name), self._local(gradient), source)
        self._mark_checked(gradient)

    def _role(self, name: str) -> SlotRole:
        return SlotRole.LEFT_OUT if name in self._left_out else SlotRole.GRADIENT

    def _mark_checked(self, gradient: Tensor) -> None:
        self._checked[id(gradient)] = weakref.ref(gradient)
        self._versions[id(gradient)] = version_of(gradient)

    def _is_checked(self, gradient: Tensor) -> bool:
        """Seen by a hook, and not changed in place since."""
        reference = self._checked.get(id(gradient))
        is_known = reference is not None and reference() is gradient
        return is_known and self._versions[id(gradient)] == version_of(gradient)
