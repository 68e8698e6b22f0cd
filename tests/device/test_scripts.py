"""Whole programs on devices of their own, ended by a fault that comes by itself, and replayed by the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_nanguard.dump.read import open_dump
from tests.scripts.running import REPOSITORY, SCRIPTS, replay, train

from . import staged

EXAMPLES = REPOSITORY / "examples"
PROGRAMS = {
    "fsdp2 that diverges": (EXAMPLES / "char_gpt.py", "--lr", "1"),
    "fsdp1": (SCRIPTS / "in_main.py", "--wrapper", "fsdp1"),
    "ddp and a scaler": (SCRIPTS / "in_main.py", "--amp", "--accumulate", "2"),
    "on the CPU of such a machine": (SCRIPTS / "top_level.py", "1e-3", "2"),
}


@pytest.mark.parametrize(
    "program",
    [pytest.param(each, marks=[pytest.mark.exhaustive] * (each != "fsdp2 that diverges")) for each in PROGRAMS],
)
def test_a_program_is_stopped_and_its_replay_alone_is_the_same(simulated: str, program: str, tmp_path: Path) -> None:
    script, *arguments = map(str, PROGRAMS[program])
    path = train(tmp_path, script, *arguments, device=simulated)
    again = replay(path, script, *arguments, options=("--trace",), device=simulated)
    assert (again.code, again.outcome["outcome"]) == (0, "same"), again
    assert _devices(path) == (["cpu", "cpu"] if "CPU" in program else ["cuda:0", "cuda:1"])


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_the_demo(simulated: str, tmp_path: Path) -> None:
    """Processes that nobody forked: torchrun, its workers, and the script that a replay starts."""
    line = [sys.executable, "-m", "ddp_nanguard", "demo", "--wrapper", "ddp", "--out", str(tmp_path)]
    env = {**os.environ, **staged.environment()}
    ended = subprocess.run(line, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "all 2 ranks raised this same text; workers ended with code 65" in ended.stdout
    assert "The same fault, bit for bit" in ended.stdout
    (path,) = (tmp_path / "nan_dumps").glob("step-*")
    assert _devices(path) == ["cuda:0", "cuda:1"]


def _devices(dump: Path) -> list[str]:
    devices = [open_dump(dump).evidence(rank).device for rank in range(2)]
    return [device.type if device.index is None else f"{device.type}:{device.index}" for device in devices]
