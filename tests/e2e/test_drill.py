"""Fire drills of whole jobs: one that keeps every promise, one whose guard is off, one that hangs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from ddp_nanguard.cli.main import main
from tests.e2e.command import command
from tests.e2e.exits import EXAMPLE
from tests.replaying import Replayed

DISABLED = """
import torch
from ddp_nanguard import NanGuard
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
guard = NanGuard(model, optimizer, enabled=False)
while True:
    guard(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""
INTEGERS = """
import torch
from ddp_nanguard import NanGuard
model = torch.nn.EmbeddingBag(5, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with NanGuard(model, optimizer) as guard:
    for batch in guard.steps([torch.ones(3, 2, dtype=torch.int64)] * 4):
        guard(batch).sum().backward()
        optimizer.step()
"""
HANGS = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"


def _drill(*arguments: str) -> Replayed:
    return command("drill", *arguments, timeout_s=110)


def _table(output: str) -> dict[str, str]:
    return dict(re.findall(r"^  (\S.*?) {2,}(ok|FAILED|-) ", output, flags=re.MULTILINE))


@pytest.mark.timeout(120)  # a launch of the job and a replay
def test_every_promise_holds_for_the_example(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = _drill("--timeout=90", f"--out={tmp_path}", "--layer=blocks.0", "--", *launch, str(EXAMPLE), "--steps=8")
    assert ended.code == 0, ended.output
    assert _table(ended.output) == {
        "stopped": "ok",
        "the fault was planted": "ok",
        "every worker's exit code": "ok",
        "one text on all ranks": "ok",
        "named exactly": "ok",
        "the dump is complete": "ok",
        "the replay is the same": "ok",
        "no process left": "ok",
    }
    assert "rank 1 · step 2 · forward · blocks.0\n" in ended.output
    assert ended.output.splitlines()[-1] == "drill: all 8 promises hold"


def test_a_guard_that_is_off_fails_the_drill(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(DISABLED)
    ended = _drill("--timeout=60", f"--out={tmp_path}", "--", sys.executable, str(script))
    assert ended.code == 1, ended.output
    assert _table(ended.output) == {"stopped": "FAILED", "the fault was planted": "FAILED", "no process left": "ok"}
    assert "NOT planted: the guard has enabled=False" in ended.output
    assert ended.output.splitlines()[-1].startswith("drill: FAILED: 2 of 3 promises: forward: stopped; forward: the f")


@pytest.mark.exhaustive
def test_an_input_of_integers_has_no_place_for_the_fault_and_fails_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(INTEGERS)
    code = main(
        ["drill", "--phase=input", "--timeout=60", f"--out={tmp_path}", "--json", "--", sys.executable, str(script)]
    )
    out, said = capsys.readouterr()
    assert code == 0, said
    assert _table(said) == {"the fault was planted": "-", "no process left": "ok"}
    assert "nothing to plant it in: NOT planted: " in said
    assert said.splitlines()[-1] == "drill: all 1 promises hold"
    data = json.loads(out)
    assert (data["holds"], data["directory"]) == (True, str(tmp_path))
    assert [(row["promise"], row["holds"]) for row in data["phases"]["input"]] == [
        ("the fault was planted", None),
        ("no process left", True),
    ]


def test_a_job_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    ended = _drill("--timeout=1", f"--out={tmp_path}", "--", sys.executable, "-c", HANGS)
    assert ended.code == 1
    assert "HANGS, or is slow: no end within 1 s; killed with its children" in ended.output
    assert "no sign of a guard: the job builds no NanGuard" in ended.output
