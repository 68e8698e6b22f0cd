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

from ddp_nanguard.board import Board, Region
from ddp_nanguard.scan import is_plain

from .backward import BackwardProbe
from .calls import version_of

_current_graph_task = torch._C._current_graph_task_id


@dataclass(frozen=True, slots=True)
class GradientNote:
    """Note of a parameter's gradient; ``micro_batch`` is None after the reduce and where it is not known."""

    name: str
    micro_batch: int | None
    reduced: bool


@dataclass(frozen=True, slots=True)
class NormNote:
    """Note of the gradient norm after a backward pass."""


class GradientProbe:
    """Watches the gradients of all parameters.

    Args:
        parameters: clean name and parameter, as the optimizer holds them.
        local: gives the local tensor of a sharded one, without communication.
        is_ignored: whether a name gets no probe.
        left_out: parameters that no optimizer holds: no scaler looks at their gradients.
        waiting_bytes: of local gradients that may wait, see [Note: waiting gradients]; None is no limit.
    """

    def __init__(
        self,
        parameters: list[tuple[str, nn.Parameter]],
        board: Board,
        backward: BackwardProbe,
        local: Callable[[Tensor], Tensor],
        is_ignored: Callable[[str], bool],
        left_out: frozenset[str] = frozenset(),
        waiting_bytes: int | None = 0,
    ) -> None:
        self._left_out = left_out
        self._waiting_bytes = waiting_bytes
        self._room = waiting_bytes or 0
        self._waiting: list[tuple[int, str, Tensor]] = []
        self.board = board
        self.backward = backward
        self.micro_batch: int | None = 0
        self._parameters = [(name, parameter) for name, parameter in parameters if not is_ignored(name)]
        self._reduced = {name: GradientNote(name, None, reduced=True) for name, _ in self._parameters}
        self._local_notes: dict[int | None, dict[str, tuple[Region, GradientNote]]] = {}
        self._local = local
        self._is_ignored = is_ignored
        self._covered: dict[int, weakref.ref[Tensor]] = {}
        self._versions: dict[int, int] = {}

    def see_local(self, name: str, gradient: Tensor) -> None:
        """Backward gave a rank-local gradient, before any communication; looked at now or a little later.

        Called by hooks in every micro-batch; see [Note: waiting gradients].
        """
        backward, board = self.backward, self.board
        if not (backward.is_entered and backward.ran):
            backward.enter()
        board.order = order = board.order + 1
        if _current_graph_task() == backward.graph_task and (self._waiting_bytes is None or self._has_room(gradient)):
            self._waiting.append((order, name, gradient))
            if board.meter is not None:
                board.meter.count_hook()
        elif board.meter is None:
            self._see_now(order, name, gradient)
        else:
            board.meter.run(self._see_now, order, name, gradient)

    def see_waiting(self) -> None:
        """Look at what `see_local` has put off, see [Note: waiting gradients]."""
        waiting, self._waiting, self._room = self._waiting, [], self._waiting_bytes or 0
        for order, name, gradient in waiting:
            self._see_local(order, name, gradient)

    def _has_room(self, gradient: Tensor) -> bool:
        if not self._room or gradient.layout is not torch.strided or gradient.nbytes > self._room:
            return False
        self._room -= gradient.nbytes
        return True

    def _see_now(self, order: int, name: str, gradient: Tensor) -> None:
        self._see_local(order, name, gradient)
        self.see_waiting()

    def _see_local(self, order: int, name: str, gradient: Tensor) -> None:
        known = self._local_notes.get(self.micro_batch)
        if known is None:
            known = self._local_notes[self.micro_batch] = {}
        if name not in known:
            if self._is_ignored(name):
                return
            known[name] = (self._region(name), GradientNote(name, self.micro_batch, reduced=False))
        region, note = known[name]
        self.board.reduce(region, gradient, note, order)

    def see_reduced(self) -> None:
        """The gradients have been communicated: look at what the optimizer will use."""
        for name, parameter in self._parameters:
            if parameter.grad is not None:
                self._see(self._reduced[name], parameter.grad)

    def cover(self) -> None:
        """Gradients were not communicated: the local ones are what the optimizer will use."""
        for _, parameter in self._parameters:
            if parameter.grad is not None:
                self._cover(parameter.grad)

    def see_norm(self) -> None:
        """L2 norm of this rank's gradients, or of its shards of them, as it is before anything clips. No host read."""
        gradients = [self._local(parameter.grad) for _, parameter in self._parameters if parameter.grad is not None]
        dense = [g if g.dtype is torch.float64 else g.float() for g in gradients if is_plain(g)]
        if dense:
            norms = torch._foreach_norm(dense, 2.0)
            self.board.reduce(Region.NORM, torch.linalg.vector_norm(torch.stack(norms)), NormNote())

    def see_uncovered(self) -> None:
        """Look at gradients that no hook has seen as they are: assigned by hand, or changed in place (clipped)."""
        for name, parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None and not self._is_covered(gradient):
                self._see(GradientNote(name, None, reduced=False), gradient)

    def forget_window(self) -> None:
        """Nothing is covered any more, nothing waits."""
        self._covered, self._versions, self._waiting = {}, {}, []

    def _see(self, note: GradientNote, gradient: Tensor) -> None:
        self.board.reduce(self._region(note.name), self._local(gradient), note)
        self._cover(gradient)

    def _region(self, name: str) -> Region:
        return Region.LEFT_OUT if name in self._left_out else Region.GRADIENT

    def _cover(self, gradient: Tensor) -> None:
        self._covered[id(gradient)] = weakref.ref(gradient)
        self._versions[id(gradient)] = version_of(gradient)

    def _is_covered(self, gradient: Tensor) -> bool:
        """Seen by a hook, and not changed in place since."""
        reference = self._covered.get(id(gradient))
        is_known = reference is not None and reference() is gradient
        return is_known and self._versions[id(gradient)] == version_of(gradient)
