"""The dumped step once more, under the same guard that saw it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from ddp_nanguard.capture import rng
from ddp_nanguard.capture.window import MicroBatch
from ddp_nanguard.config import environment_ignored
from ddp_nanguard.errors import NonFiniteError
from ddp_nanguard.inject import injector
from ddp_nanguard.probes.labels import labelled_slots
from ddp_nanguard.probes.slots import SlotStats
from ddp_nanguard.report.types import FaultReport, Phase, Site

from .rebuild import Rebuilt, fill_shards, recorded_gradients

if TYPE_CHECKING:
    from ddp_nanguard.guard import NanGuard

_KEPT_OPTIONS = ("watch", "skip_types", "ignore", "state_every", "timeout_s", "scale_floor")


@dataclass
class StepResult:
    """What the step gave this time.

    Attributes:
        report: None where the verdict was clean.
        sites: this rank's own, earliest first.
        slots: label -> (minimum, maximum), in execution order.
        losses: by (micro-batch, name).
        notes: random streams that could not be restored, and the like.
    """

    report: FaultReport | None
    sites: list[Site]
    slots: dict[str, tuple[float, float]]
    losses: dict[tuple[int, str], Tensor]
    notes: list[str] = field(default_factory=list)


def run_step(rebuilt: Rebuilt, micro_batches: list[MicroBatch], alone: bool) -> StepResult:
    """Run the window again.

    Collective: those of the training step and of the guard; every rank calls it, unless ``alone``.
    """
    from ddp_nanguard.guard import NanGuard

    options = {name: rebuilt.dump.manifest["options"][name] for name in _KEPT_OPTIONS}
    report = rebuilt.dump.report
    if report.cause.startswith("scale collapse"):
        options["max_consecutive_overflows"] = 1  # one window is all there is: its overflow is the fault
    with environment_ignored():
        guard = NanGuard(
            rebuilt.wrapper.model,
            rebuilt.optimizers,
            scaler=rebuilt.scaler,
            group=rebuilt.group,
            dump_dir=None,
            budget=None,
            keep_previous=False,
            first_step=report.step,
            **options,
        )
    guard._policy.is_quiet = True
    evidence = rebuilt.dump.evidence(rebuilt.rank)
    guard._context.budget.start_at(evidence.get("budget_level", 0), evidence.get("compiled"))
    planted = injector.reinject(guard, guard._context, rebuilt.dump.evidence(rebuilt.rank).get("injected", []))
    guard._context.known_nonfinite = frozenset(tuple(h) for h in rebuilt.dump.evidence(rebuilt.rank)["known_nonfinite"])
    try:
        again = _run(guard, rebuilt, micro_batches, alone)
        again.notes += planted
        return again
    finally:
        guard._detach()


def _run(guard: NanGuard, rebuilt: Rebuilt, micro_batches: list[MicroBatch], alone: bool) -> StepResult:
    losses: dict[tuple[int, str], Tensor] = {}
    notes: list[str] = []
    synced = set(rebuilt.dump.evidence(rebuilt.rank)["reduced_micro_batches"])
    for micro_batch, batch in zip(micro_batches, guard.steps([m.batch for m in micro_batches]), strict=True):
        notes += rng.restore(micro_batch.random_state, rebuilt.recipe.generators, rebuilt.device)
        with _sync(rebuilt, micro_batch.index in synced or not synced):
            _micro_step(guard, rebuilt, batch, list(micro_batch.losses))
        kept = guard._context.window.micro_batches[-1].losses
        losses.update({(micro_batch.index, name): loss for name, loss in kept.items()})
    report = _verdict(guard)
    if report is None and _is_update(rebuilt.dump.report.origin) and rebuilt.recipe.optimizer is not None:
        report = _update(guard, rebuilt, alone)
    findings = guard._policy.last_findings
    slot_stats = (
        _first_window(guard) if findings is None or report is None or _is_update(report.origin) else findings.slot_stats
    )
    slots = {label: (low, high) for label, low, high in labelled_slots(slot_stats)}
    sites = [ranked.site for ranked in findings.sites] if findings is not None else []
    return StepResult(report, sites, slots, losses, list(dict.fromkeys(notes)))


def _first_window(guard: NanGuard) -> list[SlotStats]:
    past = guard._context.slots.past()
    return past[0].slot_stats() if past else []


def _micro_step(guard: NanGuard, rebuilt: Rebuilt, batch: Any, names: list[str]) -> None:
    losses = rebuilt.recipe.step(rebuilt.wrapper.model, batch)
    guard.watch(**_named_as_recorded(losses, names))
    total = sum(losses.values()) if isinstance(losses, dict) else losses
    assert isinstance(total, Tensor)
    if total.requires_grad:
        (rebuilt.scaler.scale(total) if rebuilt.scaler is not None else total).backward()  # type: ignore[no-untyped-call]  # torch's own


def _named_as_recorded(losses: Tensor | dict[str, Tensor], names: list[str]) -> dict[str, Any]:
    """The losses under the names that training watched them by, where it is clear which is which."""
    given = losses if isinstance(losses, dict) else {"loss": losses}
    if len(names) == 1 and len(given) == 1:
        return {names[0]: next(iter(given.values()))}
    for prefix in {name.partition(".")[0] for name in names if "." in name}:
        if any(f"{prefix}.{key}" in names for key in given):
            return {prefix: given}
    return given


def _sync(rebuilt: Rebuilt, synced: bool) -> contextlib.AbstractContextManager[Any]:
    model = rebuilt.wrapper.model
    if not synced and hasattr(model, "no_sync"):
        return model.no_sync()  # type: ignore[no-any-return, operator]  # DDP's and FSDP1's context manager
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(synced)  # type: ignore[operator]  # FSDP2
    return contextlib.nullcontext()


def _verdict(guard: NanGuard) -> FaultReport | None:
    try:
        guard.check()
    except NonFiniteError as error:
        return error.report
    return None


def _is_update(origin: Site | None) -> bool:
    return origin is not None and origin.phase is Phase.OPTIMIZER and origin.layer is not None


def _update(guard: NanGuard, rebuilt: Rebuilt, alone: bool) -> FaultReport | None:
    """The update itself. Alone, the gradients are the recorded ones: this rank's own are those before the reduce."""
    for parameter, shards, gradient in list(recorded_gradients(rebuilt)):
        if alone or not dist.is_initialized():
            fill_shards(rebuilt, shards)
            parameter.grad = gradient
    for optimizer in rebuilt.optimizers:
        optimizer.step()
    return _verdict(guard)
