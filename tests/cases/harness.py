"""Runs cases as data: each on two ranks that train into the fault, then one rank's dump is diagnosed here."""

from __future__ import annotations

import contextlib
import importlib
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.diagnosis.diagnose import Diagnosis, diagnose
from ddp_nanguard.replay.session import open_session
from tests import diagnosing
from tests.cases.parts import NAN
from tests.diagnosing import RECIPE, Body, Training, marked, replay_with, square
from tests.ranks import run_ranks
from tests.training import Loop, listening
from tests.training.loop import summed


@dataclass
class Case:
    """One restated report: what is trained, and what must be said about it.

    Attributes:
        source: the public report.
        batch: of a rank and a micro-batch.
        origin: what the report's origin must say, as far as given; None: nothing may stop.
        reason: operator, marker of the line in the case's module, and kind of the reason; "" where there is none.
        build: the model, the same on every rank.
        step: ``step(model, batch)``, as a recipe takes it.
        wrap: ``ddp``, ``fsdp2``, ``plain``, or a function of the model.
        batches, accumulation: micro-batches in all, and per step.
        before: called with model, optimizer, rank and index before each micro-batch.
        before_update: the same, before each update.
        register: modules registered with the guard, by name.
        total: what is differentiated, of what the step gave.
        finite: whether weights and buffers must be, where nothing stops.
        runs_step: whether the loop uses ``guard.run``, which a second look needs for code outside of the model.
    """

    source: str
    batch: Callable[[int, int], Any]
    origin: dict[str, Any] | None
    reason: tuple[str, str, str] | None = None
    build: Callable[[], nn.Module] = field(default_factory=lambda: lambda: Body(torch.tanh))
    step: Callable[[Any, Any], Any] = square
    wrap: str | Callable[[nn.Module], nn.Module] = "ddp"
    batches: int = 3
    accumulation: int = 1
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(parameters, lr=0.01)
    options: dict[str, Any] = field(default_factory=dict)
    scaler: Callable[[], Any] = lambda: None
    before: Callable[[nn.Module, Any, int, int], object] = lambda model, optimizer, rank, index: None
    before_update: Callable[[nn.Module, Any, int, int], object] = lambda model, optimizer, rank, index: None
    register: Callable[[nn.Module], dict[str, Any]] = lambda model: {}
    total: Callable[[Any], Tensor] = summed
    finite: bool = True
    runs_step: bool = False

    def training(self, rank: int) -> Training:
        """What one rank trains, and what its dump is replayed with."""
        batches = (self.batch(rank, index) for index in range(self.batches))
        return Training(
            self.build, self.step, batches, self.accumulation, self.optimizer, self.options, scaler=self.scaler
        )


@dataclass
class Ended:
    """How a case ended on one rank.

    Attributes:
        steps: verdicts so far.
        report: the fault's report as data, None where nothing stopped.
        text: of the error.
        unchanged: whether the local weights are those from before the last step.
        finite: whether weights and buffers are.
        losses: as numbers.
        log: warnings of the guard.
        scale: the scaler's at the end; 0 without one.
    """

    steps: int = 0
    report: dict[str, Any] | None = None
    text: str = ""
    unchanged: bool = False
    finite: bool = False
    losses: list[float] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    scale: float = 0.0


def batch_of(bad_rank: int | None = None, at: int = 1, value: float = NAN, **more: Any) -> Callable[[int, int], Any]:
    """Batches of which one, on one rank, has one bad feature in sample 3."""

    def make(rank: int, index: int) -> dict[str, Any]:
        values = diagnosing.batch()["x"] + 0.1 * (rank + index)
        if (rank, index) == (bad_rank, at):
            values[3, 1] = value
        return {"x": values, **{name: item(rank, index) if callable(item) else item for name, item in more.items()}}

    return make


def flagged(rank: int | None, at: int = 1, good: float = 1.0, bad: float = 0.0) -> Callable[[int, int], Tensor]:
    """An item of the batch that has its bad value on one rank and one micro-batch only."""
    return lambda r, index: torch.tensor(bad if (r, index) == (rank, at) else good)


