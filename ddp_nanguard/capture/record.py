"""One step as the fault path, a dump and a replay need it; there is no other record of a step."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ddp_nanguard.probes.calls import ModuleCall
from ddp_nanguard.probes.slots import SlotStats
from ddp_nanguard.wrappers.grad_scaler import ScalerState

from .window import AccumulationWindow


class StepSlots(Protocol):
    """The slots of a step: the open ones of a `SlotBuffer`, or a `PastStep`."""

    def slot_stats(self) -> list[SlotStats]:
        """In execution order. Host sync: one per page."""


@dataclass
class StepRecord:
    """One optimizer step.

    Three kinds of steps are recorded in the same way: the one that has just been judged, the one before it whose
    verdict the host learns late (``verdict="deferred"``), and the one whose update is undone (``keep_previous``).

    Attributes:
        step: its number.
        window: its micro-batches, and the buffers from before them.
        calls: calls of modules in its forwards.
        slots: what the probes left.
        hyper_parameters: numbers of the parameter groups as this step's update uses them.
        scaler: the scaler's state in this step; None without a scaler.
        is_current: whether what lies in the parameters' ``grad``, in the batches and in the scaler is still this
            step's. Not so for a step whose verdict comes late: the next one has run meanwhile.
        gradients: parameter and gradient by name, where the update itself is to be replayed; empty otherwise.
    """

    step: int
    window: AccumulationWindow
    calls: list[ModuleCall]
    slots: StepSlots
    hyper_parameters: list[tuple[str, float | Tensor]]
    scaler: ScalerState | None
    is_current: bool = True
    gradients: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def scaler_state(self) -> dict[str, Any] | None:
        """Scale and growth tracker as plain numbers. Host sync: two; fault path only."""
        return None if self.scaler is None else self.scaler.state()


class PreviousStep:
    """A copy of weights and optimizer state from before the last update, and the record of its step.

    Made by ``keep_previous``, so that a bad update can be undone and replayed.

    Attributes:
        record: of the step whose update comes next or has just happened; None before the first one.

    Memory: as much as the parameters, the gradients and the optimizer state of this rank, and one more window.
    """

    def __init__(self) -> None:
        self.record: StepRecord | None = None
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._plain: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._state: list[tuple[torch.optim.Optimizer, dict[Any, dict[str, Any]]]] = []

    @torch.no_grad()
    def snapshot(self, record: StepRecord, tensors: Iterable[Tensor], optimizers: list[torch.optim.Optimizer]) -> None:
        """Copy everything that the coming update can change. Host sync: none."""
        self.record = record
        self._tensors = {id(tensor): (tensor, tensor.detach().clone()) for tensor in tensors}
        self._state = [(optimizer, _cloned_state(optimizer)) for optimizer in optimizers]
        self._plain = [(g, {k: v for k, v in g.items() if k != "params"}) for o in optimizers for g in o.param_groups]

    def keep_gradients(self, named: Mapping[str, Tensor]) -> None:
        """Copy the gradients that the update is about to use. Host sync: none."""
        if self.record is None:
            return
        for name, parameter in named.items():
            if parameter.grad is not None:
                self.record.gradients[name] = (parameter, parameter.grad.detach().clone())

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
