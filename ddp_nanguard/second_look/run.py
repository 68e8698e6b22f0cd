"""Runs the window of a step again on the live model, under a monitor of its own that looks at everything."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ddp_nanguard.blame import local_sites
from ddp_nanguard.blame.inspect import RankFindings, blame_input, rescan
from ddp_nanguard.blame.report import fill_sites
from ddp_nanguard.blame.triage import Decision
from ddp_nanguard.build import compose
from ddp_nanguard.capture import rng
from ddp_nanguard.capture.model_calls import BackwardPass, ModelCall, StepEvent, WatchedLoss, screen_of
from ddp_nanguard.capture.record import StepRecord
from ddp_nanguard.capture.window import MicroBatch
from ddp_nanguard.context import GuardContext
from ddp_nanguard.diagnosis.trace.traced_step import Traced, TracedJob, Watcher
from ddp_nanguard.hooks.loop import named_losses
from ddp_nanguard.inject.injector import injected_again
from ddp_nanguard.probes.severity import Severity
from ddp_nanguard.probes.slot_keys import vital_signs
from ddp_nanguard.probes.slots import is_clean
from ddp_nanguard.probes.sources import LossSource
from ddp_nanguard.replay.session import is_compiled
from ddp_nanguard.report.types import Site
from ddp_nanguard.step.monitor import StepMonitor
from ddp_nanguard.tensors.batch import batch_tensors
from ddp_nanguard.tensors.containers import copied_tensors, copy_containers, named_tensors_in, path_text, tensors_in
from ddp_nanguard.validate import ValidatedArgs
from ddp_nanguard.wrappers import wrapper_of

from .compare import OutputPair, own_sites
from .inputs import changed_by_a_call, python_state
from .place import SEED_NAME

_FABRIC = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")


@dataclass
class SecondRun:
    """What one run of the window gave on this rank.

    Attributes:
        context: of the run: a guard's, that watches everything.
        record: of the step as it ran now.
        findings: what was seen.
        as_watched: this rank's sites by its vital signs alone.
        outputs: of the model in both runs.
        traced: what the trace saw; None where none was asked for.
        stateful: attributes of the model that the run has changed, and so the calls of training.
        unfollowed: parts of the model's output whose gradient training did not record, being objects of other classes.
    """

    context: GuardContext
    record: StepRecord
    findings: RankFindings
    as_watched: list[Site]
    outputs: list[OutputPair]
    traced: Traced | None
    stateful: list[str] = field(default_factory=list)
    unfollowed: list[str] = field(default_factory=list)

    @property
    def has_healed(self) -> bool:
        """Whether an output of the model was bad in training and is finite now: then its gradient tells nothing."""
        return any(not pair.then_is_finite and pair.now_is_finite for pair in self.outputs)

    @property
    def is_bad(self) -> bool:
        """Whether this rank has made, or been given, something bad before any communication."""
        return bool(own_sites(self.findings)) and not self.has_healed


@dataclass
class StepAgain:
    """The recorded step, to be run any number of times.

    Attributes:
        context: of the job's guard.
        record: of the step.
        keep_gradients: whether the job needs the gradients that are there now.
        progress: counts what has been done, as a sign of life.
    """

    context: GuardContext
    record: StepRecord
    keep_gradients: bool
    progress: Callable[[], int] = field(default=lambda: 0)

    @property
    def is_compiled(self) -> bool:
        """Whether training runs compiled code."""
        return any(self.context.compiled) or is_compiled(self.context.wrapper.model)

    def run(self, *, traced: bool = False, eager: bool = True, everything: bool = True) -> SecondRun:
        """Run the window once. Whatever the step raises is raised here, when all has been put back.

        Args:
            traced: whether every operator is looked at.
            eager: whether compiled code runs eagerly.
            everything: whether layers are watched; else only what a clean step looks at.

        Collective: those of the model; every rank must call it. Host sync: many.
        """
        context, wrapper = self.context, self.context.wrapper
        saved = self.record.window.buffers()
        watcher = Watcher(is_lenient=True) if traced else None  # its peers would wait for a rank that raises
        with contextlib.ExitStack() as stack:
            stack.enter_context(context.paused())
            stack.enter_context(rng.kept(context.device, context.window.generators, context.window.other_devices))
            stack.enter_context(wrapper.aside(saved, self.keep_gradients))
            stack.enter_context(_as_in_training())
            if eager and self.is_compiled:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            second = _context_like(context, self.record.step, everything)
            before = python_state(context, self.record)
            found = self._run(second, watcher)
            found.unfollowed = list(dict.fromkeys(self._unfollowed))
            found.stateful = changed_by_a_call(before, python_state(context, self.record))
            return found

    def _run(self, second: GuardContext, watcher: Watcher | None) -> SecondRun:
        monitor = StepMonitor(second, _NoVerdict())
        self._outputs: list[OutputPair] = []
        self._unfollowed: list[str] = []
        self.progress = lambda: second.slots.order + (watcher.num_operators if watcher is not None else 0)
        monitor.attach()
        job = TracedJob(
            second.wrapper,
            second.optimizers,
            self.context.scaler is not None,
            self.is_compiled,
            self.context.config.root == "step",
        )
        indices = [micro_batch.index for micro_batch in self.record.window.micro_batches]
        try:
            followed = watcher.following(job, indices) if watcher is not None else _nothing()
            with injected_again(second.wrapper.root, monitor.counter), followed:
                for micro_batch in self.record.window.micro_batches:
                    self._run_micro_batch(micro_batch, monitor, second, watcher)
                second.flush_compiled()
            record = _record_of(second, self.record)
            findings = rescan(second, record)
            # now, while the parameters are those that the calls took
            fill_sites(second, record, findings)
            unread = second.undone.take()
            if unread is not None:  # half of what is to be compared would look like another outcome
                raise RuntimeError(unread)
            as_watched = self._as_watched(second, record, findings)
            traced = watcher.result([]) if watcher is not None else None
            return SecondRun(second, record, findings, as_watched, self._outputs, traced)
        finally:
            monitor.release()

    def _as_watched(self, second: GuardContext, record: StepRecord, findings: RankFindings) -> list[Site]:
        signs = vital_signs(findings.slot_stats, self.context.scaler is not None)
        ranked = local_sites(blame_input(second, record, replace(findings, slot_stats=signs)))
        return [each.site for each in ranked if not each.low_confidence]

    # -- one micro-batch -----------------------------------------------------------------------------------------------

    def _run_micro_batch(
        self, micro_batch: MicroBatch, monitor: StepMonitor, second: GuardContext, watcher: Watcher | None
    ) -> None:
        window = self.record.window
        rng.restore(micro_batch.random_state, window.generators, self.context.device)
        if watcher is not None:
            watcher.begin(micro_batch.batch)
        monitor.begin_micro_batch(micro_batch.batch)
        graphs: dict[int, list[Tensor]] = {}
        reduces = micro_batch.index in window.reduced_micro_batches
        with self.context.wrapper.syncing(reduces):
            for event in events_of(window.calls.events, micro_batch.index):
                if isinstance(event, ModelCall):
                    arguments = self._arguments(event, micro_batch.batch, watcher)
                    graphs[id(event)] = self._call(event, arguments, monitor, watcher)
                elif isinstance(event, WatchedLoss):  # of code outside of what is called: as it was in training
                    monitor.watch_loss(event.name, self._loss(micro_batch, event.name))
                else:
                    _backward(event, window.calls.calls, graphs, watcher)

    def _arguments(self, call: ModelCall, batch: Any, watcher: Watcher | None) -> Any:
        """Positional and keyword arguments of a call."""
        if not self.context.config.copy_batch:
            return copy_containers((call.args, call.kwargs), _as_argument)
        items = batch_tensors(batch) if watcher is not None else {}

        def own(tensor: Tensor) -> Tensor:
            copy = _as_own_argument(tensor)
            name = next((name for name, item in items.items() if _holds_the_same(item, tensor)), None)
            if watcher is not None and name is not None:
                watcher.name(copy, name)
            return copy

        # copies are there because the step may change them: each run needs its own, which no operator of the step makes
        with _disable_current_modes():
            return copy_containers((call.args, call.kwargs), own)

    def _loss(self, micro_batch: MicroBatch, name: str) -> Tensor:
        """A watched loss as it was when it was watched, though the loop has since made a finite number of it."""
        loss = micro_batch.losses[name]
        source = LossSource(name, micro_batch.index)
        seen = next((stats for stats in self.record.slots.slot_stats() if stats.source == source), None)
        if seen is None or loss.numel() != 1 or is_clean(seen) or not bool(loss.isfinite()):
            return loss
        return torch.full_like(loss, seen.maximum if math.isinf(seen.maximum) else seen.minimum)

    def _call(self, call: ModelCall, arguments: Any, monitor: StepMonitor, watcher: Watcher | None) -> list[Tensor]:
        """Make the call again; its outputs that have a graph."""
        rng.restore(call.random_state, self.record.window.generators, self.context.device)
        args, kwargs = arguments
        with _autocast(call), _frozen(self.context.wrapper.root if call.is_frozen else None):
            output = call.function(*args, **kwargs)
        if call.is_step:
            for name, value in named_losses({"loss": output}):
                monitor.watch_loss(name, value)
        if watcher is not None:
            name = "loss" if call.is_step else "the model's output"
            for index, tensor in enumerate(tensors_in(output)):
                watcher.keep_loss(f"{name}{index or ''}", tensor)
        found = [tensor for tensor in copied_tensors(output) if _has_graph(tensor)]
        followed = {id(tensor) for tensor in found}
        others = [path for path, each in named_tensors_in(output) if _has_graph(each) and id(each) not in followed]
        if len(found) != call.num_outputs or (others and not found):
            number = len(found) + len(others)
            raise RuntimeError(f"the model gave {number} outputs with a graph, and {call.num_outputs} in training")
        self._unfollowed += dict.fromkeys(path_text(path[:1]) for path in others)
        if not call.is_step:  # whose outputs are losses, which are watched
            self._outputs += [
                OutputPair(call.micro_batch, then, screen_of(now))
                for then, now in zip(call.screens, found, strict=True)
            ]
        return found


def _has_graph(tensor: Tensor) -> bool:
    return tensor.grad_fn is not None and (tensor.is_floating_point() or tensor.is_complex())


def events_of(events: list[StepEvent], micro_batch: int) -> list[StepEvent]:
    """The calls of a micro-batch, with the losses and backward passes after each until the next micro-batch begins."""
    found: list[StepEvent] = []
    current = None
    for event in events:
        if isinstance(event, ModelCall):
            current = event.micro_batch
            if not event.has_returned:
                continue
        if current == micro_batch:
            found.append(event)
    return found


def _backward(
    event: BackwardPass, calls: list[ModelCall], graphs: dict[int, list[Tensor]], watcher: Watcher | None
) -> None:
    """One backward pass over all outputs that got a gradient in it: call by call would give other bits."""
    outputs: list[Tensor] = []
    seeds: list[Tensor] = []
    for call in calls:
        for position, gradient in call.gradients.get(event.graph_task, {}).items():
            if id(call) in graphs:
                outputs.append(graphs[id(call)][position])
                seeds.append(gradient)
                if watcher is not None:
                    watcher.name(gradient, SEED_NAME)
    if outputs:
        more = any(task > event.graph_task for call in calls if id(call) in graphs for task in call.gradients)
        torch.autograd.backward(outputs, seeds, retain_graph=more or None)


def _holds_the_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors look alike to the last value; a NaN is like any other. Host sync: one."""
    kinds = [(type(each), each.layout, each.shape, each.dtype, each.device) for each in (one, other)]
    if kinds[0] != kinds[1] or one.layout is not torch.strided:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _as_own_argument(tensor: Tensor) -> Tensor:
    return _as_argument(tensor) if tensor.requires_grad else _as_argument(tensor.clone())


