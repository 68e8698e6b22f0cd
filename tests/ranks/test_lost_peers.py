"""Peers that are killed or stopped in the middle of a verdict, and ranks that raise one after the other."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks_raw
from tests.ranks.small import guard_of, rows, run_step, sgd, small_model


def _lost_peer(rank: int, world_size: int, policy: str, signal_number: int, dump_dir: str) -> Any:
    """Rank 1 is killed or stopped in the fault round; rank 0 ends it for good when it is done itself."""
    from ddp_nanguard import NonFiniteError
    from ddp_nanguard.blame import triage

    store = dist.distributed_c10d._get_default_store()
    store.set(f"pid-{rank}", str(os.getpid()))
    model = small_model()
    optimizer = sgd(model)
    guard = guard_of(model, optimizer, on_fault=policy, timeout_s=1, dump_dir=dump_dir)
    if rank == 1:
        triage.report_of = lambda *args: os.kill(os.getpid(), signal_number)  # type: ignore[assignment]
    start = time.monotonic()
    try:
        for step in range(4):
            run_step(guard, optimizer, rows(rank == 1 and step == 1))
    except NonFiniteError as error:
        return error.report.step, str(error), time.monotonic() - start, os.listdir(error.report.dump_path or "")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(store.get("pid-1")), signal.SIGKILL)


@pytest.mark.parametrize(
    ("policy", "signal_number"), [("skip", signal.SIGKILL), ("skip", signal.SIGSTOP), ("stop", signal.SIGSTOP)]
)
def test_a_rank_that_has_lost_its_peer_stops_and_speaks_for_itself(
    policy: str, signal_number: int, tmp_path: Any
) -> None:
    first, second = run_ranks_raw(
        _lost_peer, timeout_s=15, policy=policy, signal_number=signal_number, dump_dir=str(tmp_path / "dumps")
    )
    assert second.exit_code == -signal.SIGKILL
    assert first.exit_code == 0, first.describe()
    assert first.value is not None, "it went on alone"
    step, text, seconds, files = first.value
    assert step == 1
    assert seconds < 6
    assert "rank-00000" in files
    assert "every rank's own gradient was finite" not in text, "rank 1 was not asked"


def _both_raise(rank: int, world_size: int, dump_dir: str) -> None:
    model = small_model()
    guard = guard_of(model, sgd(model), dump_dir=dump_dir, timeout_s=4)
    guard(rows(True))
    time.sleep(0.3 * rank)
    raise ValueError("a validator of the user's own")


def test_ranks_that_raise_one_after_the_other_write_one_dump(tmp_path: Any) -> None:
    outcomes = run_ranks_raw(_both_raise, through_excepthook=True, dump_dir=str(tmp_path))
    assert [outcome.exit_code for outcome in outcomes] == [65, 65]
    assert sorted(path.name for path in tmp_path.glob("step-*/rank-*")) == ["rank-00000", "rank-00001"]
