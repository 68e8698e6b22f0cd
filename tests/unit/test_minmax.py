"""Counts and ends of tensors, against torch's own over the whole; their memory; what a collective writes to."""

from __future__ import annotations

import math
import random
import resource
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from ddp_nanguard.probes.slot_roles import SlotRole
from ddp_nanguard.probes.slots import SlotBuffer
from ddp_nanguard.tensors import minmax
from ddp_nanguard.tensors.minmax import compact, dense_parts, evidence, kind_in
from tests.ranks import run_ranks

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
VIEWS: list[Any] = [
    lambda t: t,
    lambda t: t.transpose(0, -1),
    lambda t: t[..., ::2],
    lambda t: t[:1].expand(3, *t.shape[1:]),
]


def _drawn(draw: random.Random) -> Tensor:
    shape = [draw.randint(1, 5) for _ in range(draw.randint(0, 4))]
    tensor = torch.randn(shape).to(draw.choice(DTYPES))
    for _ in range(draw.randint(0, 3)):
        tensor.view(-1)[draw.randrange(tensor.numel())] = draw.choice([math.nan, math.inf, -math.inf])
    view: Tensor = draw.choice(VIEWS)(tensor) if shape else tensor
    return view


def test_counts_in_pieces_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minmax, "_PIECE", 7)
    monkeypatch.setattr(minmax, "_LARGE", 10)
    draw = random.Random(0)
    for _ in range(800):
        tensor = _drawn(draw)
        flat, finite = tensor.flatten(), tensor.flatten().isfinite()
        bad = tensor.isfinite().logical_not().nonzero()
        found = evidence(tensor)
        assert found is not None
        assert found.num_nan == flat.isnan().sum() and found.numel == flat.numel()
        assert (found.num_inf, found.num_neg_inf) == (flat.isposinf().sum(), flat.isneginf().sum())
        assert found.largest_finite == (flat[finite].abs().max() if finite.any() else None)
        assert found.first == (tuple(bad[0].tolist()) if len(bad) and tensor.dim() else None)
        (low, high), (own_low, own_high) = torch.aminmax(tensor.contiguous()), torch.aminmax(compact(tensor))
        assert torch.equal(low.nan_to_num(7), own_low.nan_to_num(7))
        assert torch.equal(high.nan_to_num(7), own_high.nan_to_num(7))


def _grown(look: Any) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    look()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def _memory(rank: int, world_size: int) -> dict[str, int]:
    """KiB by which the process grows."""
    large = torch.zeros(2**25)
    mask = torch.zeros(1024, 1024, dtype=torch.bfloat16).expand(16, 16, 1024, 1024)
    queries = torch.zeros(64, 1024, 3 * 256)[..., :256]
    found = {"clean": _grown(lambda: kind_in(large))}
    large[5] = math.nan
    slots = SlotBuffer(history=1)
    found["mask"] = _grown(lambda: slots.reduce(SlotRole.EVIDENCE, mask, "mask"))
    found["slice"] = _grown(lambda: slots.reduce(SlotRole.EVIDENCE, queries, "slice"))
    found["bad"] = _grown(lambda: evidence(large))
    return found


def test_no_look_takes_memory_of_the_size_of_its_tensor() -> None:
    ((found),) = run_ranks(_memory, 1, process_group=False)
    assert all(grown < 8 * 1024 for name, grown in found.items() if name != "bad"), found
    assert found["bad"] < 64 * 1024, found


def test_what_is_in_flight_is_left_alone_as_evidence_and_waited_for_by_a_verdict() -> None:
    slots = SlotBuffer(history=1)
    tensor = AsyncCollectiveTensor(torch.tensor([math.nan]))
    assert dense_parts(tensor) is None and evidence(tensor) is None
    assert slots.reduce(SlotRole.EVIDENCE, tensor, "evidence") is None
    assert not tensor.completed
    slots.reduce(SlotRole.LOSS, tensor, "loss")
    assert tensor.completed
    assert [stats.source for stats in slots.slot_stats()] == ["loss"]
    assert kind_in(tensor) == "nan"
