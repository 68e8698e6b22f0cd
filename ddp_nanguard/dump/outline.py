"""`DumpOutline`: what a dump says in JSON. It needs no torch, so that ``list`` and ``show`` answer at once."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from ddp_nanguard.errors import DumpError
from ddp_nanguard.report.wording import ranges_text

from . import directories as place
from .json_files import AGAIN, MAX_CONTENT_BYTES
from .locate import Paths, as_paths, directory_of
from .names import EVIDENCE, FILES_JSON, rank_name, ranks_in
from .rank_records import RankEvidence, RankFileList
from .records import Manifest, read_record, read_versioned
from .verify import checked_manifest, require_one_dump


class DumpOutline:
    """A whole dump without its tensors: manifest, report, and what each rank has written.

    Attributes:
        paths: its directories.
        manifest: of the first directory.
        report: of the fault.
        ranks: ranks whose files are present, sorted.
    """

    def __init__(self, paths: list[Path], manifests: list[Manifest]) -> None:
        self.paths = paths
        self.manifest = manifests[0]
        self.report = self.manifest.report
        self._manifests = manifests
        # In reverse, so that the first directory given wins.
        self._rank_paths = {rank: path / rank_name(rank) for path in reversed(paths) for rank in ranks_in(path)}
        self.ranks = sorted(self._rank_paths)
        self._lists = {rank: self._list_of(rank) for rank in self.ranks}

    @classmethod
    def open(cls, path: Paths) -> Self:
        """Open a whole dump without reading the content of its files.

        Args:
            path: the dump's directory, or several where nodes hold parts of it; or a dump_dir that holds one dump.

        Raises:
            DumpError: it is not a dump, partial, of another version, or a file list is missing or damaged.
        """
        paths = [directory_of(part) for part in as_paths(path)]
        if not paths:
            raise DumpError("no dump given; see: ddp-nanguard list DIR")
        manifests = [checked_manifest(part) for part in paths]
        require_one_dump(paths, manifests)
        return cls(paths, manifests)

    @property
    def path(self) -> Path:
        """The first of the dump's directories."""
        return self.paths[0]

    @property
    def world_size(self) -> int:
        """The number of ranks that stepped together, present or not."""
        return self.report.world_size

    @property
    def size_bytes(self) -> int:
        """Total size in bytes of all files in all directories."""
        return sum(place.size_of(path) for path in self.paths)

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks of the world whose files are not present."""
        return [rank for rank in range(self.world_size) if rank not in self._rank_paths]

    def _list_of(self, rank: int) -> RankFileList:
        directory = self._rank_paths[rank]
        if rank >= self.world_size:
            raise DumpError(f"{directory} is of a rank beyond world_size={self.world_size}; {AGAIN}")
        return read_versioned(directory, FILES_JSON, RankFileList, MAX_CONTENT_BYTES)

    def _rank(self, rank: int) -> Path:
        if rank in self._rank_paths:
            return self._rank_paths[rank]
        have = f"of world_size={self.world_size} it has rank {ranges_text(self.ranks) or 'none'}"
        if rank in range(self.world_size):
            raise DumpError(
                f"{self.path} holds nothing of rank {rank}; {have}; give the directories of the other nodes too"
            )
        raise DumpError(f"{self.path} has no rank {rank}; {have}")

    def _rank_file(self, rank: int, name: str) -> Path:
        path = self._rank(rank) / name
        if not path.exists():
            problems = "; ".join(self._lists[rank].problems) or "its writer gave no reason"
            raise DumpError(f"{path} was not written ({problems}); rank {rank} cannot be replayed from this dump")
        return path

    def evidence(self, rank: int) -> RankEvidence:
        """The record of what a rank observed: sites, host, device, dtypes, settings.

        Raises:
            DumpError: it is missing or damaged, as for every file of a rank.
        """
        self._rank_file(rank, EVIDENCE)
        return read_record(self._rank(rank), EVIDENCE, RankEvidence)
