"""A check of the user's own raises before the guard judges the step: all ranks tell the same, and it runs again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddp_nanguard.dump import open_dump
from tests.e2e.command import command
from tests.scripts.running import SCRIPTS, launch, replay

SCRIPT = str(SCRIPTS / "own_check.py")
RAISED = {
    "--assert": "rank 1 raised AssertionError on its own",
    "--clip": "rank 0 raised RuntimeError on its own, rank 1 raised RuntimeError on its own",
}


@pytest.mark.parametrize("check", RAISED)
def test_all_ranks_tell_what_the_first_one_saw(check: str, tmp_path: Path) -> None:
    ended = launch(tmp_path, "own_check.py", check, uncaught=True)
    assert [each.exit_code for each in ended] == [65, 65], [each.describe() for each in ended]
    (dump,) = (tmp_path / "nan_dumps").glob("step-*")
    report = open_dump(dump).report
    assert (report.origin.rank, report.origin.phase, report.step) == (1, "loss", 2)  # type: ignore[union-attr]
    assert (report.cause, report.single_rank_view) == (RAISED[check], False)
    texts = [re.findall(r"^rank .*\n(?:  .*\n)+", each.output, flags=re.MULTILINE) for each in ended]
    assert texts[0] == texts[1] and len(texts[0]) == 1, [each.describe() for each in ended]
    assert texts[0][0].startswith("rank 1, step 2, micro-batch 0, loss: loss is NaN\n")
    assert f"next:     ddp-nanguard replay nan_dumps/{dump.name} --trace -- " in texts[0][0]
    shown = command("show", str(dump)).output
    assert "all of 2 ranks; each rank wrote its own weights" in shown and "alone" not in shown
    again = replay(dump, SCRIPT, check)
    assert (again.code, again.outcome["outcome"], again.outcome["rank"]) == (0, "same", 1), again
    assert again.outcome["replayed"]["phase"] == "forward"


def test_on_all_ranks_it_says_that_training_raised_so(tmp_path: Path) -> None:
    launch(tmp_path, "own_check.py", "--clip", uncaught=True)
    (dump,) = (tmp_path / "nan_dumps").glob("step-*")
    variables = {"NANGUARD_REPLAY": str(dump), "NANGUARD_REPLAY_OPTIONS": "--trace"}
    for each in launch(tmp_path, "own_check.py", "--clip", uncaught=True, **variables):
        assert each.exit_code == 5, each.describe()
        assert "as training did" in each.output and f"ddp-nanguard replay {dump} --rank 1 -- " in each.output
        assert "without --trace" not in each.output and "every rank's own gradient" not in each.output
