"""Exceptions of this package.

::

    Exception
    ├── ValueError
    │   └── DumpError            a dump that cannot be used: partial, tampered with, too new, a rank is missing
    └── RuntimeError
        ├── NonFiniteError       raised on every rank in the same step; carries the report
        └── OutOfStepError       ranks are not in the same step, so that no verdict can be given

Bad input to the library is a plain ``ValueError`` that names the option, the value and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from .report.types import FaultReport


_T = TypeVar("_T")


def line_of(error: BaseException) -> str:
    """Class and first line of an error, whose own code may raise when it is asked for its text."""
    try:
        text = next((line for line in str(error).splitlines() if line.strip()), "")
    except Exception as other:
        text = f"(its text raised {type(other).__name__})"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_CHECKS = (ArithmeticError, AssertionError, RuntimeError, ValueError)
_MAX_SEARCHED = 10_000
_NONFINITE = re.compile(r"\b(nans?|infs?|infinit(e|y)|(non-?|not )finite)\b", re.IGNORECASE)


def says_nonfinite(error: BaseException) -> bool:
    """Whether an exception of the job's own is about a non-finite value, by its class or by its text."""
    if isinstance(error, FloatingPointError):
        return True
    try:
        return isinstance(error, _CHECKS) and _NONFINITE.search(str(error)[:_MAX_SEARCHED]) is not None
    except Exception:
        return False  # its own code raised


class Undone:
    """What the fault path could not do on this rank, one line each: nothing that it does may replace the fault."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def attempt(self, what: str, act: Callable[[], _T], otherwise: _T) -> _T:
        """What ``act`` gives, or ``otherwise`` where it raises.

        Args:
            what: was not done then; begins the line.
            act: issues no collective: its peers would wait for the one that it does not reach.
            otherwise: stands for a result.
        """
        try:
            return act()
        except Exception as error:  # the job's objects may hold anything, and their code may raise anything
            self.add(f"{what}: {line_of(error)}")
            return otherwise

    def add(self, line: str) -> None:
        """One more line, unless it is there already."""
        if line not in self._lines:
            self._lines.append(line)

    def take(self) -> str | None:
        """All lines in one text, which are then forgotten; None without any."""
        lines, self._lines = self._lines, []
        return "; ".join(lines)[:_MAX_UNDONE] or None


_MAX_UNDONE = 1000


class NonFiniteError(RuntimeError):
    """A non-finite value stopped the job: same type, same text, same step on every rank.

    Attributes:
        report: what was seen, as plain data. It survives pickling.
        exit_code: that the worker ends with if the error is not caught.
        barrier: waits for the peers, who may still write their dumps; does nothing in an unpickled error.

    It holds the exit code and the barrier, so that the exit hook needs no reference to the guard, which may be closed.
    """

    def __init__(
        self, message: str, report: FaultReport, exit_code: int = 65, barrier: Callable[[], object] | None = None
    ) -> None:
        super().__init__(message)
        self.report = report
        self.exit_code = exit_code
        self.barrier = barrier if barrier is not None else _no_peers

    def without_traceback(self) -> NonFiniteError:
        """An equal error without a traceback, which leads to frames and through them keeps the model alive."""
        return NonFiniteError(str(self), self.report, self.exit_code, self.barrier)

    # the barrier stays behind: it leads to a process group, which no other process can use
    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[str, FaultReport, int]]:
        return type(self), (self.args[0], self.report, self.exit_code)


class OutOfStepError(RuntimeError):
    """Ranks are not in the same step, or a collective of the job has met a verdict: which ones, and the remedy."""


def _no_peers() -> None:
    return None


class DumpError(ValueError):
    """A dump that cannot be read or replayed, with the path, what is wrong and the remedy in one line."""
