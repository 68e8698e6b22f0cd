"""Runs the dumped step again, under the same monitor and probes that watched it in training."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ddp_nanguard.blame import local_sites
from ddp_nanguard.blame.inspect import blame_input, rescan
from ddp_nanguard.blame.triage import Decision, Judgement, Triage
from ddp_nanguard.build import build_context
from ddp_nanguard.capture import rng
from ddp_nanguard.capture.record import StepRecord
from ddp_nanguard.capture.window import MicroBatch
from ddp_nanguard.config import environment_ignored
from ddp_nanguard.context import GuardContext
from ddp_nanguard.dump.read import Dump
from ddp_nanguard.errors import DumpError, line_of
from ddp_nanguard.hooks.frames import is_users_own
from ddp_nanguard.hooks.loop import Steps, named_losses
from ddp_nanguard.inject.injection import Injection
from ddp_nanguard.inject.injector import follow_counter, reinject
from ddp_nanguard.inject.step_counter import unregister_counter
from ddp_nanguard.probes.severity import Severity
from ddp_nanguard.probes.slot_keys import keyed_slots, vital_signs
from ddp_nanguard.probes.slots import SlotStats
from ddp_nanguard.report.slot_key import SlotKey
from ddp_nanguard.report.types import RAISED, FaultReport, Phase, Site
from ddp_nanguard.step.monitor import StepMonitor

from .rebuild import Rebuilt, fill_shards, recorded_gradients

# What is inspected and how long ranks wait; other options decide what is done about a fault.
_KEPT_OPTIONS = ("root", "watch", "skip_types", "ignore", "state_every", "timeout_s", "scale_floor")


@dataclass
class StepResult:
    """What the step gave in the replay.

    Attributes:
        report: of the fault; None where the verdict was clean.
        sites: this rank's own, earliest first.
        as_watched: those that a run sees that watches what was watched in training, which may be no layer.
        slots: key -> (minimum, maximum), in execution order.
        losses: by (micro-batch, name).
        notes: random streams that could not be restored, and the like.
    """

    report: FaultReport | None
    sites: list[Site]
    slots: dict[SlotKey, tuple[float, float]]
    losses: dict[tuple[int, str], Tensor]
    notes: list[str] = field(default_factory=list)
    as_watched: list[Site] = field(default_factory=list)


MAX_RAISED = 200
"""Characters of the text of an exception that a note shows."""


class Collector:
    """A `VerdictHandler` that records what a verdict means instead of acting on it.

    Args:
        context: of the run.
        watched_layers: whether training did.
        saw_outputs: whether training, where it looked at no layer, has recorded what a layer gave.

    Attributes:
        fault: the judgement of the fault that was found, None where there was none.
        as_watched: see `StepResult`.
    """

    def __init__(self, context: GuardContext, watched_layers: bool, saw_outputs: bool = False) -> None:
        self.fault: Judgement | None = None
        self.as_watched: list[Site] = []
        self._context = context
        self._watched_layers = watched_layers
        self._saw_outputs = saw_outputs
        self._triage = Triage(context)

    def on_clean(self) -> None:
        """Tell the triage that the step was clean."""
        self._triage.on_clean()

    def on_verdict(self, severity: Severity, record: StepRecord) -> Decision:
        """Record a fault and have the update skipped; where the triage finds no fault, return its decision.

        Never raises for a fault, unlike the guard's own handler.
        """
        judgement = self._triage.judge(severity, record)
        if judgement.decision is not None:
            return judgement.decision
        judgement = self._triage.examine(judgement, record)
        if judgement.decision is not None:
            return judgement.decision
        self.fault, findings = judgement, judgement.findings
        assert findings is not None
        ranked = findings.sites
        if not self._watched_layers:
            signs = vital_signs(findings.slot_stats, self._context.scaler is not None)
            ranked = local_sites(blame_input(self._context, record, replace(findings, slot_stats=signs)))
        self.as_watched = [each.site for each in ranked]
        return Decision.SKIP

    def on_raise(self, error: BaseException, record: StepRecord) -> None:
        """The step raised, as it did in training, before any verdict: what was seen until then is the fault."""
        if not self._triage.has_findings(record):
            self._context.look_at_raise(error)
        findings = rescan(self._context, record)
        report = self._triage.report(record, findings, f"the step raised {line_of(error)}")
        self.fault = Judgement(None, Severity.FAULT, findings=findings, report=report)
        ranked = findings.sites
        if not self._watched_layers:  # what raises may have had no more to show than the model's output
            signs = vital_signs(findings.slot_stats, has_scaler=self._saw_outputs)
            ranked = local_sites(blame_input(self._context, record, replace(findings, slot_stats=signs)))
        self.as_watched = [each.site for each in ranked]

    @property
    def report(self) -> FaultReport | None:
        """The report of the fault, the same on all ranks; None where there was none."""
        return None if self.fault is None else self.fault.report


@dataclass
class Run:
    """One step of a rebuilt job under a monitor of its own."""

    rebuilt: Rebuilt
    context: GuardContext
    collector: Collector
    monitor: StepMonitor
    notes: list[str] = field(default_factory=list)


def run_step(rebuilt: Rebuilt, micro_batches: list[MicroBatch], alone: bool) -> StepResult:
    """Run the window again, under the same monitor and the same probes that watched it in training.

    Args:
        rebuilt: model, optimizers and scaler of the dumped step.
        micro_batches: the recorded window, or a part of it.
        alone: this process stands for its rank, without peers.

    Raises:
        DumpError: the recorded options or injected faults do not fit the rebuilt model.

    Collective: those of the training step and of a guard; every rank calls it, unless ``alone``.
    """
    with monitored(rebuilt) as run:
        return _result(run, micro_batches, alone)


@contextlib.contextmanager
def monitored(
    rebuilt: Rebuilt,
    make_monitor: Callable[[GuardContext, Collector], StepMonitor] = StepMonitor,
    answers_alone: bool = False,
) -> Iterator[Run]:
    """The step under a monitor of its own, with the options and the injected faults that were recorded.

    Args:
        rebuilt: model, optimizers and scaler.
        make_monitor: builds the monitor.
        answers_alone: no collective of a guard is issued, whatever process group there is.

    Raises:
        DumpError: the recorded options or injected faults do not fit the model.

    Collective: those of building a guard, unless ``answers_alone``.
    """
    context = _context(rebuilt, answers_alone)
    saw_outputs = any(site.phase is Phase.FORWARD for site in rebuilt.dump.evidence(rebuilt.rank).sites)
    collector = Collector(context, rebuilt.dump.manifest.options.layers != "none", saw_outputs)
    run = Run(rebuilt, context, collector, make_monitor(context, collector))
    model, root = context.wrapper.model, context.wrapper.root
    run.monitor.attach()
    follow_counter(model, run.monitor.counter, None, rebuilt.rank)
    injections: list[Injection] = []
    try:
        injections, run.notes = _reinjected(rebuilt)
        yield run
    finally:
        unregister_counter(root, run.monitor.counter)
        for injection in injections:
            injection.remove()
        run.monitor.release()
        context.close()


def _context(rebuilt: Rebuilt, answers_alone: bool) -> GuardContext:
    """The guard context of the run, with the recorded options as far as they decide what is inspected."""
    dump = rebuilt.dump
    options: dict[str, Any] = {name: getattr(dump.manifest.options, name) for name in _KEPT_OPTIONS}
    if dump.report.cause.startswith("scale collapse"):
        options["max_consecutive_overflows"] = 1  # one window is all there is: its overflow is the fault
    # where training looked at no layer the replay does all the same: it is to tell where
    layers = dump.manifest.options.layers if dump.manifest.options.layers != "none" else "every"
    options.update(dump_dir=None, keep_previous=False, first_step=dump.report.step, layers=layers)
    try:
        # Environment variables of this process are not those of the recorded run.
        with environment_ignored():
            context = build_context(
                rebuilt.wrapper.model,
                rebuilt.optimizers,
                rebuilt.scaler,
                None,
                rebuilt.group,
                options,
                answers_alone=answers_alone,
            )
    except ValueError as error:
        what = str(error).splitlines()[0]
        raise DumpError(
            f"{dump.path}: the step cannot be guarded again ({what}); give the recipe of that run"
        ) from error
    evidence = dump.evidence(rebuilt.rank)
    compiled = evidence.compiled_layers
    # compiled code carried hooks of its own choice: the same slots must exist, so that bits can be compared
    context.forward.watch_as_compiled(compiled.traced, compiled.watched)
    context.known_nonfinite = frozenset(evidence.known_nonfinite)
    context.follow_known()
    context.is_replay = True
    context.slots.exact = dump.manifest.options.verdict == "deferred"  # see `SlotBuffer`
    return context


def _reinjected(rebuilt: Rebuilt) -> tuple[list[Injection], list[str]]:
    injected = rebuilt.dump.evidence(rebuilt.rank).injected
    try:
        return reinject(rebuilt.wrapper.model, [vars(fault) for fault in injected])
    except KeyError as error:
        raise DumpError(
            f"{rebuilt.dump.path}: a fault was injected in layer {error}, which the recipe's model has not; "
            "give the recipe of that run"
        ) from None


def _result(run: Run, micro_batches: list[MicroBatch], alone: bool) -> StepResult:
    try:
        losses = _forward_backward(run, micro_batches)
    except Exception as error:
        if not (alone and has_raised(run.rebuilt.dump)):
            raise
        run.collector.on_raise(error, run.monitor.record())
        run.notes.append(raised_text(run.rebuilt.dump, error))
        return gathered(run, {})
    run.monitor.check()
    # The update runs only if the window is clean: in training it would not have been reached otherwise.
    recorded = run.rebuilt.dump.report.origin
    if run.collector.fault is None and is_update(recorded) and run.rebuilt.recipe.optimizer is not None:
        _update(run, alone)
    return gathered(run, losses)


def has_raised(dump: Dump) -> bool:
    """Whether the fault of a dump was noticed since code of the job raised."""
    return RAISED in dump.report.cause


def raised_text(dump: Dump, error: BaseException) -> str:
    """What a step raised, where in the job's own code, and what training raised."""
    walked = list(traceback.walk_tb(error.__traceback__))
    frame, line = next(((f, n) for f, n in reversed(walked) if is_users_own(f)), walked[-1])
    name = type(error).__name__
    then = "as in training" if f"raised {name} {RAISED}" in dump.report.cause else f"in training: {dump.report.cause}"
    place = f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
    return f"the step raised {name} at {place}, {then}: {line_of(error).partition(': ')[2][:MAX_RAISED]}"


