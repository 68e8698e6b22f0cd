"""The programs on the page about trainers run, as they stand there."""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks
from tests.unit.test_guarded_engines import Engine

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"


def blocks() -> dict[str, str]:
    """The program of each section."""
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return {each.splitlines()[0]: "\n".join(re.findall(r"```python\n(.*?)```", each, re.DOTALL)) for each in sections}


def toy() -> dict[str, Any]:
    """What the programs take as given."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    batches = [torch.full((2, 3), float(number)) for number in range(4)]
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": torch.utils.data.DataLoader(torch.cat(batches), 2),
        "loss_of": lambda model, batch: model(batch).pow(2).mean(),
    }


def test_there_is_a_program_in_each_section() -> None:
    assert len(blocks()) == 6 and all(blocks().values())


def test_of_an_engine() -> None:
    names = toy()
    engine = Engine(names["model"])
    exec(blocks()["Engines that own backward and step"], names | {"engine": engine})
    assert engine.num_updates == 4


@pytest.mark.parametrize("is_bad", [False, True])
def test_of_a_checkpoint(tmp_path: Path, is_bad: bool) -> None:
    from ddp_nanguard import NanGuard, NonFiniteError

    names = toy() | {"torch": torch, "rank": 0, "path": tmp_path / "saved.pt"}
    names["guard"] = NanGuard(names["model"], names["optimizer"], dump_dir=None)
    if not is_bad:
        exec(blocks()["Checkpoints of a loop of your own"], names)
        names["guard"].close()
    else:
        with torch.no_grad():
            names["model"].bias[0] = float("nan")
        with pytest.raises(NonFiniteError, match="bias is NaN"):
            exec(blocks()["Checkpoints of a loop of your own"], names)
    assert names["path"].exists() != is_bad


def of_section(rank: int, world_size: int, section: str) -> list[bool]:
    """Run its program; whether each weight has changed and is finite."""
    warnings.simplefilter("ignore")
    names = toy() | _given(section)
    before = [each.detach().clone() for each in _model(names).parameters()]
    exec(blocks()[section], names)
    after = list(_model(names).parameters())
    return [
        not torch.equal(one, other) and bool(other.isfinite().all()) for one, other in zip(before, after, strict=True)
    ]


def _given(section: str) -> dict[str, Any]:
    if section == "Lightning":
        return {"module": _lightning_module()}
    if section != "transformers and TRL":
        return {}
    from transformers import TrainingArguments

    from tests.integrations.transformers_toy import Answers, tiny_model

    arguments = TrainingArguments("saved", use_cpu=True, report_to="none", max_steps=2, save_strategy="no")
    return {"model": tiny_model(), "arguments": arguments, "dataset": Answers(is_bad=False)}


def _model(names: dict[str, Any]) -> nn.Module:
    return names.get("module", names["model"])  # type: ignore[no-any-return]


def _lightning_module() -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch).pow(2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("section", "library"),
    [
        ("Lightning", "lightning"),
        ("Fabric", "lightning"),
        ("transformers and TRL", "transformers"),
        ("accelerate", "accelerate"),
    ],
)
def test_of_a_library(section: str, library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    (changed,) = run_ranks(
        of_section,
        world_size=1,
        timeout_s=50,
        process_group=False,
        env={"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "1", "NANGUARD_DUMP_DIR": "dumps"},
        section=section,
    )
    assert changed and all(changed)
