"""Runs a job of the user from outside: a log per worker, one deadline, and no process of it left at the end."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddp_nanguard.config import ENV_INJECT
from ddp_nanguard.distributed.launcher import ENV_RUN, Stop, read_stops

from .job_output import worker_texts

ENV_DRILL_ID = "DDP_NANGUARD_DRILL"
"""Environment variable by which processes of the drill are found, whichever parent they have by then."""
GRACE_S = 5.0
LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch")
_FLAGS = ("-m", "--module", "--standalone", "--no-python", "--run-path", "--virtual-local-rank")
_FAILED = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s*exitcode\s*: (-?\d+)")
_SAID = re.compile(rf"{ENV_INJECT}: (.*)")


@dataclass
class JobResult:
    """How the job ended.

    Attributes:
        code: of the command; None where it had to be killed.
        seconds: its duration.
        codes: exit codes of the workers by rank, as far as they are known: from torchrun, else as the ranks have told.
        texts: output of each worker, in rank order; the whole output where the command is not torchrun.
        told: what each stopped rank has left, where the command is not torchrun: a trainer may start its own ranks.
        said: lines that the fault injection printed, without duplicates.
        left: processes that were left when the command had ended, and were killed.
        stopped_because: why the drill ended the job; None where it ended by itself.
    """

    code: int | None
    seconds: float
    codes: dict[int, int]
    texts: list[str]
    said: list[str]
    left: list[str] = field(default_factory=list)
    stopped_because: str | None = None
    told: list[Stop] = field(default_factory=list)


def run_job(command: Sequence[str], timeout_s: float, directory: Path, environment: dict[str, str]) -> JobResult:
    """Run the command in its own session until it ends, has missed its fault, or exceeds the timeout.

    Args:
        command: of the job.
        timeout_s: after which it is killed.
        directory: gets ``logs`` and ``output.txt``.
        environment: of the job, with `ENV_DRILL_ID`.
    """
    logs, stops = directory / "logs", directory / "stops"
    stops.mkdir(exist_ok=True)
    environment = {**environment, ENV_RUN: str(stops)}
    begun = time.monotonic()
    with (directory / "output.txt").open("w") as output:
        job = subprocess.Popen(
            with_logs(command, logs), env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            reason = _wait(job, timeout_s, directory, logs, begun)
        finally:
            ended_by_itself = job.poll() is not None
            if ended_by_itself:
                _wait_for_none(environment[ENV_DRILL_ID])
            left = kill_all(environment[ENV_DRILL_ID])
            job.terminate()  # without /proc the job is not found by its id; torchrun ends its workers then
            job.wait()
    whole = (directory / "output.txt").read_text(errors="replace")
    texts = worker_texts(logs) or [whole]
    is_torchrun = launcher_end(command) is not None
    told = [] if is_torchrun else read_stops(stops)
    codes = {int(rank): int(code) for rank, code in _FAILED.findall(whole)} if is_torchrun else {0: job.returncode}
    codes |= {stop.rank: stop.exit_code for stop in told if stop.rank}  # rank 0 may be the command itself
    return JobResult(
        code=job.returncode if ended_by_itself else None,
        seconds=time.monotonic() - begun,
        codes=codes,
        texts=texts,
        said=list(dict.fromkeys(said.strip() for text in [*texts, whole] for said in _SAID.findall(text))),
        left=left if ended_by_itself else [],
        stopped_because=reason,
        told=told,
    )


def _wait(job: subprocess.Popen[bytes], timeout_s: float, directory: Path, logs: Path, begun: float) -> str | None:
    """Wait for the job; None where it has ended, else why it has to be killed."""
    while job.poll() is None:
        if time.monotonic() - begun > timeout_s:
            return f"HANGS, or is slow: no end within {timeout_s:g} s"
        for text in (*worker_texts(logs), (directory / "output.txt").read_text(errors="replace")):
            for said in _SAID.findall(text):
                if "the job still runs" in said or said.startswith("NOT planted"):
                    return f"nothing to wait for: {said}"
        time.sleep(0.25)
    return None


def launcher_end(command: Sequence[str]) -> int | None:
    """Position of the script in a torchrun command; None for any other command."""
    position = _launcher_length(command)
    if position is None:
        return None
    while position < len(command) and command[position].startswith("-"):
        option = command[position].replace("_", "-")
        position += 1 if "=" in option or option in _FLAGS or _is_joined(option) else 2
    return min(position, len(command))


def _is_joined(option: str) -> bool:
    """Whether an option is short and joined with its value, as in ``-r3``."""
    return not option.startswith("--") and len(option) > 2


def _launcher_length(command: Sequence[str]) -> int | None:
    if os.path.basename(command[0]) == "torchrun":
        return 1
    for position in range(1, len(command) - 1):
        if command[position] == "-m" and command[position + 1] in LAUNCHERS:
            return position + 2
        if not command[position].startswith("-"):
            return None
    return None


def with_logs(command: Sequence[str], logs: Path) -> list[str]:
    """The command with a log per worker and no restarts, if it is torchrun; else unchanged."""
    end = launcher_end(command)
    start = [sys.executable, "-m", LAUNCHERS[0]] if shutil.which(command[0]) is None else [command[0]]
    if end is None:
        return list(command)
    # A restart would meet the injected fault again.
    options = [f"--log-dir={logs}", "--redirects=3", "--max-restarts=0", "--monitor-interval=0.1"]
    return [*start, *command[1:end], *options, *command[end:]]


def num_processes(command: Sequence[str]) -> int:
    """1 where a torchrun command starts one process, 2 where it starts more or the number is not a number.

    1 for any other command, and where the option is missing.
    """
    end = launcher_end(command) or 0
    for position, option in enumerate(command[:end]):
        name, _, value = option.replace("_", "-").partition("=")
        if name in ("--nproc-per-node", "--nnodes"):
            value = value or command[position + 1]
            if not value.isdigit() or int(value) > 1:
                return 2
    return 1


# -- processes ---------------------------------------------------------------------------------------------------------


def _marked(drill_id: str) -> Iterator[tuple[int, str]]:
    """Live processes with the drill's id in their environment, with their commands; none where there is no /proc."""
    wanted = f"{ENV_DRILL_ID}={drill_id}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            if wanted not in (path / "environ").read_bytes().split(b"\0"):
                continue
            # The command in parentheses may itself hold a parenthesis. Zombies have ended and wait for their parent.
            if (path / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                yield int(path.name), (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def _wait_for_none(drill_id: str) -> None:
    """Wait up to `GRACE_S` for processes that are about to end."""
    deadline = time.monotonic() + GRACE_S
    while any(_marked(drill_id)) and time.monotonic() < deadline:
        time.sleep(0.1)


def kill_all(drill_id: str) -> list[str]:
    """End every process with the drill's id, first by SIGTERM, then by SIGKILL; returns what was running."""
    found = {pid: f"{pid} {command[:80]}" for pid, command in _marked(drill_id)}
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for pid, _ in list(_marked(drill_id)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sign)
        _wait_for_none(drill_id)
    return list(found.values())
