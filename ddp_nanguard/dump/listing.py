"""`list_dumps`: the dumps in a dump_dir, readable or not."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path

from ddp_nanguard.errors import DumpError
from ddp_nanguard.report.messages import log_line

from . import directories as place
from .locate import Paths, as_paths
from .names import MANIFEST, DumpName, ranks_in
from .records import Manifest, read_versioned

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


def list_dumps(roots: Paths) -> list[DumpSummary]:
    """The dumps in one or several dump_dirs, by step; parts of one dump on several nodes are one entry.

    Checksums are not verified.

    Args:
        roots: dump_dirs, directories that hold some, or dumps themselves. One that is not there is left out.

    Raises:
        DumpError: none of the roots exists.
    """
    parts: dict[tuple[str, str], list[tuple[Path, Manifest | None]]] = {}
    given = as_paths(roots)
    present = [root for root in given if root.is_dir()]
    if not present:
        names = ", ".join(map(str, given))
        raise DumpError(f"{names} does not exist: nothing went bad there yet, or the run had another dump_dir")
    for root in present:
        for name, path in _dumps_at(root):
            manifest = _manifest_of(path)
            parts.setdefault((str(name), _identity(path, manifest)), []).append((path, manifest))
    summaries = [_summary([path for path, _ in of_one], of_one[0][1]) for of_one in parts.values()]
    return sorted(summaries, key=lambda summary: (summary.step, summary.created, summary.path))


def _dumps_at(root: Path) -> list[tuple[DumpName, Path]]:
    """The dumps in a dump_dir, else those in the dump_dirs in it; of a dump itself that one."""
    name = DumpName.parse(root.resolve().name)
    if name is not None:
        return [(name, root)]
    found = list(place.dumps_in(root))
    return found or [each for inner in sorted(root.iterdir()) if inner.is_dir() for each in place.dumps_in(inner)]


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
    world_size = manifest.report.world_size
    return dataclasses.replace(
        base,
        created=manifest.created,
        origin=log_line(manifest.report),
        world_size=world_size,
        whole=len(base.ranks) == world_size and manifest.has_weights,
        remark=_remark(manifest, len(base.ranks)),
    )


def _remark(manifest: Manifest, num_ranks: int) -> str:
    if num_ranks < manifest.report.world_size:
        return f"{num_ranks} of {manifest.report.world_size} ranks"
    return "" if manifest.has_weights else f"no weights: {manifest.weights.problem}"
