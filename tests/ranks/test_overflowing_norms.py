"""Values whose norm overflows although each is finite: a remark, and all ranks go on in lockstep."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard, NonFiniteError
from tests.ranks import run_ranks
from tests.training import listening

LARGE = 1e25  # finite; its square is not
WORLD_SIZE = {"plain": 1}


class Scaled(torch.autograd.Function):
    """The identity, with a gradient that is ``factor`` times as large."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


def _wrapped(kind: str) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    if kind == "ddp":
        return DistributedDataParallel(net)
    if kind == "ddp views":
        return DistributedDataParallel(net, gradient_as_bucket_view=True)
    if kind == "fsdp1":
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    return fully_shard(net) if kind == "fsdp2" else net


def _trained(rank: int, world_size: int, kind: str, clips: bool, accumulation: int) -> Any:
    """Large gradients on the last rank in steps 1 and 2, and infinite ones in step 3."""
    model = _wrapped(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    guard = NanGuard(model, optimizer, dump_dir=None)
    factors = {1: LARGE, 2: LARGE, 3: math.inf}
    with listening() as logged:
        for step in range(5):
            for micro_batch in range(accumulation):
                is_there = rank == world_size - 1 and micro_batch == 0
                factor = factors.get(step, 1.0) if is_there else 1.0
                Scaled.apply(guard(torch.rand(3, 4)), factor).sum().backward()  # type: ignore[no-untyped-call]
            try:
                if clips:
                    guard.clip_grad_norm_(1.0)
                optimizer.step()
            except NonFiniteError as error:
                origin = error.report.origin
                assert origin is not None
                return step, origin.rank, str(origin.phase), origin.kind, [line for line in logged if "norm" in line]
            optimizer.zero_grad()
    return None


@pytest.mark.parametrize(
    ("kind", "clips", "accumulation"),
    [
        ("plain", False, 1),
        ("ddp", False, 1),
        ("ddp", True, 2),
        ("ddp views", False, 2),
        ("fsdp1", False, 2),
        ("fsdp2", False, 1),
        ("fsdp2", True, 2),
    ],
)
def test_a_norm_that_overflows_is_said_once_and_what_is_infinite_stops(
    kind: str, clips: bool, accumulation: int
) -> None:
    world_size = WORLD_SIZE.get(kind, 2)
    for found in run_ranks(_trained, world_size, kind=kind, clips=clips, accumulation=accumulation):
        assert found is not None
        step, rank, phase, _, said = found
        assert (step, rank, phase) == (3, world_size - 1, "backward"), found
        assert len(said) == 1 and "although every element is finite" in said[0], said


def _weights(rank: int, world_size: int) -> Any:
    """Weights that are as large, on one rank of a plain model each."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=None)
    if rank == 1:
        with torch.no_grad():
            model.weight.fill_(LARGE)
    for _ in range(3):
        (guard(torch.zeros(3, 4)) * 1.0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    guard.close()
    return guard.step


def test_large_weights_do_not_stop_the_job() -> None:
    assert run_ranks(_weights) == [4, 4]


class _Steep(nn.Module):
    """Gradients grow on their way back: finite in the last layer, where their norm overflows, NaN in the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, values: Tensor) -> Tensor:
        hidden = Scaled.apply(self.first(values), LARGE)  # type: ignore[no-untyped-call]
        return Scaled.apply(self.last(hidden), LARGE)  # type: ignore[no-any-return,no-untyped-call]


def _clipped_by_hand(rank: int, world_size: int) -> Any:
    model = fully_shard(_Steep())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    guard = NanGuard(model, optimizer, dump_dir=None)
    guard(torch.randn(8, 4)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    try:
        optimizer.step()
    except NonFiniteError as error:
        return [(site.layer, site.slot) for site in error.report.sites], str(error).splitlines()[0]
    return None


def test_a_norm_that_overflowed_is_not_named_beside_a_gradient_that_is_nan() -> None:
    """Though clipping has changed the gradients since, so that none of them can be looked at again."""
    (sites, first), _ = run_ranks(_clipped_by_hand)
    assert sites and not [site for site in sites if "last" in str(site)]
    assert "first" in first or "root" in first, first
