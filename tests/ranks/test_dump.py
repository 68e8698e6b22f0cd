"""Dumps by several real ranks: what is stored once, what each keeps, what happens when some cannot write."""

import errno
import json
import os
import resource
import signal
import socket
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ddp_nanguard.dump import list_dumps, open_dump, write_dump
from ddp_nanguard.dump import peers as peers_module
from ddp_nanguard.dump import state as state_module
from ddp_nanguard.dump import write as write_module
from ddp_nanguard.dump.records import Weights
from ddp_nanguard.errors import DumpError
from ddp_nanguard.tensors.shards import TensorShard
from tests.dump_requests import DTYPES, bytes_of, random_tensor, request
from tests.rank_processes import run_ranks, run_ranks_raw

FULL_SHAPES = {
    f"model.{str(dtype).removeprefix('torch.')}": (shape, dtype)
    for dtype, shape in zip(DTYPES, [(5, 3), (7,), (3, 2, 2), (1, 4)] * 4, strict=True)
}


def dumped(root, **kwargs):
    """One rank's part in a dump of a replicated model."""
    return write_dump(request(root, **kwargs))


def files_below(root):
    return sorted(str(path.relative_to(root)) for path in Path(root).rglob("*") if path.is_file())


# replicas


def replicated(rank, world_size, root, own_value, damaged=()):
    weight = torch.arange(6.0).reshape(2, 3)
    if own_value is not None and rank == world_size - 1:
        weight[1, 1] = own_value
    state = [TensorShard.whole("model.w", weight), TensorShard.whole("model.same", torch.ones(4))]
    state.append(TensorShard.whole("optim.0.w.step", torch.tensor(3.0)))
    wanted = request(root, rank=rank, world_size=world_size, state=state, damaged=set(damaged))
    return write_dump(wanted)


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


# shards


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


# every rank's own files


def own_window(rank, world_size, root):
    torch.manual_seed(100 + rank)
    return dumped(root, rank=rank, world_size=world_size), torch.get_rng_state()


def test_every_rank_has_its_own_window_and_random_state(tmp_path):
    results = run_ranks(own_window, 2, root=tmp_path)
    dump = open_dump(results[0][0].path)
    assert dump.ranks == [0, 1]
    states = [dump.window(rank)[0].random_state.torch for rank in dump.ranks]
    assert [torch.equal(state, result[1]) for state, result in zip(states, results, strict=True)] == [True, True]
    assert not torch.equal(*states)
    assert [dump.evidence(rank).sites[0].rank for rank in dump.ranks] == [0, 1]


# names


def twice(rank, world_size, root):
    return [dumped(root, rank=rank, world_size=world_size, step=step).path for step in (7, 7, 8, 7)]


def test_a_second_dump_of_a_step_gets_a_number(tmp_path):
    paths, same = run_ranks(twice, 2, root=tmp_path)
    assert paths == same
    assert [Path(path).name for path in paths] == [
        "step-00000007",
        "step-00000007.2",
        "step-00000008",
        "step-00000007.3",
    ]


