"""`StepRecord`: one step as the fault path, a dump and a replay need it. There is no other record of a step."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ddp_nanguard.errors import Undone
from ddp_nanguard.probes.calls import ModuleCall
from ddp_nanguard.probes.slots import SlotStats
from ddp_nanguard.tensors.written import write_back
from ddp_nanguard.wrappers.grad_scaler import ScalerState

from .window import AccumulationWindow


class StepSlots(Protocol):
    """The slots of a step: the open ones of a `SlotBuffer`, or a `PastStep`."""

    def slot_stats(self) -> list[SlotStats]:
        """All slots of the step in execution order. Host sync: one per page of slots."""


@dataclass
class StepRecord:
    """One optimizer step.

    Three kinds of steps are recorded in the same way: the one that has just been judged, the one before it whose
    verdict the host learns late (``verdict="deferred"``), and the one whose update is undone (``keep_previous``).

    Attributes:
        step: its number.
        window: its micro-batches, and the buffers from before them.
        calls: calls of modules in its forwards, in execution order.
        slots: the results of its probes.
        hyper_parameters: numbers in the parameter groups, as this step's update uses them.
        scaler: gives the scaler's state in this step; None without a scaler.
        is_current: whether the parameters' ``grad``, the batches and the scaler are still those of this step. False for
            a step whose verdict comes late: the next one has run meanwhile.
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
        # Everything is put back into the objects that the loop holds, so the originals are kept beside the copies: by
        # tensor, by parameter group, by optimizer
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._plain: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._state: list[tuple[torch.optim.Optimizer, dict[Any, dict[str, Any]]]] = []

    @torch.no_grad()
    def snapshot(self, record: StepRecord, tensors: Iterable[Tensor], optimizers: list[torch.optim.Optimizer]) -> None:
        """Copy everything that the coming update can change.

        Args:
            record: of the step; its window and slots must be copies of their own, since the open ones go on.
            tensors: this rank's parts of the parameters.
            optimizers: whose state and hyper-parameters are copied too.

        Host sync: none.
        """
        self.record = record
        self._tensors = {id(tensor): (tensor, tensor.detach().clone()) for tensor in tensors}
        self._state = [(optimizer, _cloned_state(optimizer)) for optimizer in optimizers]
        self._plain = [(g, {k: v for k, v in g.items() if k != "params"}) for o in optimizers for g in o.param_groups]

    def keep_gradients(self, named: Mapping[str, Tensor]) -> None:
        """Copy the gradients that the update is about to use into the record; nothing before the first `snapshot`.

        Args:
            named: parameters by clean name; those without a gradient are left out.

        Host sync: none.
        """
        if self.record is None:
            return
        for name, parameter in named.items():
            if parameter.grad is not None:
                self.record.gradients[name] = (parameter, parameter.grad.detach().clone())

    @torch.no_grad()
    def restore(self, undone: Undone) -> None:
        """Write weights, optimizer state and hyper-parameters from before the update back, in place.

        Args:
            undone: told of what could not be put back.
        """
        for tensor, saved in self._tensors.values():
            undone.attempt("a weight was not put back", partial(write_back, tensor.detach(), saved), None)
        # a key that this update has created must go too, hence the clear
        for optimizer, state in self._state:
            optimizer.state.clear()
            # copies again: the update may be made, and undone, once more
            optimizer.state.update({parameter: _copied(values) for parameter, values in state.items()})
        for group, plain in self._plain:
            group.update(plain)


def _cloned_state(optimizer: torch.optim.Optimizer) -> dict[Any, dict[str, Any]]:
    return {parameter: _copied(values) for parameter, values in optimizer.state.items()}


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.detach().clone() if isinstance(v, Tensor) else copy.copy(v) for k, v in values.items()}
