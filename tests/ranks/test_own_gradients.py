"""Gradients that the loop itself puts on parameters: after ``autograd.grad``, and after a scaler has unscaled them."""

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
