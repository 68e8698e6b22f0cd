"""Trains a script until it is stopped, and replays its dump: by the command, and on all ranks at once.

Training and the replay on all ranks run in processes forked from the server that has torch loaded. A replay alone is
the real command in an interpreter of its own: its ``sitecustomize`` has to come before torch.
"""

from __future__ import annotations

import os
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.device import staged
from tests.rank_processes import SIMULATED
from tests.ranks import Outcome, run_ranks_raw
from tests.replaying import Replayed, captured, free_port, torchrun_variables

SCRIPTS = Path(__file__).parent
REPOSITORY = SCRIPTS.parents[1]


@dataclass(frozen=True)
class Replay:
    """What a replay alone said: exit code, JSON, and what the script printed beside it."""

    code: int
    outcome: dict[str, Any]
    output: str


def train(directory: Path, script: str, *arguments: str, num_ranks: int = 2, device: str = "cpu") -> Path:
    """The dump of the script, which must be stopped on each rank."""
    ended = launch(directory, script, *arguments, num_ranks=num_ranks, device=device)
    assert all(outcome.error_type == "NonFiniteError" for outcome in ended), [each.describe() for each in ended]
    (dump,) = (directory / "nan_dumps").glob("step-*")
    return dump


def launch(
    directory: Path,
    script: str,
    *arguments: str,
    num_ranks: int = 2,
    uncaught: bool = False,
    device: str = "cpu",
    **variables: str,
) -> list[Outcome]:
    """The script on some ranks, as torchrun starts it; it may end the process, by an exception too if ``uncaught``.

    ``device``: as for `tests.ranks.run_ranks`.
    """
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": str(num_ranks), **variables}
    return run_ranks_raw(
        _run,
        world_size=num_ranks,
        timeout_s=50,
        process_group=False,
        env=env,
        device=device,
        through_excepthook=uncaught,
        directory=str(directory),
        path=str(SCRIPTS / script),
        arguments=list(arguments),
    )


def _run(rank: int, world_size: int, directory: str, path: str, arguments: list[str]) -> None:
    os.chdir(directory)
    if world_size > 1:
        os.environ |= torchrun_variables(rank, world_size)
    sys.argv = [path, *arguments]
    sys.orig_argv = [sys.executable, *sys.argv]
    sys.path.insert(0, os.path.dirname(path))
    runpy.run_path(path, run_name="__main__")


def replay(dump: Path, *command: str, options: tuple[str, ...] = (), device: str = "cpu") -> Replay:
    """``ddp-nanguard replay DUMP -- python COMMAND``, which must end by itself; ``device`` as for `launch`."""
    arguments = ["replay", str(dump), "--json", *options, "--", sys.executable, *command]
    env = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    (ended,) = run_ranks_raw(
        _replay,
        world_size=1,
        timeout_s=50,
        process_group=False,
        num_threads=None,
        env=staged.environment() if device == SIMULATED else env,
        device=device,
        arguments=arguments,
    )
    assert ended.returned, ended.describe()
    return Replay(ended.value.code, ended.value.outcome, ended.output)


def _replay(rank: int, world_size: int, arguments: list[str]) -> Replayed:
    from ddp_nanguard.cli.main import main

    return captured(lambda: main(arguments))


def first_line(replayed: Replay) -> tuple[str, str]:
    """Operator and line at which a trace begins."""
    first = replayed.outcome["trace"]["first_nonfinite_op"]
    return first["operator"], first["lines"][0]["text"]
