"""Reading dumps: what is there, is it whole, and its contents. Nothing of a dump is executed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ddp_nanguard.capture.rng import RandomState
from ddp_nanguard.capture.window import MicroBatch
from ddp_nanguard.errors import DumpError
from ddp_nanguard.report.messages import log_line
from ddp_nanguard.report.types import SCHEMA_VERSION, FaultReport

from . import directories as place
from .batch_codec import Types, unpack
from .format import (
    EVIDENCE,
    FILES_JSON,
    HISTORY,
    MANIFEST,
    OFFSETS_KEY,
    OWN,
    STATE_DIR,
    STATE_JSON,
    WINDOW,
    DumpName,
    dtype_of,
    list_file,
    open_tensors,
    rank_name,
    ranks_in,
    read_arrays,
    read_json,
    read_tensors,
    restored,
    well_formed,
)
from .manifest import read_plain_state
from .progress import OnBytes, Progress, ignore_bytes
from .thread_map import thread_map

OPEN_FILES = 16
"""Files of tensors that a dump keeps open, since opening one parses its whole header."""

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


@dataclass(frozen=True)
class DumpSummary:
    """One dump in a listing.

    Attributes:
        path: of its directory; the first one where nodes hold parts of it.
        step: of the fault.
        created: ISO date, or of the last change where there is no manifest.
        origin: one line; empty where there is no manifest.
        world_size: 0 where it is unknown.
        ranks: that are present, over all roots.
        size_bytes: of all its files.
        whole: finished, with nothing missing.
        remark: why it is not whole, or what is wrong with it; empty otherwise.
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
    """The dumps below one or several dump_dirs, by step; parts of one dump on several nodes are one entry.

    Raises:
        DumpError: a root does not exist.
    """
    parts: dict[tuple[str, str], list[Path]] = {}
    for root in _as_paths(roots):
        if not root.is_dir():
            raise DumpError(f"{root} does not exist: nothing went bad there yet, or the run had another dump_dir")
        for name, path in place.dumps_in(root):
            parts.setdefault((str(name), _identity(path)), []).append(path)
    summaries = [_summary(paths) for paths in parts.values()]
    return sorted(summaries, key=lambda summary: (summary.step, summary.created, summary.path))


def open_dump(path: Paths, *, verify: bool = True) -> Dump:
    """Opens a whole dump and checks it: schema, manifest, the files of every rank that is present, checksums.

    Args:
        path: of the dump's directory, or several where nodes hold parts of it. A dump_dir that holds one dump will do.
        verify: whether the content of every file is checked, which reads them all.

    Raises:
        DumpError: it is no dump, partial, from a newer version, or a file is missing or damaged.
    """
    paths = [_directory_of(part) for part in _as_paths(path)]
    if not paths:
        raise DumpError("no dump given; see: ddp-nanguard list DIR")
    manifests = [_checked_manifest(part) for part in paths]
    _same_dump(paths, manifests)
    with well_formed(paths[0] / MANIFEST):
        dump = Dump(paths, manifests[0])
    if verify:
        dump.verify()
    return dump


