"""What a step leaves on the host goes when its slots leave the ring, without the garbage collector."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks

HISTORY, STEPS, CALLS = 3, 9, 3


class Masked(nn.Module):
    """Holds a NaN that it does not give on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.linear = nn.Identity(), nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(values.detach() * float("nan"))
        return self.linear(values) + torch.nan_to_num(hidden)


def _kept(rank: int, world_size: int, verdict: str) -> Any:
    from ddp_nanguard import NanGuard
    from ddp_nanguard.blame import known_nonfinite
    from ddp_nanguard.probes.slots import is_clean

    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    guard = NanGuard(model, optimizer, dump_dir=None, layers="every", history=HISTORY, verdict=verdict)
    found, alive = [], []
    gc.collect()
    gc.disable()
    for batch in guard.steps([torch.rand(2, 4) for _ in range(STEPS)]):
        loss = model(batch).pow(2).mean()
        guard.watch(loss=loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        past = [step.slot_stats() for step in guard._context.slots.past()]
        found += [
            (known_nonfinite(slot_stats), any(not is_clean(stats) for stats in slot_stats)) for slot_stats in past
        ]
        alive.append(sum(type(thing).__name__ == "ModuleCall" for thing in gc.get_objects()))
        del past
    gc.enable()
    guard.close()
    return found, alive


@pytest.mark.parametrize("verdict", ["sync", "deferred"])
def test_calls_go_with_their_step_and_not_before(verdict: str) -> None:
    ((found, alive),) = run_ranks(_kept, 1, verdict=verdict)
    assert len(found) >= HISTORY * (STEPS - HISTORY)
    assert all(seen and not habitual for habitual, seen in found), "a NaN in the layer, contained, in every past step"
    assert alive[0] == CALLS and max(alive) <= (HISTORY + 3) * CALLS < STEPS * CALLS
