"""What a guard has at hand when a fault strikes, as the request for a dump."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from . import testing
from .blame import LossNote
from .board import Reading, Region
from .dump.request import DumpRequest
from .fault import LocalView, labelled_slots, unchecked
from .parts import Parts
from .pieces import Piece
from .probes.gradient import GradientNote
from .scan import named_tensors_in, path_text
from .site import MAX_SITES, FaultReport, json_safe
from .window import MicroBatch, Previous


@dataclass(frozen=True)
class Moment:
    """The step that is to be replayed.

    Attributes:
        window: its micro-batches.
        buffers: from before it.
        readings: its slots.
        reduced_in: micro-batches after which gradients were communicated.
        gradients: parameter and gradient by name, for the replay of an update; empty otherwise.
    """

    window: list[MicroBatch]
    buffers: dict[str, Tensor]
    readings: list[Reading]
    reduced_in: set[int]
    gradients: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


def present(parts: Parts, view: LocalView) -> Moment:
    """The window that is open."""
    window = parts.window
    return Moment(window.micro_batches, window.buffers(), view.readings, parts.reduced_in)


def before_update(parts: Parts, previous: Previous) -> Moment:
    """The window of the last update, which ``keep_previous`` has put back."""
    readings = [past.readings() for past in parts.board.past() if past.step == previous.step]
    slots = readings[0] if readings else []
    return Moment(previous.window, previous.buffers, slots, previous.reduced_in, previous.gradients)


def dump_request(
    parts: Parts, report: FaultReport, view: LocalView, moment: Moment, group: dist.ProcessGroup | None
) -> DumpRequest:
    """Everything of this rank that replay needs. Host sync: many; fault path only.

    Args:
        parts: of the guard.
        report: what all ranks say.
        view: what this rank saw.
        moment: the step to replay.
        group: the fault group; None where peers are lost.
    """
    state, special = _state(parts)
    for name, (parameter, gradient) in moment.gradients.items():
        cut = partial(parts.wrapper.pieces, "grad.", name, parameter, gradient)
        _add(state, special, f"grad.{name}", gradient, cut)
    for micro_batch in moment.window:
        micro_batch.scaler = parts.scaler.state(parts.is_late) if parts.scaler is not None else None
    return DumpRequest(
        report=report,
        rank=parts.peers.rank,
        world_size=parts.peers.world_size,
        group=group,
        config=parts.config,
        wrapper=parts.wrapper.describe(),
        state=state,
        shapes=_shapes(parts, state),
        aliases=_aliases(parts),
        plain_state=plain_state(parts),
        special=special,
        shard_index=parts.wrapper.shard_index,
        num_shards=parts.wrapper.num_shards,
        replica_index=parts.wrapper.replica_index,
        evidence=_evidence(parts, view, report, moment),
        window=[_redacted(m) for m in moment.window] if parts.config.redact else moment.window,
        buffers={**dict(parts.wrapper.named_buffers()), **moment.buffers},
        history=history_of(parts, moment.readings),
        recipe=parts.recipe,
        damaged={f"model.{name}" for name in view.damage.lasting()},
        run_id=run_id(),
        run={"argv": sys.argv, "run_id": run_id(), "recipe_directory": parts.recipe_directory},
    )


def _redacted(micro_batch: MicroBatch) -> MicroBatch:
    """The micro-batch with its tensors described instead of kept, and nothing else of its contents."""
    named = {path_text(path): tensor for path, tensor in named_tensors_in(micro_batch.batch)}
    described = {path: {"shape": list(t.shape), "dtype": _dtype(t.dtype)} for path, t in named.items()}
    return replace(micro_batch, batch={"redacted": described})


def run_id() -> str:
    """The same on all ranks of a run and no other, as far as the launcher tells."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    return "-".join(os.environ.get(name, "") for name in names)


def _state(parts: Parts) -> tuple[list[Piece], dict[str, Tensor]]:
    pieces: list[Piece] = []
    special: dict[str, Tensor] = {}
    if parts.config.dump_weights:
        pieces, special = weights(parts)
    if parts.config.dump_optimizer:
        for index, optimizer in enumerate(parts.optimizers):
            for name, parameter in parts.state.named_parameters_of(optimizer):
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        _add_state(parts, pieces, special, f"optim.{index}.", name, f".{key}", parameter, value)
    return pieces, special


def weights(parts: Parts) -> tuple[list[Piece], dict[str, Tensor]]:
    """This rank's parts of the weights, and by name those tensors that cannot be cut."""
    pieces: list[Piece] = []
    special: dict[str, Tensor] = {}
    for name, parameter in parts.wrapper.named_parameters():
        cut = partial(parts.wrapper.pieces, "model.", name, parameter, parameter)
        _add(pieces, special, f"model.{name}", parameter, cut)
    return pieces, special


def _add_state(
    parts: Parts,
    pieces: list[Piece],
    special: dict[str, Tensor],
    prefix: str,
    name: str,
    suffix: str,
    parameter: Tensor,
    value: Tensor,
) -> None:
    def cut() -> list[Piece]:
        if value.dim() == 0 and parts.wrapper.local(value).dim() == 0:
            return [Piece.whole(f"{prefix}{name}{suffix}", parts.wrapper.local(value))]
        return parts.wrapper.pieces(prefix, name, parameter, value, suffix)

    _add(pieces, special, f"{prefix}{name}{suffix}", value, cut)


def _add(
    pieces: list[Piece], special: dict[str, Tensor], name: str, tensor: Tensor, cut: Callable[[], list[Piece]]
) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        special[name] = tensor.detach()
        return
    try:
        pieces += cut()
    except ValueError:
        special[name] = tensor.detach()  # no part of a parameter: this rank's own


