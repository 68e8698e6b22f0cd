"""What this rank knows and holds when a fault is handled, as the request for a dump."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_nanguard.blame.inspect import RankFindings
from ddp_nanguard.blame.report import not_checked
from ddp_nanguard.capture.command import command, launcher_variables
from ddp_nanguard.capture.record import StepRecord
from ddp_nanguard.capture.window import MicroBatch, described
from ddp_nanguard.context import GuardContext
from ddp_nanguard.distributed.fault_group import FaultGroup
from ddp_nanguard.dump.history import FAULT, step_prefix
from ddp_nanguard.dump.manifest import device_of, settings
from ddp_nanguard.dump.rank_records import CompiledLayers, InjectedFault, RankEvidence
from ddp_nanguard.dump.records import TensorShape, WrapperDescription
from ddp_nanguard.dump.request import DumpRequest, no_plain_state
from ddp_nanguard.errors import line_of
from ddp_nanguard.inject.injection import fired_injections
from ddp_nanguard.probes.gradient import GradientSource
from ddp_nanguard.probes.slot_keys import keyed_slots
from ddp_nanguard.probes.slot_roles import SlotRole
from ddp_nanguard.probes.slots import SlotStats
from ddp_nanguard.probes.sources import LossSource
from ddp_nanguard.probes.state import state_of
from ddp_nanguard.report.types import MAX_SITES, FaultReport, Phase
from ddp_nanguard.tensors.containers import named_tensors_in
from ddp_nanguard.tensors.dtypes import dtype_name
from ddp_nanguard.tensors.shards import TensorShard
from ddp_nanguard.wrappers.weights import add_tensor, weights

_log = logging.getLogger(__name__)


def dump_request(context: GuardContext, record: StepRecord, findings: RankFindings, report: FaultReport) -> DumpRequest:
    """Everything of this rank that replay needs. Host sync: many; fault path only.

    Args:
        context: of the guard.
        record: the step to replay.
        findings: what this rank found.
        report: what all ranks say.
    """
    attempt = context.undone.attempt
    answers = context.reach.answers
    state, special = _state(context, record) if answers else ([], {})
    window = record.window.micro_batches if answers else [_on_host(m) for m in record.window.micro_batches]
    for micro_batch in window:
        micro_batch.scaler = record.scaler_state()
    return DumpRequest(
        report=report,
        rank=context.ranks.rank,
        world_size=context.ranks.world_size,
        group=None if context.ranks.peers_lost else context.ranks.fault_group.group,
        why_alone=FaultGroup.why_alone if context.ranks.peers_lost else context.ranks.fault_group.why_alone,
        config=context.config,
        wrapper=WrapperDescription.from_dict(context.wrapper.describe()),
        state=state,
        shapes=_shapes(context, state),
        aliases=_aliases(context),
        plain_state=attempt("dump: plain state is left out", lambda: plain_state(context, record), no_plain_state())
        if answers
        else no_plain_state(),
        special=special,
        shard_index=context.wrapper.shard_index,
        num_shards=context.wrapper.num_shards,
        replica_index=context.wrapper.replica_index,
        evidence=_evidence(context, record, findings, report),
        window=attempt("dump: batches are left out", lambda: [_redacted(m) for m in window], [])
        if context.config.redact
        else window,
        buffers={**dict(context.wrapper.named_buffers()), **record.window.buffers()} if answers else {},
        history=history_of(context, _readable_slots(context, record)),
        recipe=context.recipe,
        damaged={f"model.{name}" for name in findings.nonfinite_state.lasting()},
        run_id=run_id(),
        argv=attempt("dump: argv is left out", lambda: tuple(map(str, sys.argv)), ()),
        recipe_directory=context.recipe_directory,
        command=attempt("dump: the command of the job is left out", command, ()),
        directory=attempt("dump: the directory of the job is left out", os.getcwd, ""),
        launcher=launcher_variables(),
    )


def _redacted(micro_batch: MicroBatch) -> MicroBatch:
    """The micro-batch with its tensors described instead of kept."""
    return replace(micro_batch, batch=described(micro_batch.batch))


def _readable_slots(context: GuardContext, record: StepRecord) -> list[SlotStats]:
    """The slots of the step, which is not the one that was looked at where its update is undone."""
    slot_stats = record.slots.slot_stats() if context.reach.answers else []
    return [stats for stats in slot_stats if context.reach.covers(stats.order)]


def _on_host(micro_batch: MicroBatch) -> MicroBatch:
    """The micro-batch, described where it lies on a device that does not answer."""
    tensors = [tensor for _, tensor in named_tensors_in(micro_batch.batch)]
    return micro_batch if all(tensor.device.type == "cpu" for tensor in tensors) else _redacted(micro_batch)


def run_id() -> str:
    """The same on all ranks of a run and no other, as far as the launcher tells."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    return "-".join(os.environ.get(name, "") for name in names)


