"""Jobs whose world works, but in which no gloo group can be made, on any rank or on one alone."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest

from ddp_nanguard.dump import open_dump
from tests.ranks import run_ranks
from tests.ranks.small import ended, guard_of, is_finite, rows, run_step, sgd, small_model


class _Said(logging.Handler):
    """The warnings of the package."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _faulty(rank: int, world_size: int, without: list[int], dump_dir: str) -> dict[str, Any]:
    from ddp_nanguard import NonFiniteError

    said = _Said()
    logging.getLogger("ddp_nanguard").addHandler(said)
    if rank in without:
        os.environ["GLOO_SOCKET_IFNAME"] = "nonsense"
    model = small_model()
    optimizer = sgd(model)
    first = guard_of(model, optimizer, dump_dir=dump_dir)
    first.close()
    guard = guard_of(model, optimizer, dump_dir=dump_dir)
    try:
        for step in range(3):
            run_step(guard, optimizer, rows(rank == 1 and step == 2))
    except NonFiniteError as error:
        met = error.barrier()
        warned = [line for line in said.lines if "GLOO_SOCKET_IFNAME" in line]
        return {
            "text": str(error),
            "met": met,
            "warned": warned,
            "finite": is_finite(model),
            "path": error.report.dump_path,
        }
    return {"text": "no error"}


@pytest.mark.parametrize("without", [[0, 1], [1]], ids=["nowhere", "not on one rank"])
def test_without_a_gloo_group_all_ranks_stop_together_and_each_writes_its_part(
    without: list[int], tmp_path: Any
) -> None:
    first, second = run_ranks(_faulty, without=without, dump_dir=str(tmp_path))
    assert first["text"] == second["text"]
    assert "rank 1, step 2" in first["text"]
    assert first["finite"] and second["finite"]
    assert first["met"] and second["met"]
    assert len(first["warned"]) == 1 and not second["warned"]
    assert f"rank {without[0]}: " in first["warned"][0]
    dump = open_dump(first["path"])
    assert dump.ranks == [0, 1]
    assert dump.manifest.alone and "there is no gloo group" in dump.manifest.problems[0]
    assert dump.report.second_look is not None


def _wrong_option(rank: int, world_size: int) -> str:
    os.environ["GLOO_SOCKET_IFNAME"] = "nonsense"
    model = small_model()
    return ended(lambda: guard_of(model, sgd(model), history=3 + rank)) or "no error"


def test_without_a_gloo_group_options_are_compared_all_the_same() -> None:
    first, second = run_ranks(_wrong_option)
    assert first == second
    assert "ranks disagree about an option" in first and "history=3 against history=4" in first
