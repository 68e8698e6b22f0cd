"""The ways to find a non-finite value that `diagnosis.py` compares, each set up as its own documentation says.

A tool is attached to a training loop at fixed points, and stops a rank by raising. What it says (its exception, its
warnings, what it prints) is then turned into a `Statement`: the places that it points at, ready to be compared.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.diagnosis.rules import REASON_KINDS
from tests.cases.harness import Case

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass
class Statement:
    """What a tool says on one rank.

    Attributes:
        located: whether it claims to know where the value came from; a bad gradient alone is no such claim.
        rank: named by number.
        layers: modules that it points at, by name; "" is the model itself.
        operators: names of operators, torch functions or autograd nodes that it points at.
        lines: (file, number) that it points at.
        reason: the words in which it says why.
        text: all of it, for people.
    """

    located: bool = True
    rank: int | None = None
    layers: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    lines: tuple[tuple[str, int], ...] = ()
    reason: str = ""
    text: str = ""


@dataclass
class Stop:
    """How training ended on one rank.

    Attributes:
        kind: ``alarm`` of the tool; ``left`` waiting in a collective that a peer never joined; ``broke`` where the
            tool or the job raised something else; ``end`` where the training came to its end.
        step: updates completed by then.
        unchanged: whether the weights are those of before the faulty step's update.
        error, traceback: of what was raised.
        output: what the process printed.
        parameters: their names.
        report: of the guard, as data.
    """

    kind: str = "end"
    step: int = 0
    unchanged: bool = False
    error: str = ""
    traceback: str = ""
    output: str = ""
    parameters: list[str] = field(default_factory=list)
    report: dict[str, Any] | None = None


class AlarmError(RuntimeError):
    """A tool that only returns an answer has found something, and its user stops the rank."""


class Tool:
    """One way to look; the points of the loop where it may act, in order."""

    name = ""
    short = ""
    package = ""
    about = ""

    def attach(self, model: nn.Module) -> None:
        """Before the model is wrapped."""

    def start(self, case: Case, model: nn.Module, optimizer: Any, scaler: Any, directory: str) -> tuple[Any, Any]:
        """After it; returns what is called and what is stepped."""
        case.register(model)  # some cases keep what they register
        return model, optimizer

    def batches(self, items: Iterable[Any]) -> Iterable[Any]:
        return items

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """Of forward and backward of one micro-batch."""
        return contextlib.nullcontext()

    def step(self, case: Case, called: Any, items: Any) -> Any:
        """The losses of one micro-batch."""
        losses = case.step(called, items)
        self.after_forward(losses)
        return losses

    def after_forward(self, losses: Any) -> None: ...

    def after_backward(self, model: nn.Module, loss: Tensor) -> None: ...

    def before_update(self, model: nn.Module) -> None: ...

    def finish(self) -> None: ...

    def is_alarm(self, error: BaseException) -> bool:
        return isinstance(error, AlarmError)

    def said(self, stop: Stop) -> Statement:
        raise NotImplementedError

    def version(self) -> str | None:
        """None where it is not installed."""
        if not self.package:
            return f"torch {torch.__version__}"
        if importlib.util.find_spec(self.package) is None:
            return None
        return f"{self.package} {importlib.metadata.version(self.package)}"


# -- this package ------------------------------------------------------------------------------------------------------


class Guard(Tool):
    name = "ddp_nanguard"
    short = "ddp_nanguard"
    about = (
        "`NanGuard(model, optimizer)` with the options of the case; the error by itself, without a recipe and "
        "without a replay; `guard.run` where the loss lies outside of the model"
    )

    def start(self, case: Case, model: nn.Module, optimizer: Any, scaler: Any, directory: str) -> tuple[Any, Any]:
        options = {"dump_dir": directory, "timeout_s": 10.0, **case.options}
        self.guard = NanGuard(model, optimizer, scaler=scaler, **options)
        self.guard.register(**case.register(model))
        return self.guard, optimizer

    def batches(self, items: Iterable[Any]) -> Iterable[Any]:
        return self.guard.steps(items)

    def step(self, case: Case, called: Any, items: Any) -> Any:
        if case.runs_step:
            return self.guard.run(case.step, items)
        losses = case.step(called, items)
        self.guard.watch(loss=losses)
        return losses

    def finish(self) -> None:
        self.guard.check()

    def is_alarm(self, error: BaseException) -> bool:
        return isinstance(error, NonFiniteError)

    def said(self, stop: Stop) -> Statement:
        assert stop.report is not None
        origin, look = stop.report["origin"] or {}, stop.report["second_look"] or {}
        layer, found = origin.get("layer"), look.get("operator") or {}
        place = re.match(r"(.*):(\d+) in ", found.get("line") or "")
        return Statement(
            rank=origin.get("rank"),
            layers=(layer,) if layer is not None else (),
            operators=(found["name"],) if found else (),
            lines=((os.path.abspath(place[1]), int(place[2])),) if place else (),
            reason=next((kind for kind in REASON_KINDS if stop.report["cause"].startswith(kind)), ""),
            text=stop.error,
        )

    def version(self) -> str | None:
        return "this repository"


# -- torch alone -------------------------------------------------------------------------------------------------------


class Anomaly(Tool):
    name = "detect_anomaly"
    short = "anomaly"
    about = "`torch.autograd.detect_anomaly(check_nan=True)` around forward and backward"

    def around(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autograd.detect_anomaly(check_nan=True)

    def is_alarm(self, error: BaseException) -> bool:
        return "returned nan values" in str(error)

    def said(self, stop: Stop) -> Statement:
        """The node of the exception, and the line of its forward from the warning."""
        forward = stop.output.rpartition("Traceback of forward call that caused the error")[2]
        lines = innermost(forward.partition("(Triggered internally")[0])
        operators = tuple(re.findall(r"Function '(\w+)' returned nan", stop.error))
        return Statement(operators=operators, lines=lines, reason=stop.error, text=with_line(stop.error, lines))


class ModuleHooks(Tool):
    name = "forward hooks"
    short = "hooks"
    about = "a forward hook on every module that raises where a tensor of its output has `isnan().any()`"

    def attach(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            module.register_forward_hook(partial(self._look, name))

    def _look(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.isnan().any():
                raise AlarmError(f"NaN in the output of {name or '(root)'} ({type(module).__name__})")

    def said(self, stop: Stop) -> Statement:
        (name,) = re.findall(r"output of (\S+) \(", stop.error)[:1]
        lines = innermost(stop.traceback)
        return Statement(layers=(plain_name(name),), lines=lines, reason=stop.error, text=with_line(stop.error, lines))


class GradientCheck(Tool):
    name = "gradient check"
    short = "gradients"
    about = "`torch.isfinite(p.grad).all()` of every parameter after the backward, before clipping and the update"

    def before_update(self, model: nn.Module) -> None:
        bad = [n for n, p in model.named_parameters() if p.grad is not None and not torch.isfinite(p.grad).all()]
        if bad:
            raise AlarmError(f"non-finite gradients: {', '.join(bad)}")

    def said(self, stop: Stop) -> Statement:
        """A list of layers points at none of them."""
        bad = stop.error.partition(": ")[2].split(", ")
        layers = {plain_name(name).rpartition(".")[0] for name in bad}
        return Statement(False, layers=tuple(layers) if len(layers) == 1 else (), reason=stop.error, text=stop.error)


# -- packages ----------------------------------------------------------------------------------------------------------


class Overflow(Tool):
    name = "DebugUnderflowOverflow"
    short = "overflow"
    package = "transformers"
    about = "`transformers.debug_utils.DebugUnderflowOverflow(model)`"

    def attach(self, model: nn.Module) -> None:
        from transformers.debug_utils import DebugUnderflowOverflow

        self.debug = DebugUnderflowOverflow(model)

    def is_alarm(self, error: BaseException) -> bool:
        return "DebugUnderflowOverflow: inf/nan detected" in str(error)

    def said(self, stop: Stop) -> Statement:
        """The module of the last frame; what it says first of it (``input[0] has nans``) is taken for a reason."""
        frames = re.findall(r"^ {18}(\S*) (\w+)$", stop.output, re.MULTILINE)
        first = re.search(r"^(\S+) has (?:nans|infs)$", stop.output, re.MULTILINE)
        layers = (plain_name(frames[-1][0]),) if frames else ()
        frame = stop.output.rpartition(" " * 18 + " ".join(frames[-1]) if frames else "?")
        shown = [first[0] if first else "", " ".join(frames[-1]) if frames else "", frame[2].strip(), stop.error]
        return Statement(
            layers=layers,
            lines=innermost(stop.traceback),
            reason=first[0] if first else "",
            text=with_line("\n".join(filter(None, shown)), innermost(stop.traceback)),
        )


class Sherlorch(Tool):
    name = "sherlorch"
    short = "sherlorch"
    package = "sherlorch"
    about = (
        "`sherlorch.trace(capture_stack=True)` with `watch(model)` around forward and backward of every micro-batch; "
        "`has_issue(loss)` after it, then `diagnose(loss)` and a stop; beyond its documentation also "
        "`has_issue(p.grad)` of every parameter, unless there is a `GradScaler`"
    )

    def start(self, case: Case, model: nn.Module, optimizer: Any, scaler: Any, directory: str) -> tuple[Any, Any]:
        self.scaled = scaler is not None
        return super().start(case, model, optimizer, scaler, directory)

    def attach(self, model: nn.Module) -> None:
        self.plain = model

    def around(self) -> contextlib.AbstractContextManager[Any]:
        import sherlorch

        return self._traced(sherlorch.trace(capture_stack=True))

    @contextlib.contextmanager
    def _traced(self, trace: Any) -> Any:
        with trace as self.tracker:
            self.tracker.watch(self.plain, name="model")
            yield

    def after_backward(self, model: nn.Module, loss: Tensor) -> None:
        if self.tracker.has_issue(loss):
            raise AlarmError(self._diagnosis(loss))
        grads = {} if self.scaled else {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        bad = [name for name, grad in grads.items() if self.tracker.has_issue(grad)]
        if bad:
            raise AlarmError(f"has_issue: gradients of {', '.join(bad)}")

    def _diagnosis(self, loss: Tensor) -> str:
        try:
            return str(self.tracker.diagnose(loss))
        except KeyError as error:
            return f"has_issue: the loss; {error}"

    def said(self, stop: Stop) -> Statement:
        """Of several culprits, each counts."""
        culprits = re.findall(r"Culprit #\d+: \[\d+\] (\S+)  shape.*", stop.error)
        heads = re.findall(r"Culprit #\d+: .*", stop.error)
        tags = [found[1] for head in heads if (found := re.search(r"\[model\.?(\S*)\]", head))]
        lines = [(found[1], int(found[2])) for head in heads if (found := re.search(r"\((/\S+):(\d+)\)", head))]
        layers = tuple(map(plain_name, tags))
        return Statement(bool(culprits), None, layers, tuple(culprits), tuple(lines), stop.error, stop.error)


class Stability(Tool):
    name = "stabilityguard"
    short = "stabilityguard"
    package = "stabilityguard"
    about = (
        '`GuardedOptimizer(optimizer, model, nan_action="raise")`; the layer that it names is one of a set, so '
        "the seed of Python's hashes is fixed. Its `DistributedGuardedOptimizer`, which is to name the rank, cannot "
        "take a step in version 0.3.0: it reads attributes that it does not set"
    )

    def start(self, case: Case, model: nn.Module, optimizer: Any, scaler: Any, directory: str) -> tuple[Any, Any]:
        from stabilityguard import GuardedOptimizer

        super().start(case, model, optimizer, scaler, directory)
        return model, GuardedOptimizer(optimizer, model, nan_action="raise", log_dir=directory)

    def is_alarm(self, error: BaseException) -> bool:
        return type(error).__name__ == "GradientSpikeError"

    def said(self, stop: Stop) -> Statement:
        (name,) = re.findall(r"layer='([^']*)'", stop.error)
        layer = name.rpartition(".")[0] if name in stop.parameters else ("" if name == "root" else name)
        return Statement(layers=(plain_name(layer),), reason=stop.error, text=stop.error)


TOOLS: dict[str, Callable[[], Tool]] = {
    tool.name: tool for tool in (Guard, Anomaly, ModuleHooks, GradientCheck, Overflow, Sherlorch, Stability)
}


# -- from text to places -----------------------------------------------------------------------------------------------


def plain_name(name: str) -> str:
    """Without what wrappers add; names that a tool writes with a wrapper's prefix count as the layer's own."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    return "" if parts == ["(root)"] else ".".join(parts)


def innermost(traceback: str) -> tuple[tuple[str, int], ...]:
    """The innermost line of the job's own code in a traceback: the line that a person looks at."""
    entries = re.findall(r'File "([^"]+)", line (\d+)', traceback)
    own = [(file, int(line)) for file, line in entries if "/tests/" in file and "rank_processes" not in file]
    return tuple(own[-1:])


def with_line(text: str, lines: tuple[tuple[str, int], ...]) -> str:
    return text + "".join(f"\n  {file}:{line}" for file, line in lines)
