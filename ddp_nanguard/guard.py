"""`NanGuard`: what a training loop touches, in the order in which it meets it.

Read on in: `step.monitor` (the life of one step), `fault.policy` (what is done about a fault), `fault.alone` (a rank
that ends on its own).
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .build import build_context
from .distributed.exit import end_if_fault, settle, unwatch_exit, watch_exit
from .errors import NonFiniteError
from .fault.alone import SingleRankExit
from .fault.policy import FaultPolicy
from .hooks.callbacks import OnEvent, OnMetrics
from .hooks.loop import CountHook, Steps, named_losses
from .inject.injector import follow_counter, warn_of_disabled
from .inject.step_counter import unregister_counter
from .probes.clipping import clip_grad_norm_
from .script import take_over
from .step.metrics import MetricsLog
from .step.monitor import StepMonitor

__frame_role__ = "passes on"  # see `hooks.frames`


class NanGuard:
    """Stops every rank in the same step, before the weights change, when a value goes non-finite on any of them.

    Args:
        model: what the training loop calls: a DDP or FSDP1 module, one that went through ``fully_shard``, or a plain
            module.
        optimizer: one optimizer or several.
        scaler: the loop's GradScaler, if it has one.
        replay: ``"module:function"`` that gives the `Recipe`, recorded in dumps.
        group: the ranks that step together; default the whole world.
        on_event: called on the first rank of the group with each fault as JSON-ready data, before any rank raises.
        on_metrics: ``on_metrics(step, numbers)``, called every ``log_every`` steps on the ranks that give it.
        options: fields of `GuardConfig`; ``NANGUARD_<OPTION>`` in the environment wins.

    Raises:
        ValueError: on every rank, if on any rank the model, an optimizer or an option does not fit, or options differ.

    Collective: construction creates a gloo group over ``group`` and compares options on it. A clean step issues one
    MAX all-reduce of 16 bytes over ``group``; evaluation and ``no_sync`` issue none.
    Host sync: one read per clean step.
    """

    _monitor: StepMonitor

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        *,
        scaler: object = None,
        replay: str | None = None,
        group: dist.ProcessGroup | None = None,
        on_event: OnEvent | None = None,
        on_metrics: OnMetrics | None = None,
        **options: Any,
    ) -> None:
        self._model: Callable[[], Any] = lambda: model  # a weak reference once the guard is closed
        self._built_in = id(sys.exc_info()[1])  # a job may train on from where it handles an exception
        # - the end: of the guard, or of a rank that raises on its own
        self._is_left = False
        self._exit: SingleRankExit | None = None
        self._handles: list[Any] = []
        # - a script that runs the step of its own dump, and ends with it
        self._takeover = take_over(model, optimizer, scaler, group)
        if self._takeover is not None and self._takeover.misfit is None:
            self._context, self._monitor = self._takeover.context, self._takeover.monitor
            return
        bystander, self._takeover = self._takeover, None
        if bystander is not None:  # the dump is that of another guard of the script
            options = {**options, "enabled": False}
        alone = bystander is not None and bystander.alone
        self._context = context = build_context(
            *(model, optimizer, scaler, replay, group, options),
            answers_alone=alone,
            on_event=on_event,
            on_metrics=on_metrics,
        )
        # - a step: the monitor follows it, the policy acts on its verdict
        self._policy = FaultPolicy(context)
        self._monitor = StepMonitor(context, self._policy)
        if context.on_metrics is not None:
            self._monitor.log_to(MetricsLog(context, self._policy.counters))
        if context.config.enabled:
            self._attach()
        else:
            self._only_count()

    # -- what the loop calls -----------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model. Without grad mode the hooks come off first, so that no layer chooses another kernel."""
        if self._monitor.is_watching:
            self._monitor.before_call()
        return self._model()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the model's: ``guard.no_sync()``, ``guard.module``, ``guard.state_dict()``."""
        if name.startswith("__") or "_model" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_model"](), name)

    @property
    def step(self) -> int:
        """Number of the step now running: verdicts so far, from ``first_step``."""
        return self._monitor.step

    def steps(
        self,
        loader: Iterable[Any],
        *,
        skip: str | os.PathLike[str] | None = None,
        epoch: int | None = None,
        start: int = 0,
    ) -> Steps:
        """The loader, with micro-batches marked and kept; re-iterable, with the loader's length.

        Args:
            loader: any iterable of batches.
            skip: a ``skips.jsonl``, whose batches are drawn and passed over, the same ones on every rank.
            epoch: number of this iteration, for a run that is resumed; by default they are counted from 0.
            start: index of the first batch that the loader gives, for one that is resumed within an epoch.

        Raises:
            ValueError: an argument does not fit, or the list is bad.

        Collective: with ``skip``, where it is asked for the first time or the first time after a stop, three
        all-reduces on the guard's own group; every rank must call it then.
        """
        if self._is_left:
            if skip is not None:
                raise ValueError("steps(skip=...) after close(): the guard is gone; build a new one")
            return Steps(loader, self._monitor)
        if self._takeover is not None:
            return Steps(self._takeover.batches(loader), self._monitor)
        passed_over = self._policy.skip_lists.positions(skip) if skip is not None else ()
        return Steps(loader, self._monitor, self._context.window.progress, epoch, start, passed_over)

    def begin(self, batch: Any) -> Any:
        """Mark a micro-batch, for engines that take batches from a loader themselves; in place of `steps`.

        Args:
            batch: what the step is about to work on.

        Returns:
            What it is to work on instead: ``batch``, or in a replay the recorded one.
        """
        if self._takeover is not None:
            batch = self._takeover.batch()
        return self._monitor.begin_micro_batch(batch) if self._monitor.is_watching else batch

    def watch(self, **losses: Any) -> None:
        """Look at losses. A dict names each term, None is ignored; no host read, no collective."""
        if not self._monitor.is_watching or not torch.is_grad_enabled():
            return
        for name, value in named_losses(losses):
            self._monitor.watch_loss(name, value)

    def run(self, step: Callable[[Any, Any], Any], batch: Any) -> Any:
        """One micro-batch, ``loss = guard.run(step, batch)``: in place of ``guard(...)`` and ``guard.watch``.

        After a fault the whole step can then be run once more, with the code of the loss, which lies outside the model.

        Args:
            step: ``step(model, batch)`` gives the loss, shape (), or a dict of named losses.
            batch: of the micro-batch.

        Raises:
            ValueError: ``step`` returned something else.
        """
        if not self._monitor.is_watching or not torch.is_grad_enabled():
            return step(self._model(), batch)
        return self._monitor.run_step(step, batch)

    def check(self, checkpoint: str | os.PathLike[str] | None = None) -> bool:
        """The verdict now, for engines that own the step, and before saving a checkpoint. Once per window.

        Args:
            checkpoint: what is about to be saved; a later error names the last one that was found good.

        Returns:
            True: go on; False: the step is to be skipped.

        Raises:
            NonFiniteError: on every rank, under ``stop``.

        Collective: as one clean step; every rank must call it. Host sync: one read.
        """
        if not self._monitor.is_watching:
            return True
        goes_on = self._monitor.check()
        if checkpoint is not None and goes_on:
            self._context.checkpoint = (os.fspath(checkpoint), self._monitor.step)
        return goes_on

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Clip the model's gradients as ``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)`` does, bit for bit.

        The guard looks at the gradients in the same go: clipped by torch's function they are read once more before the
        verdict. FSDP1 clips by its own method, ``model.clip_grad_norm_``.

        Returns:
            The total norm before clipping; a DTensor under FSDP2, as from torch.

        Raises:
            RuntimeError: the total is not finite, with ``error_if_nonfinite``.

        Collective: none but those of FSDP's own clipping. Host sync: none, one with ``error_if_nonfinite``.
        """
        if not self._monitor.is_watching:
            return clip_grad_norm_(self._model(), max_norm, norm_type, error_if_nonfinite, foreach)
        return self._context.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite, foreach)

    def register(self, **things: Any) -> None:
        """Take more to look after: modules (an EMA copy), random generators, stateful objects for the dump.

        Raises:
            ValueError: a thing of no such kind, or a name that is taken.
        """
        if self._is_left or (self._context.config.enabled and not self._monitor.is_watching):
            raise ValueError("register() after close(): the guard is gone; build a new one")
        self._context.register(things)

    def close(self) -> None:
        """Judge the last update and what else is open, then leave the model as it was.

        Called while an exception is on its way, as in ``finally``, it judges nothing: peers may not get there.

        Collective: one verdict; every rank must call it.
        """
        if self._is_left:
            return
        on_its_way = sys.exc_info()[1]
        if on_its_way is not None and id(on_its_way) != self._built_in:
            self._leave_with(on_its_way)
            return
        try:
            if self._monitor.is_watching:
                self._monitor.judge_open()
        except Exception as error:
            self._leave_with(error)
            raise
        self._detach()

    def on_exception(self, error: BaseException) -> bool:
        """For frameworks that catch what the loop raised: to be called before they take the model apart or save it.

        Waits for the peers after a `NonFiniteError`. Another exception of this rank alone, where it has to do with
        non-finite values or a peer has raised before, leaves this rank's part of the dump, and if there are peers ends
        the process here with the exit code of a fault: they wait in collectives that this rank does not reach. Then the
        guard is gone.

        Returns:
            Whether the state may be saved. False where it is damaged: after a `NonFiniteError` on all ranks alike,
            after an interrupt on those that see it, and then on none of a sharded model, which is saved together.

        Collective: none. Host sync: many.
        """
        if self._is_left:
            return True
        if isinstance(error, NonFiniteError):
            settle(error)
            self._leave_with(error)
            return not error.report.nonfinite_state
        has_peers = self._context.ranks.world_size > 1
        if isinstance(error, Exception):
            end_if_fault(error, has_peers=has_peers)
        # with peers, what has to do with a fault has ended here; nobody has asked about the update before an interrupt
        is_told = has_peers and isinstance(error, Exception)
        is_sound = is_told or self._exit is None or not self._exit.sees_damage()
        self._detach()
        return is_sound

    def __enter__(self) -> NanGuard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        elif not self._is_left:
            self._leave_with(error)

    def _leave_with(self, error: BaseException) -> None:
        """Off the model; uncaught, the exception needs the evidence of this guard, caught it takes the guard along."""
        self._unhook()
        error.__dict__["_guard"] = _Keeper(self)

    # -- on and off --------------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        context, monitor = self._context, self._monitor
        monitor.attach()
        # after the monitor's hooks: hooks that inject put themselves first
        injection = follow_counter(context.wrapper.model, monitor.counter, context.injection, context.ranks.rank)
        self._handles += [] if injection is None else [injection]
        # both last: from here on an exception or a peer's abort may ask for this rank's evidence
        self._exit = SingleRankExit(context, self._policy, monitor.last_record)
        watch_exit(self)

    def _only_count(self) -> None:
        """``enabled=False``: nothing is looked at, but a loop may end by ``guard.step``."""
        self._monitor.close()
        for optimizer in self._context.optimizers[:1]:
            self._handles.append(optimizer.register_step_post_hook(CountHook(self._monitor)))
        if self._context.ranks.index == 0:
            warn_of_disabled()

    def _unhook(self) -> None:
        """The model, the optimizers and the scaler as they were."""
        unregister_counter(self._context.wrapper.root, self._monitor.counter)
        self._monitor.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _detach(self) -> None:
        """Nothing is left, and nothing here keeps the model alive, nor DDP past its process group."""
        if self._is_left:
            return
        self._is_left = True
        self._unhook()
        if self._exit is not None:
            self._exit.close()
            unwatch_exit(self)
        self._context.close()
        # who keeps the guard must not keep DDP alive past its process group: the interpreter's shutdown may then hang
        model = self._model()
        self._model = weakref.ref(model) if isinstance(model, nn.Module) else _nothing
        self._monitor.release()
        self.__dict__.pop("_policy", None)
        del self._exit, self._takeover, self._context

    @property
    def exit_order(self) -> int:
        """For `distributed.exit`, not for users: guards are asked in the order in which they were made."""
        return -1 if self._is_left else self._context.ranks.guard_number

    def on_uncaught_exception(self, error: BaseException) -> int | None:
        """For `distributed.exit`, not for users: see `SingleRankExit.on_uncaught_exception`."""
        return None if self._is_left or self._exit is None else self._exit.on_uncaught_exception(error)


def _nothing() -> None:
    return None


class _Keeper:
    """Keeps a guard that was left by an exception for as long as that exception lives."""

    def __init__(self, guard: NanGuard) -> None:
        self._guard = guard

    def __del__(self) -> None:
        self._guard._detach()