class Dump:
    """A whole dump, open for reading. See `open_dump`.

    Attributes:
        paths: its directories.
        manifest: ``manifest.json``, of the first directory.
        report: of the fault.
        ranks: that are present.
    """

    def __init__(self, paths: list[Path], manifest: dict[str, Any]) -> None:
        self.paths = paths
        self.manifest = manifest
        self.report = FaultReport.from_dict(manifest)
        self._rank_paths = {rank: path / rank_name(rank) for path in reversed(paths) for rank in ranks_in(path)}
        self.ranks = sorted(self._rank_paths)
        self._listings = {rank: self._listing(rank) for rank in self.ranks}
        self._chunks: dict[str, list[_Chunk]] | None = None
        self._own: dict[int, dict[str, list[_Chunk]]] = {}
        self._described: dict[int, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {}
        self._tell: OnBytes = ignore_bytes
        self._open = functools.lru_cache(maxsize=OPEN_FILES)(open_tensors)

    @property
    def path(self) -> Path:
        """The first directory."""
        return self.paths[0]

    @property
    def world_size(self) -> int:
        """Ranks that stepped together."""
        return self.report.world_size

    @property
    def size_bytes(self) -> int:
        """Of all files in all directories."""
        return sum(place.size_of(path) for path in self.paths)

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks of which nothing is here."""
        return [rank for rank in range(self.world_size) if rank not in self._rank_paths]

    def verify(self) -> None:
        """Checks that every listed file is there, of the listed length and content.

        Raises:
            DumpError: names the file.
        """
        files = list(self._listed_files())
        with Progress(f"checking {self.path.name}", self.size_bytes) as progress:
            thread_map(lambda file: _verify_file(*file, progress.tell), files)

    def _listed_files(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        for path in self.paths:
            listed = {entry["path"]: entry for entry in read_json(path, MANIFEST)["files"]}
            for rank in ranks_in(path):
                listed |= {entry["path"]: entry for entry in self._listings[rank]["files"] if self._is_at(path, rank)}
            with well_formed(path / MANIFEST):
                for entry in listed.values():
                    if self._is_of_absent_rank(entry["path"]):
                        continue  # that rank's part was not copied here; who asks for it is told
                    yield path, entry

    def _is_of_absent_rank(self, path: str) -> bool:
        return any(path.startswith(f"{rank_name(rank)}/") for rank in self.missing_ranks)

    def _is_at(self, path: Path, rank: int) -> bool:
        return self._rank_paths[rank].parent == path

    def _listing(self, rank: int) -> dict[str, Any]:
        listing: dict[str, Any] = read_json(self._rank_paths[rank], FILES_JSON)
        _check_schema(self._rank_paths[rank] / FILES_JSON, listing)
        _require(self._rank_paths[rank] / FILES_JSON, listing, {"files": list, "tensors": dict, "problems": list})
        return listing

    # one rank

    def _rank(self, rank: int) -> Path:
        if rank in self._rank_paths:
            return self._rank_paths[rank]
        have = f"it has {_ranges(self.ranks)} of {self.world_size} ranks"
        if rank in range(self.world_size):
            raise DumpError(
                f"{self.path} holds nothing of rank {rank}; {have}; give the directories of the other nodes too"
            )
        raise DumpError(f"{self.path} has no rank {rank}; {have}")

    def _rank_file(self, rank: int, name: str) -> Path:
        path = self._rank(rank) / name
        if not path.exists():
            problems = "; ".join(self._listings[rank]["problems"]) or "its writer gave no reason"
            raise DumpError(f"{path} was not written ({problems}); rank {rank} cannot be replayed from this dump")
        return path

    def evidence(self, rank: int) -> dict[str, Any]:
        """What a rank saw: sites, host, device, dtypes, settings."""
        self._rank_file(rank, EVIDENCE)
        evidence: dict[str, Any] = read_json(self._rank(rank), EVIDENCE)
        return evidence

    def history(self, rank: int) -> dict[str, np.ndarray[Any, Any]]:
        """Minima and maxima per slot of a rank's last steps."""
        self._rank_file(rank, HISTORY)
        return read_arrays(self._rank(rank), HISTORY)

    def window(self, rank: int, types: Types | None = None, device: torch.device | None = None) -> list[MicroBatch]:
        """A rank's micro-batches.

        Args:
            rank: whose.
            types: builders of batch classes, see `unpack`.
            device: where tensors go that were on an accelerator; None: the CPU.
        """
        items: list[dict[str, Any]] = self._window(rank, "micro_batches", types, device)
        with well_formed(self._rank(rank) / f"{WINDOW}.json"):
            return [MicroBatch(**{**item, "random_state": RandomState(**item["random_state"])}) for item in items]

    def buffers(self, rank: int) -> dict[str, torch.Tensor]:
        """A rank's buffers from before the step, on the CPU."""
        buffers: dict[str, torch.Tensor] = self._window(rank, "buffers")
        return buffers

    def special(self, rank: int) -> dict[str, torch.Tensor]:
        """A rank's tensors that are not dense, on the CPU."""
        special: dict[str, torch.Tensor] = self._window(rank, "special")
        return special

    def _window(self, rank: int, key: str, types: Types | None = None, device: torch.device | None = None) -> Any:
        tensors = self._rank_file(rank, f"{WINDOW}.safetensors")
        self._rank_file(rank, f"{WINDOW}.json")
        with well_formed(self._rank(rank) / f"{WINDOW}.json"):
            structure = read_json(self._rank(rank), f"{WINDOW}.json")[key]
            return unpack(structure, read_tensors(tensors, _keys_in(structure)), types, device)

    def plain_state(self) -> dict[str, Any]:
        """Everything of the optimizer, scheduler and scaler that is no tensor."""
        with well_formed(self.path / STATE_JSON):
            state: dict[str, Any] = read_plain_state(read_json(self.path, STATE_JSON))
            return state

    # weights and optimizer

    def described(self, rank: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """True shape and dtype of every stored tensor, as a rank has it where ranks differ."""
        if rank not in self._described:
            listings = [*self._listings.values(), self._listings[rank]]
            entries = {name: entry for listing in listings for name, entry in listing["tensors"].items()}
            self._described[rank] = {n: (tuple(e["true_shape"]), dtype_of(e["dtype"])) for n, e in entries.items()}
        return self._described[rank]

    @contextlib.contextmanager
    def telling(self, rank: int, speaks: bool = True) -> Iterator[None]:
        """A person who waits for `load_state` is told how far it is."""
        total = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.described(rank).values())
        with Progress(f"loading {self.path.name}", total, speaks) as progress:
            self._tell = progress.tell
            try:
                yield
            finally:
                self._tell = ignore_bytes

    def names(self) -> list[str]:
        """Names of all stored tensors, without aliases."""
        return sorted({name for listing in self._listings.values() for name in listing["tensors"]})

    def load_state(self, names: Iterable[str] | None = None, rank: int | None = None) -> dict[str, torch.Tensor]:
        """Whole tensors, put together from all shards.

        Args:
            names: which, aliases included; None: all, aliases included.
            rank: whose own copies (damaged, or different from its peers') are laid over; None: none.

        Returns:
            CPU tensors in their true shapes; names that are aliases of each other give one object.

        Raises:
            DumpError: a name is unknown, or shards of it are missing.
        """
        aliases: dict[str, str] = self.manifest["aliases"]
        wanted = list(names) if names is not None else self._all_names(aliases)
        loaded: dict[str, torch.Tensor] = {}
        for name in wanted:
            kept = aliases.get(name, name)
            if kept not in loaded:
                loaded[kept] = self._load(kept, rank)
        return {name: loaded[aliases.get(name, name)] for name in wanted}

    def _all_names(self, aliases: Mapping[str, str]) -> list[str]:
        stored = self.names()
        known = set(stored)
        return stored + [alias for alias, kept in aliases.items() if kept in known]  # others are buffers

    def load_into(self, state: Mapping[str, torch.Tensor], rank: int | None = None) -> None:
        """Copies stored values into tensors, DTensors included, reading one tensor at a time.

        Args:
            state: tensors of the true (global) shapes by name, aliases included, on any device.
            rank: as in `load_state`.
        """
        aliases: dict[str, str] = self.manifest["aliases"]
        for name, target in state.items():
            whole = self._load(aliases.get(name, name), rank)
            if whole.shape != target.shape:
                raise DumpError(
                    f"{self.path}: {name} has shape {tuple(whole.shape)}, the model's has {tuple(target.shape)}; "
                    "the recipe must build the model of the run"
                )
            with torch.no_grad():
                _copy_into(target, whole)

    def _load(self, name: str, rank: int | None) -> torch.Tensor:
        entry = self._entry(name, rank)
        own = self._own_chunks(rank).get(name, []) if rank is not None else []
        dtype = dtype_of(entry["dtype"])
        stored_shape = (*entry["stored_shape"], 2) if dtype.is_complex else tuple(entry["stored_shape"])
        base = [] if _covers(own, stored_shape) else self._base_chunks(name, stored_shape)
        tensor: torch.Tensor | None = None
        for chunk in [*base, *own]:
            part = self._open(chunk.file).get_tensor(chunk.key)
            if tensor is None:
                tensor = torch.empty(stored_shape, dtype=part.dtype)
            tensor[chunk.region] = part
            self._tell(part.nbytes)
        assert tensor is not None
        return restored(tensor, dtype).reshape(entry["true_shape"])

    def _entry(self, name: str, rank: int | None) -> dict[str, Any]:
        ranks = self.ranks if rank is None else [rank, *self.ranks]
        if rank is not None:
            self._rank(rank)
        for candidate in ranks:
            entry: dict[str, Any] | None = self._listings[candidate]["tensors"].get(name)
            if entry is not None:
                return entry
        missing = f"; ranks {_ranges(self.missing_ranks)} are missing" if self.missing_ranks else ""
        raise DumpError(f"{self.path} holds no tensor {name!r}{missing}; the recipe must build the model of the run")

    def _base_chunks(self, name: str, shape: tuple[int, ...]) -> list[_Chunk]:
        """What all ranks wrote together; else what each kept for itself, the lowest rank's first."""
        if self._chunks is None:
            self._chunks = self._all_chunks()
        chunks = self._chunks.get(name, [])
        if not _covers(chunks, shape):
            raise DumpError(f"{self.path} lacks parts of {name!r}: {self._why_incomplete()}")
        return chunks

    def _why_incomplete(self) -> str:
        missing = f"ranks {_ranges(self.missing_ranks)} are not here" if self.missing_ranks else ""
        problem = self.manifest["weights"]["problem"] or ""
        remedy = (
            "give the directories of the other nodes too"
            if self.missing_ranks
            else "it cannot be replayed from this dump"
        )
        return "; ".join(part for part in (missing, problem, remedy) if part)

    def _all_chunks(self) -> dict[str, list[_Chunk]]:
        files = [file for path in self.paths for file in sorted((path / STATE_DIR).glob("*.safetensors"))]
        chunks = [chunk for file in files for chunk in _chunks_in(file)]
        if self.manifest["alone"] or not self.manifest["weights"]["complete"]:
            own = (self._own_chunks(rank) for rank in self.ranks)
            chunks += [chunk for by_name in own for named in by_name.values() for chunk in named]
        by_name: dict[str, dict[tuple[int, ...], _Chunk]] = {}
        for chunk in chunks:
            by_name.setdefault(chunk.name, {}).setdefault(chunk.offsets, chunk)
        return {name: list(places.values()) for name, places in by_name.items()}

    def _own_chunks(self, rank: int) -> dict[str, list[_Chunk]]:
        if rank not in self._own:
            path = self._rank(rank) / OWN
            by_name: dict[str, list[_Chunk]] = {}
            for chunk in _chunks_in(path) if path.exists() else []:
                by_name.setdefault(chunk.name, []).append(chunk)
            self._own[rank] = by_name
        return self._own[rank]


@dataclass(frozen=True)
class _Chunk:
    """A part of a stored tensor in a file."""

    name: str
    file: Path
    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def region(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.shape, strict=True))


