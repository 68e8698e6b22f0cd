"""`ddp-nanguard doctor` on several ranks: what fails on one is told by rank 0, and fails everywhere."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.ranks import run_ranks
from tests.replaying import captured, torchrun_variables


def _doctor(rank: int, world_size: int, places: list[str]) -> tuple[int, str]:
    from ddp_nanguard.cli.main import main

    os.environ |= torchrun_variables(rank, world_size)
    ended = captured(lambda: main(["doctor", "--json", "--dump-dir", places[rank]]))
    return ended.code, ended.output


def test_a_dump_dir_that_one_rank_cannot_write_fails_on_all(tmp_path: Path) -> None:
    (first, told), second = run_ranks(_doctor, places=[str(tmp_path), f"{__file__}/x"])
    assert (first, second) == (1, (1, "")), "rank 0 speaks for all"
    found = {check["promise"]: (check["holds"], check["detail"]) for check in json.loads(told)["checks"]}
    assert found["gloo"] == (True, "connects 2 ranks on 1 host") and found["dump_dir"][0] is True
    holds, said = found["rank 1"]
    assert holds is False and said.startswith(f"dump_dir: {__file__}/x: Not a directory")
