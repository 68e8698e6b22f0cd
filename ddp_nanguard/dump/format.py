"""Tensors and arrays in a dump: safetensors and npz. Nothing here unpickles or imports anything.

[Note: chunk] A safetensors file whose tensors are parts of larger ones has, under the metadata key
``DCP_SHARDING_INFO``, the position of each in the whole (``saved_offsets``), as torch.distributed.checkpoint writes it.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from ddp_nanguard.errors import DumpError
from ddp_nanguard.tensors.dtypes import dtype_named
from ddp_nanguard.tensors.shards import TensorShard

from .files import HashedFile, write_file
from .json_files import parse_json, well_formed
from .names import FileEntry
from .progress import OnBytes, ignore_bytes
from .thread_map import NUM_THREADS

OFFSETS_KEY = "DCP_SHARDING_INFO"
COPY_BYTES = 64 * 2**20
"""Largest size of a file in ``state/``."""
BLOCK_BYTES = COPY_BYTES // NUM_THREADS
"""Most bytes that one thread copies to the host at a time: 16 MiB."""

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

# npz


def write_arrays(root: Path, path: str, arrays: Mapping[str, np.ndarray[Any, Any]]) -> FileEntry:
    """Write an npz file that ``np.load(allow_pickle=False)`` opens. Unlike in ``np.savez``, any text may be a name."""

    def fill(file: HashedFile) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                # The size of an entry is not known yet when its header is written.
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)

    return write_file(root, path, fill)


def read_arrays(root: Path, path: str, names: Iterable[str] | None = None) -> dict[str, np.ndarray[Any, Any]]:
    """Read an npz file, without pickle.

    Args:
        root: the dump, or a rank's directory.
        path: of the file in it.
        names: of the arrays that are wanted, of which some may not be there; None for all.

    Raises:
        DumpError: it is damaged, or needs pickle.
    """
    with well_formed(root / path), np.load(root / path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files if names is None or name in names}


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

    def fill(file: HashedFile) -> None:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            for block in host_blocks(tensors[name]):
                file.write(block)

    return write_file(root, path, fill, tell)


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
