"""Exceptions of this package.

::

    Exception
    ├── ValueError
    │   └── DumpError            a dump that cannot be used: partial, tampered with, too new, a rank is missing
    └── RuntimeError
        └── NonFiniteError       raised on every rank in the same step; carries the report

Bad input to the library is a plain ``ValueError`` that names the option, the value and the remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .report.types import FaultReport


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


def _no_peers() -> None:
    return None


class DumpError(ValueError):
    """A dump that cannot be read or replayed, with the path, what is wrong and the remedy in one line."""
