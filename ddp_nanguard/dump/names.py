"""Names in a dump: of its directory, of its files, and of a file in a list. Nothing here reads a file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ddp_nanguard.report.types import Natural, Rule

PARTIAL = ".partial"
LOCK_FILE = ".lock"
LATEST = "latest"
"""A link in a dump_dir to the dump that was finished last."""
MANIFEST = "manifest.json"
REPORT = "report.txt"
STATE_JSON = "state.json"
STATE_DIR = "state"
FILES_JSON = "files.json"
WRITER_JSON = "writer.json"
EVIDENCE = "evidence.json"
WINDOW = "window"
OWN = "own.safetensors"
HISTORY = "history.npz"

_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?(\.partial)?", re.ASCII)
_RANK_NAME = re.compile(r"rank-(\d{5,})", re.ASCII)


@dataclass(frozen=True, order=True)
class DumpName:
    """The name of a dump directory: ``step-00004812``, ``step-00004812.2``, ``step-00004812.partial``.

    Attributes:
        step: of the fault.
        number: 1 for the first dump of this step in a dump_dir, which is not written into the name.
        partial: whether the dump is still being written.
    """

    step: int
    number: int = 1
    partial: bool = False

    @classmethod
    def parse(cls, name: str) -> DumpName | None:
        """The name that a directory's name spells; None if it is not that of a dump."""
        match = _NAME.fullmatch(name)
        return cls(int(match[1]), int(match[2] or 1), bool(match[3])) if match else None

    def __str__(self) -> str:
        number = f".{self.number}" if self.number > 1 else ""
        return f"step-{self.step:08d}{number}{PARTIAL if self.partial else ''}"


def rank_name(rank: int) -> str:
    """Name of the directory of one rank's files within a dump: ``rank-00003``."""
    return f"rank-{rank:05d}"


def rank_of(name: str) -> int | None:
    """The rank that a directory's name spells, the inverse of `rank_name`; None for any other name."""
    # Only the spelling of `rank_name`: ``rank-000003`` is not a second directory of rank 3.
    match = _RANK_NAME.fullmatch(name)
    return int(match[1]) if match is not None and rank_name(int(match[1])) == name else None


def ranks_in(dump: Path) -> list[int]:
    """The ranks that have a directory in ``dump``, sorted."""
    ranks = (rank_of(path.name) for path in dump.glob("rank-*") if path.is_dir())
    return sorted(rank for rank in ranks if rank is not None)


FilePath = Annotated[str, Rule(lambda path: 0 < len(path) <= 4096 and path.isprintable(), "a printable path")]
Digest = Annotated[str, Rule(lambda text: re.fullmatch(r"[0-9a-f]{32}", text) is not None, "16 bytes in hexadecimal")]


@dataclass(frozen=True)
class FileEntry:
    """A file as a dump lists it.

    Attributes:
        path: relative to the dump, with forward slashes.
        size_bytes: its length.
        blake2b: digest of its bytes, 16 bytes in hexadecimal.
    """

    path: FilePath
    size_bytes: Natural
    blake2b: Digest

    def to_dict(self) -> dict[str, Any]:
        """Path, size and digest as JSON-ready data."""
        return {"path": self.path, "size_bytes": self.size_bytes, "blake2b": self.blake2b}
