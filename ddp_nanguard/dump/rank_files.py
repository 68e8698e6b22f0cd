"""The files of one rank: evidence, window, history, its own tensors, and the list of them all."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch

from ddp_nanguard.capture.rng import RandomState
from ddp_nanguard.capture.window import MicroBatch
from ddp_nanguard.errors import DumpError, line_of
from ddp_nanguard.tensors.dtypes import dtype_name
from ddp_nanguard.tensors.shards import TensorShard

from .batch_codec import Packed, pack
from .files import sync_directory, write_json
from .format import write_arrays, write_tensors
from .json_files import MAX_CONTENT_BYTES
from .names import EVIDENCE, FILES_JSON, HISTORY, OWN, WINDOW, FileEntry, rank_name
from .progress import OnBytes, ignore_bytes
from .rank_records import RankEvidence, RankFileList, StoredTensor
from .request import DumpRequest
from .state import chunks_of

T = TypeVar("T")

RESERVE_BYTES = 2**20
"""Bytes that the JSON files, the report and the manifest are expected to take."""


class Problems:
    """Collects what went wrong on this rank. No error of a disk or a batch ends the fault path.

    Attributes:
        lines: for the log; a full disk is reported once, however many files did not fit.
        details: one line per file.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.details: list[str] = []
        self._full = False

    def add_lack(self, line: str) -> None:
        """Record that something was left out for lack of space."""
        self.lines.append(line)
        self.details.append(line)
        self._full = True

    def guard(self, what: str, act: Callable[[], T]) -> T | None:
        """Call ``act`` and return its result; if it fails, record a line that begins with ``what`` and return None."""
        try:
            return act()
        except Exception as error:  # a batch may hold anything, and the stop must still happen
            self.note(what, error)
            return None

    def note(self, what: str, error: BaseException) -> None:
        """Record a line about an error.

        Args:
            what: begins the line, such as "window.json not written".
            error: the error.
        """
        self.details.append(f"{what}: {reason(error)}")
        full = isinstance(error, OSError) and error.errno in _FULL
        if not full or not self._full:
            self.lines.append(
                f"dump incomplete: {reason(error)}" if full and what.endswith("written") else self.details[-1]
            )
        self._full = self._full or full


def reason(error: BaseException) -> str:
    """One line about an error, with the remedy if it is one of the disk."""
    if isinstance(error, OSError) and error.errno is not None:
        remedy = (
            "free some space, or set dump_dir"
            if error.errno in _FULL
            else "set dump_dir to a directory that can be written"
        )
        return f"{error.strerror} ({remedy})"
    line = line_of(error)
    return line.removeprefix(f"{type(error).__name__}: ") if isinstance(error, DumpError) else line


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RankFiles:
    """Writes and lists one rank's files.

    Args:
        request: of this rank.
        problems: gets a line for each file that cannot be written.

    Attributes:
        entries: the written files, by path within the dump.
        tell: called with the number of bytes of tensors written.
    """

    def __init__(self, request: DumpRequest, problems: Problems) -> None:
        self._request = request
        self._problems = problems
        # Packed before anything is written, since `size_bytes` needs it.
        self._packed: Packed | None = problems.guard("window not recorded", lambda: pack(_window_of(request)))
        self.entries: dict[str, FileEntry] = {}
        self.tell: OnBytes = ignore_bytes

    @property
    def size_bytes(self) -> int:
        """Roughly the bytes that `write` needs, without own tensors."""
        history = sum(array.nbytes for array in self._request.history.values())
        return (tensor_bytes(self._packed.tensors.values()) if self._packed else 0) + history + RESERVE_BYTES

    def write(self, directory: Path, own: set[str] | None) -> None:
        """Write all files but the list, the smallest and most informative first.

        Args:
            directory: exists and is empty.
            own: names of the shards that this rank keeps itself; None for all.
        """
        request, packed = self._request, self._packed
        self._write(directory, EVIDENCE, lambda: write_json(directory, EVIDENCE, self._evidence().to_dict()))
        self._write(directory, HISTORY, lambda: write_arrays(directory, HISTORY, request.history))
        if packed is not None:
            self._write_window(directory, packed)
        self.write_own(directory, [shard for shard in request.state if own is None or shard.name in own])

    def _evidence(self) -> RankEvidence:
        evidence = self._request.evidence
        return dataclasses.replace(evidence, notes=(*evidence.notes, *(self._packed.notes if self._packed else ())))

    def _write_window(self, directory: Path, packed: Packed) -> None:
        tensors, structure = f"{WINDOW}.safetensors", f"{WINDOW}.json"
        # The structure refers to the tensors, so it is left out without them.
        if self._write(directory, tensors, lambda: write_tensors(directory, tensors, packed.tensors, tell=self.tell)):
            self._write(directory, structure, lambda: _write_structure(directory, structure, packed.structure))

    def write_own(self, directory: Path, shards: Iterable[TensorShard]) -> None:
        """Write ``own.safetensors``. Further chunks of one tensor are named ``name#1``, ``name#2``, ..."""
        tensors: dict[str, torch.Tensor] = {}
        offsets: dict[str, tuple[int, ...]] = {}
        numbers: dict[str, int] = {}
        for chunk in chunks_of(shards):
            number = numbers.setdefault(chunk.name, 0)
            name = f"{chunk.name}#{number}" if number else chunk.name
            numbers[chunk.name] += 1
            tensors[name], offsets[name] = chunk.tensor, chunk.offsets
        if tensors:
            self._write(directory, OWN, lambda: write_tensors(directory, OWN, tensors, offsets, self.tell))

    def _write(self, directory: Path, name: str, write: Callable[[], FileEntry]) -> bool:
        entry = self._problems.guard(f"{name} not written", write)
        if entry is not None:
            path = f"{rank_name(self._request.rank)}/{name}"
            self.entries[path] = dataclasses.replace(entry, path=path)
        return entry is not None

    def write_list(self, directory: Path) -> None:
        """Write ``files.json``, the last of the rank's files, and sync the directory."""
        request = self._request
        listing = RankFileList(
            rank=request.rank,
            run_id=request.run_id,
            shard_index=request.shard_index,
            replica_index=request.replica_index,
            problems=tuple(self._problems.details),
            files=tuple(self.entries.values()),
            tensors={shard.name: _stored_tensor(shard) for shard in request.state},
        )
        self._problems.guard(f"{FILES_JSON} not written", lambda: write_json(directory, FILES_JSON, listing.to_dict()))
        sync_directory(directory)


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Total size in bytes of dense tensors."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def _stored_tensor(shard: TensorShard) -> StoredTensor:
    return StoredTensor(dtype_name(shard.tensor.dtype), tuple(shard.true_shape), tuple(shard.stored_shape))


def _write_structure(directory: Path, name: str, structure: Any) -> FileEntry:
    entry = write_json(directory, name, structure)
    if entry.size_bytes <= MAX_CONTENT_BYTES:
        return entry
    (directory / name).unlink()
    raise DumpError(
        f"a batch has {entry.size_bytes} bytes beside its tensors, at most {MAX_CONTENT_BYTES} can be read again; "
        "hold long texts as uint8 tensors"
    )


def _window_of(request: DumpRequest) -> dict[str, Any]:
    micro_batches = [{**_fields(item), "random_state": _fields(item.random_state)} for item in request.window]
    return {"micro_batches": micro_batches, "buffers": request.buffers, "special": request.special}


def _fields(value: MicroBatch | RandomState) -> dict[str, Any]:
    """The fields of a dataclass by name; `dataclasses.asdict` would copy every tensor."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
