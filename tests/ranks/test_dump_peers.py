"""A dump whose ranks are killed, silent, slow or cannot be reached."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_nanguard.distributed import fault_group as peers_module
from ddp_nanguard.dump import list_dumps, open_dump
from ddp_nanguard.dump import state as state_module
from ddp_nanguard.dump import write as write_module
from ddp_nanguard.errors import DumpError
from ddp_nanguard.tensors.shards import TensorShard
from tests.dump_requests import dumped, replicated
from tests.rank_processes import run_ranks, run_ranks_raw


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
