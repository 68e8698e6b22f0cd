"""The same cases after 200 clean steps, compiled, and under a scaler: the error names the same."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.cases.harness import Case, Ended, check_error, check_origin, run_case, wrapped
from tests.ranks import run_ranks

MODULES = ("a_lockstep", "b_precision", "c_sharding", "d_model", "e_data", "f_optimizer", "h_calls", "j_hooks")
CLEAN_STEPS = 200
BEFORE_ANY_STEP = {
    "B01 a bad weight under a scaler",
    "B09 an optimizer that returns early",
    "B13 a scale that never changes",
    "C01 a norm that nobody initialised",
    "F01 eps is zero in half precision",
    "F01 with the weights of before",
    "F04 finite gradients, a bad update",
}
"""Their fault is there from the first step on, or counts steps by itself."""


def _late(case: Case) -> Case:
    first = CLEAN_STEPS * case.accumulation
    return replace(
        case,
        batch=lambda rank, index: case.batch(rank, max(index - first, 0)),
        batches=case.batches + first,
        before=lambda model, optimizer, rank, index: _from(first, index, case.before, model, optimizer, rank),
        before_update=lambda model, optimizer, rank, index: _from(
            first, index, case.before_update, model, optimizer, rank
        ),
    )


def _from(first: int, index: int, hook: Callable[..., object], *what: Any) -> None:
    if index >= first:
        hook(*what, index - first)


def _compiled(case: Case) -> Case:
    def wrap(model: nn.Module) -> nn.Module:
        model.compile(backend="eager")
        return wrapped(model, case.wrap)

    return replace(case, wrap=wrap)


def _scaled(case: Case) -> Case:
    return replace(case, scaler=lambda: torch.amp.GradScaler("cpu", init_scale=4.0))


CHANGES = {"late": _late, "compiled": _compiled, "scaled": _scaled}
NEVER = {"late": BEFORE_ANY_STEP, "compiled": set[str](), "scaled": {name for name in BEFORE_ANY_STEP if "F01" in name}}


def _asked(way: str, module: str, every: bool) -> list[str]:
    cases: dict[str, Case] = importlib.import_module(f"tests.cases.test_{module}").CASES
    found = [name for name, case in cases.items() if case.origin is not None and name not in NEVER[way]]
    if way == "scaled":
        # a bad gradient alone is an overflow, which the scaler skips; where there is a scaler it is tested as it stands
        found = [name for name in found if _is_no_overflow(cases[name])]
    if every:
        return found
    # two hundred steps take long: two groups are enough here
    return found[:1] if way != "late" or module in ("d_model", "e_data") else []


def _is_no_overflow(case: Case) -> bool:
    assert case.origin is not None
    return case.scaler() is None and case.origin["phase"] in ("forward", "loss", "input", "state")


def _run(rank: int, world_size: int, way: str, asked: dict[str, list[str]], directory: str) -> dict[str, list[Ended]]:
    return {module: [_ended(rank, way, module, name, directory) for name in names] for module, names in asked.items()}


def _ended(rank: int, way: str, module: str, name: str, directory: str) -> Ended:
    case: Case = importlib.import_module(f"tests.cases.test_{module}").CASES[name]
    return run_case(rank, CHANGES[way](case), f"{directory}/{module} {name}")


def _check(way: str, every: bool, directory: Path) -> None:
    asked = {module: _asked(way, module, every) for module in MODULES}
    first, second = run_ranks(_run, timeout_s=200, way=way, asked=asked, directory=str(directory))
    for name, module in asked.items():
        _check_module(way, name, module, first[name], second[name])


def _check_module(way: str, module: str, names: list[str], first: list[Ended], second: list[Ended]) -> None:
    for name, one, other in zip(names, first, second, strict=True):
        found = importlib.import_module(f"tests.cases.test_{module}")
        case: Case = found.CASES[name]
        assert case.origin is not None and one.report is not None, (module, name, one)
        assert one.text == other.text and one.report["origin"] == other.report["origin"]  # type: ignore[index]
        check_origin(case, one, CLEAN_STEPS if way == "late" else 0)
        if case.reason is not None:
            check_error(found, case.reason, one.report)


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.exhaustive] * (way == "compiled")) for way in CHANGES]
)
def test_one_of_each_group(way: str, tmp_path: Path) -> None:
    _check(way, False, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", CHANGES)
def test_all_of_them(way: str, tmp_path: Path) -> None:
    _check(way, True, tmp_path)
