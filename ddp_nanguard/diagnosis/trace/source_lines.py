"""From Python frames to lines of the user's code; frames of torch, of this package and of Python itself are skipped."""

from __future__ import annotations

import ast
import enum
import functools
import linecache
import os
import sysconfig
from dataclasses import dataclass
from types import CodeType, FrameType

import torch

from ddp_nanguard.hooks.frames import FrameRole, module_of, role_of
from ddp_nanguard.hooks.loop import CLOSURE_CODE

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_MODULES = os.path.join(_TORCH, "nn", "modules") + os.sep
_STANDARD = (sysconfig.get_paths()["stdlib"] + os.sep, sysconfig.get_paths()["platstdlib"] + os.sep)
MAX_LINES = 4


class FrameKind(enum.IntEnum):
    """Which code a frame runs, as far as a trace has to tell it apart."""

    OTHER = 0
    """Torch, the standard library, and modules of this package that only pass a call on."""
    PROBE = 1
    """A probe of this package: its operators are not part of the step."""
    USER = 2
    ENGINE = 3
    """The call that runs a backward pass: callers beyond it are not part of what backward does."""
    CHECKPOINT = 4
    OPTIMIZER = 5
    COMPILED = 6
    WRAPPER = 7
    """FSDP: the copies that it makes are not operators of the user."""


@dataclass(frozen=True)
class SourceLine:
    """One line of the user's code.

    Attributes:
        file: path as Python knows it.
        number: line number, from 1.
        function: qualified name of the function.
        text: the whole statement, joined into one line.
        expression: the part of the statement that ran; "" where unknown.
    """

    file: str
    number: int
    function: str
    text: str
    expression: str = ""

    def place(self) -> str:
        """``file:line``, relative to the working directory where the file lies under it."""
        relative = os.path.relpath(self.file) if self.file.startswith(os.getcwd() + os.sep) else self.file
        return f"{relative}:{self.number}"


@dataclass(frozen=True)
class CodeLocation:
    """The position at which a frame stands: cheap to record, and read into a `SourceLine` only when it is shown.

    Attributes:
        code: the code object.
        instruction: byte offset of the running instruction, as in ``frame.f_lasti``.
        number: line number, from 1.
    """

    code: CodeType
    instruction: int
    number: int

    def line(self) -> SourceLine:
        """Read the source and find the statement and the expression that ran. Cached per location."""
        return _line(self.code, self.instruction, self.number)


@dataclass(frozen=True)
class Stack:
    """What the frames above an operator say.

    Attributes:
        spots: positions in the user's code, innermost first, at most `MAX_LINES`.
        kinds: kinds of all frames up to where the walk ended.
    """

    spots: tuple[CodeLocation, ...]
    kinds: frozenset[FrameKind]


_OWN_KINDS = {
    FrameRole.PROBE: FrameKind.PROBE,
    FrameRole.PASSES_ON: FrameKind.OTHER,
    FrameRole.STARTS_STEP: FrameKind.OTHER,
    FrameRole.INJECTS: FrameKind.USER,
}


def _kind(frame: FrameType) -> FrameKind:
    role = _roles[module_of(frame)]
    return _files[frame.f_code.co_filename] if role is None else _OWN_KINDS[role]


class _Roles(dict[str, FrameRole | None]):
    def __missing__(self, module: str) -> FrameRole | None:
        self[module] = role = role_of(module)
        return role


# Walked for every operator of the step, hence the caches by file and by module.
class _Files(dict[str, FrameKind]):
    def __missing__(self, file: str) -> FrameKind:
        self[file] = kind = _kind_of_file(file)
        return kind


def _kind_of_file(file: str) -> FrameKind:
    """The kind of a file that is not part of this package."""
    path = os.path.abspath(file)
    if path.startswith(_TORCH):
        inner = path.removeprefix(_TORCH).replace(os.sep, "/")
        if inner == "utils/checkpoint.py":
            return FrameKind.CHECKPOINT
        if inner.startswith("optim/"):
            return FrameKind.OPTIMIZER
        if inner.startswith("distributed/fsdp/"):
            return FrameKind.WRAPPER
        return FrameKind.COMPILED if inner == "_dynamo/eval_frame.py" else FrameKind.OTHER
    is_standard = path.startswith(_STANDARD) and "site-packages" not in path
    return FrameKind.OTHER if is_standard or file.startswith("<frozen") else FrameKind.USER


_files = _Files()
_roles = _Roles()


