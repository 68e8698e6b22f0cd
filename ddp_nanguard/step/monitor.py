"""`StepMonitor`: the life of one optimizer step, from the first batch to the verdict and the update.

It lets the probes look, asks all ranks for the verdict, and hands that to a `VerdictHandler`. It knows of no policy, no
dump and no replay: a guard hands in what stops or skips (`fault.policy`), a replay what writes the verdict down.

Read on in: `probes` (what is looked at), `distributed.verdict` (the one collective), `blame` (who did it).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ddp_nanguard.blame.triage import Decision, VerdictHandler
from ddp_nanguard.capture.record import StepRecord
from ddp_nanguard.context import GuardContext
from ddp_nanguard.distributed.verdict import Verdict
from ddp_nanguard.errors import NonFiniteError, OutOfStepError
from ddp_nanguard.hooks.loop import OptimizerHooks, named_losses, require_losses
from ddp_nanguard.probes.severity import Severity
from ddp_nanguard.probes.slot_roles import SlotRole
from ddp_nanguard.probes.sources import LossSource
from ddp_nanguard.report.types import Phase

from .counter import MonitorStepCounter
from .deferred import DeferredVerdict
from .forward import ModelForward
from .judge import StepJudge
from .metrics import MetricsLog
from .stage import LastVerdict, StepStage
from .unjudged import UnjudgedUpdates

_NO_BATCH = object()


class StepMonitor:
    """Follows one training loop.

    Args:
        context: what it is composed of.
        handler: acts on verdicts.

    Attributes:
        step: number of the step that is running: verdicts so far, from ``first_step``.
        stage: where the loop is in it.
        has_unjudged_update: whether weights have changed since the last verdict, or one has not been read yet.
        counter: tells steps to faults that are injected on purpose.

    Collective: one MAX all-reduce of 16 bytes per verdict. Host sync: one read per verdict.
    """

    def __init__(self, context: GuardContext, handler: VerdictHandler) -> None:
        config = context.config
        self.step = config.first_step
        self.stage = StepStage.IDLE
        self.has_unjudged_update = False
        self.counter = MonitorStepCounter(self)
        self._context = context
        self._handler = handler
        self._judge = StepJudge(context, handler)
        self._deferred = DeferredVerdict(context) if config.verdict == "deferred" else None
        # - what the loop has done last
        self._batch: Any = _NO_BATCH
        self._last: LastVerdict | None = None
        self._has_called = False  # the model, in this window
        self._unjudged = UnjudgedUpdates()
        # - hooks around the model and the optimizers; those on its modules belong to the probes
        self._hooks = OptimizerHooks(self, context.optimizers)
        self._forward = ModelForward(context, self._at_model)

    @property
    def is_watching(self) -> bool:
        """Whether anything is looked at; not so once it is closed."""
        return self.stage is not StepStage.CLOSED

    @property
    def is_judged(self) -> bool:
        """Whether a verdict was given, and no backward has run since, nor may have been replayed from a graph."""
        may_be_replayed = self._context.device.type != "cpu" and self._ran_unseen()
        return self._last is not None and self.stage is not StepStage.BACKWARD and not may_be_replayed

    # -- 1. a micro-batch ----------------------------------------------------------------------------------------------

    def begin_micro_batch(self, batch: Any) -> Any:
        """The loader has produced an item; what is returned goes to the loop."""
        self._forward.follow_compilation()
        for hook in self.counter.batch_hooks:
            batch = hook(batch, self.step, len(self._context.window.micro_batches))
        # a loop may step twice with one item: its second window begins with the same batch
        self._batch = batch
        self._open_micro_batch(batch)
        if self._last is not None:
            self._forward.stand_in()
        return batch

    def _open_micro_batch(self, batch: Any) -> None:
        context = self._context
        if self.has_open_window():
            self._unjudged.look(context, self.step, self.stage is StepStage.BACKWARD)
        context.flush_compiled()  # what compiled code has piled up belongs to the micro-batch before
        micro_batch = context.window.begin_micro_batch(batch)
        context.forward.begin_micro_batch(micro_batch.index)
        is_only = micro_batch.index == 0 or context.backward.ran
        context.gradient.micro_batch = micro_batch.index if is_only else None  # one backward for several: not known
        context.backward.ran = False
        if self.stage is not StepStage.BACKWARD:  # accumulation: the window has a backward already
            self.stage = StepStage.COLLECTING

    def _needs_micro_batch(self) -> bool:
        """Whether a call of the model begins one: without a loader each call after a backward does."""
        return not self.has_open_window() or (not self.has_loader() and self._context.backward.ran)

    def next_micro_batch(self) -> int:
        """Index of the micro-batch that a call of the model would belong to."""
        num_open = len(self._context.window.micro_batches)
        return num_open if self._needs_micro_batch() else num_open - 1

    def has_open_window(self) -> bool:
        """Whether a micro-batch is open, that is, waits for its verdict."""
        return bool(self._context.window.micro_batches)

    def has_loader(self) -> bool:
        """Whether the loop takes its batches from ``guard.steps``."""
        return self._batch is not _NO_BATCH

    # -- 2. the model is called ----------------------------------------------------------------------------------------

    def before_call(self) -> None:
        """The loop calls the guard, and the guard the model."""
        self._forward.before_call()

    def _at_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A micro-batch begins here, unless the loader has begun one."""
        self._has_called = True
        if self._needs_micro_batch():
            self._open_micro_batch(self._batch if self.has_loader() else {"args": args, "kwargs": kwargs})

    # -- 3. the loss ---------------------------------------------------------------------------------------------------

    def watch_loss(self, name: str, value: Tensor) -> None:
        """A loss of the micro-batch. Host sync: none."""
        context = self._context
        if context.slots.is_capturing():
            return
        if not self.has_open_window():
            self._open_micro_batch(self._batch if self.has_loader() else None)
        micro_batch = context.window.micro_batches[-1]
        for hook in self.counter.loss_hooks:
            hook(value, micro_batch.index)
        micro_batch.losses[name] = value.detach()  # the graph must not live until the verdict
        if context.config.look_again:
            context.window.calls.note_loss(name, value)
        if Phase.LOSS in context.config.watched:
            context.slots.reduce(SlotRole.LOSS, value, LossSource(name, micro_batch.index))

    def _on_scale(self, losses: Any) -> None:
        """The loop scales what it backpropagates: its loss, unless it has handed in one for this micro-batch."""
        micro_batches = self._context.window.micro_batches
        if not torch.is_grad_enabled() or (micro_batches and micro_batches[-1].losses):
            return
        for name, value in named_losses({"loss": losses}):
            self.watch_loss(name, value)

    def run_step(self, step: Callable[[Any, Any], Any], batch: Any) -> Any:
        """One micro-batch by the loop's own step function: its losses are watched, and the call can be made again.

        Args:
            step: ``step(model, batch)`` gives the loss, or a dict of named losses.
            batch: of the micro-batch.

        Raises:
            ValueError: ``step`` returned something else.
        """
        context = self._context
        self._forward.before_call()
        if context.slots.is_capturing():
            return step(context.wrapper.model, batch)
        if self._needs_micro_batch():
            self._open_micro_batch(self._batch if self.has_loader() else batch)
        calls, model = context.window.calls, context.wrapper.model
        if context.config.look_again:
            calls.begin(step, (model, batch), {}, len(context.window.micro_batches) - 1, is_step=True)
        try:
            losses = require_losses(step, step(model, batch))
        except BaseException:
            calls.abandon()
            raise
        for name, value in named_losses({"loss": losses}):
            self.watch_loss(name, value)
        return calls.end(losses) if context.config.look_again else losses

    # -- 4. the backward -----------------------------------------------------------------------------------------------

    def _on_backward(self) -> None:
        # on a GPU hooks run on autograd's own thread, while the main thread waits in backward()
        self.stage = StepStage.BACKWARD

    def _on_local_backward_end(self) -> None:
        """Everything of this rank is computed, the wrapper's communication not yet done."""
        self._context.gradient.flush_pending()
        self._context.slots.mark()

    def _on_backward_end(self) -> None:
        """The wrapper's communication is done too."""
        context = self._context
        looked = context.gradient.take_local()
        if context.wrapper.will_reduce():
            # which micro-batches were communicated decides what a replay on one rank can compare
            context.window.mark_reduced()
            if context.wrapper.leaves_reduce_running():
                return  # the last backward looks, or else the verdict
            if Phase.REDUCE in context.config.watched:
                context.gradient.probe_reduced()
        else:
            # the local gradients, looked at already, are what the update will use
            context.gradient.mark_checked(looked)
        if context.config.looks_at_norms:
            context.gradient.probe_norm(of_each=context.config.parameter_norm_warn is not None)

    # -- 5. the verdict ------------------------------------------------------------------------------------------------

    def check(self) -> bool:
        """The verdict now; whether the update may go ahead. Before any rank's backward it is no step of its own.

        A loss that was watched without any call of the model comes from a graph that was replayed: a step like others,
        whose update nothing has seen.
        """
        # an update may have been replayed from a graph, and the loop may write weights after the update that was seen
        weights_too = self.stage is not StepStage.BACKWARD
        return self._give_verdict(is_step=False, weights_too=weights_too)

    def _refuse_capture(self) -> None:
        if self._context.slots.is_capturing():
            raise ValueError(
                "a verdict cannot be captured into a graph: it reads the host. Capture the step before the guard is "
                "made and call guard.check() after each replay, or capture forward and backward only"
            )

    def _ran_unseen(self) -> bool:
        micro_batches = self._context.window.micro_batches
        return not self._has_called and any(micro_batch.losses for micro_batch in micro_batches)

    def before_update(self, optimizer: torch.optim.Optimizer) -> bool:
        """``optimizer.step`` is entered: may it go on? Optimizers that step after one backward share a verdict."""
        last = self._last
        # Sharing must come out alike on all ranks, or some would wait in an all-reduce that others never reach. So it
        # goes by backwards and updates, which all ranks run, and not by forwards or batches, which may differ.
        if last is not None and self.is_judged and id(optimizer) not in last.optimizers:
            if last.error is not None:
                raise last.error
            goes_on = last.goes_on
        else:
            goes_on = self._give_verdict(is_step=True)
        assert self._last is not None
        self._last.optimizers.add(id(optimizer))
        return goes_on

    def judge_open(self) -> bool:
        """The verdict on what is open, for the end of training; none after a stop.

        There is one also where nothing is open on this rank: ranks may have different numbers of batches, down to none.
        """
        last = self._last
        is_open = last is None or last.error is None or self.has_unjudged_update
        can_ask = is_open and not self._context.ranks.peers_lost
        return self._give_verdict(is_step=False, closes=True) if can_ask else True

    def _give_verdict(self, is_step: bool, closes: bool = False, weights_too: bool = False) -> bool:
        self._refuse_capture()
        with torch.inference_mode(False), torch.no_grad():  # slots must not become inference tensors
            self._resolve_previous()
            ran_backward = self.stage is StepStage.BACKWARD or self._ran_unseen()
            verdict = self._judge.ask_all_ranks(self.step, ran_backward, closes, weights_too)
            self.has_unjudged_update = False  # the update before it was part of this verdict
            if self._deferred is not None and is_step and self._deferred.can_defer():
                return self._defer(verdict)
            return self._read(verdict, is_step)

    def _read(self, verdict: Verdict, is_step: bool) -> bool:
        if self._deferred is not None:
            self._deferred.resolved_now()
        try:
            severity, any_backward = verdict.read()
        except OutOfStepError:
            self._context.ranks.peers_lost = True  # no collective of this rank meets the right one any more
            self._context.slots.discard()
            self._close_window()
            raise
        if severity is Severity.CLEAN and not (is_step or any_backward):
            return True  # a check between two steps: the window stays open on every rank
        self._last = last = LastVerdict()
        try:
            decision = self._judge.decide(severity, self.step)
        except NonFiniteError as error:
            # a loop that catches it and steps all the same is stopped again, with the same text
            last.error, last.goes_on = error.without_traceback(), False
            self._context.slots.discard()
            raise
        finally:
            self._close_window()  # also after a stop: the process and its groups stay usable
        last.goes_on = decision is not Decision.SKIP
        self.step += 1
        return last.goes_on

    def record(self) -> StepRecord:
        """The step that is running, as the fault path needs it."""
        return self._context.record(self.step)

    # -- verdict="deferred": the host learns of it one step later ------------------------------------------------------

    def _defer(self, verdict: Verdict) -> bool:
        assert self._deferred is not None
        self._deferred.defer(self.step, verdict)
        self._last, self.has_unjudged_update = LastVerdict(), True  # close() has to read this verdict
        self._close_window()
        self.step += 1
        return True

    def _resolve_previous(self) -> None:
        if self._deferred is None:
            return
        try:
            self._deferred.resolve_previous(self._handler)
        except NonFiniteError as error:
            self._last = LastVerdict(goes_on=False, error=error.without_traceback())
            self._context.slots.discard()  # of the step that is given up with it
            self._close_window()
            raise

    def last_record(self) -> StepRecord:
        """What a rank that ends now has to tell of: the step before, if it was bad and not read yet, or this one."""
        unresolved = self._deferred.unresolved_fault() if self._deferred is not None else None
        return unresolved or self.record()

    # -- 6. the update -------------------------------------------------------------------------------------------------

    def begin_update(self, optimizer: torch.optim.Optimizer) -> None:
        """The update is about to use its gradients, clipped and unscaled as they are by now."""
        context = self._context
        if self._deferred is not None:
            self._deferred.set_found_inf(optimizer)
        if context.previous is not None and self._last_goes_on():
            context.previous.keep_gradients(dict(context.state.named_parameters_of(optimizer)))

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """The weights have changed; what they are now rides with the next verdict."""
        goes_on = self._last_goes_on()
        if self._deferred is not None:
            self._deferred.restore_found_inf(optimizer, goes_on)
        if goes_on and Phase.OPTIMIZER in self._context.config.watched:
            with torch.no_grad():
                self._context.state.probe_update(optimizer)
            self.has_unjudged_update = True
        if self.stage is StepStage.JUDGED:  # not in COLLECTING: an optimizer that steps late shares the last verdict
            self.stage = StepStage.UPDATED

    def _last_goes_on(self) -> bool:
        return self._last is None or self._last.goes_on

    def _close_window(self) -> None:
        context = self._context
        self._unjudged.num_seen, self._has_called = 0, False
        context.window.clear()
        if context.scaler is not None:
            context.scaler.new_window()
        context.forward.release_window()
        context.gradient.release_window()
        context.backward.ran = False
        self.stage = StepStage.JUDGED

    # -- on and off ----------------------------------------------------------------------------------------------------

    def log_to(self, metrics: MetricsLog) -> None:
        """From now on hand numbers of some steps to the user's logger."""
        self._judge.metrics = metrics
        if self._deferred is not None:
            self._deferred.metrics = metrics

    def attach(self) -> None:
        """Put the hooks on."""
        context = self._context
        context.backward.on_begin = self._on_backward
        context.backward.on_local_end = self._on_local_backward_end
        context.backward.on_end = self._on_backward_end
        self._forward.attach()
        self._hooks.put()
        context.paused = self.paused
        if context.scaler is not None:
            context.scaler.watch(self.before_update, self._on_scale)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within, nothing follows the model: it is run for the second look."""
        context = self._context
        self._forward.remove()
        context.remove_hooks()
        try:
            yield
        finally:
            self._forward.resume()

    def is_inside_scaler(self) -> bool:
        """Whether ``scaler.step`` is running, whose entry has been judged."""
        return self._context.scaler is not None and self._context.scaler.is_inside

    def close(self) -> None:
        """The model, the optimizers and the scaler as they were. Collective: none. May be called again."""
        if self.stage is StepStage.CLOSED:
            return
        self.stage = StepStage.CLOSED
        self._hooks.remove()
        self._forward.remove()
        self._context.unhook()

    def release(self) -> None:
        """After `close`: nothing here keeps the model alive; the number of the step stays."""
        self.close()
        del self._context, self._handler, self._judge, self._deferred, self._hooks
        del self._forward
        del self._batch, self._last
