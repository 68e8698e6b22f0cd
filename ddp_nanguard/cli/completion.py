"""``ddp-nanguard completion``: completion of the command line in a shell, made by shtab."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys

from .arguments import WRONG_USAGE, Commands
from .help_text import add_command

SHELLS = ("bash", "zsh", "tcsh")
MISSING = "ddp-nanguard: completion needs shtab; pip install 'ddp-nanguard[completion]'"


def add_completion(commands: Commands, program: argparse.ArgumentParser) -> None:
    """Add the command ``completion`` to the parser.

    Args:
        commands: of the program.
        program: its parser, of which the completion is made.
    """
    parser = add_command(commands, "completion")
    parser.add_argument("shell", choices=SHELLS, help="whose completion is printed")
    parser.set_defaults(command=functools.partial(run_completion, program, commands))


def run_completion(program: argparse.ArgumentParser, commands: Commands, options: argparse.Namespace) -> int:
    """Run ``ddp-nanguard completion SHELL``: print the script. Returns 0, or 2 where shtab is missing."""
    if importlib.util.find_spec("shtab") is None:
        print(MISSING, file=sys.stderr)
        return WRONG_USAGE
    import shtab

    commands.help = None  # the overview tells them itself, but what the help suppresses shtab leaves out
    print(shtab.complete(program, options.shell))
    return 0
