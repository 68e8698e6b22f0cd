"""The whole way under torchrun: a NaN by itself, every rank stopped, the dump listed, shown and replayed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.command import command, replay_launch
from tests.e2e.exits import EXAMPLE, REPOSITORY, clean_exit, environment, faulty_exit, is_clean, is_faulty, torchrun
from tests.replaying import replay_on_all_ranks

RECIPE = f"{EXAMPLE}:recipe"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    out = tmp_path_factory.mktemp("demo")
    line = [sys.executable, "-m", "ddp_nanguard", "demo", "--wrapper", "ddp", "--out", str(out)]
    ended = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=90, check=False)
    return ended, out / "nan_dumps"


@pytest.mark.timeout(120)  # the demo itself is allowed 90 s
def test_the_demo_stops_names_and_replays(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    ended, dumps = demo
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "NonFiniteError: rank " in ended.stdout
    assert "loss is NaN" in ended.stdout
    assert "all 2 ranks raised this same text; workers ended with code 65" in ended.stdout
    assert "bit for bit the same" in ended.stdout
    assert "another command" not in ended.stdout + ended.stderr
    assert len(list(dumps.glob("step-*"))) == 1


def test_the_readme_shows_the_real_message(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    ended, dumps = demo
    (shown,) = re.findall(r"```text\n(NonFiniteError: .*?)```", (REPOSITORY / "README.md").read_text(), flags=re.DOTALL)
    told, following = shown.replace("nan_dumps/", f"{dumps}/").split("  next:     ")
    assert told in ended.stdout
    # the demo starts the example by its whole path, with arguments of its own
    assert following.partition("examples/")[0].removesuffix("python ") in ended.stdout.split("  next:     ")[1]


def test_the_dump_is_listed_and_shown(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, dumps = demo
    (dump,) = dumps.glob("step-*")
    listed = command("list", str(dumps))
    assert listed.code == 0
    assert dump.name.removeprefix("step-").lstrip("0") in listed.output
    shown = command("show", str(dump), "--json").outcome
    assert shown == {name: json.loads((dump / "manifest.json").read_text())[name] for name in shown}
    assert (shown["origin"]["phase"], shown["origin"]["slot"], shown["origin"]["kind"]) == ("loss", "loss", "nan")


def test_the_first_commands_of_the_readme_take_the_dump_of_the_demo(
    demo: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    _, dumps = demo
    commands = (REPOSITORY / "README.md").read_text().partition("## After a stop")[2]
    first = re.findall(r"^ddp-nanguard (\w+) (nan_dumps\S*)", commands, flags=re.MULTILINE)[:3]
    assert [name for name, _ in first] == ["show", "list", "explain"]
    for name, path in first:
        ended = command(name, path.replace("nan_dumps", str(dumps)))
        assert ended.code == 0, ended
    assert "the step is run too by ddp-nanguard replay" in ended.output and "names no recipe" not in ended.output


def test_the_trace_is_that_of_the_readme(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    ended, _ = demo
    readme = (REPOSITORY / "README.md").read_text()
    (shown,) = re.findall(r"```text\n\$ ddp-nanguard replay [^\n]*\n(    examples.*?)```", readme, flags=re.DOTALL)
    squeezed = " ".join(ended.stdout.replace(f"{REPOSITORY}/", "").split())
    for line in shown.splitlines():
        assert " ".join(line.split()) in squeezed


def test_one_sample_is_enough(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, dumps = demo
    (dump,) = dumps.glob("step-*")
    minimizing = command("replay", str(dump), "--minimize", "--json", "--recipe", RECIPE)
    minimized = minimizing.outcome["experiments"]["--minimize"]
    assert minimized["failed"]
    assert minimized["text"].startswith("1 of 56 samples still fail")


def test_the_dump_replays_on_all_ranks(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    """As torchrun starts it, without the seconds that torchrun and two times torch take to load."""
    _, dumps = demo
    (dump,) = dumps.glob("step-*")
    first, second = replay_on_all_ranks(str(dump), 2, "--recipe", RECIPE)
    assert (first.code, first.outcome["outcome"]) == (0, "same"), first
    assert (second.code, second.output) == (0, ""), second


@pytest.mark.exhaustive
def test_so_it_does_under_torchrun(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, dumps = demo
    (dump,) = dumps.glob("step-*")
    launch = torchrun("-m", "ddp_nanguard", "replay", str(dump), "--recipe", RECIPE)
    assert launch.code == 0, launch.summary
    outcomes = [line for line in launch.texts[0].splitlines() if line.startswith("{")]
    assert json.loads(outcomes[-1])["outcome"] == "same"


def test_a_wrong_number_of_ranks_is_refused(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, dumps = demo
    (dump,) = dumps.glob("step-*")
    for ended in replay_launch(str(dump), world_size=3):
        assert ended.value == 2, ended.describe()
        assert "is of 2 ranks, 3 were started" in ended.output
        assert "Traceback" not in ended.output


@pytest.mark.exhaustive  # every clean launch of the suite ends with 0; this one has an agent of torchrun above it
def test_a_clean_run_ends_with_code_0(tmp_path: Path) -> None:
    """``python -m tests.e2e.exits`` does twenty of each kind."""
    clean = clean_exit(tmp_path / "clean")
    assert is_clean(clean), clean


@pytest.mark.exhaustive  # the demo has shown code and text of every worker
def test_a_faulty_run_ends_with_code_65_and_one_text_on_all_ranks(tmp_path: Path) -> None:
    faulty = faulty_exit(tmp_path / "faulty")
    assert is_faulty(faulty), faulty
    root = faulty.summary.partition("Root Cause (first observed failure):")[2]
    assert "rank      : 1 (" in root and "NonFiniteError: rank 1, step 30" in root, faulty.summary
