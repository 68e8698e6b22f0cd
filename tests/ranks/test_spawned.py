"""Ranks whose exceptions never reach ``sys.excepthook``: children of multiprocessing, actors, notebooks, prompts."""

from __future__ import annotations

import code
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import ProcessException, start_processes
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard, NonFiniteError, record
from ddp_nanguard.distributed.launcher import ENV_RUN, read_stop
from tests.ranks import run_ranks, run_ranks_raw

REPOSITORY = Path(__file__).parents[2]
LOCKSTEP, LONE = "a NaN on rank 1", "rank 1 raises after its NaN"
WORLD = 2


def train(rank: int, out: str, how: str) -> None:
    """What a user spawns: two ranks, of which rank 1 meets a NaN in step 1. They leave nothing behind, as is usual."""
    store = f"file://{out}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    try:
        _steps(rank, out, how)
    finally:
        dist.destroy_process_group()


def _steps(rank: int, out: str, how: str) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=f"{out}/dumps", timeout_s=15)
    for batch in guard.steps([torch.ones(2, 4), torch.full((2, 4), float("nan") if rank == 1 else 1.0)]):
        loss = guard(batch).mean()
        if how == LONE and not torch.isfinite(loss):
            raise ValueError("a check of the job")
        guard.watch(loss=loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train_as_spawned(rank: int, out: str, how: str) -> None:
    """The last word of a rank is a file: that of a rank that its parent has ended is not there."""
    multiprocessing.util.Finalize(None, Path(out, f"ended-{rank}").touch, exitpriority=0)
    train(rank, out, how)


def _spawning(rank: int, world_size: int, out: str, how: str) -> str:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    os.environ[ENV_RUN] = out
    try:
        start_processes(train_as_spawned, (out, how), nprocs=WORLD, start_method="fork")
    except ProcessException as error:
        return str(error)
    return "no rank was stopped"


def _evidence(out: Path) -> dict[str, Any]:
    """What a stop must leave: both parts of one dump, and for ``ddp-nanguard run`` the exit code and the text."""
    (dump,) = (out / "dumps").glob("step-*")
    origin = json.loads((dump / "manifest.json").read_text())["origin"]
    stop = read_stop(out)
    return {
        "parts": sorted(path.parent.name for path in dump.glob("rank-*/evidence.json")),
        "origin": (origin["rank"], origin["step"], origin["kind"]),
        "stop": None if stop is None else (stop.rank, stop.exit_code, "step 1" in stop.text),
        "left": sorted(path.name for path in out.glob("rank-*.json")),
    }


WHOLE = {
    "parts": ["rank-00000", "rank-00001"],
    "origin": (1, 1, "nan"),
    "stop": (1, 65, True),
    "left": ["rank-0.json", "rank-1.json"],
}


@pytest.mark.parametrize("how", [LOCKSTEP, LONE])
def test_spawned_ranks_meet_before_their_parent_can_end_one(how: str, tmp_path: Path) -> None:
    (told,) = run_ranks(_spawning, 1, 40, process_group=False, out=str(tmp_path), how=how)
    assert _evidence(tmp_path) == WHOLE
    if how == LOCKSTEP:
        assert "NonFiniteError: rank 1, step 1" in told and (tmp_path / "ended-0").exists()


def _plain(rank: int, world_size: int, out: str) -> list[int | None]:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    os.environ[ENV_RUN] = out
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    ranks = [context.Process(target=_queueing, args=(queue, each, out)) for each in range(WORLD)]
    for each in ranks:
        each.start()
    assert sorted(queue.get(timeout=30) for _ in ranks) == [b"0" * 100_000, b"1" * 100_000]
    for each in ranks:
        each.join(30)
    return [each.exitcode for each in ranks]


def _queueing(queue: Any, rank: int, out: str) -> None:
    try:
        train(rank, out, LOCKSTEP)
    finally:
        queue.put(f"{rank}".encode() * 100_000)  # by a thread, which multiprocessing waits for at the end


def test_processes_of_multiprocessing_end_with_the_exit_code(tmp_path: Path) -> None:
    assert run_ranks(_plain, 1, 40, process_group=False, out=str(tmp_path)) == [[65, 65]]
    assert _evidence(tmp_path) == WHOLE


def _actor(rank: int, world_size: int, out: str, how: str) -> bytes:
    """As an actor of Ray: the function's exception is caught, pickled, and the process lives on."""
    os.environ[ENV_RUN] = out
    dist.destroy_process_group()
    try:
        record()(train)(rank, out, how)
    except Exception as error:
        return pickle.dumps(error)
    return b""


def test_an_actor_hands_its_error_on_when_all_ranks_have_written_their_part(tmp_path: Path) -> None:
    errors = [pickle.loads(each) for each in run_ranks(_actor, timeout_s=40, out=str(tmp_path), how=LOCKSTEP)]
    assert _evidence(tmp_path) == WHOLE
    first, second = errors
    assert type(first) is type(second) is NonFiniteError and str(first) == str(second)
    assert first.report == second.report and first.report.origin.rank == 1
    assert [each.exit_code for each in errors] == [65, 65] and first.barrier() is None


def test_an_actor_that_raises_on_its_own_tells_its_peers(tmp_path: Path) -> None:
    peer, own = run_ranks_raw(_actor, timeout_s=40, out=str(tmp_path), how=LONE)
    assert (peer.exit_code, peer.returned) == (65, False), peer.describe()
    assert str(pickle.loads(own.value)) == "a check of the job"
    assert _evidence(tmp_path) == WHOLE


PROMPT = """
import gc, sys, torch
from ddp_nanguard import NanGuard
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def cell():
    with NanGuard(model, optimizer, dump_dir=None) as guard:
        for batch in guard.steps([torch.full((1, 2), float("nan"))]):
            guard(batch).sum().backward()
            optimizer.step()

cell()
del sys.last_value, sys.last_traceback
print("left:", gc.collect() < 0, sys.excepthook, len(model._forward_hooks), len(optimizer._optimizer_step_pre_hooks))
cell()
"""


def _prompt(rank: int, world_size: int) -> None:
    sys.ps1 = ">>> "  # as an interpreter with a prompt has it, and IPython
    console = code.InteractiveConsole()
    for line in PROMPT.strip().splitlines():
        console.push(line)
    print("lives on")


def test_a_prompt_shows_the_error_and_lives_on_with_the_guard_off() -> None:
    (ended,) = run_ranks_raw(_prompt, 1, process_group=False)
    assert (ended.returned, ended.exit_code) == (True, 0), ended.describe()
    assert ended.output.count("NonFiniteError: step 0") + ended.output.count("NonFiniteError: rank 0") == 2
    assert "left: False <built-in function excepthook> 0 0\n" in ended.output and "lives on" in ended.output


@pytest.mark.exhaustive  # the same by fork, above, takes a tenth of the time
@pytest.mark.parametrize("how", [LOCKSTEP, LONE])
def test_so_they_do_where_the_parent_starts_them_anew(how: str, tmp_path: Path) -> None:
    job = "from torch.multiprocessing import spawn; from tests.ranks.test_spawned import train; "
    job += f"spawn(train, {(str(tmp_path), how)}, 2)"
    command = [sys.executable, "-m", "ddp_nanguard", "run", "--", sys.executable, "-c", job]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 65, ended.stderr
    assert _evidence(tmp_path) == {**WHOLE, "stop": None, "left": []}  # what `run` found is gone
