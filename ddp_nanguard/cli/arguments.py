"""What the commands share: exit codes, and arguments that several of them take."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from ddp_nanguard.errors import DumpError

WRONG_USAGE = 2
"""Exit code of bad input: one line on stderr names it and the remedy."""

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_dump(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument that names the dump."""
    parser.add_argument("dump", nargs="+", metavar="DUMP", help="a dump, or its parts on several nodes")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option by which a command prints one JSON object, and what it tells people goes to stderr."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add the arguments after ``--``: the command that starts the user's job."""
    parser.add_argument("job", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command of the job")


def job_of(options: argparse.Namespace) -> tuple[str, ...]:
    """The command of the job, without the ``--`` before it; () without one."""
    return tuple(options.job[1:] if options.job[:1] == ["--"] else options.job)


@contextlib.contextmanager
def told_on_stderr(as_json: bool) -> Iterator[None]:
    """Where JSON is wanted, what is printed for people within this context goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


def add_replay_source(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which rank's step is run again, by which recipe and on which device."""
    parser.add_argument("--rank", type=int, help="default: the rank where the fault began")
    parser.add_argument("--recipe", metavar="MODULE:FUNCTION", help="default: the one that the dump names")
    parser.add_argument("--device", help="default: a GPU if there is one")


def output_directory(given: str | None, prefix: str) -> Path:
    """Make the directory that ``--out`` names, or a temporary one whose name begins with ``prefix``.

    Raises:
        DumpError: it cannot be made.
    """
    if given is None:
        return Path(tempfile.mkdtemp(prefix=prefix)).absolute()
    directory = Path(given).absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DumpError(f"option --out={given}: {error.strerror}; give a directory that can be made") from None
    return directory


def index(text: str) -> int:
    """Parse a whole number of at least 0.

    Raises:
        argparse.ArgumentTypeError: it is anything else.
    """
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")
    return int(text)


def seconds(text: str) -> float:
    """Parse a number of seconds above 0.

    Raises:
        argparse.ArgumentTypeError: it is anything else.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


def count(text: str) -> int:
    """Parse a whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: it is anything else.
    """
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)
