"""What matters on a device and shows on the CPU too: memory of slots, a scaler's flags, losses whose memory is gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.probes.slot_pages import MinMaxSlots
from ddp_nanguard.probes.slot_roles import SlotRole


def test_memory_of_slots_is_never_moved_nor_freed() -> None:
    slots = MinMaxSlots(torch.device("cpu"), torch.float32)
    first: Tensor | None = None
    for index in range(300):
        slots.reduce(torch.tensor([float(index), index + 0.5]), index, SlotRole.EVIDENCE, index)
        first = slots.pieces()[0] if first is None else first
        assert slots.pieces()[0].data_ptr() == first.data_ptr()
    assert torch.cat(slots.pieces()).tolist() == [number for index in range(300) for number in (index, index + 0.5)]


class _Seen(torch.optim.AdamW):
    """Keeps the flag that its kernels get."""

    flags: list[float]

    def step(self, closure: Any = None) -> Any:
        self.flags.append(float(self.found_inf))  # type: ignore[attr-defined]
        return super().step(closure)


def test_a_scaler_that_sums_over_devices_leaves_a_flag_of_exactly_one() -> None:
    model = nn.Linear(2, 1)
    optimizer = _Seen(model.parameters(), fused=True)
    optimizer.flags, scaled = [], []
    guard = NanGuard(model, optimizer, dump_dir=None, verdict="deferred")
    for flag in (0.0, 2.0, 0.0):
        guard.watch(loss=(loss := guard(torch.ones(1, 2)).sum()))
        loss.backward()
        optimizer.found_inf = torch.tensor(flag)  # type: ignore[attr-defined]  # as GradScaler.step sets it
        optimizer.step()
        scaled.append(float(optimizer.found_inf))  # type: ignore[attr-defined]
        del optimizer.found_inf
        optimizer.zero_grad()
    guard.close()
    assert optimizer.flags[1:] == [1.0, 0.0]
    assert scaled == [0.0, 2.0, 0.0]  # and theirs is theirs again


def test_a_loss_whose_memory_is_gone_does_not_replace_the_fault() -> None:
    """As of a captured region that was replayed meanwhile."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=None)
    for scale in (1.0, float("nan")):
        loss = guard(torch.ones(1, 2)).sum() * scale
        guard.watch(loss=loss)
        loss.backward()
        loss.untyped_storage().resize_(0)
    with pytest.raises(NonFiniteError) as caught:
        optimizer.step()
    origin = caught.value.report.to_dict()["origin"]
    assert (origin["phase"], origin["micro_batch"], origin["kind"]) == ("loss", 1, "nan"), str(caught.value)
    guard.close()
