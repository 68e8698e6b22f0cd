"""`rank_rows`: where each rank ran, and what it saw first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_nanguard.dump.outline import DumpOutline
from ddp_nanguard.dump.rank_records import Device
from ddp_nanguard.errors import DumpError
from ddp_nanguard.report.messages import seen
from ddp_nanguard.report.types import Site

from .magnitudes import evenly

MAX_RANKS = 1024
"""Ranks that a page shows; of more it shows those that are affected, and others at equal distances."""

MAX_TEXT = 200
"""Characters of what a rank saw first."""


@dataclass(frozen=True)
class RankRow:
    """One rank.

    Attributes:
        rank: global.
        host: of its machine; "" where that cannot be read.
        device: with the name and number of a GPU.
        first: what it saw first, or why that is not known; "" where it saw nothing bad.
        affected: whether it saw anything bad.
        is_origin: whether the fault began there.
    """

    rank: int
    host: str
    device: str
    first: str
    affected: bool
    is_origin: bool


def ranks_shown(dump: DumpOutline, limit: int = MAX_RANKS) -> list[int]:
    """Ranks with files in a dump, sorted; of more than ``limit`` the affected ones and others at equal distances."""
    if len(dump.ranks) <= limit:
        return dump.ranks
    affected = {dump.report.origin_rank, *dump.report.ranks_affected, *dump.report.holders} & {*dump.ranks}
    return sorted({*(rank for rank in affected if rank is not None), *evenly(dump.ranks, limit - len(affected))})


def rank_rows(dump: DumpOutline, ranks: Sequence[int]) -> tuple[RankRow, ...]:
    """What each of the ranks has written of itself: that of the origin first, then those that are affected."""
    rows = [_row(dump, rank) for rank in ranks]
    return tuple(sorted(rows, key=lambda row: (not row.is_origin, not row.affected, row.rank)))


def _row(dump: DumpOutline, rank: int) -> RankRow:
    report = dump.report
    is_origin, is_listed = rank == report.origin_rank, rank in report.ranks_affected
    try:
        evidence = dump.evidence(rank)
    except DumpError as error:
        return RankRow(rank, "", "", f"not known: {error}", is_listed or is_origin, is_origin)
    first = evidence.sites[0] if evidence.sites else None
    affected = first is not None or is_listed
    text = _site_text(first) if first is not None else ("" if not is_listed else "affected; it kept no site of its own")
    return RankRow(rank, evidence.host, device_text(evidence.device), text, affected, is_origin)


def _site_text(site: Site) -> str:
    where = f", micro-batch {site.micro_batch}" if site.micro_batch is not None else ""
    text = f"{site.phase}: {seen(site)}{where}"
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"


def device_text(device: Device) -> str:
    """A device with its number and its name: ``cuda:3, NVIDIA H200``."""
    number = f":{device.index}" if device.index is not None else ""
    return f"{device.type}{number}" + (f", {device.name}" if device.name else "")