def two_jobs(rank, world_size, root):
    """Ranks 0, 1 and ranks 2, 3 are two jobs that share a dump_dir and fault in the same steps."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    job, job_rank = divmod(rank, 2)
    weight = torch.full((50_000,), float(job))
    paths = []
    for step in (1, 2, 3):
        state = [TensorShard.whole("model.w", weight + step)]
        place = {"rank": job_rank, "world_size": 2, "group": groups[job], "run_id": f"job {job}"}
        result = dumped(root, step=step, state=state, options={"dump_keep": 0}, **place)
        assert result.problems == []
        paths.append(result.path)
    return paths


def test_two_jobs_in_one_directory_lose_nothing(tmp_path):
    results = run_ranks(two_jobs, 4, root=tmp_path)
    assert results[0] == results[1] and results[2] == results[3]
    assert len({*results[0], *results[2]}) == 6
    for job, paths in enumerate((results[0], results[2])):
        for step, path in zip((1, 2, 3), paths, strict=True):
            dump = open_dump(path)
            assert dump.manifest.run.id == f"job {job}" and dump.report.step == step
            assert torch.equal(dump.load_state()["model.w"], torch.full((50_000,), float(job + step)))
    assert [summary.whole for summary in list_dumps(tmp_path)] == [True] * 6
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".new", ".old")) or "partial" in path.name]


def local_roots(rank, world_size, roots, occupied):
    """Each rank on a node of its own."""
    if occupied and rank == 1:
        dumped(roots[rank], rank=0, world_size=1, group=None)
    position = {"shard_index": rank, "num_shards": 2, "replica_index": 0, "run_id": "a"}
    state = [TensorShard("model.w", torch.full((2,), float(rank)), (4,), (2 * rank,), (4,))]
    return dumped(roots[rank], rank=rank, world_size=world_size, state=state, **position)


@pytest.mark.parametrize("occupied", [False, True])
def test_node_local_directories(tmp_path, occupied):
    """Every node lists its own part, under one name even where one of them has a dump of that step already."""
    roots = [tmp_path / "a", tmp_path / "b"]
    results = run_ranks(local_roots, 2, roots=roots, occupied=occupied)
    name = "step-00000007.2" if occupied else "step-00000007"
    assert [result.path for result in results] == [str(root / name) for root in roots]
    assert [result.problems for result in results] == [[], []]
    dump = open_dump([result.path for result in results])
    assert dump.ranks == [0, 1] and dump.missing_ranks == []
    assert torch.equal(dump.load_state()["model.w"], torch.tensor([0.0, 0.0, 1.0, 1.0]))
    alone = open_dump(results[1].path)
    assert alone.ranks == [1] and alone.missing_ranks == [0]
    with pytest.raises(
        DumpError, match="holds nothing of rank 0; it has 1 of 2 ranks; give the directories of the other"
    ):
        alone.window(0)
    with pytest.raises(DumpError, match=r"lacks parts of 'model.w': ranks 0 are not here"):
        alone.load_state()
    summaries = [summary for summary in list_dumps(roots) if summary.world_size == 2]
    assert len(summaries) == 1 and summaries[0].ranks == (0, 1) and summaries[0].whole
    assert [summary.remark for summary in list_dumps(roots[1]) if summary.world_size == 2] == ["1 of 2 ranks"]


# the disk


def unwritable(rank, world_size, root, bad_ranks):
    """A path below a regular file cannot be made, even by root."""
    blocked = Path(root) / "file" / "dumps"
    return dumped(blocked if rank in bad_ranks else root, rank=rank, world_size=world_size)


def test_no_rank_can_write(tmp_path):
    (tmp_path / "file").write_text("")
    results = run_ranks(unwritable, 2, root=tmp_path, bad_ranks=[0, 1])
    assert results[0] == results[1]
    assert results[0].path is None
    blocked = tmp_path / "file" / "dumps"
    remedy = "Not a directory (set dump_dir to a directory that can be written)"
    assert results[0].problems == [f"all ranks: no dump in {blocked}: {remedy}"]


@pytest.mark.parametrize("bad", [0, 1])
def test_one_rank_cannot_write(tmp_path, bad):
    (tmp_path / "file").write_text("")
    results = run_ranks(unwritable, 2, root=tmp_path, bad_ranks=[bad])
    assert results[0].problems == results[1].problems
    (problem,) = results[0].problems
    assert problem.startswith(f"rank {bad}: no dump in {tmp_path}/file/dumps: Not a directory")
    assert results[bad].path is None
    dump = open_dump(results[1 - bad].path)
    assert dump.ranks == [1 - bad]
    assert dump.window(1 - bad)[0].batch["y"] == [1, 2]
    if bad == 1:  # replica 0 could write what is replicated
        assert dump.load_state(rank=0)["model.w"].shape == (5, 3)
    else:
        with pytest.raises(DumpError, match=r"lacks parts of 'model.w': ranks 0 are not here; rank 0: "):
            dump.load_state(rank=1)


def small_files(rank, world_size, root, bad_rank, limit, sizes):
    """The file size limit stands for a disk that is full on one rank, though its free space looked enough."""
    if rank == bad_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    position = {"shard_index": rank, "num_shards": world_size, "replica_index": 0}
    state = [TensorShard("model.w", torch.ones(sizes), (world_size * sizes,), (rank * sizes,), (world_size * sizes,))]
    return dumped(root, rank=rank, world_size=world_size, state=state, **position)


def test_disk_error_in_the_shared_part(tmp_path):
    results = run_ranks(small_files, 2, root=tmp_path, bad_rank=1, limit=100_000, sizes=100_000)
    assert results[0] == results[1]
    (problem,) = results[0].problems
    assert problem == f"rank 1: dump incomplete: {os.strerror(errno.EFBIG)} (free some space, or set dump_dir)"
    dump = open_dump(results[0].path)
    assert dump.manifest.weights == Weights(False, problem.replace("dump incomplete: ", ""))
    assert dump.window(1)[0].batch["y"] == [1, 2]
    with pytest.raises(DumpError, match=r"lacks parts of 'model.w': rank 1: File too large"):
        dump.load_state()
    assert files_below(dump.path / "state") == ["shard-00000-00000.safetensors"]
    assert list_dumps(tmp_path)[0].remark.startswith("no weights: rank 1: File too large")


def test_disk_error_in_the_local_part(tmp_path):
    results = run_ranks(small_files, 2, root=tmp_path, bad_rank=1, limit=4000, sizes=10)
    assert results[0] == results[1]
    no_space = f"{os.strerror(errno.EFBIG)} (free some space, or set dump_dir)"
    assert results[0].problems == [f"rank 1: dump incomplete: {no_space}"]
    dump = open_dump(results[0].path)
    assert torch.equal(dump.load_state()["model.w"], torch.ones(20))
    with pytest.raises(
        DumpError, match=r"window.safetensors was not written \(window.safetensors not written: File too"
    ):
        dump.window(1)


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 4 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not permitted")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def large_state(rank, world_size, root, num_bytes, fill=0):
    if fill and rank == 0:
        (Path(root) / "other").write_bytes(b"x" * fill)
    if world_size > 1:
        dist.barrier()
    return dumped(
        root, rank=rank, world_size=world_size, state=[TensorShard.whole("model.w", torch.zeros(num_bytes // 4))]
    )


def test_too_little_space_for_weights(tiny_disk):
    results = run_ranks(large_state, 2, root=tiny_disk, num_bytes=2**24)
    assert results[0] == results[1]
    (problem,) = results[0].problems
    assert problem.startswith("rank 0: dump without weights: 18 MiB needed, ")
    assert problem.endswith(f"free in {tiny_disk}; free some space or set dump_dir")
    dump = open_dump(results[0].path)
    assert dump.window(1)[0].batch["y"] == [1, 2]
    assert dump.manifest.weights.problem == "left out for lack of space"
    with pytest.raises(DumpError, match=r"lacks parts of 'model.w': left out for lack of space"):
        dump.load_state()


@pytest.mark.parametrize("free", [0, 3 * 4096])
def test_full_disk(tiny_disk, free):
    """One line, no exception, and nothing that could be taken for a dump."""
    results = run_ranks(large_state, 2, root=tiny_disk, num_bytes=2**20, fill=2**22 - free)
    assert results[0].problems == results[1].problems
    no_space = f"{os.strerror(errno.ENOSPC)} (free some space, or set dump_dir)"
    if free == 0:
        assert results[0].problems == [f"all ranks: no dump in {tiny_disk}: {no_space}"]
        assert list_dumps(tiny_disk) == []
    else:
        lack, incomplete = results[0].problems
        assert lack.startswith("rank 0: dump without weights: 3.0 MiB needed")
        assert incomplete == f"rank 1: dump incomplete: {no_space}"
        assert [summary.remark for summary in list_dumps(tiny_disk)] == ["partial"]


def full_without_peers(rank, world_size, root):
    return dumped(
        root, rank=rank, world_size=world_size, group=None, state=[TensorShard.whole("model.w", torch.zeros(2**22))]
    )


def test_too_little_space_without_peers(tiny_disk):
    result = run_ranks(full_without_peers, 2, root=tiny_disk)[1]
    assert [line.split(":")[0] for line in result.problems] == ["dump without weights"]
    assert open_dump(result.path).window(1)[0].batch["y"] == [1, 2]


def planning_fails(rank, world_size, root, shards):
    """A defect in the shared writer, not of the disk: each rank writes for itself."""
    if rank == 0:

        def refuse(*_args):
            raise ValueError("no plan")

        state_module._ShardPlanner.create_global_plan = refuse
    place = {"shard_index": rank, "num_shards": 2, "replica_index": 0} if shards else {}
    whole = torch.arange(4.0)
    part = TensorShard("model.w", whole[2 * rank : 2 * rank + 2], (4,), (2 * rank,), (4,))
    state = [part if shards else TensorShard.whole("model.w", whole)]
    return dumped(root, rank=rank, world_size=world_size, state=state, **place)


@pytest.mark.parametrize("shards", [False, True])
def test_what_cannot_be_written_together_is_written_by_each(tmp_path, shards):
    results = run_ranks(planning_fails, 2, root=tmp_path, shards=shards)
    assert results[0] == results[1]
    assert results[0].problems == ["rank 0: state/ not written: ValueError: no plan"]
    dump = open_dump(results[0].path)
    assert dump.manifest.weights.problem == "rank 0: ValueError: no plan"
    for rank in (None, 0, 1):
        assert torch.equal(dump.load_state(rank=rank)["model.w"], torch.arange(4.0))


def unreadable_tensor(rank, world_size, root, bad):
    """A tensor that cannot be copied to the host, as after a device assert."""
    device = "meta" if rank == bad else "cpu"
    state = [TensorShard.whole("model.w", torch.ones(2, device=device)), TensorShard.whole("model.v", torch.ones(3))]
    return dumped(root, rank=rank, world_size=world_size, state=state)


@pytest.mark.parametrize("bad", [0, 1])
def test_an_unreadable_tensor_hangs_nobody(tmp_path, bad):
    results = run_ranks(unreadable_tensor, 2, root=tmp_path, bad=bad)
    assert results[0] == results[1]
    assert results[0].problems[0].startswith(f"rank {bad}: replicas not compared: NotImplementedError: ")
    dump = open_dump(results[0].path)
    assert dump.window(0)[0].batch["y"] == dump.window(1)[0].batch["y"] == [1, 2]
    assert torch.equal(dump.load_state(["model.v"], rank=1)["model.v"], torch.ones(3))


def many_differ(rank, world_size, root):
    state = [
        TensorShard.whole(f"model.a_rather_long_name_{i}.weight", torch.full((2,), float(rank))) for i in range(100)
    ]
    return dumped(root, rank=rank, world_size=world_size, state=state)


def test_many_differences_are_counted(tmp_path):
    results = run_ranks(many_differ, 2, root=tmp_path)
    assert len(results[0].replicas_disagree) == 9
    assert results[1].replicas_disagree[-1] == "rank 1: and 92 more"
    assert torch.equal(
        open_dump(results[0].path).load_state(rank=1)["model.a_rather_long_name_99.weight"], torch.ones(2)
    )


# killed


def killed_in_mid_dump(rank, world_size, root, at):
    assert dumped(root, rank=rank, world_size=world_size, step=3).problems == []

    def die(*_args, **_kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(*{"state": (write_module, "save_state"), "manifest": (write_module, "write_shared_files")}[at], die)
    if at == "manifest" and rank > 0:
        write_module._Together._finish = die
    dumped(root, rank=rank, world_size=world_size, step=4)


@pytest.mark.parametrize("at", ["state", "manifest"])
def test_kill_9_of_every_rank(tmp_path, at):
    outcomes = run_ranks_raw(killed_in_mid_dump, 2, root=tmp_path, at=at)
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL] * 2
    good, broken = list_dumps(tmp_path)
    assert (good.step, good.whole, good.remark) == (3, True, "")
    assert (broken.step, broken.whole, broken.remark) == (4, False, "partial")
    assert Path(broken.path).name == "step-00000004.partial"
    assert open_dump(good.path).load_state()["model.w"].shape == (5, 3)
    with pytest.raises(DumpError, match=r"step-00000004.partial is partial: its writers ended before it was whole"):
        open_dump(broken.path)
    later = run_ranks(replicated, 2, root=tmp_path, own_value=None)[0]
    assert later.problems == [] and open_dump(later.path).ranks == [0, 1]


def again(rank, world_size, root):
    return dumped(root, rank=rank, world_size=world_size, step=4)


def test_the_same_step_again_after_a_kill(tmp_path):
    run_ranks_raw(killed_in_mid_dump, 2, root=tmp_path, at="state")
    result, _ = run_ranks(again, 2, root=tmp_path)
    assert Path(result.path).name == "step-00000004.2" and result.problems == []
    assert (tmp_path / "step-00000004.partial").is_dir()


# peers that cannot be reached


def one_dies(rank, world_size, root, shards):
    """Rank 1 dies while the others write ``state/``."""
    if rank == 1:
        write_module.save_state = lambda *_: os._exit(9)
    place = {"shard_index": rank, "num_shards": world_size, "replica_index": 0} if shards else {}
    whole = torch.arange(6.0)
    state = [
        TensorShard("model.w", whole[2 * rank : 2 * rank + 2], (6,), (2 * rank,), (6,))
        if shards
        else TensorShard.whole("model.w", whole)
    ]
    return dumped(root, rank=rank, world_size=world_size, state=state, run_id="a", **place)


@pytest.mark.parametrize("shards", [False, True])
def test_a_peer_dies_in_mid_dump(tmp_path, shards):
    outcomes = run_ranks_raw(one_dies, 3, root=tmp_path, shards=shards)
    assert [outcome.exit_code for outcome in outcomes] == [0, 9, 0]
    results = [outcomes[0].value, outcomes[2].value]
    assert [result.problems for result in results] == [[], []]
    assert results[0].path == results[1].path
    dump = open_dump(results[0].path)
    assert dump.ranks == [0, 2]
    assert "a peer was lost: " in dump.manifest.problems[0]
    if shards:
        with pytest.raises(DumpError, match=r"lacks parts of 'model.w': ranks 1 are not here; a peer was lost"):
            dump.load_state(rank=0)
    else:
        assert torch.equal(dump.load_state(rank=2)["model.w"], torch.arange(6.0))
    partial = [path.name for path in tmp_path.iterdir() if path.name.endswith(".partial")]
    assert partial == ["step-00000007.partial"], "what the dead rank wrote is kept"
    assert os.listdir(tmp_path / partial[0] / "rank-00001")


def without_peers(rank, world_size, root, shards, run_id):
    place = {"shard_index": rank, "num_shards": world_size, "replica_index": 0} if shards else {}
    whole = torch.arange(6.0)
    part = TensorShard("model.w", whole[2 * rank : 2 * rank + 2], (6,), (2 * rank,), (6,))
    own = TensorShard.whole("model.w", whole + rank)
    state = [part if shards else own, TensorShard.whole("model.scalar", torch.tensor(float(rank)))]
    return dumped(root, rank=rank, world_size=world_size, state=state, group=None, run_id=run_id, **place)


def test_ranks_without_peers_meet_in_one_directory(tmp_path):
    results = run_ranks(without_peers, 3, root=tmp_path, shards=True, run_id="a")
    assert {result.path for result in results} == {str(tmp_path / "step-00000007")}
    assert [result.problems for result in results] == [[], [], []]
    dump = open_dump(results[0].path)
    assert dump.ranks == [0, 1, 2] and dump.manifest.alone
    assert torch.equal(dump.load_state()["model.w"], torch.arange(6.0))
    assert [float(dump.load_state(rank=rank)["model.scalar"]) for rank in range(3)] == [0.0, 1.0, 2.0]
    assert dump.window(2)[0].batch["y"] == [1, 2]
    again = run_ranks(without_peers, 3, root=tmp_path, shards=True, run_id="b")
    assert {Path(result.path).name for result in again} == {"step-00000007.2"}


def test_one_replica_without_peers_has_its_own_weights(tmp_path):
    results = run_ranks(without_peers, 2, root=tmp_path, shards=False, run_id="a")
    dump = open_dump(results[0].path)
    assert torch.equal(dump.load_state(rank=1)["model.w"], torch.arange(6.0) + 1)
    assert not (dump.path / "state").exists()


def silent_peer(rank, world_size, root):
    """Rank 1 never comes; the group's own timeout ends the wait."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 1:
        time.sleep(4)
        return None
    return dumped(root, rank=rank, world_size=world_size, group=group)


