"""Reads the output of a job under torchrun, and prepares the environment of a job started from within another."""

from __future__ import annotations

import os
import re
from pathlib import Path

# Further lines of the message are indented; torch may begin each line with the rank.
_MESSAGE = re.compile(r"(NonFiniteError: .*(?:\n(?:\[rank\d+\]: )?  .*)*)")
_JOB_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment_without_job() -> dict[str, str]:
    """The environment of this process without the variables that torchrun sets."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _JOB_VARIABLES and not name.startswith("TORCHELASTIC_")
    }


def worker_texts(logs: Path) -> list[str]:
    """Output of each worker of the newest run under ``logs``, stdout before stderr, in rank order; [] without logs."""
    runs = [path for path in logs.iterdir() if path.is_dir()] if logs.is_dir() else []
    if not runs:
        return []
    newest = max(runs, key=lambda path: path.stat().st_mtime)
    workers = sorted(newest.glob("attempt_0/*"), key=lambda path: int(path.name))
    names = ("stdout.log", "stderr.log")
    return [
        "".join((path / name).read_text(errors="replace") for name in names if (path / name).exists())
        for path in workers
    ]


def error_message(text: str) -> str | None:
    """The text of the first `NonFiniteError` in a worker's output, without torchrun's prefixes; None without one."""
    found = _MESSAGE.search(text)
    return re.sub(r"\n\[rank\d+\]: ", "\n", found[1]) if found else None
