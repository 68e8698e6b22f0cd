"""`StoredTensors`: assembles weights and optimizer state of a dump from the files that hold their parts."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from ddp_nanguard.errors import DumpError
from ddp_nanguard.report.wording import ranges_text

from .format import OFFSETS_KEY, dtype_of, open_tensors, restored
from .json_files import AGAIN, parse_json, well_formed
from .names import OWN, STATE_DIR
from .progress import OnBytes
from .rank_records import RankFileList, StoredTensor
from .records import Manifest

OPEN_FILES = 16
"""Number of safetensors files that are kept open, since opening one parses its whole header."""


class StoredTensors:
    """The tensors of a dump, by name. A file is opened when the first of its tensors is loaded.

    Args:
        paths: directories of the dump.
        rank_paths: directories of the ranks that are present.
        lists: file lists of these ranks.
        manifest: of the dump.
    """

    def __init__(
        self, paths: list[Path], rank_paths: dict[int, Path], lists: dict[int, RankFileList], manifest: Manifest
    ) -> None:
        self._paths = paths
        self._rank_paths = rank_paths
        self._lists = lists
        self._manifest = manifest
        self._chunks: dict[str, list[_Chunk]] | None = None
        self._own: dict[int, dict[str, list[_Chunk]]] = {}
        self._described: dict[int, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {}
        self._open = functools.lru_cache(maxsize=OPEN_FILES)(open_tensors)

    @property
    def _missing(self) -> str:
        """The absent ranks in words, such as "0-3, 6"; "" where none is missing."""
        absent = [rank for rank in range(self._manifest.report.world_size) if rank not in self._rank_paths]
        return ranges_text(absent) if absent else ""

    def names(self) -> list[str]:
        """Names of all stored tensors, sorted, without aliases."""
        return sorted({name for listing in self._lists.values() for name in listing.tensors})

    def described(self, rank: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """True shape and dtype of every stored tensor, by name; those of ``rank`` where ranks differ."""
        if rank not in self._described:
            listings = [*self._lists.values(), self._lists[rank]]
            entries = {name: entry for listing in listings for name, entry in listing.tensors.items()}
            self._described[rank] = {n: (each.true_shape, dtype_of(each.dtype)) for n, each in entries.items()}
        return self._described[rank]

    def load(self, name: str, rank: int | None, tell: OnBytes) -> torch.Tensor:
        """One whole tensor in its true shape, on the CPU.

        Args:
            name: as stored.
            rank: a rank whose own copies replace the common ones; None for none.
            tell: called with the number of bytes read.

        Raises:
            DumpError: the name is unknown, shards of it are missing, or a part does not fit.
        """
        entry = self._entry(name, rank)
        own = self._own_chunks(rank).get(name, []) if rank is not None else []
        dtype = dtype_of(entry.dtype)
        stored_shape = (*entry.stored_shape, 2) if dtype.is_complex else entry.stored_shape
        base = [] if _covers(own, stored_shape) else self._base_chunks(name, stored_shape)
        tensor = self._put_together([*base, *own], stored_shape, tell)
        with well_formed(self._paths[0]):
            return restored(tensor, dtype).reshape(entry.true_shape)

    def _put_together(self, chunks: list[_Chunk], shape: tuple[int, ...], tell: OnBytes) -> torch.Tensor:
        # Allocated with the first part, whose stored dtype may be the integer that stands for another dtype.
        tensor: torch.Tensor | None = None
        for chunk in chunks:
            if not chunk.is_within(shape):
                raise DumpError(f"{chunk.file}: {chunk.key!r} lies outside its tensor of shape {shape}; {AGAIN}")
            with well_formed(chunk.file):
                part = self._open(chunk.file).get_tensor(chunk.key)
                if tensor is None:
                    tensor = torch.empty(shape, dtype=part.dtype, device=part.device)
                tensor[chunk.region] = part
            tell(part.nbytes)
        assert tensor is not None
        return tensor

    def _entry(self, name: str, rank: int | None) -> StoredTensor:
        for candidate in self._lists if rank is None else [rank, *self._lists]:
            entry = self._lists[candidate].tensors.get(name)
            if entry is not None:
                return entry
        missing = f"; ranks {self._missing} are missing" if self._missing else ""
        raise DumpError(
            f"{self._paths[0]} holds no tensor {name!r}{missing}; the recipe must build the model of the run"
        )

    def _base_chunks(self, name: str, shape: tuple[int, ...]) -> list[_Chunk]:
        """Chunks that all ranks wrote together, else those that each rank kept for itself, the lowest rank's first."""
        if self._chunks is None:
            self._chunks = self._all_chunks()
        chunks = self._chunks.get(name, [])
        if not _covers(chunks, shape):
            raise DumpError(f"{self._paths[0]} lacks parts of {name!r}: {self._why_incomplete()}")
        return chunks

    def _why_incomplete(self) -> str:
        missing = f"ranks {self._missing} are not here" if self._missing else ""
        problem = self._manifest.weights.problem or ""
        remedy = "give the directories of the other nodes too" if missing else "it cannot be replayed from this dump"
        return "; ".join(part for part in (missing, problem, remedy) if part)

    def _all_chunks(self) -> dict[str, list[_Chunk]]:
        files = [file for path in self._paths for file in sorted((path / STATE_DIR).glob("*.safetensors"))]
        chunks = [chunk for file in files for chunk in _chunks_in(file)]
        if self._manifest.alone or not self._manifest.weights.complete:
            own = (self._own_chunks(rank) for rank in self._lists)
            chunks += [chunk for by_name in own for named in by_name.values() for chunk in named]
        # Ranks without peers each write the replicated tensors; the first copy of a chunk is taken.
        by_name: dict[str, dict[tuple[int, ...], _Chunk]] = {}
        for chunk in chunks:
            by_name.setdefault(chunk.name, {}).setdefault(chunk.offsets, chunk)
        return {name: list(places.values()) for name, places in by_name.items()}

    def _own_chunks(self, rank: int) -> dict[str, list[_Chunk]]:
        if rank not in self._own:
            path = self._rank_paths[rank] / OWN
            by_name: dict[str, list[_Chunk]] = {}
            for chunk in _chunks_in(path) if path.exists() else []:
                by_name.setdefault(chunk.name, []).append(chunk)
            self._own[rank] = by_name
        return self._own[rank]


