"""A script that is stopped is its own recipe: started again, alone or on all ranks, it fails at the same operator."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.exits import torchrun
from tests.ranks import Outcome
from tests.scripts.running import SCRIPTS, first_line, launch, replay, train


@dataclass(frozen=True)
class Job:
    """A script with its arguments, and the operator and the line that make its NaN."""

    script: str
    arguments: tuple[str, ...]
    operator: str
    line: str
    num_ranks: int = 2

    def __str__(self) -> str:
        return " ".join([self.script.removesuffix(".py"), *(word.strip("-") for word in self.arguments[:2])])


BALANCED = ("aten.div.Tensor", "return ((errors * targets).sum(0) / targets.sum(0)).mean()")
TOP_LEVEL = Job("top_level.py", ("1e-3", "2"), "aten.div.Tensor", "scaled = x / lengths")
SCALED = Job("in_main.py", ("--amp", "--accumulate", "2"), *BALANCED)
FSDP2 = Job("in_main.py", ("--wrapper", "fsdp2"), *BALANCED)
JOBS = [
    TOP_LEVEL,
    FSDP2,
    pytest.param(SCALED, marks=pytest.mark.exhaustive),
    pytest.param(Job("in_main.py", (), *BALANCED), marks=pytest.mark.exhaustive),
    pytest.param(Job("in_main.py", ("--wrapper", "fsdp1"), *BALANCED), marks=pytest.mark.exhaustive),
    pytest.param(Job("in_main.py", (), *BALANCED, num_ranks=3), id="three ranks", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_alone_it_is_the_same_down_to_the_operator(job: Job, tmp_path: Path) -> None:
    dump = train(tmp_path, job.script, *job.arguments, num_ranks=job.num_ranks)
    again = replay(dump, str(SCRIPTS / job.script), *job.arguments, options=("--trace",))
    assert (again.code, again.outcome["outcome"]) == (0, "same"), again
    assert again.outcome["rank"] == job.num_ranks - 1
    assert again.outcome["losses"] and all(again.outcome["losses"].values())
    assert first_line(again) == (job.operator, job.line)
    assert "done" not in again.output  # no line after the step has run
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nan_dumps"]
    assert list((tmp_path / "nan_dumps").glob("step-*")) == [dump]


@pytest.mark.parametrize("job", [TOP_LEVEL, FSDP2, pytest.param(SCALED, marks=pytest.mark.exhaustive)], ids=str)
def test_on_all_ranks_it_is_the_same_down_to_the_operator(job: Job, tmp_path: Path) -> None:
    dump = train(tmp_path, job.script, *job.arguments)
    variables = {"NANGUARD_REPLAY": str(dump), "NANGUARD_REPLAY_OPTIONS": "--trace", "NANGUARD_ON_FAULT": "skip"}
    first, second = launch(tmp_path, job.script, *job.arguments, **variables)
    assert (first.exit_code, second.exit_code) == (0, 0), first.describe() + second.describe()
    outcome = _json_of(first)
    assert [each["outcome"] for each in outcome["ranks"]] == ["same", "same"]
    assert f"operator  {job.operator} made it" in first.output and f"      {job.line}\n" in first.output
    assert "rank 1: trace of" in first.output and "trace of" not in second.output
    assert "done" not in first.output + second.output
    assert list((tmp_path / "nan_dumps").glob("step-*")) == [dump]


def _json_of(outcome: Outcome) -> dict[str, list[dict[str, str]]]:
    (line,) = [line for line in outcome.output.splitlines() if line.startswith("{")]
    return json.loads(line)  # type: ignore[no-any-return]  # whoever reads it finds out


@pytest.mark.exhaustive
@pytest.mark.timeout(120)
def test_under_torchrun_itself_it_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = (str(SCRIPTS / TOP_LEVEL.script), *TOP_LEVEL.arguments)
    stopped = torchrun(*command)
    line = f"ddp-nanguard replay nan_dumps/step-00000002 --trace -- python {' '.join(command)}"
    assert stopped.worker_codes == {0: 65, 1: 65}
    assert all(f"next:     {line}\n" in text for text in stopped.texts)
    monkeypatch.setenv("NANGUARD_REPLAY", "nan_dumps/step-00000002")
    again = torchrun(*command)
    assert again.code == 0, again.summary
    assert '{"outcome": "same"' in again.texts[0]


def test_a_bad_update_is_run_again_with_its_own_numbers(tmp_path: Path) -> None:
    dump = train(tmp_path, "update.py", "--no-eps", num_ranks=1)
    again = replay(dump, "-m", "tests.scripts.update", options=("--trace",))
    assert (again.code, again.outcome["outcome"]) == (0, "same"), again
    assert first_line(again) == ("aten.addcdiv_.default", "optimizer.step()")
    assert any("eps=1e-08 in the script, 0.0 in the dump" in note for note in again.outcome["notes"])
    assert "done" not in again.output


@pytest.mark.exhaustive
def test_a_script_that_starts_its_ranks_itself_needs_one_of_them(tmp_path: Path) -> None:
    dump = train(tmp_path, "in_main.py")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPTS / "in_main.py")]
    again = replay(dump, *command)
    assert (again.code, again.outcome["outcome"]) == (0, "same"), again


@pytest.mark.exhaustive
def test_experiments_start_the_script_again(tmp_path: Path) -> None:
    dump = train(tmp_path, "in_main.py")
    again = replay(
        dump, str(SCRIPTS / "in_main.py"), options=("--dtype", "float64", "--repeat", "2", "--poison-memory")
    )
    assert again.code == 0, again
    experiments = again.outcome["experiments"]
    assert experiments["--dtype float64"]["text"].startswith("still fails: loss")
    assert experiments["--repeat 2"]["text"].startswith("2 of 2 runs non-finite")
    assert experiments["--poison-memory"]["failed"]


def test_what_a_collective_of_the_loop_carried_is_run_on_all_ranks(tmp_path: Path) -> None:
    stopped = launch(tmp_path, "surgery.py")
    (dump,) = (tmp_path / "nan_dumps").glob("step-*")
    variables = {"NANGUARD_REPLAY": f"nan_dumps/{dump.name}", "NANGUARD_REPLAY_OPTIONS": "--trace"}
    command = " ".join(f"{name}={value}" for name, value in variables.items())
    told = [str(each.error_text).splitlines()[-1] for each in stopped]
    assert told == [f"  next:     {command} torchrun --nproc-per-node 2 {SCRIPTS / 'surgery.py'}"] * 2
    first, second = launch(tmp_path, "surgery.py", **variables)
    assert (first.exit_code, second.exit_code) == (0, 0), first.describe() + second.describe()
    assert "rank 1: trace of" in first.output and "  where     the loop, between backward and step\n" in first.output
    reason = "division by zero: 0/0 in `share = sum((u * v).sum()"
    assert f"reason: {reason}" in first.output, first.output
    alone = replay(dump, str(SCRIPTS / "surgery.py"), options=("--rank", "0"))
    assert (alone.code, alone.outcome["outcome"]) == (4, "not_reproduced")
    assert "alone it was not given what a collective of the loop brings" in alone.outcome["reason"]
    assert "the fault is gone" not in alone.outcome["reason"]


def test_of_several_guards_the_one_whose_model_is_in_the_dump_runs_the_step(tmp_path: Path) -> None:
    dump = train(tmp_path, "two_guards.py")
    alone = replay(dump, str(SCRIPTS / "two_guards.py"), options=("--trace",))
    assert (alone.code, alone.outcome["outcome"], alone.outcome["rank"]) == (0, "same", 1), alone
    assert first_line(alone)[0] == "aten.div.Tensor"
    ended = launch(tmp_path, "two_guards.py", NANGUARD_REPLAY=str(dump))
    assert [each.exit_code for each in ended] == [0, 0], [each.describe() for each in ended]
    assert not (tmp_path / "other_dumps").exists()
