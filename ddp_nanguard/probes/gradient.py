"""Gradients of parameters: on this rank before the reduce, after it, and those that no hook has covered."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddp_nanguard.board import Board, Region
from ddp_nanguard.scan import is_plain

from .backward import BackwardProbe


@dataclass(frozen=True, slots=True)
class GradientNote:
    """Note of a parameter's gradient; ``micro_batch`` is None after the reduce or where no hook saw it."""

    name: str
    micro_batch: int | None
    reduced: bool


@dataclass(frozen=True, slots=True)
class NormNote:
    """Note of the gradient norm after a backward pass."""

    micro_batch: int


class GradientProbe:
    """Watches the gradients of all parameters.

    Args:
        parameters: clean name and parameter, as the optimizer holds them.
        local: gives the local tensor of a sharded one, without communication.
    """

    def __init__(
        self,
        parameters: list[tuple[str, nn.Parameter]],
        board: Board,
        backward: BackwardProbe,
        local: Callable[[Tensor], Tensor],
        is_ignored: Callable[[str], bool],
    ) -> None:
        self.board = board
        self.backward = backward
        self.micro_batch = 0
        self._parameters = [(name, parameter) for name, parameter in parameters if not is_ignored(name)]
        self._local = local
        self._is_ignored = is_ignored
        self._covered: dict[int, weakref.ref[Tensor]] = {}

    def see_local(self, name: str, gradient: Tensor) -> None:
        """Backward gave a rank-local gradient. Called in every micro-batch, before any communication."""
        self.backward.enter()
        if not self._is_ignored(name):
            self.board.reduce(Region.GRADIENT, gradient, GradientNote(name, self.micro_batch, reduced=False))

    def see_reduced(self) -> None:
        """The gradients have been communicated: look at what the optimizer will use."""
        for name, parameter in self._parameters:
            if parameter.grad is not None:
                self._see(GradientNote(name, None, reduced=True), parameter.grad)

    def cover(self) -> None:
        """Gradients were not communicated: the local ones are what the optimizer will use."""
        for _, parameter in self._parameters:
            if parameter.grad is not None:
                self._covered[id(parameter.grad)] = weakref.ref(parameter.grad)

    def see_norm(self) -> None:
        """L2 norm of this rank's gradients, or of its shards of them, as it is before anything clips. No host read."""
        gradients = [self._local(parameter.grad) for _, parameter in self._parameters if parameter.grad is not None]
        dense = [gradient.float() for gradient in gradients if is_plain(gradient)]
        if dense:
            norms = torch._foreach_norm(dense, 2.0)
            self.board.reduce(Region.NORM, torch.linalg.vector_norm(torch.stack(norms)), NormNote(self.micro_batch))

    def see_uncovered(self) -> None:
        """Look at gradients that no hook has seen, such as those assigned by hand."""
        for name, parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None and not self._is_covered(gradient):
                self._see(GradientNote(name, None, reduced=False), gradient)

    def forget_window(self) -> None:
        """Nothing is covered any more."""
        self._covered = {}

    def _see(self, note: GradientNote, gradient: Tensor) -> None:
        self.board.reduce(Region.GRADIENT, self._local(gradient), note)
        self._covered[id(gradient)] = weakref.ref(gradient)

    def _is_covered(self, gradient: Tensor) -> bool:
        reference = self._covered.get(id(gradient))
        return reference is not None and reference() is gradient


def names_of(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[int, str]:
    """Clean name by identity of the parameter."""
    return {id(parameter): name for name, parameter in parameters}