@dataclass(frozen=True)
class _Chunk:
    """A part of a stored tensor in a file.

    Attributes:
        name: of the stored tensor.
        file: the safetensors file.
        key: of the part in that file.
        shape: of the part.
        offsets: its position in the stored tensor.
    """

    name: str
    file: Path
    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def region(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.shape, strict=True))

    def is_within(self, shape: tuple[int, ...]) -> bool:
        """Whether the part fits into a tensor of this shape."""
        places = zip(self.offsets, self.shape, shape, strict=False)
        alike = len(self.offsets) == len(self.shape) == len(shape)
        return alike and all(type(first) is int and 0 <= first <= whole - size for first, size, whole in places)


def _chunks_in(path: Path) -> list[_Chunk]:
    with well_formed(path), open_tensors(path) as file:
        places = parse_json((file.metadata() or {}).get(OFFSETS_KEY, "{}"))
        return [
            _Chunk(
                name=_name_of(key),
                file=path,
                key=key,
                shape=tuple(file.get_slice(key).get_shape()),
                offsets=tuple(places[key]["saved_offsets"]),
            )
            for key in file.keys()  # noqa: SIM118  # no dict
        ]


def _name_of(key: str) -> str:
    """The tensor's name in a key of ``own.safetensors``, which numbers further chunks: ``model.w#1``."""
    name, mark, number = key.rpartition("#")
    return name if mark and number.isdigit() else key


def _covers(chunks: list[_Chunk], shape: tuple[int, ...]) -> bool:
    return bool(chunks) and sum(math.prod(chunk.shape) for chunk in chunks) >= math.prod(shape)
