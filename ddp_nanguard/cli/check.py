"""`Check`: one line of the tables that ``drill`` and ``doctor`` print."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """Something that was checked, and whether it holds.

    Attributes:
        promise: its name.
        holds: None where it cannot be checked here, or where there is only something to tell.
        detail: what was found.
    """

    promise: str
    holds: bool | None
    detail: str

    def __str__(self) -> str:
        status = {True: "ok", False: "FAILED", None: "-"}[self.holds]
        return f"  {self.promise:<28}{status:<8}{self.detail}"
