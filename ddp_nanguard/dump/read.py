"""`open_dump`: opens a whole dump, checks it and reads its contents. Nothing in a dump is executed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ddp_nanguard.capture.window import MicroBatch
from ddp_nanguard.errors import DumpError

from .batch_codec import Types, unpack
from .format import read_arrays, read_tensors
from .history import FAULT, require_fault, require_history, slots_in
from .json_files import MAX_CONTENT_BYTES, well_formed
from .locate import Paths
from .manifest import read_plain_state
from .names import HISTORY, WINDOW, FileEntry, rank_of
from .outline import DumpOutline
from .progress import OnBytes, Progress, ignore_bytes
from .rank_records import WindowContent
from .records import Manifest, read_record, record_of
from .stored_tensors import StoredTensors
from .thread_map import thread_map
from .verify import verify_file


def open_dump(path: Paths, *, verify: bool = True) -> Dump:
    """Open a whole dump and check it: schema, manifest, the files of every rank that is present, checksums.

    Args:
        path: the dump's directory, or several where nodes hold parts of it. A dump_dir that holds one dump will do.
        verify: whether the content of every file is checked, which reads them all.

    Raises:
        DumpError: it is not a dump, partial, of another version, or a file is missing or damaged.
    """
    dump = Dump.open(path)
    if verify:
        dump.verify()
    return dump


class Dump(DumpOutline):
    """A whole dump, open for reading, tensors included. See `open_dump`."""

    def __init__(self, paths: list[Path], manifests: list[Manifest]) -> None:
        super().__init__(paths, manifests)
        self._tensors = StoredTensors(paths, self._rank_paths, self._lists, self.manifest)
        self._tell: OnBytes = ignore_bytes

    def verify(self) -> None:
        """Check that every listed file exists and has the listed length and content. Reads all files.

        Raises:
            DumpError: names the file.
        """
        files = list(self._listed_files())
        with Progress(f"checking {self.path.name}", self.size_bytes) as progress:
            thread_map(lambda file: verify_file(*file, progress.tell), files)

    def _listed_files(self) -> Iterator[tuple[Path, FileEntry]]:
        for path, manifest in zip(self.paths, self._manifests, strict=True):
            listed = {entry.path: entry for entry in manifest.files}
            for rank in self.ranks:
                if self._rank_paths[rank].parent == path:
                    listed |= {entry.path: entry for entry in self._lists[rank].files}
            # not those of a rank whose part was not copied here: asking for that rank raises
            yield from ((path, entry) for entry in listed.values() if not self._is_of_absent_rank(entry.path))

    def _is_of_absent_rank(self, path: str) -> bool:
        rank = rank_of(path.partition("/")[0])
        return rank is not None and rank not in self._rank_paths

    # one rank

    def history(self, rank: int) -> dict[str, np.ndarray[Any, Any]]:
        """Minima and maxima per slot of a rank's last steps, and their loss and gradient norm; arrays by name.

        Raises:
            DumpError: the file is missing or damaged, or holds something else.
        """
        path = self._rank_file(rank, HISTORY)
        arrays = read_arrays(self._rank(rank), HISTORY)
        require_history(path, arrays)
        return arrays

    def fault_slots(self, rank: int) -> dict[str, tuple[float, float]]:
        """Minimum and maximum of each slot of the faulty step by its label; of a rank's history nothing else is read.

        Raises:
            DumpError: as `history`.
        """
        path = self._rank_file(rank, HISTORY)
        arrays = read_arrays(self._rank(rank), HISTORY, (f"{FAULT}.labels", f"{FAULT}.values"))
        require_fault(path, arrays)
        return slots_in(arrays, FAULT)

    def window(self, rank: int, types: Types | None = None, device: torch.device | None = None) -> list[MicroBatch]:
        """A rank's micro-batches, unpacked anew at each call.

        Args:
            rank: the rank.
            types: builders of batch classes, see `unpack`.
            device: where tensors go that were on an accelerator; None for the CPU.

        Raises:
            DumpError: the files are missing or damaged, or a builder refuses its fields.
        """
        items = self._window(rank, "micro_batches", types, device)
        return record_of(self._rank(rank) / f"{WINDOW}.json", items, list[MicroBatch], "micro_batches")

    def buffers(self, rank: int) -> dict[str, torch.Tensor]:
        """A rank's buffers from before the step, on the CPU, by name."""
        return self._named_tensors(rank, "buffers")

    def special(self, rank: int) -> dict[str, torch.Tensor]:
        """A rank's tensors that are not dense, on the CPU, by stored name."""
        return self._named_tensors(rank, "special")

    def _named_tensors(self, rank: int, key: str) -> dict[str, torch.Tensor]:
        return record_of(self._rank(rank) / f"{WINDOW}.json", self._window(rank, key), dict[str, torch.Tensor], key)

    def _window(self, rank: int, key: str, types: Types | None = None, device: torch.device | None = None) -> Any:
        tensors = self._rank_file(rank, f"{WINDOW}.safetensors")
        self._rank_file(rank, f"{WINDOW}.json")
        content = read_record(self._rank(rank), f"{WINDOW}.json", WindowContent, MAX_CONTENT_BYTES)
        structure = getattr(content, key)
        with well_formed(self._rank(rank) / f"{WINDOW}.json"):
            return unpack(structure, read_tensors(tensors, _keys_in(structure)), types, device, key)

    def plain_state(self) -> dict[str, Any]:
        """State of optimizers, scaler and registered objects that is not in ``state/``; see `UnpackedState`."""
        return read_plain_state(self.path)

    # weights and optimizer

    def described(self, rank: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """True shape and dtype of every stored tensor, by name; those of ``rank`` where ranks differ."""
        self._rank(rank)
        return self._tensors.described(rank)

    @contextlib.contextmanager
    def telling(self, rank: int, speaks: bool = True) -> Iterator[None]:
        """Report the progress of `load_state` on stderr while the context is active.

        Args:
            rank: the rank whose tensors are loaded, for their total size.
            speaks: whether this process reports.
        """
        total = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.described(rank).values())
        with Progress(f"loading {self.path.name}", total, speaks) as progress:
            self._tell = progress.tell
            try:
                yield
            finally:
                self._tell = ignore_bytes

    def names(self) -> list[str]:
        """Names of all stored tensors, without aliases."""
        return self._tensors.names()

    def load_state(self, names: Iterable[str] | None = None, rank: int | None = None) -> dict[str, torch.Tensor]:
        """Whole tensors, assembled from all shards.

        Args:
            names: of the tensors, aliases included; None for all, aliases included.
            rank: a rank whose own copies (non-finite, or different from its peers') replace the common ones; None for
                none.

        Returns:
            CPU tensors in their true shapes; names that are aliases of each other give one object.

        Raises:
            DumpError: a name is unknown, or shards of it are missing.
        """
        aliases = self.manifest.aliases
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
        """Copy stored values into tensors, DTensors included, reading one tensor at a time.

        Args:
            state: tensors of the true (global) shapes by name, aliases included, on any device.
            rank: as in `load_state`.

        Raises:
            DumpError: a name is unknown, a shape differs, or shards are missing.
        """
        aliases = self.manifest.aliases
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
        if rank is not None:
            self._rank(rank)
        return self._tensors.load(name, rank, self._tell)


def _copy_into(target: torch.Tensor, whole: torch.Tensor) -> None:
    if isinstance(target, DTensor):
        shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
        region = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        target.to_local().copy_(whole[region])
    else:
        target.copy_(whole)


def _keys_in(structure: Any) -> set[str]:
    """Keys of the tensors that a packed structure needs, so that a large window is not read for a few buffers."""
    if isinstance(structure, list):
        return {key for item in structure for key in _keys_in(item)}
    if isinstance(structure, dict):
        mine = {structure["key"]} if "$" in structure and isinstance(structure.get("key"), str) else set()
        parts = {key for item in structure.values() for key in _keys_in(item)}
        nested = {structure["key"]} if "layout" in structure and isinstance(structure.get("key"), str) else set()
        return mine | parts | nested
    return set()
