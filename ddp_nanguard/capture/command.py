"""The command that started this process, and what its launcher said: enough to start the script again by hand."""

from __future__ import annotations

import os
import sys

_LAUNCHER = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
"""Nothing else of the environment is ever kept: it may hold secrets."""
MAX_CODE = 200
"""Longest code after ``-c`` that is a command."""


def command() -> tuple[str, ...]:
    """Program and arguments as typed; of a process that another Python started, the script and its arguments.

    Empty where there is no command that can be shown and starts the script again: in a notebook, or for long code
    after ``-c``.
    """
    found = _command()
    return found if all(map(str.isprintable, found)) else ()


def _command() -> tuple[str, ...]:
    typed = tuple(sys.orig_argv)
    if "-c" not in typed:
        return typed
    code = typed[typed.index("-c") + 1 :][:1]
    if code and code[0].startswith("from multiprocessing"):  # of a spawned worker: its parent's script
        return (typed[0], *sys.argv) if sys.argv and os.path.isfile(sys.argv[0]) else ()
    return typed if len("".join(code)) <= MAX_CODE else ()


def launcher_variables() -> dict[str, str]:
    """Numbers that a launcher has set, and whether it was torchrun."""
    found = {name: text for name in _LAUNCHER if (text := os.environ.get(name))}
    numbers = {name: text for name, text in found.items() if text.isdigit() and name != "TORCHELASTIC_RUN_ID"}
    return {**numbers, **({"TORCHELASTIC_RUN_ID": "set"} if "TORCHELASTIC_RUN_ID" in found else {})}
