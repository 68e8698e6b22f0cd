"""Runs cases as data: each on two ranks that train into the fault, then one rank's dump is diagnosed here."""

from __future__ import annotations

import contextlib
import importlib
import logging
import shutil
from collections.abc import Callable
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
from tests.diagnosing import RECIPE, Body, Job, marked, square
from tests.ranks import run_ranks

NAN, INF = float("nan"), float("inf")
N, WIDTH = diagnosing.N, diagnosing.WIDTH


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
    total: Callable[[Any], Tensor] = lambda losses: sum(losses.values()) if isinstance(losses, dict) else losses
    finite: bool = True


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
    return [_run_case(rank, table[name], f"{directory}/{index}") for index, name in enumerate(names)]


def _run_case(rank: int, case: Case, directory: str) -> Ended:
    ended, log = Ended(), _Log()
    logging.getLogger("ddp_nanguard").addHandler(log)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        plain = case.build()
    model, scaler = wrapped(plain, case.wrap), case.scaler()
    optimizer = case.optimizer(model.parameters())
    options = {"dump_dir": directory, "timeout_s": 10.0, "replay": RECIPE, **case.options}
    guard = NanGuard(model, optimizer, scaler=scaler, **options)
    guard.register(**case.register(model))
    try:
        _train(rank, case, guard, model, optimizer, scaler, ended)
    except NonFiniteError as error:
        ended.report, ended.text, ended.steps = error.report.to_dict(), str(error), error.report.step
    else:
        ended.steps = guard.step
    with contextlib.suppress(NonFiniteError):
        guard.close()
    logging.getLogger("ddp_nanguard").removeHandler(log)
    ended.finite = all(bool(t.isfinite().all()) for t in [*_local(model), *model.buffers()] if t.is_floating_point())
    ended.log, ended.scale = log.lines, scaler.get_scale() if scaler is not None else 0.0
    return ended


def wrapped(model: nn.Module, how: str | Callable[[nn.Module], nn.Module]) -> nn.Module:
    if callable(how):
        return how(model)
    if how == "fsdp2":
        return fully_shard(model)
    return DistributedDataParallel(model) if how == "ddp" else model


def _train(rank: int, case: Case, guard: Any, model: nn.Module, optimizer: Any, scaler: Any, ended: Ended) -> None:
    batches = [case.batch(rank, index) for index in range(case.batches)]
    before = [tensor.clone() for tensor in _local(model)]
    try:
        for index, items in enumerate(guard.steps(batches)):
            case.before(model, optimizer, rank, index)
            losses = case.step(guard, items)
            guard.watch(loss=losses)
            total = case.total(losses)
            ended.losses.append(float(total.detach()))
            (total if scaler is None else scaler.scale(total)).backward()
            if (index + 1) % case.accumulation:
                continue
            case.before_update(model, optimizer, rank, index)
            before = [tensor.clone() for tensor in _local(model)]
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        guard.check()
    finally:
        ended.unchanged = all(
            torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
            for a, b in zip(before, _local(model), strict=True)
        )


def _local(model: nn.Module) -> list[Tensor]:
    return [getattr(p, "_local_tensor", p).detach().contiguous() for p in model.parameters()]


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


# -- in the test -------------------------------------------------------------------------------------------------------


def each(cases: dict[str, Case], wrong: dict[str, str] | None = None) -> pytest.MarkDecorator:
    """Parametrizes with the cases' names; ``wrong`` says for which the answer is known to be wrong."""
    marks = {name: [pytest.mark.xfail(strict=True, reason=reason)] for name, reason in (wrong or {}).items()}
    return pytest.mark.parametrize("name", [pytest.param(name, id=name, marks=marks.get(name, [])) for name in cases])


Launch = dict[str, list[Ended]]


def launched(module: str, cases: dict[str, Case], directory: Path) -> Launch:
    """All cases of a module in one launch of two ranks."""
    names = list(cases)
    ranks = run_ranks(run_cases, timeout_s=50, module=module, names=names, directory=str(directory))
    return {name: [rank[index] for rank in ranks] for index, name in enumerate(names)}


def check(module: ModuleType, name: str, case: Case, ended: list[Ended]) -> None:
    """Both ranks say the same, and it is what the case expects."""
    if case.origin is None:
        for rank in ended:
            assert rank.report is None, rank.text
            assert rank.steps == case.batches // case.accumulation
            assert rank.finite or not case.finite
        return
    first, second = ended
    assert first.report is not None and second.report is not None, f"{name}: nothing stopped"
    assert first.text == second.text
    assert first.report["origin"] == second.report["origin"]
    assert first.steps == second.steps
    expected = dict(case.origin)
    inline_code, state = expected.pop("inline_code", None), expected.pop("state", None)
    assert {key: first.report["origin"][key] for key in expected} == expected, first.text
    if inline_code is not None:
        assert first.report["origin"]["inline_code"] == inline_code, first.text
    if state is not None:
        assert first.report["nonfinite_state"] == state
    if expected["phase"] != "optimizer":
        assert first.unchanged and second.unchanged
    if case.reason is not None:
        check_reason(module, case.reason, diagnosed_dump(case, first.report["dump_path"]))


def diagnosed_dump(case: Case, dump: str, rank: int | None = None) -> Diagnosis:
    """One rank's dump, replayed, traced and explained in this process."""
    diagnosing._job[:] = [Job(case.build, case.step, [], optimizer=case.optimizer)]
    session = open_session([dump], rank, None, "cpu")
    return diagnose(session, session.plain())


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


# -- a model and a step that take the whole batch ----------------------------------------------------------------------


class ValidatedArgs(nn.Module):
    """Two layers with a function of the case's between them, which also gets the batch."""

    def __init__(self, inline_code: Callable[[Tensor, dict[str, Any]], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.inline_code = inline_code

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.b(self.inline_code(self.a(batch["x"]), batch))  # type: ignore[no-any-return]  # modules return Any


def given(inline_code: Callable[[Tensor, dict[str, Any]], Tensor]) -> Callable[[], nn.Module]:
    return lambda: ValidatedArgs(inline_code)


def of_batch(model: Any, batch: Any) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


class _SpoiltGradient(torch.autograd.Function):
    """The gradient divided by a number of the batch: 0 spoils all of it, or one column."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, divisor: Tensor, column: int | None) -> Tensor:
        ctx.divisor, ctx.column = divisor, column
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        if ctx.column is None:
            return gradient / ctx.divisor, None, None
        gradient = gradient.clone()
        gradient[:, ctx.column] /= ctx.divisor
        return gradient, None, None


def spoilt_gradient(values: Tensor, divisor: Tensor, column: int | None = None) -> Tensor:
    return _SpoiltGradient.apply(values, divisor, column)  # type: ignore[no-any-return, no-untyped-call]  # torch's own


class BadWeight(nn.Module):
    """A layer whose weight's gradient alone is bad where the batch's "g" is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        hidden = nn.functional.linear(batch["x"], spoilt_gradient(self.a.weight, batch["g"]), self.a.bias)
        return self.b(hidden)  # type: ignore[no-any-return]  # modules return Any
