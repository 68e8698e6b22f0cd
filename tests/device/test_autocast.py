"""Autocast on a device, whose sums are of another dtype, and a model that lies on two devices at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import run_ranks

from . import jobs

STEPS, BAD_STEP = 4, 2


class Halves(nn.Module):
    """Its first half on one device, its second on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(jobs.SIZE, 8).to("cuda:0"), nn.Linear(8, 1).to("cuda:1")
        self.divide = jobs.Divide()

    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        hidden = self.divide(torch.relu(self.first(values)), divisor)
        return self.second(hidden.to("cuda:1"))  # type: ignore[no-any-return]


def _trained(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    from ddp_nanguard import NanGuard, NonFiniteError

    on_two = kind == "two devices"
    device = torch.device("cuda:0") if on_two else jobs.device_of(rank)
    torch.manual_seed(0)
    model = DistributedDataParallel(Halves() if on_two else jobs.Model(1).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0) if on_two else None
    given: dict[str, Any] = {"scaler": scaler, "verdict": "deferred"} if on_two else {}
    guard = NanGuard(model, optimizer, dump_dir=None, timeout_s=20, **given)
    try:
        for values, divisor in guard.steps(list(jobs.batches(device, STEPS, BAD_STEP if rank == 1 else None))):
            with torch.autocast("cuda", torch.bfloat16, enabled=not on_two):
                loss = guard(values, divisor).float().square().mean()
            guard.watch(loss=loss)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        guard.close()
    except NonFiniteError as error:
        report = error.report.to_dict()
        return {"text": str(error), "origin": report["origin"], "again": report["second_look"]["outcome"]}
    return {}


def _both(rank: int, world_size: int) -> list[dict[str, Any]]:
    return [_trained(rank, world_size, kind) for kind in ("autocast", "two devices")]


def test_the_second_look_gives_the_same_and_the_layer_is_named(simulated: str) -> None:
    found = run_ranks(_both, 2, 60, device=simulated)
    for mine, other in zip(*found, strict=True):
        assert mine["text"] == other["text"]
        origin = mine["origin"]
        assert (origin["rank"], origin["step"], origin["layer"]) == (1, BAD_STEP, "divide"), mine["text"]
        assert mine["again"] == "same", mine["text"]
