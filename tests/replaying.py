"""Replays in fresh processes with the default environment, through the command line that people use."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
from dataclasses import dataclass
from typing import Any

import pytest

from tests.ranks import run_ranks


@dataclass(frozen=True)
class Replayed:
    """What one replay said.

    Attributes:
        code: exit code.
        outcome: its JSON.
        output: everything on stdout.
    """

    code: int
    outcome: dict[str, Any]
    output: str


def replay_alone(
    dumps: list[str], env: dict[str, str] | None = None, *options: str, device: str = "cpu"
) -> list[Replayed]:
    """Replays the culprit of each dump by itself, each in a process of its own, on a machine with such devices."""
    return run_ranks(
        _alone,
        world_size=len(dumps),
        timeout_s=40,
        process_group=False,
        num_threads=None,
        env=env,
        device=device,
        dumps=dumps,
        options=list(options),
    )


def _alone(rank: int, world_size: int, dumps: list[str], options: list[str]) -> Replayed:
    from ddp_nanguard.cli.main import main

    return captured(lambda: main(["replay", dumps[rank], "--json", *options]))


def replay_on_all_ranks(dump: str, world_size: int, *options: str) -> list[Replayed]:
    """As ``torchrun -m ddp_nanguard replay DUMP`` starts it: every rank takes its own window."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return run_ranks(
        _together,
        world_size=world_size,
        timeout_s=40,
        process_group=False,
        num_threads=None,
        env=env,
        arguments=[dump, *options],
    )


def _together(rank: int, world_size: int, arguments: list[str]) -> Replayed:
    from ddp_nanguard.cli.main import main

    os.environ |= torchrun_variables(rank, world_size)
    return captured(lambda: main(["replay", *arguments]))


def torchrun_variables(rank: int, world_size: int) -> dict[str, str]:
    """What torchrun tells a process of the rank that it is to be, as far as a replay asks for it."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    return {"TORCHELASTIC_RUN_ID": "none", **{name: str(number) for name, number in numbers.items()}}


def under_torchrun(monkeypatch: pytest.MonkeyPatch, rank: int = 0, world_size: int = 2) -> None:
    """Set `torchrun_variables` until the test ends."""
    for name, value in torchrun_variables(rank, world_size).items():
        monkeypatch.setenv(name, value)


def captured(run: Any) -> Replayed:
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        try:
            code = run()
        except SystemExit as end:
            code = end.code
    text = stdout.getvalue()
    return Replayed(int(code or 0), _last_json(text), text)


def _last_json(text: str) -> dict[str, Any]:
    """The last JSON object of the output, whether on one line or on many."""
    with contextlib.suppress(json.JSONDecodeError):
        return json.loads(text)  # type: ignore[no-any-return]  # checked by whoever reads it
    for line in reversed(text.splitlines()):
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(line)  # type: ignore[no-any-return]  # likewise
    return {}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
