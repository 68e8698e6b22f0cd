"""Local gradients that wait for the end of the backward give the same answers as those looked at in their hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.probes.gradient import GradientProbe
from ddp_nanguard.wrappers import wrapper_of
from ddp_nanguard.wrappers.plain import PlainWrapper
from tests.ranks import run_ranks
from tests.training import Loop

FAULT_STEP = 2
MARK = 64.0
"""A batch that holds it spoils the gradient of one weight."""


class Scaling(torch.autograd.Function):
    """A product whose weight gets a NaN gradient while the input gets a good one."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, is_bad: bool) -> Tensor:
        ctx.save_for_backward(values, weight)
        ctx.is_bad = is_bad
        return values * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        values, weight = ctx.saved_tensors
        own = (gradient * values).sum(0)
        return gradient * weight, own * float("nan") if ctx.is_bad else own, None


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.is_bad = False

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = Scaling.apply(values, self.weight, self.is_bad)
        return out


class Net(nn.Module):
    """The first half may be checkpointed, by a pass within the pass."""

    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.first, self.scale, self.last = nn.Linear(4, 4), Scale(), nn.Linear(4, 2)
        self.is_checkpointed = is_checkpointed

    def forward(self, values: Tensor) -> Tensor:
        self.scale.is_bad = bool((values == MARK).any())
        if not self.is_checkpointed:
            return self.last(self._half(values))
        return self.last(checkpoint(self._half, values.requires_grad_(), use_reentrant=True))

    def _half(self, values: Tensor) -> Tensor:
        return self.scale(torch.tanh(self.first(values)))


def _wrapped(kind: str, net: Net) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(net)
    if kind == "ddp views":
        return DistributedDataParallel(net, gradient_as_bucket_view=True)
    return fully_shard(net) if kind == "fsdp2" else net


def _batches(rank: int) -> list[Tensor]:
    batches = [torch.rand(3, 4, generator=torch.Generator().manual_seed(step)) for step in range(4)]
    if rank == 1:
        batches[FAULT_STEP][0, 0] = MARK
    return batches


def _labels(guard: Any) -> list[str]:
    """What the slots of the window are of, in execution order."""
    sources = [stats.source for stats in guard._context.slots.slot_stats()]
    found = [getattr(source, "name", None) or f"{type(source).__name__} {source.call.layer}" for source in sources]
    return [label for label in found if label != "loss"]


def _trained(rank: int, world_size: int, kind: str, waits: bool, is_checkpointed: bool = False) -> Any:
    torch.manual_seed(0)
    model = _wrapped(kind, Net(is_checkpointed))
    if not waits:
        type(wrapper_of(model)).pending_gradient_bytes = lambda wrapper: 0  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=None, layers="every")
    orders: list[list[str]] = []
    waited = 0
    rescan = guard._context.gradient.flush_pending

    def counted() -> None:
        nonlocal waited
        waited += len(guard._context.gradient._pending)
        rescan()

    guard._context.gradient.flush_pending = counted  # type: ignore[method-assign]
    loop = Loop(model, optimizer, _mean_square, guard=guard, call=model)
    loop.before_update = lambda _: orders.append(_labels(guard))
    error = loop.until_fault(_batches(rank if world_size > 1 else 1))
    assert error is not None, "the guard has not stopped"
    return error.report.to_dict(), orders, waited


def _mean_square(model: Any, batch: Tensor) -> Tensor:
    return model(batch).pow(2).mean()  # type: ignore[no-any-return]  # modules return Any


def _answer(report: dict[str, Any]) -> dict[str, Any]:
    return {key: report[key] for key in ("step", "origin", "sites", "ranks_affected")}


def _guilty(report: dict[str, Any]) -> set[tuple[int, str]]:
    return {(site["rank"], site["slot"]) for site in report["sites"] if site["phase"] == "backward"}


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp2"])
def test_what_waits_is_told_like_what_does_not(kind: str) -> None:
    world_size = 1 if kind == "plain" else 2
    waiting = run_ranks(_trained, world_size, kind=kind, waits=True)
    at_once = run_ranks(_trained, world_size, kind=kind, waits=False)
    for (report, orders, waited), (other, other_orders, none_waited) in zip(waiting, at_once, strict=True):
        assert waited == 5 * (FAULT_STEP + 1) and none_waited == 0
        assert orders == other_orders
        assert _answer(report) == _answer(other)
        origin = report["origin"]
        assert (origin["phase"], origin["layer"], origin["slot"]) == ("backward", "scale", "scale.weight")
        assert (report["step"], origin["rank"]) == (FAULT_STEP, world_size - 1)
        assert origin["input_kind"] is None, "the gradient of its output was looked at and finite"


def test_views_of_ddps_buckets_do_not_wait() -> None:
    for report, _, waited in run_ranks(_trained, kind="ddp views", waits=True):
        assert waited == 0
        assert _guilty(report) == {(1, "scale.weight")}


def test_a_pass_within_the_pass_shows_what_was_local() -> None:
    for report, _, waited in run_ranks(_trained, kind="ddp", waits=True, is_checkpointed=True):
        assert waited == 2 * (FAULT_STEP + 1), "those of the last layer, which ran outside of the checkpoint"
        assert _guilty(report) == {(1, "scale.weight")}, "DDP's mean, put back by the inner pass, is no rank's own"


def _limited(rank: int, world_size: int, limit: int) -> Any:
    PlainWrapper.pending_gradient_bytes = lambda wrapper: limit  # type: ignore[method-assign]
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)), nn.Linear(8, 64, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=None, layers="every")
    see, held = GradientProbe.probe_local, []

    def watched(probe: GradientProbe, name: str, gradient: Tensor) -> None:
        see(probe, name, gradient)
        held.append(sum(kept.nbytes for kept in probe._pending))

    guard._context.local_gradients.on_gradient = lambda *args: watched(guard._context.gradient, *args)
    model(torch.rand(2, 8)).sum().backward()
    names = [getattr(stats.source, "name", "") for stats in guard._context.slots.slot_stats()]
    guard.close()
    return held, [name for name in names if name]


def test_what_would_be_freed_waits_up_to_a_limit() -> None:
    ((held, names),) = run_ranks(_limited, 1, limit=3 * 8 * 8 * 4)
    assert held == [0, 256, 512, 768, 0], "the first is larger than the limit, the last no longer fits"
    local = [name for name in names if name.endswith("weight")][-5:]
    assert local == ["4.weight", "3.weight", "2.weight", "1.weight", "0.weight"]


class _Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise KeyError("of the user's own")


def _raised(rank: int, world_size: int) -> Any:
    model = Net()
    guard = NanGuard(model, torch.optim.SGD(model.parameters(), lr=0.1), dump_dir=None, layers="every")
    model.first.register_forward_hook(lambda module, args, output: _Raising.apply(output))
    saw = []
    for value in (1.0, MARK):
        with pytest.raises(KeyError) as raised:
            guard(torch.full((3, 4), value)).sum().backward()
        saw.append(guard._policy.has_findings(guard._monitor.record(), raised.value))
    with pytest.raises(NonFiniteError):  # the window is open, and what it holds is bad
        guard.close()
    return saw


def test_a_backward_that_raises_leaves_what_has_waited() -> None:
    assert run_ranks(_raised, 1) == [[False, True]]
