"""The directory ``state/``: weights and optimizer tensors, planned by torch.distributed.checkpoint.

Torch decides which rank writes which of the replicated tensors. The files are those of its safetensors writer, but they
are written here, block by block and by several threads: torch's writer copies each file twice in memory and leaves the
checksums to be read back.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ddp_nanguard.tensors.shards import TensorShard

from .format import COPY_BYTES, bounded_parts, storable_shard, write_tensors
from .names import STATE_DIR, FileEntry
from .progress import OnBytes, ignore_bytes
from .thread_map import thread_map


def chunks_of(shards: Iterable[TensorShard]) -> Iterator[TensorShard]:
    """Shards as they are stored: in dtypes that safetensors takes, cut to at most `COPY_BYTES`, without empty ones.

    A tensor that is empty as a whole stays, so that its name and dtype are kept.
    """
    for shard in map(storable_shard, shards):
        if shard.tensor.numel() == 0 and 0 not in shard.stored_shape:
            continue
        for part in bounded_parts(shard.tensor.shape, shard.tensor.itemsize, COPY_BYTES):
            offsets = tuple(base + cut.start for base, cut in zip(shard.offsets, part, strict=True))
            yield TensorShard(shard.name, shard.tensor[part], shard.stored_shape, offsets, shard.true_shape)


def save_state(
    shards: Iterable[TensorShard],
    dump: Path | None,
    rank: int,
    group: dist.ProcessGroup | None,
    tell: OnBytes = ignore_bytes,
) -> list[FileEntry]:
    """Write the shards of all ranks; of replicated ones the copy of the lowest rank.

    Args:
        shards: of this rank.
        dump: the dump's directory; None on a rank that cannot write, which is an error only if it would have to.
        rank: global rank, for the file names.
        group: None for a process without peers.
        tell: called with the number of bytes that this rank writes.

    Returns:
        The files that this rank has written.

    Raises:
        CheckpointException: some rank could not write; the same on every rank.

    Collective: the planning of torch.distributed.checkpoint, by every rank of ``group``: one gather and scatter of the
    plans (some hundred bytes per chunk), one gather of what was written.
    """
    writer = _BoundedWriter(dump, rank, tell)
    with warnings.catch_warnings():
        # torch warns that a save without a process group is one of a single process, which is meant
        warnings.simplefilter("ignore")
        save({}, storage_writer=writer, planner=_ShardPlanner(shards), process_group=group, no_dist=group is None)
    return writer.entries


class _ShardPlanner(DefaultSavePlanner):
    """Plans from shards instead of a state dict, so that no DTensor and no gathered tensor is needed."""

    def __init__(self, shards: Iterable[TensorShard]) -> None:
        super().__init__(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
        self._shards = shards
        self._chunks: dict[tuple[str, tuple[int, ...]], TensorShard] = {}

    def create_local_plan(self) -> SavePlan:
        # not in the constructor: an error here reaches every rank
        self._chunks = {(chunk.name, chunk.offsets): chunk for chunk in chunks_of(self._shards)}
        self.plan = SavePlan([_write_item(chunk) for chunk in self._chunks.values()])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        # without torch's check for gaps: optimizer state of a shard that never had a gradient does not exist
        plans = dedup_save_plans(all_plans, save_to_lowest_rank=True)
        self.global_plan, self.metadata = create_default_global_save_plan(plans)
        return self.global_plan, self.metadata

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._chunks[write_item.index.fqn, _offset_of(write_item)].tensor


def _write_item(chunk: TensorShard) -> WriteItem:
    offsets = torch.Size(chunk.offsets)
    place = ChunkStorageMetadata(offsets=offsets, sizes=chunk.tensor.shape)
    properties = TensorProperties(dtype=chunk.tensor.dtype)
    data = TensorWriteData(chunk=place, properties=properties, size=torch.Size(chunk.stored_shape))
    return WriteItem(index=MetadataIndex(chunk.name, offsets), type=WriteItemType.SHARD, tensor_data=data)


def _offset_of(item: WriteItem) -> tuple[int, ...]:
    assert item.index.offset is not None
    return tuple(item.index.offset)


class _BoundedWriter(HuggingFaceStorageWriter):
    """Writes files of bounded size, several at a time; a file holds each name once."""

    def __init__(self, dump: Path | None, rank: int, tell: OnBytes) -> None:
        super().__init__(path=str(dump / STATE_DIR if dump is not None else None), save_distributed=True)
        self._dump = dump
        self._rank = rank
        self._tell = tell
        self.entries: list[FileEntry] = []

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return super().prepare_local_plan(plan) if self._dump is not None else plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if plan.items and self._dump is None:
            raise OSError("this rank has no directory to write to")
        numbered = list(enumerate(_bounded_files(plan.items)))
        self.entries = thread_map(lambda file: self._write_one(*file, planner), numbered)
        results: Future[list[WriteResult]] = Future()
        written = zip(numbered, self.entries, strict=True)
        results.set_result([_result(item, entry.path) for (_, items), entry in written for item in items])
        return results

    def _write_one(self, index: int, items: list[WriteItem], planner: SavePlanner) -> FileEntry:
        assert self._dump is not None
        assert isinstance(planner, _ShardPlanner)
        tensors = {item.index.fqn: planner.resolve_data(item) for item in items}
        offsets = {item.index.fqn: _offset_of(item) for item in items}
        path = f"{STATE_DIR}/shard-{self._rank:05d}-{index:05d}.safetensors"
        return write_tensors(self._dump, path, tensors, offsets, self._tell)


def _result(item: WriteItem, path: str) -> WriteResult:
    return WriteResult(item.index, _size_bytes(item), path)


def _bounded_files(items: Iterable[WriteItem]) -> list[list[WriteItem]]:
    files: list[list[WriteItem]] = []
    names: set[str] = set()
    size_bytes = 0
    for item in items:
        item_bytes = _size_bytes(item)
        # Chunks of one tensor share a name, and a safetensors file holds each name once.
        if not files or size_bytes + item_bytes > COPY_BYTES or item.index.fqn in names:
            files.append([])
            names, size_bytes = set(), 0
        files[-1].append(item)
        names.add(item.index.fqn)
        size_bytes += item_bytes
    return files


def _size_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