# -- on the ranks ------------------------------------------------------------------------------------------------------


def run_cases(rank: int, world_size: int, module: str, names: list[str], directory: str) -> list[Ended]:
    """Body for `run_ranks`: the cases of a module one after the other, each with a fresh model and guard."""
    table = importlib.import_module(module).CASES
    return [run_case(rank, table[name], f"{directory}/{index}") for index, name in enumerate(names)]


def run_case(rank: int, case: Case, directory: str) -> Ended:
    """One case on this rank, with a fresh model and guard."""
    training = case.training(rank)
    model, scaler = wrapped(training.built(), case.wrap), training.scaler()
    optimizer = training.optimizer(model.parameters())
    options = {"dump_dir": directory, "timeout_s": 10.0, "replay": RECIPE, **training.options}
    with listening() as log:
        guard = NanGuard(model, optimizer, scaler=scaler, **options)
        guard.register(**case.register(model))
        loop = Loop(
            model, optimizer, training.step, guard, scaler, training.accumulation, case.runs_step, total=case.total
        )
        ended = _trained(rank, case, loop, training.batches)
        with contextlib.suppress(NonFiniteError):
            guard.close()
    ended.finite = all(bool(t.isfinite().all()) for t in [*_local(model), *model.buffers()] if t.is_floating_point())
    ended.log, ended.scale = log, scaler.get_scale() if scaler is not None else 0.0
    return ended


def wrapped(model: nn.Module, how: str | Callable[[nn.Module], nn.Module]) -> nn.Module:
    if callable(how):
        return how(model)
    if how == "fsdp2":
        return fully_shard(model)
    return DistributedDataParallel(model) if how == "ddp" else model


def _trained(rank: int, case: Case, loop: Loop, batches: Iterable[Any]) -> Ended:
    ended, model = Ended(), loop.model
    before = _bits(model)

    def look_before_update(index: int) -> None:
        nonlocal before
        case.before_update(model, loop.optimizer, rank, index)
        before = _bits(model)

    loop.before_batch = lambda index, batch: case.before(model, loop.optimizer, rank, index)
    loop.before_update = look_before_update
    loop.on_losses = lambda losses: ended.losses.append(float(case.total(losses).detach()))
    try:
        loop.run(batches)
        loop.guard.check()
    except NonFiniteError as error:
        ended.report, ended.text = error.report.to_dict(), str(error)
    ended.steps = loop.guard.step if ended.report is None else ended.report["step"]
    ended.unchanged = all(torch.equal(a, b) for a, b in zip(before, _bits(model), strict=True))
    return ended


def _bits(model: nn.Module) -> list[Tensor]:
    return [tensor.clone().reshape(-1).view(torch.uint8) for tensor in _local(model)]


def _local(model: nn.Module) -> list[Tensor]:
    return [getattr(p, "_local_tensor", p).detach().contiguous() for p in model.parameters()]


# -- in the test -------------------------------------------------------------------------------------------------------


def each(cases: dict[str, Case], wrong: dict[str, str] | None = None) -> pytest.MarkDecorator:
    """Parametrizes with the cases' names; ``wrong`` says for which the answer is known to be wrong."""
    marks = {name: [pytest.mark.xfail(strict=True, reason=reason)] for name, reason in (wrong or {}).items()}
    return pytest.mark.parametrize("name", [pytest.param(name, id=name, marks=marks.get(name, [])) for name in cases])


