"""A framework that catches what the loop raised, and hands it to the guard before it takes the model apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard
from ddp_nanguard.dump.read import open_dump
from tests.ranks import run_ranks_raw


def _trains(rank: int, world_size: int, directory: str, text: str, is_seen: bool, bad: int = 1) -> str:
    """A rank raises in its third step; its framework would go on into a collective that others never reach.

    ``is_seen``: whether the guard can see what was bad there.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=directory, timeout_s=10.0)
    try:
        for step in range(4):
            factor = float("nan") if is_seen and rank == bad and step == 2 else 1.0
            loss = guard.run(
                lambda called, batch: called(batch[0]).sum() * batch[1], guard.begin((torch.ones(2, 4), factor))
            )
            if rank == bad and step == 2:
                raise ValueError(text)
            loss.backward()
            optimizer.step()
    except Exception as error:
        guard.on_exception(error)
        torch.distributed.barrier()
    return "ended by itself"


@pytest.mark.parametrize(
    ("text", "is_seen"),
    [("my own check", True), ("Expected parameter loc, found invalid values:\ntensor([nan])", False)],
)
def test_an_exception_over_bad_values_ends_all_ranks_with_both_parts(tmp_path: Path, text: str, is_seen: bool) -> None:
    outcomes = run_ranks_raw(_trains, world_size=2, timeout_s=40, directory=str(tmp_path), text=text, is_seen=is_seen)
    assert [outcome.exit_code for outcome in outcomes] == [65, 65], [each.describe() for each in outcomes]
    assert f"ValueError: {text.splitlines()[0]}" in outcomes[1].output
    (dump,) = tmp_path.glob("step-*")
    assert open_dump([str(dump)]).ranks == [0, 1]


def test_without_peers_there_is_a_dump_and_the_process_goes_on(tmp_path: Path) -> None:
    (outcome,) = run_ranks_raw(_trains, world_size=1, directory=str(tmp_path), text="loss is NaN", is_seen=False, bad=0)
    assert outcome.value == "ended by itself", outcome.describe()
    (dump,) = tmp_path.glob("step-*")
    assert open_dump([str(dump)]).ranks == [0]
