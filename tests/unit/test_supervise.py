"""``ddp-nanguard run``: exit codes, signals, output, and what is left for Kubernetes. Real commands, no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

RUN = [sys.executable, "-m", "ddp_nanguard", "run"]
REPOSITORY = Path(__file__).parents[2]
STOPPED = """
import os, sys
from ddp_nanguard.distributed.launcher import forget_stop, tell_launcher
for rank, text in enumerate(sys.argv[2:]):
    os.environ["RANK"] = str(rank)
    tell_launcher(text, 1, 65)
    if text == "goes on":
        forget_stop()
sys.exit(int(sys.argv[1]))
"""
TERMINAL = """
import os, pty, sys
child, terminal = pty.fork()
if not child:
    os.execv(sys.argv[1], sys.argv[1:])
told = b""
while b"ready" not in told:
    told += os.read(terminal, 1000)
os.write(terminal, bytes([3]))
while True:
    try:
        told += os.read(terminal, 1000)
    except OSError:
        break
print(told.decode(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
COUNTS = """
import signal, sys, time
told = []
signal.signal(signal.SIGINT, lambda *_: told.append("interrupted"))
signal.signal(signal.SIGTERM, lambda *_: told.append("terminated"))
print("ready", flush=True)
while not told:
    time.sleep(0.01)
time.sleep(0.2)
print(told)
sys.exit(len(told) + 10)
"""


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def _run(*arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    command = [*RUN, *arguments]
    return subprocess.run(
        command, env=_environment(), input=typed, capture_output=True, text=True, timeout=30, check=False
    )


def _stopped(code: int, texts: Sequence[str], *options: str) -> subprocess.CompletedProcess[str]:
    return _run(*options, "--", sys.executable, "-c", STOPPED, str(code), *texts)


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("exit 1", 1), ("kill -9 $$", 137)])
def test_another_end_than_a_stop_keeps_its_code_and_its_output(script: str, code: int) -> None:
    ended = _run("--", "bash", "-c", f"cat; echo told >&2; {script}", typed="typed\n")
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "typed\n", "told\n")


@pytest.mark.parametrize(
    ("code", "texts", "expected"),
    [
        (1, ["NonFiniteError: one", "NonFiniteError: one"], 65),  # as torchrun
        (65, ["NonFiniteError: one"], 65),
        (0, ["NonFiniteError: one"], 0),  # the job has gone on
        (1, ["goes on", "goes on"], 1),  # started again, and ended by something else
        (1, ["goes on", "NonFiniteError: one"], 65),
    ],
)
def test_the_code_is_that_of_the_ranks_that_were_stopped(code: int, texts: list[str], expected: int) -> None:
    ended = _stopped(code, texts)
    assert (ended.returncode, ended.stdout) == (expected, "")
    assert ("the guard stopped this job" in ended.stderr) == (expected != code), ended.stderr


def test_kubernetes_gets_the_text_of_the_rank_where_it_began(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    assert _stopped(1, ["of rank 0", "of rank 1"], f"--termination-log={log}").returncode == 65
    assert log.read_text() == "of rank 1"
    assert _stopped(1, ["NonFiniteError: " + "·" * 4000], f"--termination-log={log}").returncode == 65
    assert len(log.read_bytes()) <= 4096 and log.read_text() == "NonFiniteError: " + "·" * 2040
    log.write_text("of the job itself")
    assert _stopped(1, [], f"--termination-log={log}").returncode == 1
    assert log.read_text() == "of the job itself"


def test_a_signal_reaches_the_job_and_the_job_decides() -> None:
    with subprocess.Popen(
        [*RUN, "--", sys.executable, "-c", COUNTS], env=_environment(), stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None and run.stdout.readline() == "ready\n"
        run.send_signal(signal.SIGTERM)
        assert run.stdout.read() == "['terminated']\n" and run.wait(20) == 11


def test_what_is_typed_at_a_terminal_reaches_the_job_once() -> None:
    command = [sys.executable, "-c", TERMINAL, *RUN, "--", sys.executable, "-c", COUNTS]
    ended = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=30, check=True)
    told = ended.stdout.replace("^C", "")  # as the terminal shows what is typed
    assert told.splitlines()[-2:] == ["['interrupted']", " 11"], told


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "give the command of the job: ddp-nanguard run -- torchrun"),
        (("--", "no-such-launcher"), "no-such-launcher: No such file or directory"),
        (("--termination-log=/no/such/file", "--", "true"), "option --termination-log=/no/such/file: No such file"),
    ],
)
def test_wrong_usage_is_one_line(arguments: tuple[str, ...], line: str) -> None:
    ended = _run(*arguments)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert ended.stderr.startswith(f"ddp-nanguard: {line}")
