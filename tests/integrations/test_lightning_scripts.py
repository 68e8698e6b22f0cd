"""Scripts whose Trainer starts its own ranks: how they end, and their dumps run again by the same script."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.scripts.running import REPOSITORY, first_line, replay

pytestmark = [
    pytest.mark.exhaustive,  # `test_lightning` replays by the script what it has trained in one launch
    pytest.mark.timeout(200),
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed"),
]

SCRIPT = Path(__file__).parent / "lightning_train.py"
BALANCED = ("aten.div.Tensor", "return ((errors * members).sum(0) / members.sum(0)).mean()")


@dataclass(frozen=True)
class Job:
    """Arguments of the script, and the exit code of the process that was started."""

    arguments: tuple[str, ...] = ()
    exit_code: int = 65
    num_ranks: int = 2

    def __str__(self) -> str:
        return " ".join(word.strip("-") for word in self.arguments) or "as it is"


JOBS = [
    Job(),
    Job(("--manual",)),
    Job(("--accumulate", "2")),
    Job(("--strategy", "ddp_spawn"), exit_code=1),
    Job(("--strategy", "ddp_fork"), exit_code=1),
    Job(("--strategy", "auto", "--devices", "1"), num_ranks=1),
    Job(("--module", "Sharded")),
    Job(("--detect-anomaly",)),
    Job(("--module", "Checked")),
]


def train(directory: Path, *arguments: str) -> tuple[int, str]:
    """Exit code, and what was printed."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *arguments]
    ended = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_it_is_stopped_whole_and_runs_again_alone(job: Job, tmp_path: Path) -> None:
    code, output = train(tmp_path, *job.arguments)
    assert code == job.exit_code, output
    assert f"rank {job.num_ranks - 1}" in output and "loss" in output
    (dump,) = (tmp_path / "nan_dumps").glob("step-*")
    assert {path.name for path in dump.glob("rank-*")} == {f"rank-{rank:05}" for rank in range(job.num_ranks)}
    again = replay(dump, str(SCRIPT), *job.arguments, options=("--trace",))
    assert (again.code, again.outcome["outcome"]) == (0, "same"), again
    assert again.outcome["rank"] == job.num_ranks - 1
    assert first_line(again) == BALANCED


@pytest.mark.timeout(580)
def test_a_drill_of_each_phase_holds_though_the_trainer_starts_its_ranks(tmp_path: Path) -> None:
    """``forward`` lies in a layer that the drill finds itself; the loss of the toy is no layer's."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    drill = [sys.executable, "-m", "ddp_nanguard", "drill", "--phase", "all", "--step", "2", "--rank", "1"]
    ended = subprocess.run(
        [*drill, "--", sys.executable, str(SCRIPT)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=570, check=False,
    )  # fmt: skip
    assert ended.returncode == 0 and "FAILED" not in ended.stdout, ended.stdout


def test_on_all_ranks_inside_of_the_trainer(tmp_path: Path) -> None:
    train(tmp_path)
    (dump,) = (tmp_path / "nan_dumps").glob("step-*")
    code, output = train(tmp_path, "--replay-from", str(dump))
    assert code == 0 and '"outcome": "same"' in output, output
