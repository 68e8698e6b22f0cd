"""`excerpt`: the lines of the user's file around the operator in which a value began."""

from __future__ import annotations

import re
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_nanguard.report.types import FirstOperator

AROUND = 6
MAX_STATEMENT = 60
MAX_FILE_BYTES = 4 * 2**20
_LINE = re.compile(r"(.+):(\d+) in (.+)", re.DOTALL)


@dataclass(frozen=True)
class SourceLine:
    """One line: its number, its text, and whether the statement of the operator is on it."""

    number: int
    text: str
    marked: bool


@dataclass(frozen=True)
class Excerpt:
    """The lines around a statement.

    Attributes:
        file: as the dump names it.
        function: in which the statement is.
        lines: from the file where it is at hand and unchanged, else the statement that the dump holds.
        remark: why the lines are not those of the file, in a sentence; "" where they are.
    """

    file: str
    function: str
    lines: tuple[SourceLine, ...]
    remark: str = ""


def excerpt(operator: FirstOperator | None, directory: str) -> Excerpt | None:
    """The lines around an operator; None where no line of the user's code is known.

    A dump may come from anybody: of a file on this machine nothing is shown unless it holds the recorded statement.

    Args:
        operator: of the second look.
        directory: the working directory of the run, where a relative name is looked for too.
    """
    match = _LINE.fullmatch(operator.line or "") if operator is not None else None
    if operator is None or match is None:
        return None
    file, number, function = match[1], int(match[2]), match[3]
    text = _lines_of(file, directory)
    span = _span(text, number, operator.code) if text is not None else None
    if text is not None and span is not None:
        return Excerpt(file, function, _around(text, *span))
    why = f"{file} is not at hand here" if text is None else f"{file} has changed since: the statement is not there"
    held = (SourceLine(number, operator.code, True),) if operator.code else ()
    return Excerpt(file, function, held, f"{why}; the dump holds the statement alone, joined into one line.")


def _lines_of(file: str, directory: str) -> list[str] | None:
    for path in (Path(file), Path(directory, file)):
        try:
            if path.suffix == ".py" and path.is_file() and path.stat().st_size <= MAX_FILE_BYTES:
                with tokenize.open(path) as opened:
                    return opened.read().splitlines()
        except (OSError, SyntaxError, ValueError):
            continue
    return None


def _span(lines: Sequence[str], number: int, code: str) -> tuple[int, int] | None:
    """First and last line of the statement that is on a line; None where it is not there. Numbers begin at 1."""
    for first in range(number, max(0, number - MAX_STATEMENT), -1):
        parts = [line.strip() for line in lines[first - 1 : first - 1 + MAX_STATEMENT]]
        start = " ".join(parts).find(code) if code and parts else -1
        if 0 <= start < len(parts[0]) if parts else False:
            last = first + _num_breaks(parts, start + len(code))
            return (first, last) if number <= last else None
    return None


def _num_breaks(parts: Sequence[str], end: int) -> int:
    """The number of the part in which the joined text reaches a position."""
    reached = 0
    for index, part in enumerate(parts):
        reached += len(part)
        if end <= reached:
            return index
        reached += 1
    return len(parts) - 1


def _around(lines: Sequence[str], first: int, last: int) -> tuple[SourceLine, ...]:
    numbers = range(max(1, first - AROUND), min(len(lines), last + AROUND) + 1)
    return tuple(SourceLine(number, lines[number - 1], first <= number <= last) for number in numbers)
