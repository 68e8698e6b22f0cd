"""The code on the pages runs, and their commands are ones that the parser takes."""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ddp_nanguard
from ddp_nanguard import NanGuard, Recipe
from ddp_nanguard.cli import main, replay
from tests.golden import GOLDEN

REPOSITORY = Path(__file__).parents[2]
PAGES = [*sorted((REPOSITORY / "docs").glob("*.md")), REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]
ELSEWHERE = {
    "DistributedDataParallel(net)": "two ranks: tests/ranks/test_readme.py",
    "inject(model, rank=1": "two ranks: tests/ranks/test_readme.py",
    "import sentry_sdk": "a stand-in for the service: tests/unit/test_logger_page.py",
    "from opentelemetry": "likewise",
    "from prometheus_client": "likewise",
}
"""Blocks that another test runs, by what is in them, and where."""
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


def _blocks() -> list[Any]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for block in FENCE.finditer(text):
            name = f"{page.name}:{text.count(chr(10), 0, block.start()) + 1}"
            found.append(pytest.param(block[2], textwrap.dedent(block[3]), id=name))
    return found


BLOCKS = _blocks()
PYTHON = [block for block in BLOCKS if block.values[0] == "python"]
OWN_TEST = "trainers.md"
"""Its programs are run whole, each in processes of its own: tests/integrations/test_trainers_page.py."""
OF_LOOPS = [block for block in PYTHON if not str(block.id).startswith(OWN_TEST)]
RUN_HERE = [block for block in OF_LOOPS if not any(mark in block.values[1] for mark in ELSEWHERE)]


class Net(nn.Module):
    """Something with the names that the pages use."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.blocks(values)  # type: ignore[no-any-return]  # modules return Any


def _train_step(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def _job() -> dict[str, Any]:
    """What a training script has where a page speaks of its loop."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return {
        "torch": torch, "ddp_nanguard": ddp_nanguard, "NanGuard": NanGuard,
        "model": net, "optimizer": optimizer, "loss_fn": nn.functional.mse_loss, "rank": 0,
        "loader": [{"x": torch.ones(2, 4), "y": torch.zeros(2, 1)}] * 2,
        "engine": SimpleNamespace(step=optimizer.step, zero_grad=optimizer.zero_grad),
        "graph": SimpleNamespace(replay=lambda: None), "static_loss": torch.zeros(()),
        "sampler": SimpleNamespace(set_epoch=lambda epoch: None), "first_epoch": 0, "num_epochs": 2,
        "wandb": SimpleNamespace(init=lambda *_: None), "run": SimpleNamespace(alert=lambda *_, **__: None),
        "build_model": Net, "train_step": _train_step,
        "build_optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    }  # fmt: skip


def test_every_page_with_code_is_read() -> None:
    assert len(RUN_HERE) >= 12 and len(RUN_HERE) + len(ELSEWHERE) == len(OF_LOOPS)


@pytest.mark.parametrize(("language", "code"), RUN_HERE)
def test_code_runs(language: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    Path("train.py").write_text("recipe = None\n")
    Path("nan_dumps").mkdir()
    Path("nan_dumps/step-00000030").symlink_to(GOLDEN)
    names = _job()
    if re.search(r"\bguard\b", code) and "guard = " not in code:
        names["guard"] = NanGuard(names["model"], names["optimizer"])
        names["loss"] = names["guard"](torch.ones(2, 4)).sum()
    exec(compile(code, "page", "exec"), names)
    if "recipe" in names:
        assert isinstance(names["recipe"](), Recipe)
    if "guard" in names:
        names["guard"].close()


COMMAND = re.compile(r"(?:^|[$;&] *|-m |next: +)(?:ddp-nanguard|ddp_nanguard) (.+)", re.MULTILINE)


def _commands() -> list[str]:
    text = "\n".join(block.values[1].replace("\\\n", " ") for block in BLOCKS)
    return sorted({found[1].split("  #")[0].split(" && ")[0].strip() for found in COMMAND.finditer(text)})


@pytest.mark.parametrize("command", _commands())
def test_commands_are_taken_by_the_parser(command: str) -> None:
    given, _ = replay.without_job(shlex.split(command))
    assert callable(main._parser().parse_args(given).command)


def test_commands_are_found() -> None:
    assert {command.split()[0] for command in _commands()} >= {
        "show", "list", "report", "explain", "replay", "drill", "doctor", "run"
    }  # fmt: skip
