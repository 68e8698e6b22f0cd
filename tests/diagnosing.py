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
from tests.training import Loop

RECIPE = f"{__name__}:recipe"
N, WIDTH = 6, 4
"""Samples of a batch, and features of each."""


@dataclass
class Training:
    """A training of few steps that ends in a fault, and that its dump can be replayed with.

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

    def built(self) -> nn.Module:
        """The same weights each time, without a trace in the global random state."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return self.build()


_latest: list[Training] = []


def recipe() -> Recipe:
    """Of the training that `replay_with` was given last."""
    training = _latest[-1]
    return Recipe(training.built(), training.step, training.optimizer)


def replay_with(training: Training) -> None:
    """From now on `recipe` rebuilds this training."""
    _latest[:] = [training]


def trained(training: Training, directory: Path) -> str:
    """The path of the dump."""
    replay_with(training)
    model, scaler = training.built(), training.scaler()
    optimizer = training.optimizer(model.parameters())
    options = {"dump_dir": str(directory), "replay": RECIPE, **training.options}
    guard = NanGuard(model, optimizer, scaler=scaler, **options)
    loop = Loop(model, optimizer, training.step, guard=guard, scaler=scaler, accumulation=training.accumulation)
    loop.before_update = lambda index: training.before_update(model, optimizer, index)
    with contextlib.closing(guard):
        error = loop.until_fault(list(training.batches)) or _late(guard)
    assert error is not None, "no fault"
    return str(error.report.dump_path)


def _late(guard: NanGuard) -> NonFiniteError | None:
    """A bad update is seen in the next verdict."""
    try:
        guard.check()
    except NonFiniteError as error:
        return error
    return None


def session_of(training: Training, directory: Path) -> Session:
    """The training run into its fault, ready to be replayed."""
    return open_session([trained(training, directory)], None, None, "cpu")


def diagnosed(training: Training, directory: Path) -> Diagnosis:
    """The training run into its fault, replayed, traced and explained."""
    session = session_of(training, directory)
    return diagnose(session, session.plain())


def marked(module: ModuleType, name: str) -> int:
    """The number of the line that carries ``# <name>``."""
    lines = inspect.getsource(module).splitlines()
    found = [number for number, line in enumerate(lines, 1) if line.endswith(f"# <{name}>")]
    assert len(found) == 1, (name, found)
    return found[0]


# -- a model and its batches -------------------------------------------------------------------------------------------


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


def inline_code(function: Callable[[Tensor], Tensor], **more: Any) -> Training:
    return Training(body(function), square, [batch()], **more)


def of_loss(loss: Callable[[Tensor, dict[str, Any]], Any], **more: Any) -> Training:
    def step(model: Any, items: dict[str, Any]) -> Any:
        return loss(model(items["x"]), items)

    return Training(body(torch.tanh), step, [batch(**more)])
