"""Slots, against the tensor's own minimum and maximum."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ddp_nanguard.probes.slot_roles import SlotRole
from ddp_nanguard.probes.slots import SlotBuffer
from ddp_nanguard.tensors.minmax import compact

LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.contiguous().transpose(1, 3),
    "every other": lambda t: torch.stack((t, t), -1)[..., 0],
    "expanded": lambda t: t.contiguous()[:, :1].expand(-1, 5, -1, -1),
    "flipped": lambda t: t.flip(3),
    "a number": lambda t: t.contiguous()[1, 1, 1, 1],
}


def _tensor() -> Tensor:
    return torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), -float("inf")])
def test_a_slot_holds_minimum_and_maximum_whatever_the_layout(layout: str, bad: float | None) -> None:
    tensor = _tensor()
    if bad is not None:
        tensor[1, 0, 1, 2] = tensor[1, 1, 1, 1] = bad
    tensor = LAYOUTS[layout](tensor)
    slots = SlotBuffer(history=2)
    assert slots.reduce(SlotRole.EVIDENCE, tensor, "it") == 1
    (stats,) = slots.slot_stats()
    values = tensor.flatten().tolist()
    if any(math.isnan(value) for value in values):
        assert math.isnan(stats.minimum) and math.isnan(stats.maximum)
    else:
        assert (stats.minimum, stats.maximum) == (min(values), max(values))
    assert stats.source == "it" and (bad is None or any(not math.isfinite(value) for value in values))


@pytest.mark.parametrize("layout", ["channels last", "transposed"])
def test_dense_tensors_are_read_in_the_order_of_memory(layout: str) -> None:
    tensor = LAYOUTS[layout](_tensor())
    ordered = compact(tensor)
    assert not tensor.is_contiguous() and ordered.is_contiguous()
    assert ordered.data_ptr() == tensor.data_ptr()


def test_what_is_looked_at_later_keeps_its_order() -> None:
    slots = SlotBuffer(history=2)
    slots.order = 3
    slots.reduce(SlotRole.EVIDENCE, torch.ones(1), "later")
    slots.reduce(SlotRole.GRADIENT, torch.ones(1, dtype=torch.float64), "earlier", order=2)
    assert [stats.source for stats in slots.slot_stats()] == ["earlier", "later"]
    slots.push_history(0)
    (past,) = slots.past()
    assert [(stats.order, stats.role) for stats in past.slot_stats()] == [
        (2, SlotRole.GRADIENT),
        (4, SlotRole.EVIDENCE),
    ]
