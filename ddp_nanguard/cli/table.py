"""`dump_table`: the listing of ``ddp-nanguard list``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_nanguard.report.text import human_size

if TYPE_CHECKING:
    from ddp_nanguard.dump.incidents import Incident
    from ddp_nanguard.dump.listing import DumpSummary

HEADER = ("STEP", "WHEN", "DUMP", "RANKS", "SIZE", "STATUS", "ORIGIN")
RIGHT = {"STEP", "RANKS", "SIZE"}


def dump_table(summaries: Iterable[DumpSummary], roots: Sequence[str] = ()) -> str:
    """One line per dump, the oldest step first; "no dumps" where there is none.

    Args:
        summaries: of the dumps.
        roots: directories that were looked at: the path of a dump is told where it is not directly in the only one.
    """
    summaries = list(summaries)
    places = {Path(summary.path).parent for summary in summaries}
    with_directory = len(places) > 1 or not places <= {Path(root) for root in roots}
    rows = [_row(summary, with_directory) for summary in summaries]
    if not rows:
        return "no dumps\n"
    widths = [max(len(row[column]) for row in [HEADER, *rows]) for column in range(len(HEADER))]
    return "".join(f"{_line(row, widths)}\n" for row in [HEADER, *rows])


def incident_lines(found: Iterable[Incident]) -> str:
    """A paragraph on faults that were met more than once; "" without any."""
    lines = [f"{incident.fault}\n  {incident}\n" for incident in found]
    return "\n" + "".join(lines) if lines else ""


def _row(summary: DumpSummary, with_directory: bool) -> Sequence[str]:
    world = str(summary.world_size) if summary.world_size else "?"
    return (
        str(summary.step),
        summary.created[:19].replace("T", " "),
        summary.path if with_directory else Path(summary.path).name,
        f"{len(summary.ranks)}/{world}",
        human_size(summary.size_bytes),
        summary.remark or "whole",
        summary.origin.replace(f"step {summary.step} · ", "") or "-",
    )


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        f"{cell:>{width}}" if name in RIGHT else f"{cell:<{width}}"
        for name, cell, width in zip(HEADER, row, widths, strict=True)
    ]
    return "  ".join(cells).rstrip()
