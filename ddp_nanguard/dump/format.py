"""The files of a dump: names, JSON, safetensors and npz, checksums. Nothing here unpickles or imports anything.

[Note: chunk] A safetensors file whose tensors are parts of larger ones has, under the metadata key
``DCP_SHARDING_INFO``, the position of each in the whole (``saved_offsets``), as torch.distributed.checkpoint writes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from ddp_nanguard.errors import DumpError
from ddp_nanguard.report.types import Natural, Rule, json_safe
from ddp_nanguard.tensors.dtypes import dtype_named
from ddp_nanguard.tensors.shards import TensorShard

from .json_files import parse_json, well_formed
from .progress import OnBytes, ignore_bytes
from .thread_map import NUM_THREADS

PARTIAL = ".partial"
LOCK_FILE = ".lock"
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

OFFSETS_KEY = "DCP_SHARDING_INFO"
COPY_BYTES = 64 * 2**20
"""Largest size of a file in ``state/``."""
BLOCK_BYTES = COPY_BYTES // NUM_THREADS
"""Most bytes that one thread copies to the host at a time: 16 MiB."""
DIGEST_BYTES = 16

_STORED_AS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
"""Dtypes that both safetensors and torch.distributed.checkpoint read; all others are stored as integers."""
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

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


class _Hashed:
    """A binary file that is being written, with the digest and the length of its bytes.

    The bytes are hashed as they are written, so that nothing has to be read back.
    """

    def __init__(self, file: IO[bytes], tell: OnBytes) -> None:
        self._file = file
        self._tell = tell
        self.digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self.size_bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self.digest.update(view)
        self.size_bytes += len(view)
        self._tell(len(view))
        return len(view)

    def flush(self) -> None:
        """Do nothing: `zipfile` expects the method, and `_write_file` flushes."""

    def close(self) -> None:
        """Do nothing: `zipfile` expects the method, and `_write_file` closes."""


def _write_file(root: Path, path: str, fill: Callable[[_Hashed], object], tell: OnBytes = ignore_bytes) -> FileEntry:
    """Write, sync and list one file; a file that could not be written completely is removed."""
    target = root / path
    try:
        with open(target, "wb") as file:
            hashed = _Hashed(file, tell)
            fill(hashed)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return FileEntry(path, hashed.size_bytes, hashed.digest.hexdigest())


def sync_directory(path: Path) -> None:
    """Make the names within a directory durable; does nothing on file systems that cannot."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def list_file(root: Path, path: str, tell: OnBytes = ignore_bytes) -> FileEntry:
    """The entry of a file that exists already, from reading it.

    Args:
        root: the dump.
        path: of the file in it.
        tell: called with the number of bytes read.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    size_bytes = 0
    with open(root / path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
            size_bytes += len(block)
            tell(len(block))
    return FileEntry(path, size_bytes, digest.hexdigest())


# JSON and text


def write_text(root: Path, path: str, text: str) -> FileEntry:
    """Write a text file in UTF-8, sync it and return its entry."""
    return _write_file(root, path, lambda file: file.write(text.encode()))


def write_json(root: Path, path: str, data: Any) -> FileEntry:
    """Write strict JSON: non-finite numbers as strings, objects that JSON does not know as their ``str()``."""
    return write_text(root, path, json.dumps(json_safe(data), indent=1, allow_nan=False, default=str) + "\n")


# npz


def write_arrays(root: Path, path: str, arrays: Mapping[str, np.ndarray[Any, Any]]) -> FileEntry:
    """Write an npz file that ``np.load(allow_pickle=False)`` opens. Unlike in ``np.savez``, any text may be a name."""

    def fill(file: _Hashed) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                # The size of an entry is not known yet when its header is written.
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)

    return _write_file(root, path, fill)


def read_arrays(root: Path, path: str) -> dict[str, np.ndarray[Any, Any]]:
    """Read an npz file, without pickle.

    Raises:
        DumpError: it is damaged, or needs pickle.
    """
    with well_formed(root / path), np.load(root / path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


# tensors


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name that a file holds, such as "float32".

    Raises:
        DumpError: this torch has no such dtype.
    """
    try:
        return dtype_named(name)
    except ValueError as error:
        raise DumpError(str(error)) from None


