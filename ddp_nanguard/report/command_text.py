"""Commands that replay a dump, as text to be copied."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence


def script_text(command: Sequence[str]) -> str:
    """The recorded command in a shell's words, with the interpreter by its name alone; "" where there is none."""
    if not command:
        return ""
    program = os.path.basename(command[0])
    rest = [word for position, word in enumerate(command[1:]) if word != "-u" or position]  # torchrun adds it
    return shlex.join(["python" if program.startswith("python") else command[0], *rest])


def replay_text(dump: str, script: str) -> str:
    """Of one rank alone.

    Args:
        dump: its directories.
        script: the recorded command, "" where the dump has a recipe.
    """
    return f"ddp-nanguard replay {dump} --trace" + (f" -- {script}" if script else "")


def replay_all_text(dump: str, script: str, world_size: int) -> str:
    """Of all ranks; arguments as `replay_text`."""
    launch = f"torchrun --nproc-per-node {world_size}"
    if not script:
        return f"{launch} -m ddp_nanguard replay {dump} --trace"
    bare = script.removeprefix("python ")
    own = script.startswith("python ") and (not bare.startswith("-") or bare.startswith("-m "))
    variables = f"NANGUARD_REPLAY={dump} NANGUARD_REPLAY_OPTIONS=--trace"
    return f"{variables} {launch} {bare if own else f'--no-python {script}'}"
