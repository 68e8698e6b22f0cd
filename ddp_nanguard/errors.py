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

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .site import FaultReport


class NonFiniteError(RuntimeError):
    """A non-finite value stopped the job: same type, same text, same step on every rank.

    Attributes:
        report: what was seen, as plain data. It survives pickling.
    """

    def __init__(self, message: str, report: FaultReport) -> None:
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[str, FaultReport]]:
        return type(self), (self.args[0], self.report)


class DumpError(ValueError):
    """A dump that cannot be read or replayed, with the path, what is wrong and the remedy in one line."""