def _chunks_in(path: Path) -> list[_Chunk]:
    with well_formed(path), open_tensors(path) as file:
        places = json.loads((file.metadata() or {}).get(OFFSETS_KEY, "{}"))
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
    """``own.safetensors`` numbers further chunks of a tensor: ``model.w#1``."""
    name, mark, number = key.rpartition("#")
    return name if mark and number.isdigit() else key


def _covers(chunks: list[_Chunk], shape: tuple[int, ...]) -> bool:
    return bool(chunks) and sum(math.prod(chunk.shape) for chunk in chunks) >= math.prod(shape)


def _copy_into(target: torch.Tensor, whole: torch.Tensor) -> None:
    if isinstance(target, DTensor):
        shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
        region = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        target.to_local().copy_(whole[region])
    else:
        target.copy_(whole)


def _keys_in(structure: Any) -> set[str]:
    """Tensors that a packed structure needs, so that a large window is not read for a few buffers."""
    if isinstance(structure, list):
        return {key for item in structure for key in _keys_in(item)}
    if isinstance(structure, dict):
        mine = {structure["key"]} if "$" in structure and isinstance(structure.get("key"), str) else set()
        parts = {key for item in structure.values() for key in _keys_in(item)}
        nested = {structure["key"]} if "layout" in structure and isinstance(structure.get("key"), str) else set()
        return mine | parts | nested
    return set()