def storable(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in a dtype that safetensors takes: complex as pairs of reals (one dim more), others as integers."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    if tensor.dtype in _STORED_AS:
        return tensor
    return tensor.view(_INTEGER_OF_SIZE[tensor.dtype.itemsize])


def restored(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A stored tensor in its original dtype, the inverse of `storable`.

    Args:
        tensor: as `storable` returned it.
        dtype: the original one.
    """
    if dtype.is_complex:
        return torch.view_as_complex(tensor)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def storable_shard(shard: TensorShard) -> TensorShard:
    """`storable` for a shard: shapes and offsets get the further dim of complex numbers too."""
    tensor = storable(shard.tensor)
    if tensor.dim() == shard.tensor.dim():
        return TensorShard(shard.name, tensor, shard.stored_shape, shard.offsets, shard.true_shape)
    return TensorShard(shard.name, tensor, (*shard.stored_shape, 2), (*shard.offsets, 0), shard.true_shape)


def bounded_parts(shape: Iterable[int], itemsize: int, limit_bytes: int) -> Iterator[tuple[slice, ...]]:
    """Cut a tensor into boxes of at most ``limit_bytes`` (or one element), in row-major order of its elements.

    Args:
        shape: of the tensor.
        itemsize: bytes per element.
        limit_bytes: of one box.

    Yields:
        Slices, one per dim.
    """
    yield from _cut([slice(0, size) for size in shape], itemsize, limit_bytes)


def _cut(box: list[slice], itemsize: int, limit_bytes: int) -> Iterator[tuple[slice, ...]]:
    sizes = [part.stop - part.start for part in box]
    size_bytes = itemsize * int(np.prod(sizes, dtype=np.int64))
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), None)
    if size_bytes <= limit_bytes or dim is None:
        yield tuple(box)
        return
    rows = max(1, sizes[dim] * limit_bytes // size_bytes)
    for start in range(box[dim].start, box[dim].stop, rows):
        part = slice(start, min(start + rows, box[dim].stop))
        yield from _cut([*box[:dim], part, *box[dim + 1 :]], itemsize, limit_bytes)


def host_blocks(tensor: torch.Tensor, limit_bytes: int = BLOCK_BYTES) -> Iterator[memoryview]:
    """The bytes of a tensor in row-major order, at most ``limit_bytes`` on the host at a time.

    Host sync: one blocking copy per block of a device tensor.
    """
    if tensor.numel() == 0:
        return
    for part in bounded_parts(tensor.shape, tensor.itemsize, limit_bytes):
        block = tensor[part].detach().cpu().contiguous()
        # not reshape, which leaves a single element any stride it had
        yield block.as_strided((block.numel(),), (1,)).view(torch.uint8).numpy().data


def write_tensors(
    root: Path,
    path: str,
    tensors: Mapping[str, torch.Tensor],
    offsets: Mapping[str, tuple[int, ...]] | None = None,
    tell: OnBytes = ignore_bytes,
) -> FileEntry:
    """Write dense tensors, on any device and with any strides, to a safetensors file, block by block.

    Args:
        root: the dump.
        path: of the file in it.
        tensors: storable ones (see `storable`), by name.
        offsets: the position of each in the tensor that it is a part of, see [Note: chunk]; None for whole tensors.
        tell: called with the number of bytes written.

    Host sync: one blocking copy per 16 MiB of a device tensor.
    """
    # safetensors maps files into memory: the widest first keeps every tensor aligned
    names = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    if offsets is not None:
        header["__metadata__"][OFFSETS_KEY] = json.dumps({name: {"saved_offsets": offsets[name]} for name in names})
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": _STORED_AS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    # The format wants the tensors to begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)

    def fill(file: _Hashed) -> None:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            for block in host_blocks(tensors[name]):
                file.write(block)

    return _write_file(root, path, fill, tell)


def open_tensors(path: Path) -> Any:
    """A safetensors file, opened lazily; its header is checked against its length.

    Raises:
        DumpError: it is missing or damaged.
    """
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise DumpError(f"{path} is missing: the dump is incomplete; copy it again from where it was written") from None
    except (SafetensorError, OSError) as error:
        raise DumpError(f"{path} is damaged ({error}); copy the dump again from where it was written") from None


def read_tensors(path: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Tensors of a safetensors file, on the CPU, each in its own memory.

    Raises:
        DumpError: the file is missing or damaged.
    """
    with open_tensors(path) as file:
        return {name: file.get_tensor(name).clone() for name in names}


def check_header(path: Path) -> list[str]:
    """Reopen a safetensors file of chunks and return its names.

    Raises:
        DumpError: it cannot be opened, or a chunk has no offsets.
    """
    with open_tensors(path) as file:
        names = list(file.keys())
        places = parse_json((file.metadata() or {}).get(OFFSETS_KEY, "{}"))
        for name in names:
            shape = file.get_slice(name).get_shape()
            if len(places.get(name, {}).get("saved_offsets", ())) != len(shape):
                raise DumpError(f"{path}: {name} has no place in its tensor; write the dump again")
    return names
