"""Gradients that code of the job makes: by ``autograd.grad``, after ``unscale_``, and in hooks on tensors."""

import contextlib
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_nanguard import NanGuard, NonFiniteError
from tests.ranks import run_ranks

BAD_STEP = 2


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def train_step(model: Any, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def _assigned(rank: int, name: str) -> dict[str, Any] | None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    guard = NanGuard(net, optimizer, group=dist.group.WORLD, dump_dir=None)
    try:
        for step in range(4):
            loss = train_step(guard, torch.ones(3, 4))
            if name == "backward" and step == BAD_STEP and rank == 1:
                loss = (loss * 0).sqrt()
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            scale = 0.0 if name == "projected" and step == BAD_STEP else 1.0
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter.grad = gradient / scale
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
    except NonFiniteError as error:
        return error.report.to_dict()
    finally:
        guard.close()
    return None


def _jobs(rank: int, world_size: int) -> dict[str, Any]:
    return {name: _assigned(rank, name) for name in ("projected", "backward")}


def test_gradients_that_the_loop_assigns_are_told_from_those_of_a_backward() -> None:
    first, second = run_ranks(_jobs)
    assert first == second
    projected, backward = first["projected"], first["backward"]
    assert (projected["origin"]["phase"], projected["second_look"]["outcome"]) == ("loop", "same")
    assert projected["cause"].startswith("code after the backward: ")
    # where one rank's own backward is bad, the others had it by the loop's all-reduce
    origin = backward["origin"]
    assert (origin["rank"], origin["phase"], origin["micro_batch"]) == (1, "backward", 0)


def _with_a_scaler(guard: NanGuard, optimizer: torch.optim.Optimizer, scaler: Any, gradient_of: nn.Parameter) -> None:
    for step in range(4):
        scaler.scale(train_step(guard, torch.ones(3, 4))).backward()
        assert gradient_of.grad is not None
        if step == 1:
            gradient_of.grad.fill_(math.inf)  # before it looks: an overflow, which it skips
        scaler.unscale_(optimizer)
        if step == BAD_STEP:
            gradient_of.grad.fill_(math.nan)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def test_gradients_that_the_loop_spoils_after_a_scaler_has_unscaled_them_stop_the_job() -> None:
    net, scaler = _net(), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    guard = NanGuard(net, optimizer, scaler=scaler, dump_dir=None)
    with pytest.raises(NonFiniteError) as stopped:
        _with_a_scaler(guard, optimizer, scaler, dict(net.named_parameters())["2.bias"])
    guard.close()
    report = stopped.value.report
    assert report.origin is not None
    assert (report.step, report.origin.phase, report.origin.slot) == (BAD_STEP, "loop", "2.bias")
    assert all(bool(parameter.isfinite().all()) for parameter in net.parameters())


class _Hooked(nn.Module):
    """A hook on the output of one of its layers, or on a tensor between them, divides the gradient by ``divisor``."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.a, self.b, self.place, self.divisor = nn.Linear(4, 4), nn.Linear(4, 1), place, 1.0

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.a(values)
        hidden = self._hooked(hidden * 2 if self.place == "between" else hidden, self.place != "output")
        return self._hooked(self.b(hidden), self.place == "output")

    def _hooked(self, values: Tensor, is_here: bool) -> Tensor:
        if is_here and values.requires_grad:
            values.register_hook(self._divided)
        return values

    def _divided(self, gradient: Tensor) -> Tensor:
        return gradient / self.divisor


def _trained(net: _Hooked) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with contextlib.closing(NanGuard(net, optimizer, dump_dir=None)) as guard:
        for step in range(4):
            net.divisor = 0.0 if step == BAD_STEP else 1.0
            train_step(guard, torch.ones(3, 4)).backward()  # type: ignore[no-untyped-call]  # torch's own
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("layer", {"layer": "", "after": None, "before": "a"}),
        ("between", {"layer": "", "after": "b", "before": None}),
        ("output", {"layer": "", "after": None, "before": "b"}),
    ],
)
def test_no_layer_is_named_for_what_a_hook_on_a_tensor_made(place: str, code: dict[str, str | None]) -> None:
    with pytest.raises(NonFiniteError) as stopped:
        _trained(_Hooked(place))
    report = stopped.value.report.to_dict()
    assert report["origin"]["inline_code"] == code
    operator = report["second_look"]["operator"]
    assert operator["line"].endswith("in _Hooked._divided")
    assert operator["in_backward"] is False  # the line itself ran there, not the backward of it
