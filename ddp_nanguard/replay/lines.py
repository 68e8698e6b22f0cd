"""From Python frames to the user's lines: frames of torch, of this package and of the standard library are left out."""

from __future__ import annotations

import enum
import linecache
import os
import sysconfig
from dataclasses import dataclass
from types import CodeType, FrameType

import torch

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD = (sysconfig.get_paths()["stdlib"] + os.sep, sysconfig.get_paths()["platstdlib"] + os.sep)
_TRANSPARENT = (_PACKAGE + "guard.py", _PACKAGE + "replay" + os.sep, _PACKAGE + "demo.py", _PACKAGE + "cli.py")
MAX_LINES = 4


class Kind(enum.IntEnum):
    """Whose code a frame runs."""

    OTHER = 0
    """Torch, the standard library, and the parts of this package that only pass a call on."""
    PROBE = 1
    """This package looks at something."""
    USER = 2
    ENGINE = 3
    """The call that runs a backward pass: frames above it are not part of what backward does."""
    CHECKPOINT = 4
    OPTIMIZER = 5
    COMPILED = 6


@dataclass(frozen=True)
class Line:
    """One line of the user's code.

    Attributes:
        file: path as Python knows it.
        number: from 1.
        function: qualified name.
        text: the line, without indentation.
        expression: the part of the source that ran, of the whole statement where it spans lines; "" where unknown.
    """

    file: str
    number: int
    function: str
    text: str
    expression: str = ""

    def place(self) -> str:
        """``file:line``, relative to the present directory where it lies in it."""
        relative = os.path.relpath(self.file) if self.file.startswith(os.getcwd() + os.sep) else self.file
        return f"{relative}:{self.number}"


@dataclass(frozen=True)
class Spot:
    """Where a frame stands, cheap to take; `line` reads the source."""

    code: CodeType
    instruction: int
    number: int

    def line(self) -> Line:
        """The line of source."""
        text = linecache.getline(self.code.co_filename, self.number).strip()
        expression = _expression(self.code, self.instruction)
        return Line(self.code.co_filename, self.number, self.code.co_qualname, text, expression)


@dataclass(frozen=True)
class Stack:
    """What the frames above an operator say.

    Attributes:
        spots: of the user's code, innermost first, at most `MAX_LINES`.
        kinds: whose code was met on the way.
    """

    spots: tuple[Spot, ...]
    kinds: frozenset[Kind]


class _Files(dict[str, Kind]):
    def __missing__(self, file: str) -> Kind:
        self[file] = kind = _kind_of_file(file)
        return kind


def _kind_of_file(file: str) -> Kind:
    path = os.path.abspath(file)
    if path.startswith(_TORCH):
        inner = path.removeprefix(_TORCH).replace(os.sep, "/")
        if inner == "utils/checkpoint.py":
            return Kind.CHECKPOINT
        if inner.startswith("optim/"):
            return Kind.OPTIMIZER
        return Kind.COMPILED if inner == "_dynamo/eval_frame.py" else Kind.OTHER
    if path.startswith(_PACKAGE):
        return Kind.OTHER if path.startswith(_TRANSPARENT) else Kind.PROBE
    is_standard = path.startswith(_STANDARD) and "site-packages" not in path
    return Kind.OTHER if is_standard or file.startswith("<frozen") else Kind.USER


_files = _Files()


def first_spot(frame: FrameType | None) -> Spot | Kind | None:
    """The innermost spot of the user's code; `Kind.PROBE` for this package's own; None within a backward pass."""
    while frame is not None:
        kind = _files[frame.f_code.co_filename]
        if kind is Kind.USER:
            return Spot(frame.f_code, frame.f_lasti, frame.f_lineno)
        if kind is Kind.PROBE:
            return kind
        if frame.f_code.co_name == "_engine_run_backward":
            return None
        frame = frame.f_back
    return None


def stack_of(frame: FrameType | None) -> Stack:
    """All of the user's spots up to the backward pass that the frame runs in, or to the top."""
    spots: list[Spot] = []
    kinds: set[Kind] = set()
    while frame is not None:
        kind = _files[frame.f_code.co_filename]
        if frame.f_code.co_name == "_engine_run_backward":
            kinds.add(Kind.ENGINE)
            break
        if kind is not Kind.COMPILED or frame.f_code.co_name == "compile_wrapper":
            kinds.add(kind)
        if kind is Kind.USER and len(spots) < MAX_LINES and not _is_launcher(frame):
            spots.append(Spot(frame.f_code, frame.f_lasti, frame.f_lineno))
        frame = frame.f_back
    return Stack(tuple(spots), frozenset(kinds))


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's code."""
    while frame is not None and _files[frame.f_code.co_filename] is not Kind.USER:
        frame = frame.f_back
    return frame


def _is_launcher(frame: FrameType) -> bool:
    """The console script or the test that started the replay is no part of the step."""
    caller: FrameType | None = frame
    while caller is not None:
        if caller.f_code.co_filename.startswith(_PACKAGE + "replay"):
            return False
        caller = caller.f_back
    return True


def _expression(code: CodeType, instruction: int) -> str:
    positions = list(code.co_positions())
    index = instruction // 2
    if not 0 <= index < len(positions):
        return ""
    first, last, start, end = positions[index]
    if first is None or last is None or start is None or end is None:
        return ""
    lines = [linecache.getline(code.co_filename, number).encode() for number in range(first, last + 1)]
    if not all(lines):
        return ""
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    return " ".join(line.decode(errors="replace").strip() for line in lines)