def _as_argument(tensor: Tensor) -> Tensor:
    """An argument without the graph of what it was made from; what required grad does so again, and is no leaf."""
    if not tensor.requires_grad:
        return tensor.detach() if type(tensor) is Tensor and not tensor.is_inference() else tensor
    return tensor.detach().requires_grad_().clone()


# -- the surroundings of a run -----------------------------------------------------------------------------------------


class _NoVerdict:
    """The handler of a monitor that gives no verdict."""

    def on_clean(self) -> None:
        """Nothing: there is no verdict."""

    def on_verdict(self, severity: Severity, record: StepRecord) -> Decision:
        """Nothing: there is no verdict."""
        return Decision.PROCEED


def _context_like(context: GuardContext, step: int, everything: bool) -> GuardContext:
    """The parts of a guard that looks at everything, on the model as it is now."""
    config = replace(
        context.config,
        layers="every" if everything else "none",
        first_step=step,
        dump_dir=None,
        keep_previous=False,
        verdict="sync",
        look_again=False,
        grad_norm_warn=None,
        hold_batches="device",
        copy_batch=False,
    )
    args = ValidatedArgs(config, wrapper_of(context.wrapper.model), context.optimizers, None, None)
    second = compose(args, context.ranks, None, context.device)
    second.is_second_look = True
    second.slots.exact = context.slots.exact  # the same reductions: bits are compared
    second.known_nonfinite = context.known_nonfinite
    second.follow_known()
    second.state.registered = context.state.registered
    return second


