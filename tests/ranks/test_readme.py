"""The README's code runs as it stands."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddp_nanguard import NanGuard, NonFiniteError
from tests.ranks import run_ranks

README = Path(__file__).parents[2] / "README.md"


def _blocks(language: str, page: Path = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def _run_first_screen(rank: int, world_size: int, code: str) -> tuple[int, bool]:
    Path("train.py").write_text("recipe = None\n")  # the module that the snippet calls its own
    sys.path.insert(0, str(Path.cwd()))
    batches = [{"x": torch.ones(2, 4) * (1 + rank), "y": torch.zeros(2, 1)} for _ in range(3)]
    names: dict[str, Any] = {"net": nn.Linear(4, 1), "loss_fn": nn.functional.mse_loss, "loader": batches}
    before = names["net"].weight.detach().clone()
    exec(code, names)
    step = names["guard"].step
    names["guard"].close()
    return step, torch.equal(before, names["net"].weight)


def test_the_first_screen_runs() -> None:
    code = _blocks("python")[0]
    assert run_ranks(_run_first_screen, code=code) == [(3, False), (3, False)]


def _run_planted(rank: int, world_size: int, code: str) -> str:
    model = nn.Module()
    model.blocks = nn.Sequential(nn.Linear(2, 2))
    model.forward = model.blocks.forward  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exec(code, {"model": model})
    guard = NanGuard(model, optimizer, dump_dir=None)
    for _ in range(5):
        loss = guard(torch.ones(1, 2)).sum()
        guard.watch(loss=loss)
        loss.backward()
        try:
            optimizer.step()
        except NonFiniteError as error:
            return str(error).splitlines()[0]
    return "not stopped"


def test_the_planted_fault_of_the_page_comes_where_the_page_says() -> None:
    (code,) = [block for block in _blocks("python", README.parent / "docs/launching.md") if "inject(" in block]
    first, other = run_ranks(_run_planted, code=code)
    assert first == other and first.startswith("rank 1, step 3, micro-batch 0, forward: blocks.0 ")


def test_there_is_one_test_command() -> None:
    """`.ci/run` takes it from here."""
    commands = [line for block in _blocks("bash") for line in block.splitlines() if line.startswith("pip install")]
    assert commands == [
        "pip install -c constraints.txt -e '.[demo]' && ddp-nanguard demo",
        "pip install -c constraints.txt -e '.[test]' && pytest",
    ]
