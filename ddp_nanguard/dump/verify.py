"""Checks that a dump is whole, of this version, and unchanged since it was written."""

from __future__ import annotations

from pathlib import Path

from ddp_nanguard.errors import DumpError

from . import directories as place
from .files import list_file
from .json_files import well_formed
from .names import EVIDENCE, MANIFEST, FileEntry
from .progress import OnBytes
from .records import Manifest, read_versioned


def checked_manifest(path: Path) -> Manifest:
    """The manifest of a whole dump.

    Raises:
        DumpError: the dump is partial, of another version or damaged.
    """
    if not place.is_whole(path):
        evidence = next(iter(sorted(path.glob(f"rank-*/{EVIDENCE}"))), None)
        remedy = f"read {evidence} by eye, or use another dump" if evidence else "use another dump"
        raise DumpError(
            f"{path} is partial: its writers ended before it was whole; {remedy}, see: ddp-nanguard list {path.parent}"
        )
    return read_versioned(path, MANIFEST, Manifest)


def require_one_dump(paths: list[Path], manifests: list[Manifest]) -> None:
    """Check that directories hold parts of one dump: same run, step, world size and origin.

    Raises:
        DumpError: names two that do not, and what differs.
    """
    first = manifests[0]
    for path, manifest in zip(paths[1:], manifests[1:], strict=True):
        for key in ("step", "world_size", "origin"):
            if getattr(manifest.report, key) != getattr(first.report, key):
                raise DumpError(
                    f"{path} and {paths[0]} are not parts of one dump: their {key} differs; give parts of one"
                )
        if manifest.run.id != first.run.id:
            raise DumpError(f"{path} and {paths[0]} are from different runs; give parts of one dump")


def verify_file(root: Path, entry: FileEntry, tell: OnBytes) -> None:
    """Check that a listed file exists and has the listed length and content.

    Args:
        root: the dump.
        entry: as listed.
        tell: called with the number of bytes read.

    Raises:
        DumpError: names the file.
    """
    path = root / entry.path
    # A forged manifest must not make the reader open other files.
    if root.resolve() not in path.resolve().parents:
        raise DumpError(f"{root / MANIFEST} lists {entry.path!r}, which is outside the dump; do not use it")
    if not path.is_file():
        raise DumpError(f"{path} is missing: the dump is incomplete; copy it again from where it was written")
    with well_formed(path):
        if list_file(root, entry.path, tell) != entry:
            raise DumpError(
                f"{path} was changed after it was written (checksum); copy it again from where it was written"
            )
