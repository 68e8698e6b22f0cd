"""Weights in a dump by several ranks: equal replicas are stored once, shards come together."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ddp_nanguard.dump import open_dump
from ddp_nanguard.errors import DumpError
from ddp_nanguard.tensors.shards import TensorShard
from tests.dump_requests import DTYPES, bytes_of, dumped, files_below, random_tensor, replicated
from tests.rank_processes import run_ranks

FULL_SHAPES = {
    f"model.{str(dtype).removeprefix('torch.')}": (shape, dtype)
    for dtype, shape in zip(DTYPES, [(5, 3), (7,), (3, 2, 2), (1, 4)] * 4, strict=True)
}


def test_equal_replicas_are_stored_once(tmp_path):
    first, second = run_ranks(replicated, 2, root=tmp_path, own_value=None)
    assert first == second
    assert first.problems == [] and first.replicas_disagree == []
    assert first.size_bytes == sum(path.stat().st_size for path in Path(first.path).rglob("*") if path.is_file())
    files = files_below(first.path)
    assert [file for file in files if file.startswith("state/")] == ["state/shard-00000-00000.safetensors"]
    assert not [file for file in files if file.endswith("own.safetensors")]
    state = open_dump(first.path).load_state(rank=1)
    assert torch.equal(state["model.w"], torch.arange(6.0).reshape(2, 3))
    assert state["optim.0.w.step"].shape == () and state["optim.0.w.step"] == 3.0


@pytest.mark.parametrize("own_value", [float("nan"), 4.0000005])
def test_a_rank_that_differs_keeps_its_own(tmp_path, own_value):
    results = run_ranks(replicated, 3, root=tmp_path, own_value=own_value)
    assert [result.replicas_disagree for result in results] == [["rank 2: model.w"]] * 3
    assert [result.problems for result in results] == [[]] * 3
    dump = open_dump(results[0].path)
    expected = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(dump.load_state()["model.w"], expected)
    assert torch.equal(dump.load_state(rank=1)["model.w"], expected)
    expected[1, 1] = own_value
    assert bytes_of(dump.load_state(rank=2)["model.w"]) == bytes_of(expected)
    assert torch.equal(dump.load_state(rank=2)["model.same"], torch.ones(4))
    with safe_open(Path(dump.path) / "rank-00002" / "own.safetensors", framework="pt") as file:
        assert list(file.keys()) == ["model.w"]
    assert dump.report.notes == ("replicas disagree: rank 2: model.w",)
    assert "replicas disagree: rank 2: model.w" in (dump.path / "report.txt").read_text()


def test_a_damaged_tensor_is_kept_by_every_rank(tmp_path):
    result, _ = run_ranks(replicated, 2, root=tmp_path, own_value=None, damaged=["model.w"])
    for rank in range(2):
        with safe_open(Path(result.path) / f"rank-0000{rank}" / "own.safetensors", framework="pt") as file:
            assert list(file.keys()) == ["model.w"]


def partitioned(rank, world_size, root):
    """Optimizer state that exists on one rank only, as with ZeroRedundancyOptimizer."""
    state = [
        TensorShard.whole("model.w", torch.ones(2)),
        TensorShard.whole(f"optim.0.p{rank}.m", torch.full((2,), float(rank))),
    ]
    return dumped(root, rank=rank, world_size=world_size, state=state)


def test_tensors_that_one_rank_alone_has(tmp_path):
    result, _ = run_ranks(partitioned, 2, root=tmp_path)
    assert result.replicas_disagree == []
    state = open_dump(result.path).load_state()
    assert sorted(state) == ["model.w", "optim.0.p0.m", "optim.0.p1.m"]
    assert torch.equal(state["optim.0.p1.m"], torch.ones(2))


def rows_of(rank, world_size, size):
    """torch.chunk's uneven split: the last ranks may have fewer or no rows."""
    length = -(-size // world_size)
    return min(rank * length, size), min((rank + 1) * length, size)


def sharded(rank, world_size, root):
    shards = []
    for name, (shape, dtype) in FULL_SHAPES.items():
        start, stop = rows_of(rank, world_size, shape[0])
        whole = random_tensor(name, shape, dtype)
        shards.append(TensorShard(name, whole[start:stop], shape, (start, *(0,) * (len(shape) - 1)), shape))
    if rank == 0:
        shards.append(TensorShard.whole("optim.0.w.step", torch.tensor(5, dtype=torch.int64)))
    shards.append(TensorShard.whole("model.nothing", torch.empty(0, 4)))
    position = {"shard_index": rank, "num_shards": world_size, "replica_index": 0}
    return dumped(
        root, rank=rank, world_size=world_size, state=shards, aliases={"model.tied": "model.float32"}, **position
    )


def test_shards_come_together_bit_for_bit(tmp_path):
    result = run_ranks(sharded, 3, root=tmp_path)[0]
    assert result.problems == []
    state = open_dump(result.path).load_state()
    for name, (shape, dtype) in FULL_SHAPES.items():
        assert (state[name].shape, state[name].dtype) == (shape, dtype)
        assert bytes_of(state[name]) == bytes_of(random_tensor(name, shape, dtype)), name
    assert state["model.nothing"].shape == (0, 4)
    assert state["optim.0.w.step"].shape == () and state["optim.0.w.step"] == 5
    assert state["model.tied"] is state["model.float32"]


def load_sharded(rank, world_size, path):
    mesh = init_device_mesh("cpu", (world_size,))
    dump = open_dump(path)
    loaded = {}
    for name, (shape, dtype) in FULL_SHAPES.items():
        if dtype not in (torch.float32, torch.bfloat16, torch.int64):
            continue
        target = distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, [Shard(0)])
        assert isinstance(target, DTensor)
        dump.load_into({name: target})
        loaded[name] = bytes_of(target.to_local())
    return loaded