# checks


def _as_paths(paths: Paths) -> list[Path]:
    return [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(path) for path in paths]


def _what_is_in(root: Path) -> str:
    names = [str(name) for name, dump in place.dumps_in(root) if place.is_whole(dump)] if root.is_dir() else []
    if not names:
        return "see what a run has left: ddp-nanguard list DIR"
    return f"{root} holds {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"


def _directory_of(path: Path) -> Path:
    if not path.is_dir():
        raise DumpError(f"{path} is no directory; {_what_is_in(path.parent)}")
    if DumpName.parse(path.resolve().name) is not None or (path / MANIFEST).exists():
        return path
    whole = [dump for _, dump in place.dumps_in(path) if place.is_whole(dump)]
    if len(whole) == 1:
        return whole[0]
    have = f"holds {len(whole)} dumps" if whole else "holds no whole dump"
    raise DumpError(f"{path} is no dump but {have}; give one of them, see: ddp-nanguard list {path}")


def _checked_manifest(path: Path) -> dict[str, Any]:
    if not place.is_whole(path):
        evidence = next(iter(sorted(path.glob(f"rank-*/{EVIDENCE}"))), None)
        remedy = f"read {evidence} by eye, or use another dump" if evidence else "use another dump"
        raise DumpError(
            f"{path} is partial: its writers ended before it was whole; {remedy}, see: ddp-nanguard list {path.parent}"
        )
    manifest: dict[str, Any] = read_json(path, MANIFEST)
    _check_schema(path / MANIFEST, manifest)
    _require(path / MANIFEST, manifest, {"files": list, "aliases": dict, "run": dict, "weights": dict, "alone": bool})
    return manifest