@dataclass
class Launch:
    """All cases of a module, after one launch of two ranks.

    Attributes:
        module: where the cases are.
        ended: per case, how it ended on each rank.
    """

    module: ModuleType
    ended: dict[str, list[Ended]]

    def __getitem__(self, name: str) -> list[Ended]:
        return self.ended[name]

    def report(self, name: str) -> dict[str, Any]:
        """The report of a case that has stopped."""
        report = self.ended[name][0].report
        assert report is not None, f"{name}: nothing stopped"
        return report

    def check(self, name: str) -> None:
        """Both ranks say the same, and it is what the case expects."""
        case = self.module.CASES[name]
        if case.origin is None:
            _check_quiet(case, self.ended[name])
            return
        _check_stopped(case, self.report(name), self.ended[name])
        if case.reason is not None:
            check_error(self.module, case.reason, self.report(name))
            check_reason(self.module, case.reason, self.diagnosed(name))

    def diagnosed(self, name: str, rank: int | None = None) -> Diagnosis:
        """The case's dump, replayed, traced and explained in this process."""
        return diagnosed_dump(self.module.CASES[name], self.report(name)["dump_path"], rank)


def launched(module: ModuleType, directory: Path) -> Launch:
    """All cases of a module in one launch of two ranks."""
    names = list(module.CASES)
    ranks = run_ranks(run_cases, timeout_s=50, module=module.__name__, names=names, directory=str(directory))
    return Launch(module, {name: [rank[index] for rank in ranks] for index, name in enumerate(names)})


def _check_quiet(case: Case, ended: list[Ended]) -> None:
    for rank in ended:
        assert rank.report is None, rank.text
        assert rank.steps == case.batches // case.accumulation
        assert rank.finite or not case.finite


def _check_stopped(case: Case, report: dict[str, Any], ended: list[Ended]) -> None:
    first, second = ended
    assert second.report is not None and case.origin is not None
    assert first.text == second.text
    assert report["origin"] == second.report["origin"]
    assert first.steps == second.steps
    check_origin(case, first)
    assert case.origin["phase"] == "optimizer" or (first.unchanged and second.unchanged)


def check_origin(case: Case, ended: Ended, steps_before: int = 0) -> None:
    """The report names what the case expects, so many steps later."""
    assert case.origin is not None and ended.report is not None
    expected = dict(case.origin)
    if "step" in expected:
        expected["step"] += steps_before
    state = expected.pop("state", None)
    assert {key: ended.report["origin"][key] for key in expected} == expected, ended.text
    assert state is None or ended.report["nonfinite_state"] == state


def diagnosed_dump(case: Case, dump: str, rank: int | None = None) -> Diagnosis:
    """One rank's dump, replayed, traced and explained in this process."""
    replay_with(case.training(rank or 0))  # of which the dump has the batches
    session = open_session([dump], rank, None, "cpu")
    return diagnose(session, session.plain())


def check_error(module: ModuleType, expected: tuple[str, str, str], report: dict[str, Any]) -> None:
    """The error itself names operator, line and kind of the reason: nothing was replayed, and no recipe was asked."""
    operator, marker, kind = expected
    first = (report["second_look"] or {}).get("operator") or {}
    line = re.match(r"(.*):(\d+) in ", first.get("line") or "")
    got = (first.get("name", ""), int(line[2]) if line else None)
    assert got == (operator, marked(module, marker) if marker else None), report["second_look"]
    assert line is None or (module.__file__ is not None and module.__file__.endswith(line[1].rpartition("/")[2]))
    assert kind == "unknown" or report["cause"].startswith(kind), report["cause"]


def check_reason(module: ModuleType, expected: tuple[str, str, str], found: Diagnosis) -> None:
    operator, marker, kind = expected
    first_nonfinite_op = found.traced.first_nonfinite_op if found.traced is not None else None
    line = first_nonfinite_op.line if first_nonfinite_op is not None else None
    got = (
        first_nonfinite_op.operator if first_nonfinite_op is not None else "",
        line.number if line is not None else None,
        found.reason.kind,
    )
    wanted = (operator, marked(module, marker) if marker else None, kind)
    assert got == wanted, (got, found.reason.sentence, found.obstacle)
    assert line is None or line.file == module.__file__


def copied(dump: str, to: Path) -> Path:
    return Path(shutil.copytree(dump, to))


def train_alone(guard: Any, optimizer: Any, step: Callable[[Any, Any], Tensor], batches: list[Any]) -> None:
    """A loop of one process, without a watched loss."""
    for batch in guard.steps(batches):
        step(guard, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
