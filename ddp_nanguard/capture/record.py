"""One step as it was, for the fault path."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .window import (
    AccumulationWindow,
    MicroBatch,
)


class Previous:
    """A copy of weights, optimizer state and window from before the last update (``keep_previous``).

    StorageTracker: as much as the parameters, the gradients and the optimizer state of this rank, and one more window.
    """

    def __init__(self) -> None:
        self.step = -1
        self.window: list[MicroBatch] = []
        self.buffers: dict[str, Tensor] = {}
        self.gradients: dict[str, tuple[Tensor, Tensor]] = {}
        self.reduced_in: set[int] = set()
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._plain: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._state: list[tuple[torch.optim.Optimizer, dict[Any, dict[str, Any]]]] = []

    @torch.no_grad()
    def snapshot(
        self,
        step: int,
        window: AccumulationWindow,
        reduced_in: set[int],
        tensors: Iterable[Tensor],
        optimizers: list[torch.optim.Optimizer],
    ) -> None:
        """Copy everything that the coming update can change. Host sync: none."""
        self.step = step
        self.window = window.micro_batches
        self.reduced_in = reduced_in
        self.gradients = {}
        self.buffers = {name: buffer.clone() for name, buffer in window.buffers().items()}
        self._tensors = {id(tensor): (tensor, tensor.detach().clone()) for tensor in tensors}
        self._state = [(optimizer, _cloned_state(optimizer)) for optimizer in optimizers]
        self._plain = [(g, {k: v for k, v in g.items() if k != "params"}) for o in optimizers for g in o.param_groups]

    def keep_gradients(self, named: Mapping[str, Tensor]) -> None:
        """Copy the gradients that the update is about to use. Host sync: none."""
        for name, parameter in named.items():
            if parameter.grad is not None:
                self.gradients[name] = (parameter, parameter.grad.detach().clone())

    @torch.no_grad()
    def restore(self) -> None:
        """Put weights and optimizer state back to where they were before the update."""
        for tensor, saved in self._tensors.values():
            tensor.detach().copy_(saved)
        for optimizer, state in self._state:
            optimizer.state.clear()
            optimizer.state.update({parameter: dict(values) for parameter, values in state.items()})
        for group, plain in self._plain:
            group.update(plain)


def _cloned_state(optimizer: torch.optim.Optimizer) -> dict[Any, dict[str, Any]]:
    return {
        parameter: {k: v.detach().clone() if isinstance(v, Tensor) else copy.copy(v) for k, v in values.items()}
        for parameter, values in optimizer.state.items()
    }
