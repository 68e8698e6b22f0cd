"""`NanGuard.clip_grad_norm_`: torch's bits, one pass over the gradients less, and no fault that goes unseen."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_nanguard import NanGuard, NonFiniteError
from tests.ranks import run_ranks

KINDS = ("plain", "ddp", "fsdp1", "fsdp2")
WIDTH = 96  # its weights are too large to be rows, its biases are not


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(9)))


def _wrapped(kind: str) -> nn.Module:
    net = _net()
    if kind == "ddp":
        return DistributedDataParallel(net)
    if kind == "fsdp1":
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    return fully_shard(net) if kind == "fsdp2" else net


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _clipped(model: Any, kind: str, max_norm: float, norm_type: float) -> Any:
    if kind == "fsdp1":
        return model.clip_grad_norm_(max_norm, norm_type)
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)


def _trained(rank: int, world_size: int, kind: str, guarded: bool, norm_type: float, unscaled: bool) -> Any:
    model = _wrapped(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=None) if guarded else None
    totals, gradients = [], []
    for step in range(3):
        values = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        (guard or model)(values).pow(2).mean().backward()
        if unscaled:
            for parameter in model.parameters():
                parameter.grad = None if parameter.grad is None else parameter.grad * 0.5
        max_norm = 0.01 if step else 100.0
        total = guard.clip_grad_norm_(max_norm, norm_type) if guard else _clipped(model, kind, max_norm, norm_type)
        totals.append(_local(total).clone())
        gradients += [_local(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    if guard is not None:
        guard.close()
    return totals, gradients, [_local(p).detach().clone() for p in model.parameters()]


NORM_TYPES = (2.0, math.inf, 1.0, 0.0)


def _of_all_kinds_of_norms(rank: int, world_size: int, kind: str) -> dict[tuple[float, bool], Any]:
    """Of each norm, unscaled or not, what training gave without a guard and with one, in the same processes."""
    cases = [(norm_type, unscaled) for norm_type in NORM_TYPES for unscaled in (False, True)]
    cases = [case for case in cases if (kind, case[0]) != ("fsdp1", 0.0)]  # FSDP1 divides by the order
    return {
        (norm_type, unscaled): [
            _trained(rank, world_size, kind, guarded, norm_type, unscaled) for guarded in (False, True)
        ]
        for norm_type, unscaled in cases
    }


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_torch(kind: str) -> None:
    for found in run_ranks(_of_all_kinds_of_norms, 1 if kind == "plain" else 2, kind=kind, timeout_s=40):
        assert len(found) == (6 if kind == "fsdp1" else 8)
        for case, (theirs, mine) in found.items():
            for one, other in zip(mine, theirs, strict=True):
                assert len(one) == len(other) > 0
                assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True)), case


class _Readers(TorchDispatchMode):
    """Counts operators that read a whole gradient to reduce it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        if name in ("aten::_foreach_norm", "aten::linalg_vector_norm", "aten::aminmax"):
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.counts[name] += sum(_local(tensor).numel() >= WIDTH * WIDTH // 2 for tensor in tensors)
        return func(*args, **(kwargs or {}))


def _counted(rank: int, world_size: int, kind: str, unscaled: bool) -> Any:
    """Reads of weights' gradients by the verdict after torch's clipping, and after the guard's."""
    found = []
    for rides in (False, True):
        model = _wrapped(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = NanGuard(model, optimizer, dump_dir=None)
        for _ in range(2):
            optimizer.zero_grad()
            guard(torch.ones(2, WIDTH)).pow(2).mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.grad.mul_(0.5) if unscaled and parameter.grad is not None else None
            guard.clip_grad_norm_(0.01) if rides else _clipped(model, kind, 0.01, 2.0)
            with _Readers() as readers:
                guard.check()
        found.append(readers.counts.total())
        guard.close()
    return found


@pytest.mark.parametrize(
    ("kind", "unscaled", "expected"),
    [
        ("plain", False, [9, 0]),
        ("plain", True, [9, 0]),
        ("ddp", False, [9, 0]),
    ],
)
def test_clipped_gradients_are_not_read_again(kind: str, unscaled: bool, expected: list[int]) -> None:
    world_size = 1 if kind == "plain" else 2
    assert run_ranks(_counted, world_size, kind=kind, unscaled=unscaled) == [expected] * world_size


def _spoilt(rank: int, world_size: int, kind: str, norm_type: float, by_hand: bool) -> Any:
    model = _wrapped(kind)
    name = ""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=None)
    try:
        for step in range(3):
            values = torch.ones(2, WIDTH)
            if step == 2 and rank == 1 and not by_hand:
                values[0, 0] = math.inf
            guard(values).mean().backward()
            if step == 2 and by_hand and rank == 1:
                gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
                name, gradient = [(n, g) for n, g in gradients.items() if _local(g).numel()][-1]
                _local(gradient).view(-1)[:1] = math.inf
            guard.clip_grad_norm_(0.1, norm_type)
            optimizer.step()
            optimizer.zero_grad()
    except NonFiniteError as error:
        origin = error.report.origin
        assert origin is not None
        return step, origin.rank, str(origin.phase), origin.slot, name
    return None


@pytest.mark.parametrize(("kind", "norm_type"), [("ddp", 2.0), ("ddp", 0.0), ("fsdp1", 2.0), ("fsdp2", 2.0)])
def test_a_fault_is_seen_all_the_same(kind: str, norm_type: float) -> None:
    for found in run_ranks(_spoilt, kind=kind, norm_type=norm_type, by_hand=False):
        assert found[:3] == (2, 1, "input"), found


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_a_gradient_that_the_loop_spoils_before_it_is_named(kind: str) -> None:
    for found in run_ranks(_spoilt, kind=kind, norm_type=2.0, by_hand=True):
        assert found[:3] == (2, 1, "loop"), found
    assert found[3] == found[4].replace("_fsdp_wrapped_module.", "").replace("module.", ""), found