def test_a_silent_peer_costs_the_timeout(tmp_path):
    result, _ = run_ranks(silent_peer, 2, root=tmp_path)
    assert result.problems == []
    dump = open_dump(result.path)
    assert dump.ranks == [0] and "a peer was lost" in dump.manifest.problems[0]
    assert dump.load_state(rank=0)["model.w"].shape == (5, 3)


def slow_write(rank, world_size, root):
    """Rank 0 writes for longer than peers wait otherwise."""
    peers_module.SLOWEST_BYTES_PER_S = 1e5
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        write = state_module._BoundedWriter.write_data

        def slowly(*args):
            time.sleep(3)
            return write(*args)

        state_module._BoundedWriter.write_data = slowly
    state = [TensorShard.whole("model.w", torch.zeros(250_000))]
    options = {"timeout_s": 1.0}
    return dumped(root, rank=rank, world_size=world_size, state=state, group=group, options=options)


def test_a_long_write_is_waited_for(tmp_path):
    results = run_ranks(slow_write, 2, root=tmp_path)
    assert results[0] == results[1] and results[0].problems == []
    assert not open_dump(results[0].path).manifest.alone


# rotation


def many(rank, world_size, root, keep):
    return [
        Path(dumped(root, rank=rank, world_size=world_size, step=s, options={"dump_keep": keep}).path).name
        for s in range(5)
    ]


def test_rotation_keeps_the_newest_whole_dumps(tmp_path):
    partial = tmp_path / "step-00000000.partial"
    (partial / "rank-00000").mkdir(parents=True)
    (partial / "writer.json").write_text(
        json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "nonce": "other"})
    )
    (tmp_path / "checkpoints").mkdir()
    run_ranks(many, 2, root=tmp_path, keep=2)
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert names == ["checkpoints", "step-00000000.partial", "step-00000003", "step-00000004"]
