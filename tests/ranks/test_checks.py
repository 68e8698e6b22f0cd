"""Calls between the steps: evaluation, `check()` anywhere, and buffers of compiled models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import run_ranks
from tests.ranks.small import INF, NAN, ended, guard_of, rows, run_step, sgd, small_model, state_of
from tests.training import digest


def _compiled(rank: int, world_size: int) -> Any:
    from ddp_nanguard import NonFiniteError

    model = DistributedDataParallel(
        torch.compile(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), backend="eager")
    )
    optimizer = sgd(model)
    guard = guard_of(model, optimizer, on_fault="skip", layers="every")
    run_step(guard, optimizer, torch.randn(4, 4))
    before = state_of(model)
    (guard(torch.randn(4, 4)).sum() * (INF if rank == 1 else 1.0)).backward()
    optimizer.step()
    moved = [name for name, value in state_of(model).items() if before[name] != value]
    optimizer.zero_grad()
    guard.close()
    guard = guard_of(model, optimizer, layers="every")
    try:
        for step in range(3):
            run_step(guard, optimizer, torch.randn(4, 4) / (0.0 if rank == 1 and step == 1 else 1.0))
    except NonFiniteError as error:
        return moved, error.report.to_dict()["origin"]["phase"], str(error), bool(error.report.unchecked)
    return moved, None, "", False


def test_buffers_of_a_compiled_model() -> None:
    """They are spoilt by the step's own forward, not before it; a skip puts them back."""
    for moved, phase, text, says_unchecked in run_ranks(_compiled, timeout_s=40):
        assert not says_unchecked, "the second guard has its hooks compiled in anew"
        assert phase is not None
        assert phase != "state", text
        assert moved == []


def _evaluated(rank: int, world_size: int) -> Any:
    """An encoder evaluated in every way that does not go through the guard."""
    shown = []
    for guarded in (False, True):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        model = DistributedDataParallel(nn.TransformerEncoder(layer, 2))
        optimizer = sgd(model)
        guard = guard_of(model, optimizer) if guarded else None
        outputs = []
        for _ in range(2):
            run_step(guard or model, optimizer, torch.randn(2, 5, 8))
            model.eval()
            mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
            with torch.no_grad():
                values = torch.randn(2, 5, 8)
                for part in (guard or model, model, model.module, model.module.layers[0]):
                    outputs.append(digest(part(values, src_key_padding_mask=mask)))
            model.train()
        if guard is not None:
            guard.close()
        shown.append(outputs)
    return shown


def test_an_encoder_evaluated_between_steps_gives_the_same_bits() -> None:
    for unguarded, guarded in run_ranks(_evaluated):
        assert guarded == unguarded


def _checked(rank: int, world_size: int) -> Any:
    from ddp_nanguard import NonFiniteError

    model = small_model(norm=True)
    optimizer = sgd(model)
    guard = guard_of(model, optimizer)

    def train() -> None:
        for _ in range(3):
            with torch.inference_mode():
                guard.check()  # before a checkpoint, after an evaluation
            run_step(guard, optimizer, torch.randn(4, 4))
        with torch.inference_mode():
            guard.close()

    in_inference = ended(train), guard.step
    model = small_model()
    optimizer = sgd(model)
    guard = guard_of(model, optimizer)
    try:
        for step, values in enumerate(guard.steps([rows(False)] * 4)):
            loss = guard(values).sum()
            guard.watch(loss=loss)
            if not guard.check():  # so that all ranks skip together, before anyone's backward
                continue
            (loss * (NAN if rank == 1 and step == 2 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    except NonFiniteError as error:
        return in_inference, error.report.step
    return in_inference, None


def test_a_check_may_fall_anywhere() -> None:
    for in_inference, stopped_in in run_ranks(_checked):
        assert in_inference == (None, 3)
        assert stopped_in == 2, "a check before the backward is no step of its own"