def _shapes(parts: Parts, state: list[Piece]) -> dict[str, Any]:
    shapes = {piece.name: {"shape": list(piece.true_shape), "dtype": _dtype(piece.tensor.dtype)} for piece in state}
    for name, (shape, dtype) in parts.wrapper.all_shapes().items():
        shapes[f"model.{name}"] = {"shape": list(shape), "dtype": _dtype(dtype)}
    return shapes


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _aliases(parts: Parts) -> dict[str, str]:
    return {f"model.{alias}": f"model.{name}" for alias, name in parts.wrapper.aliases().items()}


def plain_state(parts: Parts) -> dict[str, Any]:
    """Everything of optimizers, scaler and registered objects that is no tensor of ``state/``."""
    return {
        "optimizers": plain_optimizers(parts),
        "scaler": parts.scaler.state(parts.is_late) if parts.scaler is not None else None,
        "registered": {
            name: thing.state_dict()
            for name, thing in parts.registered.items()
            if hasattr(thing, "state_dict") and not isinstance(thing, torch.nn.Module)
        },
    }


def plain_optimizers(parts: Parts) -> list[dict[str, Any]]:
    """Class, groups and plain state of each optimizer."""
    return [_plain_optimizer(parts, optimizer) for optimizer in parts.optimizers]


def _plain_optimizer(parts: Parts, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in parts.state.named_parameters_of(optimizer)}
    return {
        "class": type(optimizer).__name__,
        "groups": [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [names[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups
        ],
        "state": {
            names[id(parameter)]: {k: v for k, v in values.items() if not isinstance(v, Tensor)}
            for parameter, values in optimizer.state.items()
            if id(parameter) in names
        },
    }


def _evidence(parts: Parts, view: LocalView, report: FaultReport, moment: Moment) -> dict[str, Any]:
    device = parts.peers.device
    return {
        "rank": parts.peers.rank,
        "step": report.step,
        "sites": [ranked.site.to_dict() for ranked in view.sites[:MAX_SITES]],
        "budget_level": parts.budget.level_index,
        "compiled": parts.forward.compiled_layers(),
        "habits": sorted(list(habit) for habit in view.habits),
        "reduced_in": sorted(moment.reduced_in),
        "hyper_parameters": {name: json_safe(float(value)) for name, value in parts.state.hyper_parameters()},
        "in_eval": [name for name, module in parts.wrapper.named_modules() if not module.training],
        "frozen": [name for name, p in parts.wrapper.named_parameters() if not p.requires_grad],
        "damaged": view.damage.names(),
        "unchecked": unchecked(parts),
        "injected": testing.recorded(parts),
        "host": socket.gethostname(),
        "device": device_text(device),
        "dtypes": dtypes_of(parts),
        "scaler": json_safe(parts.scaler.state(parts.is_late)) if parts.scaler is not None else None,
    }


def dtypes_of(parts: Parts) -> dict[str, str]:
    """Dtype of each parameter."""
    return {name: _dtype(parameter.dtype) for name, parameter in parts.wrapper.named_parameters()}


def device_text(device: torch.device) -> dict[str, Any]:
    """Type, and of a GPU its index, name and uuid."""
    if device.type != "cuda":
        return {"type": device.type}
    properties = torch.cuda.get_device_properties(device)
    return {"type": "cuda", "index": device.index, "name": properties.name, "uuid": str(properties.uuid)}


def history_of(parts: Parts, readings_now: list[Reading]) -> dict[str, np.ndarray[Any, Any]]:
    """Slots of the last steps and of this one: ``step.<n>.labels`` (text), ``step.<n>.values`` (min, max)."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    steps = [(past.step, past.readings()) for past in parts.board.past()]
    for step, readings in steps:
        _add_slots(arrays, f"step.{step}", readings)
    _add_slots(arrays, "fault", readings_now)
    arrays["steps"] = np.array([step for step, _ in steps], dtype=np.int64)
    arrays["loss"] = np.array([_loss(readings) for _, readings in steps], dtype=np.float64)
    arrays["gradient_norm"] = np.array([_norm(readings) for _, readings in steps], dtype=np.float64)
    arrays["gradient_max"] = np.array([_gradient_max(readings) for _, readings in steps], dtype=np.float64)
    return arrays


def _add_slots(arrays: dict[str, np.ndarray[Any, Any]], prefix: str, readings: list[Reading]) -> None:
    slots = labelled_slots(readings)
    arrays[f"{prefix}.labels"] = np.array([label for label, _, _ in slots], dtype=np.str_)
    arrays[f"{prefix}.values"] = np.array([(low, high) for _, low, high in slots], dtype=np.float64).reshape(-1, 2)


def _loss(readings: list[Reading]) -> float:
    losses = [reading.maximum for reading in readings if isinstance(reading.note, LossNote)]
    return losses[-1] if losses else float("nan")


def _norm(readings: list[Reading]) -> float:
    """NaN where ``grad_norm_warn`` is not set."""
    norms = [reading.maximum for reading in readings if reading.region is Region.NORM]
    return norms[-1] if norms else float("nan")


def _gradient_max(readings: list[Reading]) -> float:
    values = list(_gradient_values(readings))
    return max(values) if values else float("nan")


def _gradient_values(readings: list[Reading]) -> Iterator[float]:
    for reading in readings:
        if isinstance(reading.note, GradientNote):
            yield max(abs(reading.minimum), abs(reading.maximum))
