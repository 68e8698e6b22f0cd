"""Starts a script as one rank of the run that a dump is of, alone, and waits for its outcome."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ddp_nanguard.capture.backends import ENVIRONMENT
from ddp_nanguard.dump.read import Dump
from ddp_nanguard.errors import DumpError

from .request import ReplayRequest

INTERCEPT = Path(__file__).parent / "intercept"
POLL_S = 0.2
GRACE_S = 3.0
"""How long a command is given to end once its rank has told what it has found."""
_OF_A_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
        code: the exit code of the command.
        data: what the script's guard had to tell; None where it did not come to that.
    """

    code: int
    data: dict[str, Any] | None


def run_script(dump: Dump, request: ReplayRequest, command: Sequence[str], quiet: bool) -> Ended:
    """Run the command once.

    Args:
        dump: the dump; its checksums have been checked.
        request: of the child; its ``result`` is set here.
        command: program and arguments.
        quiet: whether what the script prints goes to stderr, because stdout is for JSON.

    Raises:
        DumpError: there is no such program, or it hides the environment from Python.
    """
    _require_open(command)
    with tempfile.TemporaryDirectory(prefix="nanguard-") as directory:
        result = Path(directory) / "result.json"
        environment = child_environment(dump, dataclasses.replace(request, result=str(result)))
        try:
            process = subprocess.Popen(command, env=environment, stdout=sys.stderr if quiet else None)
        except OSError as error:
            raise DumpError(f"command {command[0]!r}: {error.strerror}; give the command of the run") from None
        with process:
            code = _code_of(process, result)
        return Ended(code, json.loads(result.read_text()) if result.exists() else None)


def _code_of(process: subprocess.Popen[bytes], result: Path) -> int:
    """Wait for the end of the command; a parent of the rank that has ended may wait for it for ever."""
    while not result.exists():
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(POLL_S)
    for end in (process.poll, process.terminate, process.kill):
        end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(GRACE_S)
    return process.wait()


def _require_open(command: Sequence[str]) -> None:
    """Refuse Python's ``-I``, ``-E`` and ``-S``: without `intercept.sitecustomize` the script would wait for peers."""
    if not os.path.basename(command[0]).startswith("python"):
        return
    for argument in command[1:]:
        if not argument.startswith("-") or argument in ("-m", "-c"):
            return
        if not argument.startswith("--") and set(argument) & set("IES"):
            raise DumpError(f"option {argument} of {command[0]} hides the replay from the script: leave it out")


def child_environment(dump: Dump, request: ReplayRequest) -> dict[str, str]:
    """The environment of a script that runs as one rank of the recorded run, and waits for nobody."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_A_JOB and not name.startswith(("TORCHELASTIC_", "NANGUARD_"))
    }
    paths = [str(INTERCEPT), *filter(None, [environment.get("PYTHONPATH")])]
    # libraries read these once, before a guard could set them
    environment.update(
        {name: value for name, value in dump.manifest.settings.environment.items() if name in ENVIRONMENT}
    )
    return {**environment, **_launched(dump, request), **request.to_environment(), "PYTHONPATH": os.pathsep.join(paths)}


def _launched(dump: Dump, request: ReplayRequest) -> dict[str, str]:
    """The variables of the launcher, where there was one."""
    recorded = dump.manifest.run.launcher
    if "WORLD_SIZE" not in recorded:
        return {}
    per_node = int(recorded.get("LOCAL_WORLD_SIZE", recorded["WORLD_SIZE"]))
    local_rank = request.as_rank % per_node
    if torch.accelerator.is_available() and local_rank >= torch.accelerator.device_count():
        local_rank = 0  # the script puts itself on the GPU of this number
    own = {"RANK": request.as_rank, "LOCAL_RANK": local_rank, "GROUP_RANK": request.as_rank // per_node}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # read by scripts; nobody listens there
    return {**recorded, **{name: str(number) for name, number in own.items()}, **address}


def world_size_of(dump: Dump) -> int:
    """The number of ranks that the script sees: all that were started, also where fewer stepped together."""
    return int(dump.manifest.run.launcher.get("WORLD_SIZE", dump.world_size))
