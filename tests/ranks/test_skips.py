"""What a skipped step leaves: scale, buffers, gradients that no optimizer owns, and the steps after it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import run_ranks
from tests.ranks.small import ended, guard_of, is_finite, rows, run_step, sgd, small_model, state_of
from tests.training import digest


def _skips_with_scaler(rank: int, num_optimizers: int, **kind: bool) -> Any:
    model = small_model()
    parts = [model.module[0], model.module[2]] if num_optimizers == 2 else [model]
    optimizers = [torch.optim.AdamW(part.parameters(), **kind) for part in parts]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    guard = guard_of(model, optimizers, scaler=scaler, on_fault="skip")
    seen = []
    for step in range(6):
        before = state_of(model)
        scaler.scale(guard(rows(rank == 1 and step in (1, 3, 4))).sum()).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        state = scaler.state_dict()
        seen.append((state["scale"], state["_growth_tracker"], state_of(model) != before))
        model.zero_grad()
    guard.close()
    return seen


def _all_skips_with_scaler(rank: int, world_size: int) -> Any:
    kinds = [(1, {"fused": True}), (2, {"fused": True}), (1, {"foreach": True}), (2, {"foreach": True})]
    return [_skips_with_scaler(rank, number, **kind) for number, kind in kinds]


def test_every_skip_leaves_scale_and_growth_tracker() -> None:
    trackers_and_moves = [(1, True), (1, False), (2, True), (2, False), (2, False), (3, True)]
    for runs in run_ranks(_all_skips_with_scaler):
        assert runs == [[(256.0, *pair) for pair in trackers_and_moves]] * 4


def _unowned(rank: int, world_size: int) -> Any:
    """An optimizer over the head only: nobody else clears the gradients of the body."""
    model = small_model()
    head = torch.optim.SGD(model.module[2].parameters(), lr=0.1)
    guard = guard_of(model, head, on_fault="skip")

    def train() -> None:
        for step in range(4):
            run_step(guard, head, rows(rank == 1 and step == 1))
        guard.close()

    skipped = ended(train), guard.step, is_finite(model)

    model = small_model()
    head = torch.optim.SGD(model.module[2].parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    guard = guard_of(model, head, scaler=scaler)

    def train_with_scaler() -> None:
        for step in range(2):
            loss = guard(rows(False)).sum()
            if rank == 1 and step == 1:
                loss = loss + torch.sqrt((model.module[0].weight * 0).sum())  # finite, its gradient is not
            scaler.scale(loss).backward()
            scaler.unscale_(head)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(head)
            scaler.update()

    return skipped, ended(train_with_scaler) is not None, is_finite(model)


def test_gradients_that_no_optimizer_owns() -> None:
    for skipped, stopped, finite in run_ranks(_unowned):
        assert skipped == (None, 4, True), "a skip clears them too"
        assert finite, "no scaler was going to skip this one"
        assert stopped


def _skip_in_window(rank: int, view: bool) -> list[str]:
    """A window of three micro-batches whose first is bad, against a run that never had it."""
    states = []
    for has_bad_window in (True, False):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        model = DistributedDataParallel(module, gradient_as_bucket_view=view)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        guard = guard_of(model, optimizer, on_fault="skip")
        for step in [0, 1, 2, 3] if has_bad_window else [0, 1, 3]:
            torch.manual_seed(100 * step + rank)
            for index in range(3):
                values = torch.randn(4, 4) / (0.0 if (rank, step, index) == (1, 2, 0) else 1.0)
                with model.no_sync() if index < 2 else contextlib.nullcontext():
                    guard(values).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        guard.close()
        moments = {str(i): digest(s["momentum_buffer"]) for i, s in enumerate(optimizer.state.values())}
        states.append(state_of(model) | moments)
    return [name for name in states[0] if states[0][name] != states[1][name]]


def _skip_in_windows(rank: int, world_size: int) -> list[list[str]]:
    return [_skip_in_window(rank, view) for view in (False, True)]


def test_after_a_skipped_window_all_is_as_if_it_had_never_been() -> None:
    assert run_ranks(_skip_in_windows) == [[[], []]] * 2


class _Counting(nn.Module):
    """Buffers of several kinds, changed by every forward, one of them replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("turns", torch.zeros((), dtype=torch.int64))
        self.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))
        self.register_buffer("moving", torch.zeros(2), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        self.turns += 1
        self.phase += 1j
        self.moving = self.moving + 1
        return self.linear(values)


def _skip_buffers(rank: int, world_size: int) -> list[str]:
    model = DistributedDataParallel(_Counting())
    optimizer = sgd(model)
    guard = guard_of(model, optimizer, on_fault="skip")
    run_step(guard, optimizer, rows(False))
    before = state_of(model)
    run_step(guard, optimizer, rows(rank == 1))
    after = state_of(model)
    guard.close()
    return [name for name in before if before[name] != after[name]]


def test_a_skip_puts_back_buffers_of_every_kind() -> None:
    assert run_ranks(_skip_buffers) == [[], []]
