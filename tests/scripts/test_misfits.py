"""A command that does not run the step of the dump: ``cannot``, code 5, and the line to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.command import command
from tests.scripts.running import SCRIPTS, launch, replay, train


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("misfit"), "in_main.py", "--accumulate", "2")


def test_a_script_that_waits_for_an_object_of_another_rank_is_started_again_as_that_rank(dump: Path) -> None:
    lost = replay(dump, str(SCRIPTS / "in_main.py"), "--accumulate", "2", "--share", options=("--as-rank", "1"))
    assert (lost.code, lost.outcome["outcome"]) == (5, "cannot"), lost
    assert "broadcast_object_list for an object of rank 0" in lost.outcome["reason"]
    assert "--as-rank 0" in lost.outcome["reason"]
    assert lost.outcome["recorded"]["phase"] == "loss"
    found = replay(dump, str(SCRIPTS / "in_main.py"), "--accumulate", "2", "--share")
    assert "started again as that rank" in found.output
    assert "another command than that of the run, which was: python" in found.output  # which had no --share
    assert (found.code, found.outcome["outcome"], found.outcome["rank"]) == (0, "same", 1), found


MISFITS = {
    "--accumulate 1": "updates after 1 micro-batches, the step in the dump has 2",
    "--accumulate 3": "asks for more micro-batches than the 2 of the step in the dump",
    "--accumulate 2 --width 12": "the script's parameter 'first.weight' has shape (12, 8), the dump's (16, 8)",
    "--accumulate 2 --amp": "the script's guard has a scaler, the dump has none",
}


@pytest.mark.parametrize("arguments", MISFITS)
def test_another_script_is_told_from_that_of_the_dump(dump: Path, tmp_path: Path, arguments: str) -> None:
    """On all ranks, where no interpreter has to be started; alone the same code runs."""
    ended = launch(tmp_path, "in_main.py", *arguments.split(), NANGUARD_REPLAY=str(dump))
    assert all(outcome.exit_code == 5 for outcome in ended), [outcome.describe() for outcome in ended]
    for rank, outcome in enumerate(ended):
        assert f"replay of rank {rank}: cannot: " in outcome.output
        assert MISFITS[arguments] in outcome.output
    assert not list(tmp_path.iterdir())


def test_labels_that_did_not_come_through_the_guard_are_not_those_of_the_dump(tmp_path: Path) -> None:
    stopped = launch(tmp_path, "in_main.py", "--bare")
    (bare,) = (tmp_path / "nan_dumps").glob("step-*")
    through = "take batches from guard.steps(loader), or without a loader from guard.steps([batch])"
    told = [str(each.error_text).splitlines()[-1] for each in stopped]
    lacks = f"nan_dumps/{bare.name}; a replay would lack labels and the like: {through}"
    assert told == [f"  next:     ddp-nanguard show {lacks}"] * 2
    assert through in command("show", str(bare)).output
    ended = launch(tmp_path, "in_main.py", "--bare", NANGUARD_REPLAY=str(bare))
    assert [outcome.exit_code for outcome in ended] == [5, 5], [outcome.describe() for outcome in ended]
    assert "the loss takes tensors that did not come through the guard, such as labels" in ended[0].output
    other = launch(tmp_path, "in_main.py", NANGUARD_REPLAY=str(bare))
    assert all("training called the model without guard.steps" in outcome.output for outcome in other)


def test_a_batch_has_to_come_through_the_guard(dump: Path, tmp_path: Path) -> None:
    ended = launch(tmp_path, "in_main.py", "--accumulate", "2", "--bare", NANGUARD_REPLAY=str(dump))
    assert [outcome.exit_code for outcome in ended] == [5, 5], [outcome.describe() for outcome in ended]
    assert "the batch does not come through the guard: take it from guard.steps(loader)" in ended[0].output


def test_a_script_without_a_guard_says_which_line_is_missing(dump: Path) -> None:
    ended = replay(dump, "-c", "pass")
    assert ended.code == 5, ended
    assert ended.outcome["reason"] == "the command ended normally, before it came to a line that makes NanGuard(...)"
    failed = replay(dump, "-c", "raise SystemExit(2)")
    assert failed.code == 5 and "ended with code 2, see its own message" in failed.outcome["reason"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--"], "no command after --; give that of the run"),
        (["--", "no-such-program"], "command 'no-such-program': No such file"),
        (["--recipe", "a:b", "--", "python"], "option --recipe=a:b: the command after -- is the recipe"),
        (["--minimize", "--", "python"], "--minimize runs the step hundreds of times: it needs a recipe"),
        (["--", "python", "-I", "train.py"], "option -I of python hides the replay from the script"),
        (["--as-rank", "0"], "option --as-rank=0 is for a script"),
        ([], "names no recipe; give --recipe module:function (a function that returns a Recipe), or the command of"),
    ],
)
def test_wrong_usage_names_its_remedy(
    dump: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from ddp_nanguard.cli.main import main

    assert main(["replay", str(dump), *arguments]) == 2
    assert text in capsys.readouterr().err


def test_the_dump_shows_the_command_that_replays_it(dump: Path) -> None:
    shown = command("show", str(dump)).output
    line = f"ddp-nanguard replay {dump} --trace -- python {SCRIPTS / 'in_main.py'} --accumulate 2"
    assert shown.rstrip().endswith(f"next      {line}")