def gathered(run: Run, losses: dict[tuple[int, str], Tensor]) -> StepResult:
    """What the step gave, once its verdict was read; ``losses`` by (micro-batch, name)."""
    report, fault = run.collector.report, run.collector.fault
    # A clean step has moved its slots to the history; those of a fault are in the findings.
    slot_stats = _slots_of_clean_step(run.context)
    if fault is not None and fault.findings is not None and report is not None and not is_update(report.origin):
        slot_stats = fault.findings.recorded
    slots = dict(keyed_slots(slot_stats))
    sites = [ranked.site for ranked in fault.findings.sites] if fault is not None and fault.findings is not None else []
    return StepResult(report, sites, slots, losses, list(dict.fromkeys(run.notes)), run.collector.as_watched)


def _forward_backward(run: Run, micro_batches: list[MicroBatch]) -> dict[tuple[int, str], Tensor]:
    """Run all micro-batches, each with its random state and its sync flag; the losses by (micro-batch, name)."""
    rebuilt, losses = run.rebuilt, dict[tuple[int, str], Tensor]()
    synced = set(rebuilt.dump.evidence(rebuilt.rank).reduced_micro_batches)
    remarks: list[str] = []
    for micro_batch, batch in zip(micro_batches, Steps([m.batch for m in micro_batches], run.monitor), strict=True):
        remarks += rng.restore(micro_batch.random_state, rebuilt.recipe.generators, rebuilt.device)
        with _sync(rebuilt, micro_batch.index in synced or not synced):
            _micro_step(run, batch, list(micro_batch.losses))
        kept = run.context.window.micro_batches[-1].losses
        losses.update({(micro_batch.index, name): loss for name, loss in kept.items()})
    run.notes = [*remarks, *run.notes]
    return losses


