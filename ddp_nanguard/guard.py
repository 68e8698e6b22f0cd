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

from . import testing
from .blame import LossNote
from .board import Region
from .deferred import Deferral
from .ending import Distress, leave, unwatch_exit, watch_exit
from .errors import NonFiniteError
from .fault import UNSEEN, traced_layers, unheard
from .loop import (
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
from .message import log_line
from .parts import build_parts
from .policy import FaultPolicy
from .severity import Severities, Severity
from .verdict import Answer

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

PATIENCE_S = 1.0
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
        self._parts = parts = build_parts(model, optimizer, scaler, replay, group, options, self._before_scaler_step)
        self._closed = False
        self._left = False
        self._config = parts.config
        self._step = parts.config.first_step
        self._judged: set[int] = set()
        self._has_verdict = False
        self._go_on = True
        self._error: NonFiniteError | None = None
        self._first_window = True
        self._entered = False
        self._told_of_unseen = False
        self._regions_checked = False
        self._deferral: Deferral | None = None
        self._batch: Any = None
        self._has_batch = False
        self._last_update_judged = True
        self._handles: list[Any] = []
        self._around: list[Any] = []
        if parts.config.enabled:
            self._attach()
        else:  # a loop may end by guard.step
            self._handles.append(parts.optimizers[0].register_step_post_hook(CountHook(self)))
            testing.warn_of_disabled()

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
        self._parts.register(things)

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
        self._batch, self._has_batch = testing.spoilt_batch(self, self._parts, batch), True
        self._timed(self._open_micro_batch, self._batch)
        if self._has_verdict and not self._entered:
            self._stand_in_for_entry()
        return self._batch

    def _stand_in_for_entry(self) -> None:
        """The model is called inside compiled code of the loop's own: what its entry would have kept is kept here."""
        parts = self._parts
        parts.window.keep_buffers(parts.named_buffers())
        if self._first_window:
            self._first_window = False
            parts.see_initial_state()
            parts.see_initial_buffers()

    def _before_call(self) -> None:
        self._follow_compilation()
        if not torch.is_grad_enabled():
            self._parts.disarm()

    def _follow_compilation(self) -> None:
        """The model may be compiled between the making of the guard and the first step."""
        if self._first_window:
            before = self._parts.compiled
            self._parts.follow_compilation()
            if before != self._parts.compiled:
                self._hook_model()

    def _open_micro_batch(self, batch: Any) -> None:
        parts = self._parts
        parts.settle_regions()
        micro_batch = parts.window.begin_micro_batch(batch)
        parts.forward.begin_micro_batch(micro_batch.index)
        is_only = micro_batch.index == 0 or parts.backward.ran
        parts.gradient.micro_batch = micro_batch.index if is_only else None  # one backward for several: not known
        parts.backward.ran = False

    def _before_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._timed(self._enter_model, args, kwargs)

    def _enter_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """2. The model is called: the first call looks at all state, before anything is changed."""
        parts = self._parts
        self._entered = True
        self._follow_compilation()
        if not torch.is_grad_enabled():
            parts.disarm()
            return
        if parts.wrapper.is_joining():
            raise ValueError(
                "model.join() shadows DDP's communication only: a rank that ran out of data would miss the verdict "
                "of the others; give every rank the same number of batches, or set enabled=False"
            )
        root_hook_missed = parts.arm() and parts.wrapper.root is parts.wrapper.model
        parts.forward.begin_root()
        parts.backward.reset()
        if self._needs_micro_batch():
            self._open_micro_batch(self._batch if self._has_batch else {"args": args, "kwargs": kwargs})
        if parts.root_is_traced:
            parts.window.keep_buffers(parts.named_buffers())
        if self._first_window:
            self._first_window = False
            parts.see_initial_state()
        parts.see_doomed_buffers()
        if root_hook_missed:  # hooks put on a module from one of its own hooks begin with its next call
            parts.forward.before("", args, kwargs)

    def _after_model(self, output: Any) -> None:
        """The output of a root that runs inside compiled code is looked at here."""
        parts = self._parts
        if parts.root_is_traced and torch.is_grad_enabled() and {"forward", "backward"} & set(self._config.watch):
            self._timed(parts.forward.see_root_output, output)

    def _needs_micro_batch(self) -> bool:
        parts = self._parts
        return not parts.window.micro_batches or (not self._has_batch and parts.backward.ran)

    def _before_root(self) -> None:
        """3. Inside the wrapper, after its broadcast: keep the buffers before the model changes them."""
        parts = self._parts
        parts.window.keep_buffers(parts.named_buffers())
        parts.see_initial_buffers()

    def _watch_loss(self, name: str, value: Tensor) -> None:
        """4. The loss."""
        parts = self._parts
        if not parts.window.micro_batches:
            self._open_micro_batch(self._batch if self._has_batch else None)
        micro_batch = parts.window.micro_batches[-1]
        testing.spoil_loss(parts, micro_batch.index, value)
        micro_batch.losses[name] = value.detach()
        if "loss" in self._config.watch:
            parts.board.reduce(Region.LOSS, value, LossNote(name, micro_batch.index))

    def _at_end_of_local_backward(self) -> None:
        self._timed(self._parts.gradient.see_waiting)

    def _at_end_of_backward(self) -> None:
        self._timed(self._after_backward)

    def _after_backward(self) -> None:
        """5. A backward pass has ended, the wrapper's communication included."""
        parts = self._parts
        if parts.wrapper.will_reduce():
            parts.reduced_in.add(parts.window.micro_batches[-1].index if parts.window.micro_batches else 0)
            if "reduce" in self._config.watch:
                parts.gradient.see_reduced()
        else:
            parts.gradient.cover()
        if self._config.grad_norm_warn is not None:
            parts.gradient.see_norm()

    def _before_update(self, optimizer: torch.optim.Optimizer) -> bool:
        """6. ``optimizer.step`` is entered: may it go on? Optimizers that step after one backward share a verdict."""
        shares = self._has_verdict and not self._parts.backward.ran_since_verdict and id(optimizer) not in self._judged
        if shares and self._error is not None:
            raise self._error
        go_on = self._go_on if shares else self._judge(is_step=True)
        self._judged.add(id(optimizer))
        return go_on

    def _begin_update(self, optimizer: torch.optim.Optimizer) -> None:
        """The update is about to use its gradients, clipped and unscaled as they are by now."""
        parts = self._parts
        if self._deferral is not None:
            self._deferral.hand_over(optimizer)
        if parts.previous is not None and self._go_on:
            parts.previous.keep_gradients(dict(parts.state.named_parameters_of(optimizer)))

    def _judge(self, is_step: bool = False) -> bool:
        """7. The verdict of all ranks.

        One that is asked for before any rank's backward (`check`) is no step of its own: the window stays open.
        """
        with torch.inference_mode(False), torch.no_grad():  # slots must not become inference tensors
            return self._judge_outside_inference(is_step)

    def _judge_outside_inference(self, is_step: bool) -> bool:
        parts = self._parts
        self._learn()
        severity = self._timed(self._own_severity)
        share = parts.budget.parts_per_million() if parts.backward.ran_since_verdict else 0
        answer = parts.peers.ask(severity, parts.backward.ran_since_verdict, share)
        self._last_update_judged = True
        self._check_hooks()
        if self._deferral is not None:
            if is_step and self._deferral.can_wait():
                return self._put_off(answer)
            self._deferral.judged_at_once()
        severity_of_all, any_backward, share = answer.read()
        if severity_of_all is Severity.CLEAN and not (is_step or any_backward):
            return True
        self._judged, self._has_verdict, self._error = set(), True, None
        try:
            self._go_on = self._timed(self._policy.go_on, severity_of_all, self._step)
        except NonFiniteError as error:
            self._error = _copy_of(error)
            raise
        finally:
            self._close_window()
        self._step += 1
        parts.budget.heard(share)
        parts.budget.next_step()
        return self._go_on

    def _put_off(self, answer: Answer) -> bool:
        """``verdict="deferred"``: the device decides about this update, the host learns of it at the next verdict."""
        assert self._deferral is not None
        self._deferral.put_off(self._step, answer)
        self._last_update_judged = False
        self._judged, self._has_verdict, self._error, self._go_on = set(), True, None, True
        self._close_window()
        self._step += 1
        self._parts.budget.next_step()
        return True

    def _learn(self) -> None:
        """``verdict="deferred"``: what became of the step before."""
        if self._deferral is None:
            return
        try:
            self._deferral.learn(self._policy)
        except NonFiniteError as error:
            self._judged, self._has_verdict, self._error = set(), True, _copy_of(error)
            self._parts.board.discard()  # of the step that is given up with it
            self._close_window()
            raise

    def _own_severity(self) -> Tensor:
        self._parts.see_before_verdict(self._step)
        return self._severities.severity(self._known_to_host())

    def _timed(self, probe: Callable[..., _T], *args: Any) -> _T:
        """Probes are timed in the few steps that `Budget` measures."""
        meter = self._parts.board.meter
        return probe(*args) if meter is None else meter.run(probe, *args)

    def _check_hooks(self) -> None:
        """Do the hooks run? Host sync: one per page of slots in the first step of a compiled model, else none."""
        parts = self._parts
        if not parts.backward.ran_since_verdict:
            return
        self._check_regions()
        is_seen = parts.forward.calls or parts.root_is_traced or not {"forward", "backward"} & set(self._config.watch)
        if not is_seen and parts.forward.modules and not self._told_of_unseen:
            self._told_of_unseen = True
            _log.warning("step %d: %s", self._step, UNSEEN)

    def _check_regions(self) -> None:
        regions = self._parts.forward.regions
        if regions is None or self._regions_checked:
            return
        self._regions_checked = True
        forward = self._parts.forward
        ran = traced_layers(self._parts) | {call.layer for call in forward.calls}
        silent = sorted(set(regions.layers) - ran - forward.without_forward)
        if silent:
            _log.warning("%s", unheard(silent))

    def _after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """8. The weights have changed; what they are now rides with the next verdict."""
        if self._deferral is not None and self._is_watching():
            self._deferral.take_back(optimizer, self._go_on)
        if self._go_on and "optimizer" in self._config.watch:
            with torch.no_grad():
                self._timed(self._parts.state.see_update, optimizer)
            self._last_update_judged = False

    def _close_window(self) -> None:
        parts = self._parts
        parts.window.clear()
        if parts.scaler is not None:
            parts.scaler.new_window()
        parts.forward.forget_window()
        parts.gradient.forget_window()
        parts.reduced_in = set()
        parts.backward.ran = parts.backward.ran_since_verdict = False

    def _known_to_host(self) -> Severity:
        if "optimizer" in self._config.watch and self._parts.state.see_hyper_parameters():
            return Severity.FAULT
        return Severity.CLEAN

    # -- on and off --------------------------------------------------------------------------------------------------

    def _count_step(self) -> None:
        self._step += 1

    def _has_open_window(self) -> bool:
        return bool(self._parts.window.micro_batches)

    def _is_watching(self) -> bool:
        return self._config.enabled and not self._closed

    def _attach(self) -> None:
        parts = self._parts
        has_scaler = parts.scaler is not None
        self._severities = Severities(parts.board, parts.device, has_scaler, self._config.grad_norm_warn)
        self._policy = FaultPolicy(parts)
        self._deferral = Deferral(parts) if self._config.verdict == "deferred" else None
        parts.backward.on_local_end = self._at_end_of_local_backward
        parts.backward.on_end = self._at_end_of_backward
        parts.forward.on_root = self._before_root
        parts.forward.on_idle = parts.disarm
        parts.follow_compilation()
        self._hook_model()
        parts.arm()  # after the entry hook, which on a plain module has to run before the root's own
        self._hook_optimizers()
        self._handles += testing.begin(self, parts)
        watch_exit(self)
        self._distress = (
            Distress(parts.name, parts.peers.rank, parts.peers.world_size, self._config.timeout_s, self._called_by_peer)
            if parts.peers.world_size > 1
            else None
        )

    def _hook_optimizers(self) -> None:
        for optimizer in self._parts.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(BeforeStepHook(self)))
            self._handles.append(optimizer.register_step_post_hook(AfterStepHook(self)))

    def _hook_model(self) -> None:
        """Hooks around the whole model; the first of them runs before those of its modules."""
        for handle in self._around:
            handle.remove()
        model = self._parts.wrapper.model
        is_compiled = getattr(model, "_compiled_call_impl", None) is not None
        entry, leaving = (UncompiledEntryHook, UncompiledExitHook) if is_compiled else (EntryHook, ExitHook)
        come_late = self._parts.armed or any(self._parts.compiled)
        self._around = [model.register_forward_pre_hook(entry(self), with_kwargs=True, prepend=come_late)]
        if self._parts.root_is_traced:
            self._around.append(model.register_forward_hook(leaving(self)))

    def _unhook(self) -> None:
        """The model, the optimizers and the scaler as they were."""
        self._closed = True
        for handle in (*self._handles, *self._around):
            handle.remove()
        self._handles, self._around = [], []
        self._parts.unhook()

    def _detach(self) -> None:
        """Nothing is left, and nothing here keeps the model alive."""
        if self._left:
            return
        self._left = True
        self._unhook()
        if self._config.enabled:
            if self._distress is not None:
                self._distress.close()
            unwatch_exit(self)
            del self._policy, self._severities, self._distress
            self._deferral = None
        self._parts.close()
        self._model = weakref.ref(self._model())
        del self._parts, self._batch, self._error

    # -- a rank that falls alone --------------------------------------------------------------------------------------

    def fell(self, error: BaseException) -> int | None:
        """An exception of the user's own ends this process. For `ending`, not for users.

        If this rank's slots are bad, or a peer has fallen: write the local part, tell the peers, wait for theirs.
        """
        if self._left:
            return None
        with self._unheard_fault() as late:
            called = late is not None or (self._distress is not None and self._distress.was_called())
            if not called and not self._policy.saw_something():
                called = self._distress is not None and self._distress.hears_within(PATIENCE_S)
                if not called:
                    return None
            step = self._step if late is None else late
            report = self._policy.dump_alone(step, f"this rank raised {type(error).__name__} on its own")
        if report is None:  # the other thread is at it, and ends the process when it has done
            time.sleep(self._config.timeout_s)
        elif self._distress is not None:
            self._distress.call(log_line(report))
            self._distress.wait_for_all()
        return self._config.exit_code

    def _unheard_fault(self) -> contextlib.AbstractContextManager[int | None]:
        return contextlib.nullcontext() if self._deferral is None else self._deferral.unheard_fault()

    def _called_by_peer(self, text: str) -> None:
        """A peer has fallen, and this rank's main thread may wait for it for ever. Runs on the distress thread."""
        if self._left or self._distress is None:
            return
        with self._unheard_fault() as late:
            is_done = self._policy.dump_with_fallen_peer(self._step if late is None else late, text)
        if is_done:
            self._distress.wait_for_all()
            leave(self._config.exit_code)

    def _is_inside_scaler(self) -> bool:
        return self._parts.scaler is not None and self._parts.scaler.is_inside

    def _before_scaler_step(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._before_update(optimizer) if self._is_watching() else True


def _copy_of(error: NonFiniteError) -> NonFiniteError:
    """The raised one's traceback leads to the frames that hold the model."""
    return NonFiniteError(str(error), error.report, error.exit_code, error.meet)


class _Keeper:
    """Keeps a guard that was left by an exception for as long as that exception lives."""

    def __init__(self, guard: NanGuard) -> None:
        self._guard = guard

    def __del__(self) -> None:
        self._guard._detach()