def _state(context: GuardContext, record: StepRecord) -> tuple[list[TensorShard], dict[str, Tensor]]:
    shards: list[TensorShard] = []
    special: dict[str, Tensor] = {}
    attempt, config = context.undone.attempt, context.config
    if config.dump_weights:
        nothing = shards, special
        shards, special = attempt("dump: weights are left out", lambda: weights(context.wrapper), nothing)
    if config.dump_optimizer:
        what = "dump: optimizer state is left out"
        attempt(what, lambda: _add_optimizers(context, shards, special), None)
    attempt("dump: gradients are left out", lambda: _add_gradients(context, record, shards, special), None)
    return shards, special


def _add_gradients(
    context: GuardContext, record: StepRecord, shards: list[TensorShard], special: dict[str, Tensor]
) -> None:
    for name, (parameter, gradient) in record.gradients.items():
        cut = partial(context.wrapper.shards, "grad.", name, parameter, gradient)
        add_tensor(shards, special, f"grad.{name}", gradient, cut)


def _add_optimizers(context: GuardContext, shards: list[TensorShard], special: dict[str, Tensor]) -> None:
    for index, optimizer in enumerate(context.optimizers):
        for name, parameter in context.state.named_parameters_of(optimizer):
            for key, value in state_of(optimizer, parameter).items():
                if isinstance(value, Tensor):
                    _add_state(context, shards, special, f"optim.{index}.", name, f".{key}", parameter, value)


def _add_state(
    context: GuardContext,
    shards: list[TensorShard],
    special: dict[str, Tensor],
    prefix: str,
    name: str,
    suffix: str,
    parameter: Tensor,
    value: Tensor,
) -> None:
    if value.is_meta:
        context.undone.add(f"dump: {prefix}{name}{suffix} is left out: a meta tensor holds nothing")
        return

    def cut() -> list[TensorShard]:
        if value.dim() == 0 and context.wrapper.local(value).dim() == 0:
            return [TensorShard.whole(f"{prefix}{name}{suffix}", context.wrapper.local(value))]
        return context.wrapper.shards(prefix, name, parameter, value, suffix)

    add_tensor(shards, special, f"{prefix}{name}{suffix}", value, cut)


def _shapes(context: GuardContext, state: list[TensorShard]) -> dict[str, TensorShape]:
    shapes = {shard.name: TensorShape(tuple(shard.true_shape), dtype_name(shard.tensor.dtype)) for shard in state}
    for name, (shape, dtype) in context.wrapper.all_shapes().items():
        shapes[f"model.{name}"] = TensorShape(tuple(shape), dtype_name(dtype))
    return shapes


def _aliases(context: GuardContext) -> dict[str, str]:
    return {f"model.{alias}": f"model.{name}" for alias, name in context.wrapper.aliases().items()}


def plain_state(context: GuardContext, record: StepRecord) -> dict[str, Any]:
    """Everything of optimizers, scaler and registered objects that is no tensor of ``state/``."""
    return {
        "optimizers": plain_optimizers(context),
        "scaler": record.scaler_state(),
        "registered": {
            name: _state_of(name, thing)
            for name, thing in context.registered.items()
            if hasattr(thing, "state_dict") and not isinstance(thing, torch.nn.Module)
        },
    }


def _state_of(name: str, thing: Any) -> Any:
    """The state of a registered object, or in its place why there is none: its code is the user's."""
    try:
        return thing.state_dict()
    except Exception as error:
        _log.error("dump: state of registered %r is left out: %s", name, line_of(error))
        return {"left out": line_of(error)}


def plain_optimizers(context: GuardContext) -> list[dict[str, Any]]:
    """Class, groups and plain state of each optimizer."""
    return [_plain_optimizer(context, optimizer) for optimizer in context.optimizers]


