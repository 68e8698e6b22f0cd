"""What torchrun makes of the files that ranks leave for it, by torchrun's own code."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ddp_nanguard.distributed.connect import name_of
from ddp_nanguard.distributed.launcher import tell_launcher

TEXT = "NonFiniteError: rank 2, step 7, forward: layer 'divide'\n  cause: 0/0"


def test_the_rank_where_it_began_is_the_root_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = {}
    for rank in range(4):
        path = tmp_path / f"{rank}.json"
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        tell_launcher(TEXT, 2, 65)
        failures[rank] = ProcessFailure(local_rank=rank, pid=rank, exitcode=65, error_file=str(path))
    shown = str(ChildFailedError("train.py", failures))
    root = shown.partition("Root Cause (first observed failure):")[2]
    assert "rank      : 2 (local_rank: 2)" in root and "exitcode  : 65" in root and "0/0" in root


def test_nothing_is_left_where_nobody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    tell_launcher(TEXT, 0, 65)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no" / "such" / "directory"))
    tell_launcher(TEXT, 0, 65)
    assert not list(tmp_path.iterdir())


def test_a_restart_meets_nothing_that_the_job_has_left_in_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's store outlives it: a rank that raised in the first life would end all of the second."""
    names = []
    for restarts in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        names += [name_of((0, 1)), name_of((0, 2))]
    assert len(set(names)) == 4
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert name_of((0, 1)) == names[0]
