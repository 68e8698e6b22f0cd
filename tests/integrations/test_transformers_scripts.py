"""Scripts with a Trainer of transformers: how they end, and their dumps run again by the same script."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.ranks import Outcome
from tests.scripts.running import first_line, launch, replay

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="it is not installed"),
    pytest.mark.exhaustive,
]

SCRIPT = Path(__file__).parent / "transformers_train.py"
OWN = ("aten.div.Tensor", "return -(chosen * mask).sum() / mask.sum()")
MODELS = ("aten.div.Tensor", "loss = loss / num_items_in_batch")
SMOOTHED = ("aten.div.Tensor", "nll_loss = nll_loss.sum() / denominator")


def train(directory: Path, *arguments: str) -> list[Outcome]:
    """Both ranks, whose exceptions end them as in a script."""
    return launch(directory, str(SCRIPT), *arguments, uncaught=True, HF_HUB_OFFLINE="1")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--accumulate", "2"), OWN),
        (("--bf16",), OWN),
        (("--own-tokens",), MODELS),
        (("--smooth", "0.1"), SMOOTHED),
        (("--kind", "OwnLoss"), OWN),
        (("--kind", "OwnStep"), OWN),
        (("--kind", "OwnStep", "--accumulate", "2"), OWN),
        (("--tokenizers",), OWN),
        (("--asks",), OWN),
    ],
    ids=lambda each: " ".join(word.strip("-") for word in each) if each[0] != "aten.div.Tensor" else "",
)
def test_it_is_stopped_whole_and_runs_again_alone(
    arguments: tuple[str, ...], line: tuple[str, str], tmp_path: Path
) -> None:
    ended = train(tmp_path, *arguments)
    assert [outcome.exit_code for outcome in ended] == [65, 65], [each.describe() for each in ended]
    (dump,) = (tmp_path / "nan_dumps").glob("step-*")
    assert {path.name for path in dump.glob("rank-*")} == {"rank-00000", "rank-00001"}
    again = replay(dump, str(SCRIPT), *arguments, options=("--trace",))
    assert (again.code, again.outcome["outcome"], again.outcome["rank"]) == (0, "same", 1), again
    assert first_line(again) == line


@pytest.mark.parametrize("catches", ["", "--catches"])
def test_what_one_rank_raises_on_its_own_ends_both_with_a_whole_dump(catches: str, tmp_path: Path) -> None:
    """Also where somebody would catch it, as the launcher of a notebook does: its peer waits for it."""
    ended = train(tmp_path, "--checks", *([catches] if catches else []))
    assert [outcome.exit_code for outcome in ended] == [65, 65], [each.describe() for each in ended]
    assert "FloatingPointError: loss is nan" in ended[1].output and "caught" not in ended[1].output
    (dump,) = (tmp_path / "nan_dumps").glob("step-*")
    assert {path.name for path in dump.glob("rank-*")} == {"rank-00000", "rank-00001"}


def test_on_all_ranks_inside_of_the_trainer(tmp_path: Path) -> None:
    train(tmp_path)
    (dump,) = (tmp_path / "nan_dumps").glob("step-*")
    ended = train(tmp_path, "--replay-from", str(dump))
    assert [outcome.exit_code for outcome in ended] == [0, 0], [each.describe() for each in ended]
    assert '"outcome": "same"' in ended[0].output
