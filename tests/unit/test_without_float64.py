"""Devices that have no float64, as MPS: the guard computes in none there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddp_nanguard.probes.compiled import CompiledSlots, accumulate
from ddp_nanguard.probes.severity import Severity, SeverityReducer
from ddp_nanguard.probes.slots import SlotBuffer
from tests.ranks.small import ended, guard_of

CPU = torch.device("cpu")


class _NoFloat64(TorchDispatchMode):
    """Refuses every operator that takes or gives float64, as such a device does; not what is read from it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) and leaf.dtype is torch.float64 for leaf in tree_leaves((args, kwargs, found))):
            raise TypeError(f"{func}: this device has no float64")
        return found


@pytest.mark.parametrize(("value", "severity"), [(1.0, Severity.CLEAN), (torch.inf, Severity.CLEAN)])
def test_slots_of_compiled_layers_hold_what_the_device_has(value: float, severity: Severity) -> None:
    with _NoFloat64():
        slots = SlotBuffer(history=2)
        compiled = CompiledSlots(["layer"], CPU, probes_gradients=True)
        accumulate(compiled.after("layer"), torch.tensor([1.0, value]))
        compiled.move_to(slots, 0)
        found = SeverityReducer(slots, CPU, has_scaler=False, warn_limits={}).severity(Severity.CLEAN)
    assert int(found) == severity
    assert [stats.maximum for stats in slots.slot_stats() if stats.maximum >= 1.0] == [value]


def test_a_step_is_judged_and_told_without_float64(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    guard = guard_of(model, optimizer, layers="every", dump_dir=str(tmp_path), grad_norm_warn=1e9)

    def train() -> None:
        for batch in guard.steps([torch.ones(2, 4), torch.full((2, 4), torch.inf)]):
            loss = guard(batch).sum()
            guard.watch(loss=loss)
            loss.backward()
            guard.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    with _NoFloat64():
        text = ended(train)
    assert text is not None and text.startswith("NonFiniteError: rank 0, step 1, micro-batch 0, input"), text
