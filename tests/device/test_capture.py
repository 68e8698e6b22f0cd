"""Captured graphs: nothing of the guard goes into one, and what a replay makes is looked at by `guard.check`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks

from . import jobs

STEPS, BAD_STEP = 6, 3


def _captured_whole(rank: int, world_size: int) -> Any:
    """A whole step in a graph, captured before the guard is made; `check` after each replay."""
    from ddp_nanguard import NanGuard, NonFiniteError

    device = jobs.device_of(rank)
    model = jobs.wrapped("plain", device, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    values, divisor = next(jobs.batches(device, 1))

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss: torch.Tensor = model(values, divisor).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    guard = NanGuard(model, optimizer, dump_dir=None)
    kept: list[list[torch.Tensor]] = []
    try:
        for values_now, divisor_now in guard.steps(list(jobs.batches(device, STEPS, bad=BAD_STEP))):
            values.copy_(values_now)
            divisor.copy_(divisor_now)
            graph.replay()
            guard.watch(loss=loss)
            guard.check()
            kept.append([parameter.detach().cpu() for parameter in model.parameters()])
    except NonFiniteError as error:
        return str(error), error.report.to_dict()["origin"], guard.step, kept
    return "nothing", None, guard.step, kept


def test_a_captured_step_is_judged_between_its_replays(simulated: str) -> None:
    ((text, origin, step, kept),) = run_ranks(_captured_whole, 1, 60, device=simulated)
    assert (origin["step"], origin["kind"]) == (BAD_STEP, "nan"), text
    assert origin["phase"] == "loss"
    assert step == BAD_STEP
    assert len(kept) == BAD_STEP and not torch.equal(kept[0][0], kept[1][0])


def _captured_with_hooks(rank: int, world_size: int) -> Any:
    """Forward and backward captured while the hooks are on: a layer with a legal -inf, replayed into later steps."""
    from ddp_nanguard import NanGuard

    from . import simulated_cuda

    device = jobs.device_of(rank)
    model = jobs.wrapped("plain", device, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guard = NanGuard(model, optimizer, dump_dir=None, layers="every")
    batches = list(jobs.batches(device, STEPS))
    for batch in batches[:2]:
        jobs.train(guard, optimizer, batch)
    slots = guard._context.slots
    seen = slots.slot_stats()  # of the last update, which the next verdict judges
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    graph, launched = torch.cuda.CUDAGraph(), []
    for enabled in (True, False):
        if not enabled:
            guard.close()
        with simulated_cuda.logging() as log, torch.cuda.graph(graph):
            loss = model(*batches[2]).square().mean()
            guard.watch(loss=loss)
            loss.backward()
        launched.append(log.kernels())
        for name, parameter in model.named_parameters():
            parameter.grad = before[name]
        if enabled:
            assert slots.slot_stats() == seen and not guard._context.window.micro_batches
    return launched


def test_hooks_put_nothing_into_a_graph(simulated: str) -> None:
    ((guarded, unguarded),) = run_ranks(_captured_with_hooks, 1, 60, device=simulated)
    assert guarded == unguarded


def _captured_block(rank: int, world_size: int) -> Any:
    """``make_graphed_callables`` of one block; the optimizer steps as ever."""
    from ddp_nanguard import NanGuard, NonFiniteError

    device = jobs.device_of(rank)
    ends = []
    for enabled, bad in ((False, None), (True, None), (True, BAD_STEP)):
        model: Any = jobs.wrapped("plain", device, 2)
        sample = torch.randn(4, 5, jobs.SIZE, device=device, requires_grad=True)
        model.blocks[0] = torch.cuda.make_graphed_callables(model.blocks[0], (sample,))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        guard = NanGuard(model, optimizer, dump_dir=None, enabled=enabled, layers="every")
        try:
            batches = list(jobs.batches(device, STEPS))
            if bad is not None:
                batches[bad][0][0, 0, 0] = math.nan
            for batch in guard.steps(batches):
                jobs.train(guard, optimizer, batch)
        except NonFiniteError as error:
            ends.append((error.report.to_dict()["origin"], str(error)))
        else:
            ends.append([parameter.detach().cpu() for parameter in model.parameters()])
        guard.close()
    return ends


def test_a_graphed_block_trains_the_same_and_bad_input_is_named(simulated: str) -> None:
    ((without, guarded, (origin, text)),) = run_ranks(_captured_block, 1, 60, device=simulated)
    assert all(torch.equal(one, other) for one, other in zip(without, guarded, strict=True))
    assert (origin["step"], origin["phase"]) == (BAD_STEP, "input"), text


def _verdict_in_a_capture(rank: int, world_size: int) -> str:
    from ddp_nanguard import NanGuard

    device = jobs.device_of(rank)
    model = nn.Linear(2, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=None)
    with pytest.raises(ValueError, match="cannot be captured") as caught, torch.cuda.graph(torch.cuda.CUDAGraph()):
        guard.check()
    with pytest.raises(ValueError, match="cannot be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    return str(caught.value)


def test_a_verdict_in_a_capture_is_one_clear_error(simulated: str) -> None:
    ((text),) = run_ranks(_verdict_in_a_capture, 1, 60, device=simulated)
    assert "guard.check() after each replay" in text
