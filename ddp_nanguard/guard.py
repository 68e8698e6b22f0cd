"""`NanGuard`: the life of one step, in reading order. It composes the other modules and does nothing itself.

Read on in: `probes` (what is looked at), `board` (where it is left), `verdict` (the one collective), `fault` and
`blame` (who did it),
`record` and `dump` (what is kept), `ending` (how a process stops).
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .build import build_context
from .deferred import DeferredVerdict
from .distributed.abort import AbortSignal
from .distributed.exit import exit_process, unwatch_exit, watch_exit
from .distributed.verdict import Verdict
from .errors import NonFiniteError
from .fault.policy import FaultPolicy
from .hooks.loop import (
    AfterStepHook,
    BeforeStepHook,
    CountHook,
    EntryHook,
    ExitHook,
    Steps,
    UncompiledEntryHook,
    UncompiledExitHook,
    named_losses,
)
from .inject import injector
from .probes.coverage import UNSEEN, compiled_layers_that_ran, unheard
from .probes.severity import Severity, SeverityReducer
from .probes.slots import SlotRole
from .probes.sources import LossSource
from .report.messages import log_line

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

PEER_GRACE_S = 1.0
"""How long a rank whose own code raised, with fine values, listens for a peer that may have fallen first."""


class NanGuard:
    """Stops every rank in the same step, before the weights change, when a value goes non-finite on any of them.

    Args:
        model: what the training loop calls: a DDP or FSDP1 module, one that went through ``fully_shard``, or a plain
            module.
        optimizer: one optimizer or several.
        scaler: the loop's GradScaler, if it has one.
        replay: ``"module:function"`` that gives the `Recipe`, recorded in dumps.
        group: the ranks that step together; default the whole world.
        options: fields of `GuardConfig`; ``NANGUARD_<OPTION>`` in the environment wins.

    Raises:
        ValueError: on every rank, if on any rank the model, an optimizer or an option does not fit, or options differ.

    Collective: construction creates a gloo group over ``group`` and compares options on it. A clean step issues one
    MAX all-reduce of 16 bytes
    over ``group``; evaluation and ``no_sync`` issue none.
    Host sync: one read per clean step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        *,
        scaler: object = None,
        replay: str | None = None,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self._model: Callable[[], Any] = lambda: model
        self._closed = True
        self._context = context = build_context(
            model, optimizer, scaler, replay, group, options, self._before_scaler_step
        )
        self._closed = False
        self._left = False
        self._config = context.config
        self._step = context.config.first_step
        self._judged: set[int] = set()
        self._has_verdict = False
        self._go_on = True
        self._error: NonFiniteError | None = None
        self._first_window = True
        self._entered = False
        self._told_of_unseen = False
        self._regions_checked = False
        self._deferral: DeferredVerdict | None = None
        self._batch: Any = None
        self._has_batch = False
        self._last_update_judged = True
        self._handles: list[Any] = []
        self._around: list[Any] = []
        if context.config.enabled:
            self._attach()
        else:  # a loop may end by guard.step
            self._handles.append(context.optimizers[0].register_step_post_hook(CountHook(self)))
            injector.warn_of_disabled()

    # -- what the loop calls -----------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model. Without grad mode the hooks come off first, so that no layer chooses another kernel."""
        if not self._closed:
            self._before_call()
        return self._model()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the model's: ``guard.no_sync()``, ``guard.module``, ``guard.state_dict()``."""
        if name.startswith("__") or "_model" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_model"](), name)

    @property
    def step(self) -> int:
        """Number of the step now running: verdicts so far, from ``first_step``."""
        return self._step

    def steps(self, loader: Iterable[Any]) -> Steps:
        """The loader, with micro-batches marked and kept; re-iterable, with the loader's length."""
        return Steps(loader, self)

    def watch(self, **losses: Any) -> None:
        """Look at losses. A dict names each term, None is ignored; no host read, no collective."""
        if not self._is_watching() or not torch.is_grad_enabled():
            return
        for name, value in named_losses(losses):
            self._timed(self._watch_loss, name, value)

    def check(self) -> bool:
        """The verdict now, for engines that own the step, and before saving a checkpoint. Once per window.

        Returns:
            True: go on; False: the step is to be skipped.

        Raises:
            NonFiniteError: on every rank, under ``stop``.

        Collective: as one clean step; every rank must call it. Host sync: one read.
        """
        return self._judge() if self._is_watching() else True

    def register(self, **things: Any) -> None:
        """Take more to look after: modules (an EMA copy), random generators, stateful objects for the dump.

        Raises:
            ValueError: a thing of no such kind, or a name that is taken.
        """
        if self._closed:
            raise ValueError("register() after close(): the guard is gone; build a new one")
        self._context.register(things)

    def close(self) -> None:
        """Judge the last update, then leave the model as it was. Collective: one verdict; every rank must call it."""
        try:
            if self._is_watching() and not self._last_update_judged:
                self._judge()
        finally:
            self._detach()

    def __enter__(self) -> NanGuard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        elif not self._left:
            self._unhook()
            error.__dict__["_guard"] = _Keeper(self)  # uncaught, it still needs the evidence; caught, it lets go of it

    # -- one step, in order ------------------------------------------------------------------------------------------

    def _begin_micro_batch(self, batch: Any) -> Any:
        """1. The loader has produced an item. The same, unless a fault is planted in it (`testing`)."""
        self._follow_compilation()
        self._batch, self._has_batch = injector.corrupt_batch(self, self._context, batch), True
        self._timed(self._open_micro_batch, self._batch)
        if self._has_verdict and not self._entered:
            self._stand_in_for_entry()
        return self._batch

    def _stand_in_for_entry(self) -> None:
        """The model is called inside compiled code of the loop's own: what its entry would have kept is kept here."""
        context = self._context
        context.window.snapshot_buffers(context.named_buffers())
        if self._first_window:
            self._first_window = False
            context.probe_initial_state()
            context.probe_initial_buffers()

    def _before_call(self) -> None:
        self._follow_compilation()
        if not torch.is_grad_enabled():
            self._context.remove_hooks()

    def _follow_compilation(self) -> None:
        """The model may be compiled between the making of the guard and the first step."""
        if self._first_window:
            before = self._context.compiled
            self._context.follow_compilation()
            if before != self._context.compiled:
                self._hook_model()

    def _open_micro_batch(self, batch: Any) -> None:
        context = self._context
        context.flush_compiled()
        micro_batch = context.window.begin_micro_batch(batch)
        context.forward.begin_micro_batch(micro_batch.index)
        is_only = micro_batch.index == 0 or context.backward.ran
        context.gradient.micro_batch = micro_batch.index if is_only else None  # one backward for several: not known
        context.backward.ran = False

    def _before_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._timed(self._enter_model, args, kwargs)

    def _enter_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """2. The model is called: the first call looks at all state, before anything is changed."""
        context = self._context
        self._entered = True
        self._follow_compilation()
        if not torch.is_grad_enabled():
            context.remove_hooks()
            return
        if context.wrapper.is_joining():
            raise ValueError(
                "model.join() shadows DDP's communication only: a rank that ran out of data would miss the verdict "
                "of the others; give every rank the same number of batches, or set enabled=False"
            )
        root_hook_missed = context.install_hooks() and context.wrapper.root is context.wrapper.model
        context.forward.begin_root()
        context.backward.reset()
        if self._needs_micro_batch():
            self._open_micro_batch(self._batch if self._has_batch else {"args": args, "kwargs": kwargs})
        if context.root_is_traced:
            context.window.snapshot_buffers(context.named_buffers())
        if self._first_window:
            self._first_window = False
            context.probe_initial_state()
        context.probe_buffers_before_broadcast()
        if root_hook_missed:  # hooks put on a module from one of its own hooks begin with its next call
            context.forward.before("", args, kwargs)

    def _after_model(self, output: Any) -> None:
        """The output of a root that runs inside compiled code is looked at here."""
        context = self._context
        if context.root_is_traced and torch.is_grad_enabled() and {"forward", "backward"} & set(self._config.watch):
            self._timed(context.forward.probe_root_output, output)

    def _needs_micro_batch(self) -> bool:
        context = self._context
        return not context.window.micro_batches or (not self._has_batch and context.backward.ran)

    def _before_root(self) -> None:
        """3. Inside the wrapper, after its broadcast: keep the buffers before the model changes them."""
        context = self._context
        context.window.snapshot_buffers(context.named_buffers())
        context.probe_initial_buffers()

    def _watch_loss(self, name: str, value: Tensor) -> None:
        """4. The loss."""
        context = self._context
        if not context.window.micro_batches:
            self._open_micro_batch(self._batch if self._has_batch else None)
        micro_batch = context.window.micro_batches[-1]
        injector.corrupt_loss(context, micro_batch.index, value)
        micro_batch.losses[name] = value.detach()
        if "loss" in self._config.watch:
            context.slots.reduce(SlotRole.LOSS, value, LossSource(name, micro_batch.index))

    def _at_end_of_local_backward(self) -> None:
        self._timed(self._context.gradient.flush_pending)

    def _at_end_of_backward(self) -> None:
        self._timed(self._after_backward)

    def _after_backward(self) -> None:
        """5. A backward pass has ended, the wrapper's communication included."""
        context = self._context
        if context.wrapper.will_reduce():
            context.reduced_in.add(context.window.micro_batches[-1].index if context.window.micro_batches else 0)
            if "reduce" in self._config.watch:
                context.gradient.probe_reduced()
        else:
            context.gradient.mark_checked()
        if self._config.grad_norm_warn is not None:
            context.gradient.probe_norm()

    def _before_update(self, optimizer: torch.optim.Optimizer) -> bool:
        """6. ``optimizer.step`` is entered: may it go on? Optimizers that step after one backward share a verdict."""
        shares = (
            self._has_verdict and not self._context.backward.ran_since_verdict and id(optimizer) not in self._judged
        )
        if shares and self._error is not None:
            raise self._error
        go_on = self._go_on if shares else self._judge(is_step=True)
        self._judged.add(id(optimizer))
        return go_on

    def _begin_update(self, optimizer: torch.optim.Optimizer) -> None:
        """The update is about to use its gradients, clipped and unscaled as they are by now."""
        context = self._context
        if self._deferral is not None:
            self._deferral.set_found_inf(optimizer)
        if context.previous is not None and self._go_on:
            context.previous.keep_gradients(dict(context.state.named_parameters_of(optimizer)))

    def _judge(self, is_step: bool = False) -> bool:
        """7. The verdict of all ranks.

        One that is asked for before any rank's backward (`check`) is no step of its own: the window stays open.
        """
        with torch.inference_mode(False), torch.no_grad():  # slots must not become inference tensors
            return self._judge_outside_inference(is_step)

    def _judge_outside_inference(self, is_step: bool) -> bool:
        context = self._context
        self._resolve_previous()
        severity = self._timed(self._own_severity)
        share = context.budget.parts_per_million() if context.backward.ran_since_verdict else 0
        verdict = context.ranks.all_reduce_verdict(severity, context.backward.ran_since_verdict, share)
        self._last_update_judged = True
        self._check_hooks()
        if self._deferral is not None:
            if is_step and self._deferral.can_defer():
                return self._defer(verdict)
            self._deferral.resolved_now()
        severity_of_all, any_backward, share = verdict.read()
        if severity_of_all is Severity.CLEAN and not (is_step or any_backward):
            return True
        self._judged, self._has_verdict, self._error = set(), True, None
        try:
            self._go_on = self._timed(self._policy.act_on, severity_of_all, self._step)
        except NonFiniteError as error:
            self._error = _copy_of(error)
            raise
        finally:
            self._close_window()
        self._step += 1
        context.budget.heard(share)
        context.budget.next_step()
        return self._go_on

    def _defer(self, verdict: Verdict) -> bool:
        """``verdict="deferred"``: the device decides about this update, the host learns of it at the next verdict."""
        assert self._deferral is not None
        self._deferral.defer(self._step, verdict)
        self._last_update_judged = False
        self._judged, self._has_verdict, self._error, self._go_on = set(), True, None, True
        self._close_window()
        self._step += 1
        self._context.budget.next_step()
        return True

    def _resolve_previous(self) -> None:
        """``verdict="deferred"``: what became of the step before."""
        if self._deferral is None:
            return
        try:
            self._deferral.resolve_previous(self._policy)
        except NonFiniteError as error:
            self._judged, self._has_verdict, self._error = set(), True, _copy_of(error)
            self._context.slots.discard()  # of the step that is given up with it
            self._close_window()
            raise

    def _own_severity(self) -> Tensor:
        self._context.probe_before_verdict(self._step)
        return self._severities.severity(self._known_to_host())

    def _timed(self, probe: Callable[..., _T], *args: Any) -> _T:
        """Probes are timed in the few steps that `Budget` measures."""
        meter = self._context.slots.meter
        return probe(*args) if meter is None else meter.run(probe, *args)

    def _check_hooks(self) -> None:
        """Do the hooks run? Host sync: one per page of slots in the first step of a compiled model, else none."""
        context = self._context
        if not context.backward.ran_since_verdict:
            return
        self._check_regions()
        is_seen = (
            context.forward.calls or context.root_is_traced or not {"forward", "backward"} & set(self._config.watch)
        )
        if not is_seen and context.forward.modules and not self._told_of_unseen:
            self._told_of_unseen = True
            _log.warning("step %d: %s", self._step, UNSEEN)

    def _check_regions(self) -> None:
        compiled_slots = self._context.forward.compiled_slots
        if compiled_slots is None or self._regions_checked:
            return
        self._regions_checked = True
        forward = self._context.forward
        ran = compiled_layers_that_ran(self._context) | {call.layer for call in forward.calls}
        silent = sorted(set(compiled_slots.layers) - ran - forward.without_forward)
        if silent:
            _log.warning("%s", unheard(silent))

    def _after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """8. The weights have changed; what they are now rides with the next verdict."""
        if self._deferral is not None and self._is_watching():
            self._deferral.restore_found_inf(optimizer, self._go_on)
        if self._go_on and "optimizer" in self._config.watch:
            with torch.no_grad():
                self._timed(self._context.state.probe_update, optimizer)
            self._last_update_judged = False

    def _close_window(self) -> None:
        context = self._context
        context.window.clear()
        if context.scaler is not None:
            context.scaler.new_window()
        context.forward.release_window()
        context.gradient.release_window()
        context.reduced_in = set()
        context.backward.ran = context.backward.ran_since_verdict = False

    def _known_to_host(self) -> Severity:
        if "optimizer" in self._config.watch and self._context.state.probe_hyper_parameters():
            return Severity.FAULT
        return Severity.CLEAN

    # -- on and off --------------------------------------------------------------------------------------------------

    def _count_step(self) -> None:
        self._step += 1

    def _has_open_window(self) -> bool:
        return bool(self._context.window.micro_batches)

    def _is_watching(self) -> bool:
        return self._config.enabled and not self._closed

    def _attach(self) -> None:
        context = self._context
        has_scaler = context.scaler is not None
        self._severities = SeverityReducer(context.slots, context.device, has_scaler, self._config.grad_norm_warn)
        self._policy = FaultPolicy(context)
        self._deferral = DeferredVerdict(context) if self._config.verdict == "deferred" else None
        context.backward.on_local_end = self._at_end_of_local_backward
        context.backward.on_end = self._at_end_of_backward
        context.forward.on_root = self._before_root
        context.forward.on_idle = context.remove_hooks
        context.follow_compilation()
        self._hook_model()
        context.install_hooks()  # after the entry hook, which on a plain module has to run before the root's own
        self._hook_optimizers()
        self._handles += injector.attach_to_guard(self, context)
        watch_exit(self)
        self._abort_signal = (
            AbortSignal(
                context.name, context.ranks.rank, context.ranks.world_size, self._config.timeout_s, self._on_abort
            )
            if context.ranks.world_size > 1
            else None
        )

    def _hook_optimizers(self) -> None:
        for optimizer in self._context.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(BeforeStepHook(self)))
            self._handles.append(optimizer.register_step_post_hook(AfterStepHook(self)))

    def _hook_model(self) -> None:
        """Hooks around the whole model; the first of them runs before those of its modules."""
        for handle in self._around:
            handle.remove()
        model = self._context.wrapper.model
        is_compiled = getattr(model, "_compiled_call_impl", None) is not None
        entry, leaving = (UncompiledEntryHook, UncompiledExitHook) if is_compiled else (EntryHook, ExitHook)
        come_late = self._context.hooks_installed or any(self._context.compiled)
        self._around = [model.register_forward_pre_hook(entry(self), with_kwargs=True, prepend=come_late)]
        if self._context.root_is_traced:
            self._around.append(model.register_forward_hook(leaving(self)))

    def _unhook(self) -> None:
        """The model, the optimizers and the scaler as they were."""
        self._closed = True
        for handle in (*self._handles, *self._around):
            handle.remove()
        self._handles, self._around = [], []
        self._context.unhook()

    def _detach(self) -> None:
        """Nothing is left, and nothing here keeps the model alive."""
        if self._left:
            return
        self._left = True
        self._unhook()
        if self._config.enabled:
            if self._abort_signal is not None:
                self._abort_signal.close()
            unwatch_exit(self)
            del self._policy, self._severities, self._abort_signal
            self._deferral = None
        self._context.close()
        self._model = weakref.ref(self._model())
        del self._context, self._batch, self._error

    # -- a rank that falls alone --------------------------------------------------------------------------------------

    def on_uncaught_exception(self, error: BaseException) -> int | None:
        """An exception of the user's own ends this process. For `ending`, not for users.

        If this rank's slots are bad, or a peer has fallen: write the local part, tell the peers, wait for theirs.
        """
        if self._left:
            return None
        with self._unresolved_fault() as late:
            called = late is not None or (self._abort_signal is not None and self._abort_signal.is_set())
            if not called and not self._policy.has_findings():
                called = self._abort_signal is not None and self._abort_signal.wait(PEER_GRACE_S)
                if not called:
                    return None
            step = self._step if late is None else late
            report = self._policy.dump_single_rank(step, f"this rank raised {type(error).__name__} on its own")
        if report is None:  # the other thread is at it, and ends the process when it has done
            time.sleep(self._config.timeout_s)
        elif self._abort_signal is not None:
            self._abort_signal.set(log_line(report))
            self._abort_signal.wait_for_all()
        return self._config.exit_code

    def _unresolved_fault(self) -> contextlib.AbstractContextManager[int | None]:
        return contextlib.nullcontext() if self._deferral is None else self._deferral.unresolved_fault()

    def _on_abort(self, text: str) -> None:
        """A peer has fallen, and this rank's main thread may wait for it for ever. Runs on the distress thread."""
        if self._left or self._abort_signal is None:
            return
        with self._unresolved_fault() as late:
            is_done = self._policy.dump_with_fallen_peer(self._step if late is None else late, text)
        if is_done:
            self._abort_signal.wait_for_all()
            exit_process(self._config.exit_code)

    def _is_inside_scaler(self) -> bool:
        return self._context.scaler is not None and self._context.scaler.is_inside

    def _before_scaler_step(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._before_update(optimizer) if self._is_watching() else True


def _copy_of(error: NonFiniteError) -> NonFiniteError:
    """The raised one's traceback leads to the frames that hold the model."""
    return NonFiniteError(str(error), error.report, error.exit_code, error.barrier)


class _Keeper:
    """Keeps a guard that was left by an exception for as long as that exception lives."""

    def __init__(self, guard: NanGuard) -> None:
        self._guard = guard

    def __del__(self) -> None:
        self._guard._detach()
