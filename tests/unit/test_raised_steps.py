"""A step that raises because of a NaN: the dump names where that began, and the replay raises as training did."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ddp_nanguard import NanGuard, Recipe
from ddp_nanguard.diagnosis.diagnose import diagnose
from ddp_nanguard.dump import open_dump
from ddp_nanguard.replay.outcome import Outcome
from ddp_nanguard.replay.session import open_session
from ddp_nanguard.report.types import Site


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 1)
        nn.init.constant_(self.weight, 1.0)
        nn.init.constant_(self.bias, 5.0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x * self.bias, super().forward(x).log()


def step(model: nn.Module, batch: Tensor) -> Tensor:
    _, out = model(batch)
    if not bool(out.isfinite().all()):
        raise ValueError("matrix contains invalid numeric entries")
    return out.mean()


def recipe() -> Recipe:
    return Recipe(model=Net(), step=step)


def _dumped(folder: Path, name: str, by_step: bool = False) -> tuple[Path, Site]:
    """The dump of a training whose third step raises, and its origin."""
    recipe = globals()[name]()
    net, step = recipe.model, recipe.step
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    guard = NanGuard(net, optimizer, dump_dir=str(folder), replay=f"{__name__}:{name}")
    try:
        for x in guard.steps([torch.ones(3, 2) * scale for scale in (1, 1, -9)]):
            (guard.run(step, x) if by_step else step(guard, x)).backward()
            optimizer.step()
    except (AssertionError, ValueError) as error:
        code = guard.on_uncaught_exception(error)
    guard.close()
    assert code == 65
    (path,) = folder.glob("step-*")
    origin = open_dump(path).report.origin
    assert origin is not None
    return path, origin


@pytest.mark.parametrize("by_step", [False, True])
def test_the_raise_is_the_outcome_of_the_replay(tmp_path: Path, by_step: bool) -> None:
    path, origin = _dumped(tmp_path, "recipe", by_step)
    assert (origin.step, str(origin.phase), origin.layer, origin.kind) == (2, "forward", "", "nan")
    session = open_session([str(path)], None, None, "cpu")
    outcome = session.plain()
    assert outcome.outcome is Outcome.SAME
    (note,) = [note for note in outcome.notes if note.startswith("the step raised")]
    assert note.startswith(f"the step raised ValueError at {__file__}:")
    assert note.endswith(" in step, as in training: matrix contains invalid numeric entries")
    found = diagnose(session, outcome)
    assert found.traced is not None
    assert "log of a negative number" in found.reason.sentence


class Checked(Net):
    """Refuses its own values."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.log(5 + (x * self.weight).sum(1))
        assert bool(h.isfinite().all()), "exploded"
        return h, h


class Finite(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, 5 + (x * self.weight).sum(1)


def matched(model: nn.Module, batch: Tensor) -> Tensor:
    _, out = model(batch)
    cost = out.log()
    if not bool(cost.detach().isfinite().all()):
        raise ValueError("matrix contains invalid numeric entries")
    return cost.mean()


def checked_recipe() -> Recipe:
    return Recipe(model=Checked(), step=step)


def matched_recipe() -> Recipe:
    return Recipe(model=Finite(), step=matched)


@pytest.mark.parametrize("name", ["checked", "matched"])
def test_a_raise_before_any_output_or_loss_is_told_by_what_its_code_had_computed(tmp_path: Path, name: str) -> None:
    path, origin = _dumped(tmp_path, f"{name}_recipe")
    expected = ("forward", "", "output") if name == "checked" else ("loss", None, "cost")
    assert (str(origin.phase), origin.layer, origin.slot) == expected
    session = open_session([str(path)], None, None, "cpu")
    outcome = session.plain()
    assert outcome.outcome is Outcome.SAME
    assert "log of a negative number" in diagnose(session, outcome).reason.sentence


def test_a_raise_over_finite_values_and_masks_is_not_ours() -> None:
    net = Net()
    guard = NanGuard(net, torch.optim.SGD(net.parameters(), lr=1e-3), dump_dir=None)
    code: int | None = 0
    try:
        scores = guard(torch.ones(3, 2))[0].masked_fill(torch.eye(3, 2) > 0, -float("inf"))
        raise KeyError(scores.shape)
    except KeyError as error:
        code = guard.on_uncaught_exception(error)
    guard.close()
    assert code is None
