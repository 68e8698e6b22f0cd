"""A check of the user's own raises before the guard judges the step: all ranks tell the same, and it runs again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddp_nanguard.dump import open_dump
from tests.e2e.command import command
from tests.ranks import Outcome
from tests.scripts.running import SCRIPTS, launch, replay

SCRIPT = str(SCRIPTS / "own_check.py")
RAISED = {
    "--assert": "rank 1 raised AssertionError on its own",
    "--clip": "rank 0 raised RuntimeError on its own, rank 1 raised RuntimeError on its own",
}


@pytest.fixture(scope="module", params=RAISED)
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[Outcome], Path]:
    directory = tmp_path_factory.mktemp("own")
    ended = launch(directory, "own_check.py", request.param, uncaught=True)
    assert [each.exit_code for each in ended] == [65, 65], [each.describe() for each in ended]
    (dump,) = (directory / "nan_dumps").glob("step-*")
    return request.param, ended, dump


def test_all_ranks_tell_what_the_first_one_saw(trained: tuple[str, list[Outcome], Path]) -> None:
    check, ended, dump = trained
    report = open_dump(dump).report
    assert (report.origin.rank, report.origin.phase, report.step) == (1, "loss", 2)  # type: ignore[union-attr]
    assert (report.cause, report.single_rank_view) == (RAISED[check], False)
    texts = [re.findall(r"^rank .*\n(?:  .*\n)+", each.output, flags=re.MULTILINE) for each in ended]
    assert texts[0] == texts[1] and len(texts[0]) == 1, [each.describe() for each in ended]
    assert texts[0][0].startswith("rank 1, step 2, micro-batch 0, loss: loss is NaN\n")
    assert f"next:     ddp-nanguard replay nan_dumps/{dump.name} --trace -- " in texts[0][0]
    shown = command("show", str(dump)).output
    assert "all of 2 ranks; each rank wrote its own weights" in shown and "alone" not in shown


def test_alone_it_is_the_same_though_its_place_is_known_better(trained: tuple[str, list[Outcome], Path]) -> None:
    check, _, dump = trained
    again = replay(dump, SCRIPT, check)
    assert (again.code, again.outcome["outcome"], again.outcome["rank"]) == (0, "same", 1), again
    assert again.outcome["replayed"]["phase"] == "forward"


def test_on_all_ranks_it_says_that_training_raised_so(trained: tuple[str, list[Outcome], Path], tmp_path: Path) -> None:
    check, _, dump = trained
    variables = {"NANGUARD_REPLAY": str(dump), "NANGUARD_REPLAY_OPTIONS": "--trace"}
    ended = launch(tmp_path, "own_check.py", check, uncaught=True, **variables)
    raised = ended if check == "--clip" else ended[1:]  # the other rank waits in its backward, and loses its peer
    for each in raised:
        assert each.exit_code == 5, each.describe()
        assert "as training did" in each.output and f"ddp-nanguard replay {dump} --rank 1 -- " in each.output
        assert "without --trace" not in each.output and "every rank's own gradient" not in each.output
