"""The whole way under torchrun: a NaN by itself, every rank stopped, the dump listed, shown and replayed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.exits import REPOSITORY, clean_exit, environment, faulty_exit, is_clean, is_faulty, torchrun


def _cli(*arguments: str, timeout_s: float = 90) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddp_nanguard", *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    out = tmp_path_factory.mktemp("demo")
    return _cli("demo", "--wrapper", "ddp", "--out", str(out)), out / "nan_dumps"


@pytest.mark.timeout(120)  # the demo itself is allowed 90 s
def test_the_demo_stops_names_and_replays(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    ended, dumps = demo
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "NonFiniteError: rank " in ended.stdout
    assert "loss is NaN" in ended.stdout
    assert "all 2 ranks raised this same text; workers ended with code 65" in ended.stdout
    assert "bit for bit the same" in ended.stdout
    assert len(list(dumps.glob("step-*"))) == 1


def test_the_readme_shows_the_real_message(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    ended, dumps = demo
    (shown,) = re.findall(r"```text\n(NonFiniteError: .*?)```", (REPOSITORY / "README.md").read_text(), flags=re.DOTALL)
    assert shown.replace("nan_dumps/", f"{dumps}/") in ended.stdout


def test_the_dump_is_listed_and_shown(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, dumps = demo
    (dump,) = dumps.glob("step-*")
    listed = _cli("list", str(dumps))
    assert listed.returncode == 0
    assert dump.name.removeprefix("step-").lstrip("0") in listed.stdout
    shown = json.loads(_cli("show", str(dump), "--json").stdout)
    assert shown == {name: json.loads((dump / "manifest.json").read_text())[name] for name in shown}
    assert (shown["origin"]["phase"], shown["origin"]["slot"], shown["origin"]["kind"]) == ("loss", "loss", "nan")


def test_the_trace_is_that_of_the_readme(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, dumps = demo
    (dump,) = dumps.glob("step-*")
    traced = _cli("replay", str(dump), "--trace")
    assert traced.returncode == 0, traced.stderr
    (shown,) = re.findall(r"```text\n(    examples.*?)```", (REPOSITORY / "README.md").read_text(), flags=re.DOTALL)
    squeezed = " ".join(traced.stdout.replace(f"{REPOSITORY}/", "").split())
    for line in shown.splitlines():
        assert " ".join(line.split()) in squeezed


def test_one_sample_is_enough(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, dumps = demo
    (dump,) = dumps.glob("step-*")
    minimized = json.loads(_cli("replay", str(dump), "--minimize", "--json").stdout)["experiments"]["--minimize"]
    assert minimized["failed"]
    assert minimized["text"].startswith("1 of 56 samples still fail")


def test_the_dump_replays_on_all_ranks(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, dumps = demo
    (dump,) = dumps.glob("step-*")
    launch = torchrun(REPOSITORY / "launch" / "replay.py", str(dump))
    assert launch.code == 0, launch.summary
    outcomes = [line for line in launch.texts[0].splitlines() if line.startswith("{")]
    assert json.loads(outcomes[-1])["outcome"] == "same"


def test_a_wrong_number_of_ranks_is_refused(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, dumps = demo
    (dump,) = dumps.glob("step-*")
    launch = torchrun(REPOSITORY / "launch" / "replay.py", str(dump), num_ranks=1)
    assert launch.worker_codes == {0: 2}
    assert "2" in launch.texts[0]
    assert "Traceback" not in launch.texts[0]


def test_exits_in_a_row(tmp_path: Path) -> None:
    """One of each here; ``python -m tests.e2e.exits`` does twenty of each."""
    clean = clean_exit(tmp_path / "clean")
    assert is_clean(clean), clean
    faulty = faulty_exit(tmp_path / "faulty")
    assert is_faulty(faulty), faulty
