"""Screens, against the tensors' own elements: never a false negative, and the same bits alone and beside others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_nanguard.probes import screens
from ddp_nanguard.probes.gradient import _Seen
from ddp_nanguard.probes.screens import MIN_ROWS, ROW_SIZE, Screen
from ddp_nanguard.probes.slot_roles import SlotRole
from ddp_nanguard.probes.slots import SlotBuffer, SlotStats, is_clean

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = (1, 2, 3, 64, 1000, ROW_SIZE, ROW_SIZE + 1, 3 * ROW_SIZE)


def _random(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)


def _looked(tensors: list[Tensor], exact: bool = False) -> list[SlotStats]:
    slots = SlotBuffer(history=2, exact=exact)
    Screen(range(len(tensors)), [SlotRole.GRADIENT] * len(tensors)).look(slots, tensors)
    return slots.slot_stats()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_element_makes_its_slot_bad_and_no_other(dtype: torch.dtype, exact: bool, bad: float) -> None:
    tensors = [_random(size, dtype) for size in SIZES for _ in range(MIN_ROWS)]
    assert all(is_clean(stats) for stats in _looked(tensors, exact))
    for index in range(0, len(tensors), 7):
        spoilt = [tensor.clone() for tensor in tensors]
        spoilt[index][-1] = bad
        assert [s.source for s in _looked(spoilt, exact) if not is_clean(s)] == [index]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_the_company(dtype: torch.dtype) -> None:
    tensors = [_random(size, dtype) for size in SIZES for _ in range(MIN_ROWS)]
    together = [(s.minimum, s.maximum) for s in _looked(tensors)]
    alone = [(s.minimum, s.maximum) for tensor in tensors for s in _looked([tensor])]
    assert together == alone
    assert together == [(s.minimum, s.maximum) for s in _looked(list(reversed(tensors)))][::-1]


def test_only_a_screen_that_is_not_exact_overflows() -> None:
    large = [torch.full((3,), 1e30), torch.full((3,), 60000.0, dtype=torch.float16)]
    (first, second), exact = _looked(large), _looked(large, exact=True)
    assert first.is_screen and math.isinf(first.maximum)
    assert is_clean(second)
    assert all(is_clean(stats) and not stats.is_screen for stats in exact)


STRANGE: dict[str, Any] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "empty": lambda: torch.ones(0),
    "whole numbers": lambda: torch.ones(3, dtype=torch.int64),
    "fp8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "expanded": lambda: torch.ones(1).expand(ROW_SIZE + 1),
    "transposed": lambda: torch.ones(70, 70).t(),
    "a number": lambda: torch.ones(()),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "of a graph": lambda: torch.ones(3, requires_grad=True) * 2,
}


@pytest.mark.parametrize("kind", STRANGE)
def test_every_kind_of_tensor_is_looked_at_beside_plain_ones(kind: str) -> None:
    found = _looked([_random(5), STRANGE[kind](), _random(5)])
    assert all(is_clean(stats) for stats in found)
    expected = [0, 2] if kind in ("empty", "whole numbers") else [0, 1, 2]
    assert [stats.source for stats in found] == expected


@pytest.mark.parametrize("kind", STRANGE)
def test_a_tensor_that_becomes_another_kind_is_still_looked_at(kind: str) -> None:
    slots = SlotBuffer(history=2)
    screen = Screen(range(MIN_ROWS), [SlotRole.STATE] * MIN_ROWS)
    tensors = [torch.ones(3) for _ in range(MIN_ROWS)]
    screen.look(slots, tensors)
    tensors[1] = STRANGE[kind]()
    tensors[2] = torch.tensor([1.0, math.nan, 1.0])
    screen.look(slots, tensors)
    assert [stats.source for stats in slots.slot_stats() if not is_clean(stats)] == [2]


def test_what_is_left_out_takes_no_slot_and_orders_go_with_their_tensors() -> None:
    slots = SlotBuffer(history=2)
    Screen(["a", None, "c"], [SlotRole.STATE] * 3).look(slots, [torch.ones(2)] * 3, orders=[7, 8, 5])
    assert [(stats.source, stats.order) for stats in slots.slot_stats()] == [("c", 5), ("a", 7)]


def test_a_page_that_grows_keeps_its_slots() -> None:
    count = 200
    found = _looked([torch.full((ROW_SIZE + 1,), float(index)) for index in range(count)])
    assert [round(stats.maximum / math.sqrt(ROW_SIZE + 1)) for stats in found] == list(range(count))


def test_one_call_serves_all_tensors_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(tensors: Any, order: float) -> Any:
        calls.append(len(tensors))
        return torch._foreach_norm(tensors, order)

    monkeypatch.setattr(screens, "_foreach_norm", counted)
    _looked([_random(ROW_SIZE + 1) for _ in range(5)])
    assert calls == [5]


class Sharded(torch.Tensor):
    """A kind of tensor that may be written without a new version, as DTensors are."""


@pytest.mark.parametrize("is_first", [True, False])
def test_where_one_gradient_may_be_written_unseen_all_are_looked_at_again(is_first: bool) -> None:
    gradients = [torch.ones(2), torch.ones(2).as_subclass(Sharded)][:: -1 if is_first else 1]
    seen = _Seen()
    seen.mark(("a", "b"), gradients)
    assert seen.changed(("a", "b"), gradients) == [0, 1]
    seen.mark(("a", "b"), gradients, is_sure=True)
    assert seen.changed(("a", "b"), gradients) == []
    gradients[0].mul_(2)
    assert seen.changed(("a", "b"), gradients) == [0]
