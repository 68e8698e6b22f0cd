"""Experiments: the step is run again with one thing changed, such as precision, determinism or memory contents."""

from __future__ import annotations

import contextlib
import pdb
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ddp_nanguard.capture.window import MicroBatch
from ddp_nanguard.replay.rebuild import Rebuilt
from ddp_nanguard.replay.run_step import StepResult
from ddp_nanguard.replay.session import Session
from ddp_nanguard.report.messages import what
from ddp_nanguard.report.types import Site
from ddp_nanguard.tensors.containers import copy_containers
from ddp_nanguard.wrappers import wrapper_class

from .trace.events import Event
from .trace.source_lines import user_frame
from .trace.traced_step import Traced, trace_step

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass
class ExperimentResult:
    """The result of one experiment.

    Attributes:
        name: the option on the command line.
        text: the result in one sentence.
        failed: whether the step was non-finite; None where it could not be run.
        details: for ``--json``.
    """

    name: str
    text: str
    failed: bool | None
    details: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Text, result and details as JSON-ready data."""
        return {"text": self.text, "failed": self.failed, **self.details}


KEEP_DTYPE = "cannot: sharded parameters keep their dtype"
OWN_CASTS = "; casts that the step's own code makes are as they were"


def in_dtype(session: Session, name: str) -> ExperimentResult:
    """Whether the step stays finite with weights, buffers and floating-point batch items in another precision.

    Args:
        session: without an obstacle.
        name: a key of `DTYPES`.
    """
    if wrapper_class(session.dump.manifest.wrapper_description.kind).is_sharded:
        return ExperimentResult(f"--dtype {name}", KEEP_DTYPE, None)
    return _changed(session, f"--dtype {name}", around_experiment(name), OWN_CASTS)


def deterministic(session: Session) -> ExperimentResult:
    """Whether the step also fails with deterministic algorithms."""
    return _changed(session, "--deterministic", around_experiment("deterministic"))


def poison_memory(session: Session) -> ExperimentResult:
    """Whether the step reads memory that it has not written: uninitialised tensors are filled with NaN."""
    return _changed(session, "--poison-memory", around_experiment("poison-memory"))


def around_experiment(name: str) -> Callable[[Rebuilt, list[MicroBatch]], contextlib.AbstractContextManager[None]]:
    """What is changed around the step.

    Args:
        name: a key of `DTYPES`, ``deterministic``, ``poison-memory``, or ``plain`` for nothing.
    """

    @contextlib.contextmanager
    def around(rebuilt: Rebuilt, window: list[MicroBatch]) -> Iterator[None]:
        if name in DTYPES:
            rebuilt.wrapper.model.to(DTYPES[name])
            for micro_batch in window:
                micro_batch.batch = copy_containers(micro_batch.batch, lambda tensor: _cast(tensor, DTYPES[name]))
        if name == "poison-memory":
            fill_free_memory(rebuilt.device)
        changed = name in ("deterministic", "poison-memory")
        with _deterministic(fill=name == "poison-memory") if changed else contextlib.nullcontext():
            yield

    return around


def fill_free_memory(device: torch.device) -> None:
    """Leave NaN in the memory that the allocator will hand out next, in blocks of 64 B to 8 MiB."""
    sizes = [1 << exponent for exponent in range(6, 24)]
    held = [torch.full((size // 4,), torch.nan, dtype=torch.float32, device=device) for size in sizes for _ in range(4)]
    del held


@contextlib.contextmanager
def _deterministic(fill: bool) -> Iterator[None]:
    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    settings: Any = torch.utils.deterministic  # mypy does not see the attributes of this module
    filled = settings.fill_uninitialized_memory
    # torch fills uninitialised memory in this mode only; a warning instead of an error for operators without such an
    # algorithm.
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = fill
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filled


def repeat(session: Session, count: int) -> ExperimentResult:
    """How often the step fails in ``count`` runs, and at which sites."""
    return repeated([_first(session.run()) for _ in range(count)])


def repeated(sites: list[Site | None]) -> ExperimentResult:
    """What several runs say by the first site of each, None where one was finite."""
    count, places = len(sites), Counter(map(_place, sites))
    failed = count - places[""]
    text = f"{failed} of {count} runs non-finite"
    if failed:
        text += ": " + "; ".join(f"{number} times {place}" for place, number in places.most_common() if place)
    return ExperimentResult(f"--repeat {count}", text, failed > 0, {"runs": count, "places": dict(places)})


def _changed(session: Session, name: str, around: Any, remark: str = "") -> ExperimentResult:
    try:
        site = _first(session.run(around=around))
    except (RuntimeError, TypeError, ValueError) as error:
        return ExperimentResult(name, f"cannot: {type(error).__name__}: {str(error).splitlines()[0]}", None)
    return changed_result(name, site, remark)


def changed_result(name: str, site: Site | None, remark: str = "") -> ExperimentResult:
    """What an experiment says by the first site of its run, None where that was finite."""
    text = f"the step is finite{remark}" if site is None else f"still fails: {_place(site)}{remark}"
    return ExperimentResult(name, text, site is not None, {"site": site.to_dict() if site is not None else None})


def _first(again: StepResult) -> Site | None:
    if again.sites:
        return again.sites[0]
    return again.report.origin if again.report is not None else None


def _place(site: Site | None) -> str:
    return "" if site is None else f"{site.phase} · {what(site)}"


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


# -- a debugger at the operator ----------------------------------------------------------------------------------------


def debug(session: Session, traced: Traced) -> ExperimentResult:
    """Open pdb in the user's frame at the operator that a trace has found, before the operator's caller continues.

    The step is traced again; ``traced`` says at which operator to stop.
    """
    first = traced.first_nonfinite_op
    if first is None:
        return ExperimentResult("--pdb", "no operator to stop at", None)
    stopped: list[str] = []

    def stop(event: Event, frame: FrameType) -> None:
        if event.order == first.order and event.operator == first.operator:
            stopped.append(stop_at_operator(event, frame))

    trace_step(session, stop)
    text = stopped[0] if stopped else "this run did not come to the operator of the first one"
    return ExperimentResult("--pdb", text, None)


def stop_at_operator(event: Event, frame: FrameType) -> str:
    """Open pdb in the user's frame above ``frame``; what came of it, in words."""
    return _interact(user_frame(frame), event)


def _interact(frame: FrameType | None, event: Event) -> str:
    if frame is None:
        line = event.line
        where = f"; the forward line is {line.place()}" if line is not None else ""
        return f"{event.operator} ran in backward, where none of the user's frames is left{where}"
    print(f"stopped in {event.operator}, which gave {event.kind}; c goes on", file=sys.stderr)
    debugger: Callable[[], Any] = pdb.Pdb
    shell = debugger()
    shell.reset()
    shell.interaction(frame, None)
    return f"stopped at {event.operator}"