def _record_of(second: GuardContext, then: StepRecord) -> StepRecord:
    """The record of the run, with the window of training: its batches and losses are those that count."""
    return replace(
        then,
        window=then.window,
        calls=second.forward.calls,
        slots=second.slots,
        is_current=True,  # while it is read, the gradients that are there are its own
    )


@contextlib.contextmanager
def _as_in_training() -> Iterator[None]:
    torch.clear_autocast_cache()
    with torch.inference_mode(False), torch.enable_grad(), _as_fabrics_backward():
        yield
    torch.clear_autocast_cache()


@contextlib.contextmanager
def _as_fabrics_backward() -> Iterator[None]:
    """Within, a backward passes for Lightning Fabric's own: its hooks on outputs refuse any other in low precision."""
    loaded: list[Any] = [sys.modules[name] for name in _FABRIC if name in sys.modules]
    before = [(module, module._in_fabric_backward) for module in loaded if hasattr(module, "_in_fabric_backward")]
    for module, _ in before:
        module._in_fabric_backward = True
    try:
        yield
    finally:
        for module, mark in before:
            module._in_fabric_backward = mark


@contextlib.contextmanager
def _autocast(call: ModelCall) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind, enabled, dtype in call.autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        yield


@contextlib.contextmanager
def _frozen(model: nn.Module | None) -> Iterator[None]:
    """Parameters of a model that is given require no gradient within the block."""
    parameters = [p for p in model.parameters() if p.requires_grad] if model is not None else []
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


_nothing = contextlib.nullcontext