def _slots_of_clean_step(context: GuardContext) -> list[SlotStats]:
    past = context.slots.past()
    return past[0].slot_stats() if past else []


def _micro_step(run: Run, batch: Any, names: list[str]) -> None:
    rebuilt = run.rebuilt
    losses = rebuilt.recipe.step(rebuilt.wrapper.model, batch)
    for name, value in named_losses(_named_as_recorded(losses, names)):
        run.monitor.watch_loss(name, value)
    total = sum(losses.values()) if isinstance(losses, dict) else losses
    assert isinstance(total, Tensor)
    if total.requires_grad:
        (rebuilt.scaler.scale(total) if rebuilt.scaler is not None else total).backward()  # type: ignore[no-untyped-call]  # torch's own


def _named_as_recorded(losses: Tensor | dict[str, Tensor], names: list[str]) -> dict[str, Any]:
    """The losses under the names that training watched them by, as far as they can be matched."""
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


def is_update(origin: Site | None) -> bool:
    """Whether the update itself made the weights non-finite, so that a replay runs it too."""
    return origin is not None and origin.phase is Phase.OPTIMIZER and origin.layer is not None


def _update(run: Run, alone: bool) -> None:
    """Run the update and judge the weights after it.

    Alone, the gradients are the recorded ones: this rank's own are those from before the reduce.
    """
    if alone or not dist.is_initialized():
        lay_in_gradients(run.rebuilt)
    for optimizer in run.rebuilt.optimizers:
        optimizer.step()
    run.monitor.check()


def lay_in_gradients(rebuilt: Rebuilt) -> None:
    """Give the parameters the gradients that the recorded update used."""
    for parameter, shards, gradient in list(recorded_gradients(rebuilt)):
        fill_shards(rebuilt, shards)
        parameter.grad = gradient
