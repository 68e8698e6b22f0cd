"""Gradients of parameters: on this rank before the reduce, after it, and those that no hook has seen.

[Note: waiting gradients]
Between two large operators a hook that reduces costs ten times what it costs in a loop: code and data have left the
cache. Where `.grad` stays what this rank has accumulated until the backward ends, the hooks only note the execution
order, and all gradients are reduced together in the engine's first callback, which comes before the wrapper's own.
Gradients that the wrapper would have freed meanwhile wait up to a number of bytes; at that limit all are looked at. A
pass inside the pass may end with the wrapper's callback, so its gradients do not wait.
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
    """Source of a slot: the gradient of a parameter.

    Attributes:
        name: clean name of the parameter.
        micro_batch: index in the step; None after the reduce, and where one backward serves several micro-batches.
        reduced: whether it was taken after the gradient communication.
    """

    name: str
    micro_batch: int | None
    reduced: bool


@dataclass(frozen=True, slots=True)
class NormSource:
    """Source of a slot: the L2 norm of all gradients after a backward pass."""


class GradientProbe:
    """Watches the gradients of all parameters.

    Args:
        parameters: clean name and parameter, as the optimizer holds them.
        slots: where the results go.
        backward: tells whether a backward pass is running.
        local: maps a tensor to this rank's part of it, without communication.
        is_ignored: whether a parameter of this name is not watched.
        left_out: names of parameters that no optimizer holds: no scaler looks at their gradients.
        pending_bytes: of local gradients that may wait, see [Note: waiting gradients]; 0 lets none wait, None all.

    Attributes:
        micro_batch: index that local gradients are attributed to; None where it is not known.
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
        self.slots = slots
        self.backward = backward
        self.micro_batch: int | None = 0
        self._local = local
        self._is_ignored = is_ignored
        self._left_out = left_out
        self._parameters = [(name, parameter) for name, parameter in parameters if not is_ignored(name)]

        # - Sources are made once and used in every step: the hooks run for each parameter and micro-batch
        self._reduced_sources = {name: GradientSource(name, None, reduced=True) for name, _ in self._parameters}
        self._local_sources: dict[int | None, dict[str, tuple[SlotRole, GradientSource]]] = {}

        # - Pending gradients: (execution order, name, gradient), see [Note: waiting gradients]. They are held strongly,
        # which is what the limit in bytes is for
        self._pending: list[tuple[int, str, Tensor]] = []
        self._pending_bytes = pending_bytes
        self._bytes_left = pending_bytes or 0

        # - What was looked at in this window, by `id`, and at which version: a gradient that was clipped, or assigned
        # by hand, is read again before the update
        self._checked: dict[int, weakref.ref[Tensor]] = {}
        self._checked_versions: dict[int, int] = {}

    def probe_local(self, name: str, gradient: Tensor) -> None:
        """Look at a gradient of this rank before any communication, now or at the end of the backward pass.

        Called by the parameters' hooks in every micro-batch; see [Note: waiting gradients].

        Args:
            name: clean name of the parameter.
            gradient: what this rank has accumulated; a tensor that is not plain is read at once where bytes are
                limited.
        """
        backward, slots = self.backward, self.slots
        if not (backward.is_entered and backward.ran):
            backward.enter()
        # blame goes by this order, so it is that of the hooks even where the gradient is looked at later
        slots.order = order = slots.order + 1
        if _current_graph_task() == backward.graph_task and (self._pending_bytes is None or self._has_room(gradient)):
            self._pending.append((order, name, gradient))
        else:
            self._probe_now(order, name, gradient)

    def flush_pending(self) -> None:
        """Look at the gradients that `probe_local` has left pending, see [Note: waiting gradients]."""
        pending, self._pending, self._bytes_left = self._pending, [], self._pending_bytes or 0
        for order, name, gradient in pending:
            self._probe_local(order, name, gradient)

    def _has_room(self, gradient: Tensor) -> bool:
        if not self._bytes_left or gradient.layout is not torch.strided or gradient.nbytes > self._bytes_left:
            return False
        self._bytes_left -= gradient.nbytes
        return True

    def _probe_now(self, order: int, name: str, gradient: Tensor) -> None:
        self._probe_local(order, name, gradient)
        self.flush_pending()

    def _probe_local(self, order: int, name: str, gradient: Tensor) -> None:
        sources = self._local_sources.get(self.micro_batch)
        if sources is None:
            sources = self._local_sources[self.micro_batch] = {}
        if name not in sources:
            if self._is_ignored(name):
                return
            sources[name] = (self._role(name), GradientSource(name, self.micro_batch, reduced=False))
        role, source = sources[name]
        self.slots.reduce(role, gradient, source, order)

    def probe_reduced(self) -> None:
        """Look at the gradients that the optimizer will use, after they have been communicated."""
        for name, parameter in self._parameters:
            if parameter.grad is not None:
                self._probe(self._reduced_sources[name], parameter.grad)

    def mark_checked(self) -> None:
        """Take the local gradients for checked: where nothing was communicated the optimizer uses these."""
        for _, parameter in self._parameters:
            if parameter.grad is not None:
                self._mark_checked(parameter.grad)

    def probe_norm(self) -> None:
        """Reduce the L2 norm of this rank's gradients, or of its shards of them, as it is before clipping.

        One slot; no host read. Sparse gradients and other kinds that are not dense take no part.
        """
        gradients = [self._local(parameter.grad) for _, parameter in self._parameters if parameter.grad is not None]
        dense = [g if g.dtype is torch.float64 else g.float() for g in gradients if is_plain(g)]
        if dense:
            norms = torch._foreach_norm(dense, 2.0)
            self.slots.reduce(SlotRole.NORM, torch.linalg.vector_norm(torch.stack(norms)), NormSource())

    def probe_unhooked(self) -> None:
        """Look at gradients that were assigned by hand, or changed in place (clipped) since a hook saw them."""
        for name, parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None and not self._is_checked(gradient):
                self._probe(GradientSource(name, None, reduced=False), gradient)

    def release_window(self) -> None:
        """Forget which gradients were checked or are pending: the window is over."""
        self._checked, self._checked_versions, self._pending = {}, {}, []

    def _probe(self, source: GradientSource, gradient: Tensor) -> None:
        self.slots.reduce(self._role(source.name), self._local(gradient), source)
        self._mark_checked(gradient)

    def _role(self, name: str) -> SlotRole:
        return SlotRole.LEFT_OUT if name in self._left_out else SlotRole.GRADIENT

    def _mark_checked(self, gradient: Tensor) -> None:
        self._checked[id(gradient)] = weakref.ref(gradient)
        self._checked_versions[id(gradient)] = version_of(gradient)

    def _is_checked(self, gradient: Tensor) -> bool:
        """Whether this very gradient was looked at and has not been changed in place since."""
        reference = self._checked.get(id(gradient))
        is_known = reference is not None and reference() is gradient
        return is_known and self._checked_versions[id(gradient)] == version_of(gradient)
