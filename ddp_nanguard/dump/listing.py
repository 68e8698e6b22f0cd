"""`list_dumps`: the dumps in and below a directory, readable or not."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ddp_nanguard.errors import DumpError
from ddp_nanguard.report.fingerprint import fault_text, fingerprint
from ddp_nanguard.report.messages import log_line

from . import directories as place
from .locate import Paths, as_dump, as_paths
from .names import MANIFEST, DumpName, ranks_in
from .records import Manifest, read_versioned

_log = logging.getLogger(__name__)

MAX_DEPTH = 6
MAX_DIRECTORIES = 20_000
UNREADABLE = "unreadable, see show"


@dataclass(frozen=True)
class DumpSummary:
    """One dump in a listing.

    Attributes:
        path: its directory; the first one where several nodes hold parts of it.
        step: of the fault.
        created: date and time in ISO 8601; that of the last change where there is no manifest.
        origin: where the fault began, in one line; "" without a manifest.
        world_size: 0 where it is unknown.
        ranks: ranks with files, over all its directories.
        size_bytes: total size of its files.
        whole: finished, with nothing missing.
        remark: why it is not whole, or what is wrong with it; "" otherwise.
        paths: all its directories.
        fingerprint: equal for dumps of the same fault, see `report.fingerprint`; "" without an origin.
        fault: what the fingerprint stands for, in one line.
        origin_rank: where the fault began; None where that is no single rank, or not known.
        run_id: of the run that wrote it; "" without a manifest. Runs without a launcher have the same one.
        ended_run: whether the run ended with it, as far as its options tell.
    """

    path: str
    step: int
    created: str
    origin: str
    world_size: int
    ranks: tuple[int, ...]
    size_bytes: int
    whole: bool
    remark: str
    paths: tuple[str, ...]
    fingerprint: str = ""
    fault: str = ""
    origin_rank: int | None = None
    run_id: str = ""
    ended_run: bool = False


class _Part(NamedTuple):
    """A directory with a dump, or with a node's part of one."""

    path: Path
    manifest: Manifest | None
    ranks: frozenset[int]


def list_dumps(roots: Paths) -> list[DumpSummary]:
    """The dumps in one or several dump_dirs, by step; parts of one dump on several nodes are one entry.

    Checksums are not verified.

    Args:
        roots: dump_dirs, directories with some below them, or dumps themselves. One that is not there is left out.

    Raises:
        DumpError: none of the roots is a directory.
    """
    given = as_paths(roots)
    present = [root for root in given if root.is_dir()]
    if not present:
        names = ", ".join(map(str, given))
        if any(root.exists() for root in given):
            raise DumpError(f"{names} is no directory; give the dump_dir of a run, or a directory above it")
        raise DumpError(f"{names} does not exist: nothing went bad there yet, or the run had another dump_dir")
    dumps: dict[tuple[str, str], list[list[_Part]]] = {}
    for root in present:
        for name, path in dumps_below(root):
            part = _Part(path, _manifest_of(path), frozenset(ranks_in(path)))
            same = dumps.setdefault((str(name), _identity(path, part.manifest)), [])
            whole = next((parts for parts in same if _is_of_one(part, parts)), None)
            same.append([part]) if whole is None else whole.append(part)
    summaries = [
        _summary([part.path for part in parts], parts[0].manifest) for same in dumps.values() for parts in same
    ]
    return sorted(summaries, key=lambda summary: (summary.step, summary.created, summary.path))


def dumps_below(root: Path) -> list[tuple[DumpName, Path]]:
    """The dumps in a directory and below it, nearest first; of a dump itself that one.

    At most `MAX_DIRECTORIES` directories are looked at, `MAX_DEPTH` levels down, each once, whatever links lead to it.
    """
    name = DumpName.parse(as_dump(root).resolve().name)
    if name is not None:
        return [(name, as_dump(root))]
    found: list[tuple[DumpName, Path]] = []
    for number, directory in enumerate(_directories_below(root)):
        if number == MAX_DIRECTORIES:
            _log.warning("%s: only %d directories below it were looked at; give one further down", root, number)
            break
        found += place.dumps_in(directory)
    return found


def _directories_below(root: Path) -> Iterator[Path]:
    """The directory and those below it that are no dumps, level by level."""
    level, seen = [root], set[tuple[int, int]]()
    for _ in range(MAX_DEPTH + 1):
        below: list[Path] = []
        for directory in level:
            if _is_new(directory, seen):
                yield directory
                below += _directories_in(directory)
        level = below


def _is_new(directory: Path, seen: set[tuple[int, int]]) -> bool:
    try:
        status = directory.stat()
    except OSError:
        return False
    is_new = (status.st_dev, status.st_ino) not in seen
    seen.add((status.st_dev, status.st_ino))
    return is_new


def _directories_in(directory: Path) -> list[Path]:
    """Sorted, without dumps and what leads to one by a link; none where the directory cannot be read."""
    try:
        inside = sorted(path for path in directory.iterdir() if path.is_dir())
    except OSError:
        return []
    return [path for path in inside if DumpName.parse(path.resolve().name) is None]


def _manifest_of(path: Path) -> Manifest | None:
    """The manifest of a dump directory, None where it cannot be read."""
    try:
        return read_versioned(path, MANIFEST, Manifest)
    except DumpError:
        return None


def _identity(path: Path, manifest: Manifest | None) -> str:
    """A text that is equal for the parts of one dump on several nodes, and for no others."""
    if manifest is None:
        return str(path)
    origin = manifest.report.origin
    return json.dumps([manifest.run.id, origin.to_dict() if origin else None, manifest.report.world_size])


def _is_of_one(part: _Part, others: list[_Part]) -> bool:
    """Whether a directory holds other ranks of the same dump, or a copy; else another run met the same fault again."""
    first = others[0].manifest
    is_copy = first is not None and first == part.manifest  # which holds the path where it was written
    return is_copy or all(part.ranks.isdisjoint(other.ranks) for other in others)


def _summary(paths: list[Path], manifest: Manifest | None) -> DumpSummary:
    name = DumpName.parse(paths[0].name)
    assert name is not None
    ranks = tuple(sorted({rank for path in paths for rank in ranks_in(path)}))
    base = DumpSummary(
        path=str(paths[0]),
        step=name.step,
        created=time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(paths[0].stat().st_mtime)),
        origin="",
        world_size=0,
        ranks=ranks,
        size_bytes=sum(place.size_of(path) for path in paths),
        whole=False,
        remark="partial",
        paths=tuple(map(str, paths)),
    )
    if not place.is_whole(paths[0]):
        return base
    return dataclasses.replace(base, remark=UNREADABLE) if manifest is None else _with_manifest(base, manifest)


def _with_manifest(base: DumpSummary, manifest: Manifest) -> DumpSummary:
    world_size, origin = manifest.report.world_size, manifest.report.origin
    return dataclasses.replace(
        base,
        created=manifest.created,
        origin=log_line(manifest.report),
        world_size=world_size,
        whole=len(base.ranks) == world_size and manifest.has_weights,
        remark=_remark(manifest, len(base.ranks)),
        fingerprint=fingerprint(manifest.report),
        fault=fault_text(origin) if origin is not None else "",
        origin_rank=origin.rank if origin is not None else None,
        run_id=manifest.run.id,
        ended_run=manifest.options.on_fault == "stop",
    )


def _remark(manifest: Manifest, num_ranks: int) -> str:
    if num_ranks < manifest.report.world_size:
        return f"{num_ranks} of {manifest.report.world_size} ranks"
    return "" if manifest.has_weights else f"no weights: {manifest.weights.problem}"
