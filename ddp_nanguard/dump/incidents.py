"""`incidents`: the same fault in several dumps, and what its steps and hosts have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_nanguard.errors import DumpError
from ddp_nanguard.report.wording import listed

from .listing import DumpSummary
from .names import EVIDENCE, rank_name
from .rank_records import RankEvidence
from .records import read_record


@dataclass(frozen=True)
class Incident:
    """One fault, by its fingerprint, and the dumps that it has left.

    Attributes:
        fingerprint: of `report.fingerprint`.
        fault: phase, layer, slot and kind, in one line.
        steps: of the dumps, in the order in which they were written.
        paths: of the dumps, likewise.
        deterministic: whether each dump is of another run, and all met it in the same step.
        host: the machine of the rank where it began, where that was the same one in all dumps of jobs with several
            machines; None otherwise.
    """

    fingerprint: str
    fault: str
    steps: tuple[int, ...]
    paths: tuple[str, ...]
    deterministic: bool
    host: str | None

    def __str__(self) -> str:
        text = f"seen {len(self.steps)} times, steps {listed(self.steps)}"
        text += ": deterministic" if self.deterministic else ""
        return text + (f"; always on host {self.host}" if self.host is not None else "")


def incidents(summaries: Iterable[DumpSummary]) -> list[Incident]:
    """The faults that more than one of the dumps is of, the one with the most dumps first."""
    groups: dict[str, list[DumpSummary]] = {}
    for summary in summaries:
        groups.setdefault(summary.fingerprint, []).append(summary)
    found = [_incident(dumps) for key, dumps in groups.items() if key and len(dumps) > 1]
    return sorted(found, key=lambda each: -len(each.steps))


def _incident(dumps: list[DumpSummary]) -> Incident:
    dumps = sorted(dumps, key=lambda dump: (dump.created, dump.path))
    steps = tuple(dump.step for dump in dumps)
    # steps of a run only grow, but a run that goes on may have two guards
    are_runs = len({dump.run_id for dump in dumps}) == len(dumps) or all(dump.ended_run for dump in dumps)
    is_same_step = len(set(steps)) == 1 and are_runs
    return Incident(
        fingerprint=dumps[0].fingerprint,
        fault=dumps[0].fault,
        steps=steps,
        paths=tuple(dump.path for dump in dumps),
        deterministic=is_same_step,
        host=_common_host(dumps),
    )


def _common_host(dumps: Sequence[DumpSummary]) -> str | None:
    """The one host on which it always began, where another host could have had it."""
    hosts = {_host(dump, dump.origin_rank) for dump in dumps}
    (host, *others) = hosts
    if host is None or others:
        return None
    return host if any(_has_other_host(dump, host) for dump in dumps) else None


def _has_other_host(dump: DumpSummary, host: str) -> bool:
    return any(other not in (host, None) for other in (_host(dump, rank) for rank in dump.ranks))


def _host(dump: DumpSummary, rank: int | None) -> str | None:
    """The machine of a rank; None where its part of the dump is not here, or cannot be read."""
    for path in dump.paths if rank is not None else ():
        directory = Path(path) / rank_name(rank or 0)
        if directory.is_dir():
            try:
                return read_record(directory, EVIDENCE, RankEvidence).host
            except DumpError:
                return None
    return None
