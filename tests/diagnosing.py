"""Trains a model of a test into its fault, and diagnoses the dump, all in this process."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ddp_nanguard import NanGuard, NonFiniteError, Recipe
from ddp_nanguard.diagnosis.diagnose import Diagnosis, diagnose
from ddp_nanguard.replay.session import Session, open_session

RECIPE = f"{__name__}:recipe"
N, WIDTH = 6, 4
"""Samples of a batch, and features of each."""


@dataclass
class Job:
    """A training of few steps that ends in a fault.

    Attributes:
        build: the model.
        step: ``step(model, batch)`` as a recipe takes it.
        batches: one per micro-batch.
        accumulation: micro-batches per step.
        optimizer: parameters -> optimizer.
        options: of the guard.
        scaler: for the guard and the training.
        before_update: called with the model and the number of micro-batches so far.
    """

    build: Callable[[], nn.Module]
    step: Callable[[Any, Any], Any]
    batches: Iterable[Any]
    accumulation: int = 1
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(parameters, lr=0.01)
    options: dict[str, Any] = field(default_factory=dict)
    scaler: Callable[[], Any] = lambda: None
    before_update: Callable[[Any, Any, int], object] = lambda model, optimizer, index: None


_job: list[Job] = []


def recipe() -> Recipe:
    """Of the job that was trained last."""
    job = _job[-1]
    return Recipe(_built(job), job.step, job.optimizer)


def _built(job: Job) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return job.build()


def trained(job: Job, directory: Path) -> str:
    """The path of the dump."""
    _job[:] = [job]
    model, scaler = _built(job), job.scaler()
    optimizer = job.optimizer(model.parameters())
    options = {"dump_dir": str(directory), "replay": RECIPE, **job.options}
    guard = NanGuard(model, optimizer, scaler=scaler, **options)
    with contextlib.closing(guard):
        try:
            _train(job, guard, model, optimizer, scaler)
            guard.check()
        except NonFiniteError as error:
            return str(error.report.dump_path)
    raise AssertionError("no fault")


def _train(job: Job, guard: Any, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    for index, batch in enumerate(guard.steps(list(job.batches))):
        losses = job.step(guard, batch)
        guard.watch(loss=losses)
        total = sum(losses.values()) if isinstance(losses, dict) else losses
        assert isinstance(total, Tensor)
        (total if scaler is None else scaler.scale(total)).backward()
        if (index + 1) % job.accumulation:
            continue
        job.before_update(model, optimizer, index)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        model.zero_grad()


def session_of(job: Job, directory: Path) -> Session:
    """The job trained into its fault, ready to be replayed."""
    return open_session([trained(job, directory)], None, None, "cpu")


def diagnosed(job: Job, directory: Path) -> Diagnosis:
    """The job trained into its fault, replayed, traced and explained."""
    session = session_of(job, directory)
    return diagnose(session, session.plain())


def marked(module: ModuleType, name: str) -> int:
    """The number of the line that carries ``# <name>``."""
    lines = inspect.getsource(module).splitlines()
    found = [number for number, line in enumerate(lines, 1) if line.endswith(f"# <{name}>")]
    assert len(found) == 1, (name, found)
    return found[0]


# -- a model and its batches
# ---------------------------------------------------------------------------------------------------


class Body(nn.Module):
    """Two layers with a function of the test's between them."""

    def __init__(self, inline_code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.inline_code = inline_code

    def forward(self, values: Tensor) -> Tensor:
        return self.b(self.inline_code(self.a(values)))  # type: ignore[no-any-return]  # modules return Any


def body(inline_code: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Body(inline_code)


def square(model: Any, batch: Any) -> Tensor:
    return model(batch["x"]).square().mean()  # type: ignore[no-any-return]


def batch(**more: Any) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return {"x": torch.randn(N, WIDTH), **more}


def inline_code(function: Callable[[Tensor], Tensor], **more: Any) -> Job:
    return Job(body(function), square, [batch()], **more)


def of_loss(loss: Callable[[Tensor, dict[str, Any]], Any], **more: Any) -> Job:
    def step(model: Any, items: dict[str, Any]) -> Any:
        return loss(model(items["x"]), items)

    return Job(body(torch.tanh), step, [batch(**more)])