def test_shards_load_into_another_world(tmp_path):
    path = run_ranks(sharded, 3, root=tmp_path)[0].path
    for rank, loaded in enumerate(run_ranks(load_sharded, 2, path=path)):
        assert len(loaded) == 3
        for name, data in loaded.items():
            start, stop = rows_of(rank, 2, FULL_SHAPES[name][0][0])
            assert data == bytes_of(random_tensor(name, *FULL_SHAPES[name])[start:stop])


def flat_ranges(rank, world_size, root):
    """FSDP1: each rank has a range of the flattened parameters, cut anywhere."""
    sizes = {"model.a": (3, 5), "model.b": (4,), "model.c": ()}
    cuts = [0, 11, 17, 20][rank : rank + 2]
    shards, start = [], 0
    for name, shape in sizes.items():
        numel = int(np.prod(shape))
        low, high = max(cuts[0], start), min(cuts[1], start + numel)
        if low < high:
            flat = random_tensor(name, shape, torch.float32).reshape(-1)[low - start : high - start]
            shards.append(TensorShard(name, flat, (numel,), (low - start,), shape))
        start += numel
    return dumped(root, rank=rank, world_size=world_size, state=shards, shard_index=rank, num_shards=3, replica_index=0)


def test_flat_ranges(tmp_path):
    result = run_ranks(flat_ranges, 3, root=tmp_path)[0]
    state = open_dump(result.path).load_state()
    for name, shape in {"model.a": (3, 5), "model.b": (4,), "model.c": ()}.items():
        assert state[name].shape == shape
        assert bytes_of(state[name]) == bytes_of(random_tensor(name, shape, torch.float32))


def hybrid(rank, world_size, root):
    """HSDP 2x2: two shards, two replicas; rank 3 has bits of its own."""
    replica, shard = divmod(rank, 2)
    whole = torch.arange(8.0).reshape(4, 2)
    part = whole[2 * shard : 2 * shard + 2].clone()
    if rank == 3:
        part[0, 0] = -1.0
    state = [TensorShard("model.w", part, (4, 2), (2 * shard, 0), (4, 2))]
    place = {"shard_index": shard, "num_shards": 2, "replica_index": replica}
    return dumped(root, rank=rank, world_size=world_size, state=state, **place)


def test_hybrid_shards(tmp_path):
    results = run_ranks(hybrid, 4, root=tmp_path)
    assert results[0].replicas_disagree == ["rank 3: model.w"]
    dump = open_dump(results[0].path)
    expected = torch.arange(8.0).reshape(4, 2)
    for rank in (None, 0, 1, 2):
        assert torch.equal(dump.load_state(rank=rank)["model.w"], expected)
    expected[2, 0] = -1.0
    assert torch.equal(dump.load_state(rank=3)["model.w"], expected)


def gaps(rank, world_size, root):
    """Optimizer state of rank 1's shard does not exist yet."""
    state = [TensorShard("model.w", torch.full((2,), float(rank)), (4,), (2 * rank,), (4,))]
    if rank == 0:
        state.append(TensorShard("optim.0.w.m", torch.ones(2), (4,), (0,), (4,)))
    position = {"shard_index": rank, "num_shards": 2, "replica_index": 0}
    return dumped(root, rank=rank, world_size=world_size, state=state, **position)


def test_a_gap_spoils_only_its_own_tensor(tmp_path):
    result = run_ranks(gaps, 2, root=tmp_path)[0]
    assert result.problems == []
    dump = open_dump(result.path)
    assert torch.equal(dump.load_state(["model.w"])["model.w"], torch.tensor([0.0, 0.0, 1.0, 1.0]))
    with pytest.raises(DumpError, match=r"lacks parts of 'optim.0.w.m'"):
        dump.load_state(["optim.0.w.m"])
