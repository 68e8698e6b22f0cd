"""A dump where some ranks cannot write, or the disk is full: what is there is whole, and what is not is said."""

import errno
import os
import resource
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.dump import list_dumps, open_dump
from ddp_nanguard.dump import state as state_module
from ddp_nanguard.dump.records import Weights
from ddp_nanguard.errors import DumpError
from ddp_nanguard.tensors.shards import TensorShard
from tests.dump_requests import dumped, files_below
from tests.rank_processes import run_ranks
from tests.ranks.small import sgd, small_model


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
        assert results[0].is_partial


def stopped_on_full_disk(rank, world_size, root):
    model = small_model()
    optimizer = sgd(model)
    guard = NanGuard(model, optimizer, dump_dir=str(root), replay="os:getcwd", timeout_s=10)
    (guard(torch.ones(2, 4)).sum() * float("nan")).backward()
    with pytest.raises(NonFiniteError) as stopped:
        optimizer.step()
    return str(stopped.value), stopped.value.report.dump_path


def test_no_command_is_named_for_a_dump_that_was_not_finished(tiny_disk):
    (tiny_disk / "other").write_bytes(b"x" * (2**22 - 3 * 4096))
    (text, path), other = run_ranks(stopped_on_full_disk, 2, root=tiny_disk)
    assert (text, path) == other and path is None
    assert "\n  next:" not in text
    assert f"note:     dump: {tiny_disk}/step-00000000.partial cannot be read, since it was not finished" in text


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