def first_spot(frame: FrameType | None) -> CodeLocation | FrameKind | None:
    """The innermost position in the user's code; `FrameKind.PROBE` if a probe of this package is met first, else None.

    The walk ends at the call that runs a backward pass, and where this package starts a step.
    """
    while frame is not None:
        kind = _kind(frame)
        if _roles[module_of(frame)] is FrameRole.STARTS_STEP:
            return None
        if kind is FrameKind.USER:
            return CodeLocation(frame.f_code, frame.f_lasti, frame.f_lineno)
        if kind is FrameKind.PROBE:
            return kind
        if frame.f_code.co_name == "_engine_run_backward":
            return None
        frame = frame.f_back
    return None


def is_wrappers_own(frame: FrameType | None) -> bool:
    """Whether FSDP itself runs the operator: its code is met before the user's and before a module's forward."""
    while frame is not None:
        kind = _kind(frame)
        if kind not in (FrameKind.OTHER, FrameKind.COMPILED) or frame.f_code.co_filename.startswith(_MODULES):
            return kind is FrameKind.WRAPPER
        if frame.f_code.co_name == "_engine_run_backward":
            return False
        frame = frame.f_back
    return False


def stack_of(frame: FrameType | None) -> Stack:
    """All positions in the user's code, up to the backward pass that the frame runs in or to the start of the step."""
    spots: list[CodeLocation] = []
    kinds: set[FrameKind] = set()
    in_closure = False  # of an optimizer, which runs forward and backward in it
    while frame is not None:
        kind = _kind(frame)
        if frame.f_code.co_name == "_engine_run_backward":
            kinds.add(FrameKind.ENGINE)
            break
        # Wrappers that keep a function from being compiled lie in that file too; only ``compile_wrapper`` runs compiled
        # code.
        in_closure = in_closure or frame.f_code is CLOSURE_CODE
        if kind is FrameKind.COMPILED and frame.f_code.co_name != "compile_wrapper":
            pass
        elif kind is not FrameKind.OPTIMIZER or not in_closure:
            kinds.add(kind)
        if _roles[module_of(frame)] is FrameRole.STARTS_STEP:
            break  # what started the replay is no part of the step
        if kind is FrameKind.USER and len(spots) < MAX_LINES:
            spots.append(CodeLocation(frame.f_code, frame.f_lasti, frame.f_lineno))
        frame = frame.f_back
    return Stack(tuple(spots), frozenset(kinds))


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's code, or None."""
    while frame is not None and _kind(frame) is not FrameKind.USER:
        frame = frame.f_back
    return frame


@functools.lru_cache(maxsize=4096)
def _line(code: CodeType, instruction: int, number: int) -> SourceLine:
    first, last, start, end = _positions(code, instruction)
    text = linecache.getline(code.co_filename, number).strip()
    tree = _tree(code.co_filename)
    if tree is None or first is None or last is None or start is None or end is None:
        return SourceLine(code.co_filename, number, code.co_qualname, text)
    statement, expression = _nodes(tree, first, start, last, end)
    whole = _joined(code.co_filename, statement) if statement is not None else text
    part = _joined(code.co_filename, expression) if expression is not None else ""
    return SourceLine(code.co_filename, number, code.co_qualname, whole, part)


def _positions(code: CodeType, instruction: int) -> tuple[int | None, int | None, int | None, int | None]:
    positions = list(code.co_positions())
    index = instruction // 2
    return positions[index] if 0 <= index < len(positions) else (None, None, None, None)


@functools.lru_cache(maxsize=256)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return None


def _nodes(tree: ast.Module, first: int, start: int, last: int, end: int) -> tuple[ast.stmt | None, ast.expr | None]:
    """The innermost simple statement around a position, and the longest expression that ends exactly there.

    Python gives a method call that spans lines the position of the method's name only.
    """
    statement: ast.stmt | None = None
    expression: ast.expr | None = None
    for node in ast.walk(tree):
        if not isinstance(node, (ast.stmt, ast.expr)) or node.end_lineno is None:
            continue
        around = (node.lineno, node.col_offset) <= (first, start) and (last, end) <= _end(node)
        if isinstance(node, ast.stmt) and around and not hasattr(node, "body"):
            statement = node
        elif isinstance(node, (ast.Call, ast.BinOp, ast.expr)) and around and _end(node) == (last, end):
            expression = (
                node if isinstance(node, ast.Call) or (node.lineno, node.col_offset) == (first, start) else None
            )
            if expression is not None:
                break
    return statement, expression


def _end(node: ast.stmt | ast.expr) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def _joined(file: str, node: ast.stmt | ast.expr) -> str:
    """The source of a node in one line, without comments after it."""
    # The column offsets of `ast` count UTF-8 bytes, not characters.
    lines = [linecache.getline(file, number).encode() for number in range(node.lineno, (node.end_lineno or 0) + 1)]
    lines[-1] = lines[-1][: node.end_col_offset]
    lines[0] = lines[0][node.col_offset :]
    return " ".join(line.decode(errors="replace").strip() for line in lines)
