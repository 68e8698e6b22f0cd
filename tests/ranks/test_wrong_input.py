"""Wrong input on one rank only, or on all, is a ValueError everywhere that names the option."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import run_ranks, run_ranks_raw
from tests.ranks.small import INF, NAN, ended, guard_of, sgd, small_model

WRONG: dict[str, dict[str, Any]] = {
    "optimizer": {"optimizer": None},
    "no optimizer": {"optimizer": []},
    "replay": {"replay": 5},
    "group": {"group": [0, 1]},
    "timeout_s": {"timeout_s": INF},
    "scale_floor": {"scale_floor": NAN},
    "max_skips": {"max_skips": 1.5},
    "dump_dir": {"dump_dir": 3},
    "scaler": {"scaler": "yes"},
    "watch": {"watch": "loss"},
}


def _outside(rank: int, world_size: int) -> str | None:
    group = dist.new_group([0, 1])
    model = nn.Linear(4, 2)
    return ended(lambda: guard_of(model, sgd(model), group=group).close())


def _over_a_part(rank: int, world_size: int) -> str | None:
    group = dist.new_group([0, 1])
    if rank == 2:
        return None
    model = DistributedDataParallel(nn.Linear(4, 2), process_group=group)
    return ended(lambda: guard_of(model, sgd(model)).close())  # group= is missing


def test_a_group_that_does_not_fit_is_refused() -> None:
    outside = run_ranks(_outside, world_size=3, timeout_s=12)
    assert outside[:2] == [None, None]
    assert outside[2] is not None and outside[2].startswith("ValueError: ") and "group" in outside[2]
    for found in run_ranks(_over_a_part, world_size=3, timeout_s=12)[:2]:
        assert found is not None and found.startswith("ValueError: ") and "group=" in found


def _lazy(rank: int, world_size: int) -> str | None:
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d())
    return ended(lambda: guard_of(model, sgd(model)))


def test_a_lazy_model_is_refused_with_the_remedy() -> None:
    for found in run_ranks(_lazy):
        assert found is not None
        assert found.startswith("ValueError: ")
        assert "one forward" in found


def _wrong(rank: int, world_size: int, names: list[str], everywhere: bool) -> dict[str, str | None]:
    found = {}
    for name in names:
        model = small_model()
        arguments: dict[str, Any] = {"optimizer": sgd(model)} | (WRONG[name] if everywhere or rank == 1 else {})
        found[name] = ended(lambda a=arguments, m=model: guard_of(m, a.pop("optimizer"), **a).close())
    return found


def _is_told(name: str, text: str | None) -> bool:
    return text is not None and text.startswith("ValueError: ") and name.split()[-1] in text


RISKY = ["optimizer", "no optimizer", "replay", "group"]  # not refused by a type check alone: one launch for each


@pytest.mark.parametrize("names", [[name for name in WRONG if name not in RISKY], *([name] for name in RISKY)])
def test_wrong_input_on_one_rank_is_a_value_error_on_all(names: list[str]) -> None:
    outcomes = run_ranks_raw(_wrong, timeout_s=12, names=names, everywhere=False)
    assert not any(outcome.hung for outcome in outcomes), "the peers of the rank with the wrong input wait"
    for outcome in outcomes:
        assert {name: text for name, text in outcome.value.items() if not _is_told(name, text)} == {}


def test_wrong_input_everywhere_names_the_option() -> None:
    for found in run_ranks(_wrong, names=list(WRONG), everywhere=True):
        assert {name: text for name, text in found.items() if not _is_told(name, text) or "disagree" in text} == {}
