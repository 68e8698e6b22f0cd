"""Dumps by several real ranks: what each rank keeps, how dumps are named, and which are rotated away."""

import json
import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_nanguard.dump import list_dumps, open_dump
from ddp_nanguard.errors import DumpError
from ddp_nanguard.tensors.shards import TensorShard
from tests.dump_requests import dumped
from tests.rank_processes import run_ranks


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
        DumpError, match="holds nothing of rank 0; of world_size=2 it has rank 1; give the directories of the other"
    ):
        alone.window(0)
    with pytest.raises(DumpError, match=r"lacks parts of 'model.w': ranks 0 are not here"):
        alone.load_state()
    summaries = [summary for summary in list_dumps(roots) if summary.world_size == 2]
    assert len(summaries) == 1 and summaries[0].ranks == (0, 1) and summaries[0].whole
    assert [summary.remark for summary in list_dumps(roots[1]) if summary.world_size == 2] == ["1 of 2 ranks"]


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
    assert (tmp_path / "latest").readlink() == Path("step-00000004")
    assert names == ["checkpoints", "latest", "step-00000000.partial", "step-00000003", "step-00000004"]
