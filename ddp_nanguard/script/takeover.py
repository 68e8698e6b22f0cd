"""What a `NanGuard` does in a script that replays a dump: it is laid in, fed, judged once, and ended.

Read on in: `recorded_step` (batches and state), `monitor` (the loop), `ending`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import traceback
from collections.abc import Iterable
from dataclasses import replace
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ddp_nanguard.capture.window import MicroBatch
from ddp_nanguard.context import GuardContext
from ddp_nanguard.diagnosis.all_ranks import told_by_all_ranks
from ddp_nanguard.diagnosis.diagnose import diagnosis_of
from ddp_nanguard.diagnosis.experiments import around_experiment, stop_at_operator
from ddp_nanguard.diagnosis.trace.events import Event
from ddp_nanguard.diagnosis.trace.traced_step import Traced, Watcher
from ddp_nanguard.diagnosis.trace_text import diagnosis_text
from ddp_nanguard.distributed.exit import watch_exit
from ddp_nanguard.dump.batch_codec import unregistered_type
from ddp_nanguard.dump.read import Dump, open_dump
from ddp_nanguard.errors import DumpError
from ddp_nanguard.hooks.frames import is_users_own
from ddp_nanguard.hooks.optimizers import each_given, optimizers_in
from ddp_nanguard.replay.outcome import (
    EXIT_CODES,
    Outcome,
    Result,
    compare,
    why_not_replayable,
)
from ddp_nanguard.replay.outcome_text import outcome_text
from ddp_nanguard.replay.rebuild import Rebuilt, require_matching_parameters
from ddp_nanguard.replay.recipe import Recipe
from ddp_nanguard.replay.run_step import Run, StepResult, gathered, has_raised, monitored, raised_text
from ddp_nanguard.replay.session import is_compiled, what_needs_peers
from ddp_nanguard.report.command_text import script_text
from ddp_nanguard.report.text import THROUGH_STEPS
from ddp_nanguard.report.types import RAISED
from ddp_nanguard.wrappers import Wrapper, wrapper_of

from .batch_types import LoadedTypes
from .bystander import stand_by, take
from .ending import end, end_cannot, end_wrong_usage
from .monitor import ScriptMonitor
from .recorded_step import RecordedBatches, RecordedCall, RecordedStep
from .request import TRACE_ALONE, ReplayRequest
from .stand_in import StandIn


class Takeover:
    """The replay in the script's own process, from the making of its guard to the end.

    Args:
        model, optimizer, scaler, group: as `NanGuard` got them; its options are those of the dump.

    Attributes:
        context, monitor: what the guard consists of.
        misfit: why the model is not that of the dump, so that another guard of the script has to be it; else None.

    Collective: alone none of the guard's; else those of a guard, and at the end a gather of the results.
    """

    context: GuardContext
    monitor: ScriptMonitor

    def __init__(self, model: nn.Module, optimizer: object, scaler: Any, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._has_ended = False
        self._process = os.getpid()  # a forked child has the same exit callbacks
        try:
            self._request = ReplayRequest.from_environment()
            self._alone = self._request.rank is not None or not _is_connected()
            self._dump = _opened(self._request, self._alone)
        except DumpError as error:
            end_wrong_usage(str(error))
        self._rank = self._own_rank()
        self.misfit = self._why_other(model)
        if self.misfit is not None:
            stand_by(model, lambda: self._cannot(self.misfit or ""))
            return
        take()
        try:
            self._lay_in(model, _as_list(optimizer), scaler)
        except (DumpError, ValueError) as error:
            self._cannot(str(error).splitlines()[0])
        watch_exit(self)
        atexit.register(self._on_exit)

    def _own_rank(self) -> int:
        if self._request.rank is not None:
            return self._request.rank
        size = dist.get_world_size(self._group) if _is_connected() else 1
        if size != self._dump.world_size:
            number = self._dump.world_size
            end_wrong_usage(
                f"{self._dump.path} is of {number} ranks, the guard has {size}; use torchrun --nproc-per-node {number}"
                f", or for one rank alone: ddp-nanguard replay {self._dump.path} -- COMMAND"
            )
        return dist.get_rank() if _is_connected() else self._dump.ranks[0]

    # -- 1. the guard is made --------------------------------------------------------------------------------------

    def _lay_in(self, model: nn.Module, optimizers: list[torch.optim.Optimizer], scaler: Any) -> None:
        dump, rank = self._dump, self._rank
        self._refuse(why_not_replayable(dump, self._alone, by_script=True))
        wrapper = wrapper_of(model)
        self._refuse(self._why_not_alone(wrapper) if self._alone else None)
        device = wrapper.compute_device()
        window = dump.window(rank, types=LoadedTypes(), device=device)
        self._refuse(_foreign_batch(window))
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        recipe = Recipe(model=wrapper.root, step=_no_step)
        rebuilt = Rebuilt(dump, rank, recipe, wrapper, optimizers, scaler, device, self._group)
        self._losses = [replace(micro_batch, batch=None) for micro_batch in window]
        self._step = RecordedStep(rebuilt, window, self._cannot)
        with dump.telling(rank, speaks=self._alone or rank == 0):
            self._step.lay_in()
        self._follow(rebuilt)

    def _follow(self, rebuilt: Rebuilt) -> None:
        """Watch the loop as in training, for the one step."""
        self._held = contextlib.ExitStack()

        def make_monitor(context: GuardContext, collector: Any) -> ScriptMonitor:
            self.monitor = ScriptMonitor(context, collector, self._step, self._alone, self._finish)
            return self.monitor

        self._run: Run = self._held.enter_context(monitored(rebuilt, make_monitor, answers_alone=self._alone))
        self._step.run, self.context = self._run, self._run.context
        self._prepare_contexts(rebuilt)
        call = RecordedCall(self._step, self._has_batch, self.monitor.begins_micro_batch)
        rebuilt.wrapper.model.register_forward_pre_hook(call, prepend=True, with_kwargs=True)
        if self._step.is_of_calls:
            rebuilt.wrapper.model.register_forward_hook(call.keep_outputs)

    def _has_batch(self) -> bool:
        """Whether the recorded batch has come to the model on another way than by its arguments."""
        return self.monitor.has_loader() or self.monitor.is_in_step

    def _prepare_contexts(self, rebuilt: Rebuilt) -> None:
        step, request = self._step, self._request
        if request.experiment not in (None, TRACE_ALONE):
            change = around_experiment(request.experiment)
            step.contexts.append(lambda: change(rebuilt, step.window))
        if request.trace or request.stop_at is not None:
            watcher = step.watcher = Watcher(self._on_event if request.stop_at is not None else None)
            step.contexts.append(lambda: watcher.around(rebuilt, step.window))

    def _on_event(self, event: Event, frame: FrameType) -> None:
        assert self._request.stop_at is not None
        if (event.order, event.operator) == self._request.stop_at:
            text = stop_at_operator(event, frame)
            end(self._request, {"text": text}, "", 0)

    def batches(self, loader: Iterable[Any]) -> RecordedBatches:
        """What stands in for the script's loader."""
        return RecordedBatches(self._step, loader)

    def batch(self) -> Any:
        """What stands in for the batch that the script is about to begin with."""
        self._step.require_batches()
        return self._step.serve()

    def _why_not_alone(self, wrapper: Wrapper) -> str | None:
        number = self._dump.world_size
        on_all = f"NANGUARD_REPLAY={self._dump.path} torchrun --nproc-per-node {number}"
        recipe = Recipe(model=wrapper.root, step=_no_step)
        if what_needs_peers(self._dump, recipe) is not None:
            return f"SyncBatchNorm mixes all ranks: replay all {number} with {on_all}"
        if _is_connected() and dist.get_world_size() > 1 and not isinstance(dist.group.WORLD, StandIn):
            return f"the process group could not be stood in for: replay all {number} ranks with {on_all}"
        for name, parameter in wrapper.named_parameters():
            if isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1:
                return f"{name} lies on several ranks (tensor parallel): replay all {number} with {on_all}"
        return None

    def _why_other(self, model: nn.Module) -> str | None:
        try:
            require_matching_parameters(self._dump, model, "script", "command")
        except DumpError as error:
            return str(error)
        except (ValueError, TypeError):
            return None  # no model that a guard takes: said where it is laid in
        return None

    @property
    def alone(self) -> bool:
        """Whether this process stands for all ranks."""
        return self._alone

    def _refuse(self, reason: str | None) -> None:
        if reason is not None:
            raise DumpError(reason)

    # -- 2. the outcome --------------------------------------------------------------------------------------------

    def _cannot(self, reason: str) -> NoReturn:
        self._has_ended = True
        end_cannot(self._request, self._dump, self._rank, self._alone, reason)

    def _finish(self) -> NoReturn:
        self._has_ended = True
        step = self._step
        step.around.close()
        self._run.notes += list(dict.fromkeys(step.notes))
        again = gathered(self._run, step.losses)
        if self._request.experiment not in (None, TRACE_ALONE):
            self._end_experiment(again)
        # a trace runs compiled code eagerly
        compiled = self._step.watcher is None and (is_compiled(step.rebuilt.wrapper.model) or not self._alone)
        result = compare(self._dump, self._rank, self._losses, again, self._alone, compiled)
        self._judge_calls(result)
        if self._alone:
            self._end_alone(result, again)
        self._end_on_all_ranks(result, again)

    def _judge_calls(self, result: Result) -> None:
        """Where only the model's arguments were recorded, a loss with the script's own labels says nothing."""
        if result.outcome is not Outcome.SAME and self._step.loss_takes_more:
            result.outcome = Outcome.CANNOT
            result.reason = (
                "the loss takes tensors that did not come through the guard, such as labels, and met other ones here: "
                f"so that the dump has them, {THROUGH_STEPS}"
            )
        elif result.outcome is not Outcome.SAME and self._step.is_of_calls:
            result.notes.append(
                "the dump holds what the model was called with; all else in the step is the script's own"
            )

    def _end_experiment(self, again: StepResult) -> NoReturn:
        site = again.sites[0] if again.sites else (again.report.origin if again.report is not None else None)
        end(self._request, {"site": site.to_dict() if site is not None else None}, "", 0)

    def _end_alone(self, result: Result, again: StepResult) -> NoReturn:
        data, text = result.to_dict(), outcome_text(result)
        if self._step.watcher is not None and (traced := self._told(self._step.watcher.result(again.notes), result)):
            found = diagnosis_of(self._dump, traced, result)
            data |= found.to_dict()
            text = "\n".join([*([text] if self._request.experiment is None else [""]), diagnosis_text(found)])
        end(self._request, data, text, EXIT_CODES[result.outcome])

    @staticmethod
    def _told(traced: Traced, result: Result) -> Traced | None:
        """The trace, unless it is of another step than that of training and has found nothing."""
        if result.outcome is not Outcome.CANNOT:
            return traced
        traced.notes.append("this step was not given all that training's was: the trace is of what it met here")
        return traced if traced.first_nonfinite_op is not None else None

    def _end_on_all_ranks(self, result: Result, again: StepResult) -> NoReturn:
        """Rank 0 prints what all have to say. Collective: two gathers and a barrier; with a trace a broadcast too."""
        results: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(results, result.to_dict(), group=self._group)
        worst = max((Outcome(each["outcome"]) for each in results), key=lambda outcome: EXIT_CODES[outcome])
        text = json.dumps({"outcome": str(worst), "ranks": results}) + "\n"
        if self._step.watcher is not None:
            found = diagnosis_of(self._dump, self._step.watcher.result(again.notes), result)
            text += told_by_all_ranks(self._dump, self._rank, found, diagnosis_text)
        if dist.get_rank(self._group) == 0:
            print(text, end="", flush=True)
        dist.barrier(group=self._group)  # torchrun ends all once one has ended with another code than 0
        end(self._request, {}, "", EXIT_CODES[worst])

    # -- 3. the script ends before that ----------------------------------------------------------------------------

    @property
    def exit_order(self) -> int:
        """As of a guard: there is one takeover."""
        return 0

    def on_uncaught_exception(self, error: BaseException) -> int | None:
        """For `distributed.exit`: the script raised. In training the step may have ended just so."""
        if self._has_ended:
            return None
        if self._alone and self._step.num_served == len(self._step.window) and self._raised_then():
            with contextlib.suppress(Exception):
                self._run.collector.on_raise(error, self.monitor.record())
                self._run.notes.append(raised_text(self._dump, error))
                self._finish()
        frame = next((f for f, _ in reversed(list(traceback.walk_tb(error.__traceback__))) if is_users_own(f)), None)
        where = f" in {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
        self._cannot(f"the script raised {type(error).__name__}{where} before the update, {self._what_then(error)}")

    def _what_then(self, error: BaseException) -> str:
        """What a script that raised in a replay is to be told beside: whether training did so, or what may have."""
        if not self._alone and has_raised(self._dump):
            origin = self._dump.report.origin
            rank = f" --rank {origin.rank}" if origin is not None and origin.rank is not None else ""
            script = script_text(self._dump.manifest.run.command) or "python train.py"
            then = "as training did" if f"raised {type(error).__name__} {RAISED}" in self._dump.report.cause else ""
            alone = f"ddp-nanguard replay {self._dump.path}{rank} -- {script}"
            return ", ".join(filter(None, [then, f"so that ranks cannot compare: replay one alone, {alone}"]))
        traced = "; without --trace it may not" if self._step.watcher is not None and not self._raised_then() else ""
        return f"see its traceback{traced}"

    def _raised_then(self) -> bool:
        dump = self._dump
        return dump.manifest.alone or dump.report.single_rank_view or has_raised(dump)

    def _on_exit(self) -> None:
        if not self._has_ended and os.getpid() == self._process:
            what = "before a batch came through the guard" if not self._step.num_served else "before the update"
            self._cannot(
                f"the script ended {what}: it must take batches from guard.steps(loader) or call guard(...), and reach "
                "optimizer.step()"
            )


def _is_connected() -> bool:
    return dist.is_available() and dist.is_initialized()


def _opened(request: ReplayRequest, alone: bool) -> Dump:
    """The dump; its checksums are the parent's to check, or rank 0's."""
    first = not _is_connected() or dist.get_rank() == 0
    return open_dump(list(request.paths), verify=request.result is None and first)


def _as_list(optimizer: Any) -> list[torch.optim.Optimizer]:
    return [inner for each in each_given(optimizer) for inner in optimizers_in(each)]


def _foreign_batch(window: list[MicroBatch]) -> str | None:
    """Why a batch cannot be given to the script: it holds a class that is not built by its name. None if it can."""
    names = [name for micro_batch in window if (name := unregistered_type(micro_batch.batch)) is not None]
    if not names:
        return None
    return f"the batch holds a {names[0]}, which is no dataclass: hand a dataclass, dict or tuple to the loop"


def _no_step(model: Any, batch: Any) -> Any:
    raise AssertionError("the script has the step")