def _plain_optimizer(context: GuardContext, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in context.state.named_parameters_of(optimizer)}
    return {
        "class": type(optimizer).__name__,
        "groups": [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [names[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups
        ],
        "state": {
            name: {k: v for k, v in state_of(optimizer, parameter).items() if not isinstance(v, Tensor)}
            for name, parameter in context.state.named_parameters_of(optimizer)
            if parameter in optimizer.state
        },
    }


def _evidence(context: GuardContext, record: StepRecord, findings: RankFindings, report: FaultReport) -> RankEvidence:
    attempt = context.undone.attempt
    return RankEvidence(
        rank=context.ranks.rank,
        step=report.step,
        settings=settings(),
        host=attempt("dump: the host has no name", socket.gethostname, ""),
        device=device_of(context.device),
        sites=tuple(ranked.site for ranked in findings.sites[:MAX_SITES]),
        compiled_layers=CompiledLayers(**{name: tuple(of) for name, of in context.forward.compiled_layers().items()}),
        known_nonfinite=tuple(sorted(findings.known_nonfinite)),
        reduced_micro_batches=tuple(sorted(record.window.reduced_micro_batches)),
        hyper_parameters=_single_numbers(record),
        eval_modules=tuple(name for name, module in context.wrapper.named_modules() if not module.training),
        frozen_parameters=tuple(name for name, p in context.wrapper.named_parameters() if not p.requires_grad),
        nonfinite_state=tuple(findings.nonfinite_state.names()),
        unchecked=tuple(not_checked(context, record, findings)),
        injected=tuple(
            InjectedFault(**{**spec, "phase": Phase(spec["phase"])}) for spec in fired_injections(context.wrapper.root)
        ),
        dtypes=dtypes_of(context),
        scaler=record.scaler_state(),
    )


def _single_numbers(record: StepRecord) -> dict[str, float]:
    numbers = record.hyper_parameters
    return {name: float(value) for name, value in numbers if not isinstance(value, Tensor) or value.numel() == 1}


def dtypes_of(context: GuardContext) -> dict[str, str]:
    """Dtype of each parameter."""
    return {name: dtype_name(parameter.dtype) for name, parameter in context.wrapper.named_parameters()}


def history_of(context: GuardContext, slots_now: list[SlotStats]) -> dict[str, np.ndarray[Any, Any]]:
    """Slots of the last steps and of this one: ``step.<n>.labels`` (text), ``step.<n>.values`` (min, max)."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    steps = [(past.step, past.slot_stats()) for past in context.slots.past()] if context.reach.answers else []
    for step, slot_stats in steps:
        _add_slots(arrays, step_prefix(step), slot_stats)
    _add_slots(arrays, FAULT, slots_now)
    arrays["steps"] = np.array([step for step, _ in steps], dtype=np.int64)
    arrays["loss"] = np.array([_loss(slot_stats) for _, slot_stats in steps], dtype=np.float64)
    arrays["gradient_norm"] = np.array([_norm(slot_stats) for _, slot_stats in steps], dtype=np.float64)
    arrays["gradient_max"] = np.array([_gradient_max(slot_stats) for _, slot_stats in steps], dtype=np.float64)
    return arrays


def _add_slots(arrays: dict[str, np.ndarray[Any, Any]], prefix: str, slot_stats: list[SlotStats]) -> None:
    keyed = keyed_slots(slot_stats)
    arrays[f"{prefix}.labels"] = np.array([key.to_label() for key, _ in keyed], dtype=np.str_)
    arrays[f"{prefix}.values"] = np.array([values for _, values in keyed], dtype=np.float64).reshape(-1, 2)


def _loss(slot_stats: list[SlotStats]) -> float:
    losses = [stats.maximum for stats in slot_stats if isinstance(stats.source, LossSource)]
    return losses[-1] if losses else float("nan")


def _norm(slot_stats: list[SlotStats]) -> float:
    """NaN where ``grad_norm_warn`` is not set."""
    norms = [stats.maximum for stats in slot_stats if stats.role is SlotRole.NORM]
    return norms[-1] if norms else float("nan")


def _gradient_max(slot_stats: list[SlotStats]) -> float:
    values = list(_gradient_values(slot_stats))
    return max(values) if values else float("nan")


def _gradient_values(slot_stats: list[SlotStats]) -> Iterator[float]:
    for stats in slot_stats:
        if isinstance(stats.source, GradientSource):
            yield max(abs(stats.minimum), abs(stats.maximum))