def _require(path: Path, data: dict[str, Any], kinds: dict[str, type]) -> None:
    for key, kind in kinds.items():
        if not isinstance(data.get(key), kind):
            raise DumpError(f"{path} is damaged (no {key}); copy the dump again from where it was written")


def _check_schema(path: Path, data: Any) -> None:
    version = data.get("schema_version") if isinstance(data, dict) else None
    if not isinstance(version, int):
        raise DumpError(f"{path} has no schema_version; this is no dump of ddp-nanguard")
    if version > SCHEMA_VERSION:
        raise DumpError(
            f"{path} has schema version {version}, this ddp-nanguard reads up to {SCHEMA_VERSION}; upgrade ddp-nanguard"
        )


def _same_dump(paths: list[Path], manifests: list[dict[str, Any]]) -> None:
    first = manifests[0]
    for path, manifest in zip(paths[1:], manifests[1:], strict=True):
        for key in ("step", "world_size", "origin"):
            if manifest[key] != first[key]:
                raise DumpError(
                    f"{path} and {paths[0]} are not parts of one dump: their {key} differs; give parts of one"
                )
        if manifest["run"].get("id") != first["run"].get("id"):
            raise DumpError(f"{path} and {paths[0]} are from different runs; give parts of one dump")


def _verify_file(root: Path, entry: dict[str, Any], tell: OnBytes) -> None:
    with well_formed(root / MANIFEST):
        _verify_listed(root, entry, tell)


def _verify_listed(root: Path, entry: dict[str, Any], tell: OnBytes) -> None:
    path = root / entry["path"]
    if root.resolve() not in path.resolve().parents:
        raise DumpError(f"{root / MANIFEST} lists {entry['path']!r}, which is outside the dump; do not use it")
    if not path.is_file():
        raise DumpError(f"{path} is missing: the dump is incomplete; copy it again from where it was written")
    if list_file(root, entry["path"], tell).to_dict() != entry:
        raise DumpError(f"{path} was changed after it was written (checksum); copy it again from where it was written")


def _ranges(ranks: list[int]) -> str:
    """``0-3, 6``."""
    groups: list[list[int]] = []
    for rank in ranks:
        if groups and rank == groups[-1][1] + 1:
            groups[-1][1] = rank
        else:
            groups.append([rank, rank])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in groups) or "none"


# listing


def _identity(path: Path) -> str:
    """Equal for the parts of one dump on several nodes."""
    try:
        manifest = read_json(path, MANIFEST)
        return json.dumps([manifest["run"].get("id"), manifest["origin"], manifest["world_size"]])
    except (DumpError, KeyError, AttributeError, TypeError):
        return str(path)


def _summary(paths: list[Path]) -> DumpSummary:
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
    return _with_manifest(base, paths) if place.is_whole(paths[0]) else base


def _with_manifest(base: DumpSummary, paths: list[Path]) -> DumpSummary:
    try:
        manifest = read_json(paths[0], MANIFEST)
        _check_schema(paths[0] / MANIFEST, manifest)
        report = FaultReport.from_dict(manifest)
    except (DumpError, KeyError, TypeError, ValueError):
        return dataclasses.replace(base, remark="unreadable, see show")
    return dataclasses.replace(
        base,
        created=manifest["created"],
        origin=log_line(report),
        world_size=report.world_size,
        whole=len(base.ranks) == report.world_size and (manifest["weights"]["complete"] or manifest["alone"]),
        remark=_warn_once(manifest, len(base.ranks)),
    )


def _warn_once(manifest: dict[str, Any], num_ranks: int) -> str:
    if num_ranks < manifest["world_size"]:
        return f"{num_ranks} of {manifest['world_size']} ranks"
    complete = manifest["weights"]["complete"] or manifest["alone"]
    return "" if complete else f"no weights: {manifest['weights']['problem']}"
