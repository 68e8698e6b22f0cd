"""What engines need that own the loop: a batch begun by hand, a root that is the step, the loss of a scaler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.dump.read import open_dump


class OwnLoss(nn.Module):
    """Called with labels it calls itself for the output, and returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        if weight is None:
            return self.norm(self.linear(x))
        return (self(x) * weight).sum() / weight


def trained(directory: Path, *, step: int = 2, scaler: Any = None, **options: Any) -> tuple[NonFiniteError, nn.Module]:
    """Four steps, of which the one with this number divides 0 by 0; the error and the model."""
    torch.manual_seed(0)
    model = OwnLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, scaler=scaler, dump_dir=str(directory), **options)
    with pytest.raises(NonFiniteError) as caught:
        _train(guard, optimizer, scaler, step)
    return caught.value, model


def _train(guard: NanGuard, optimizer: torch.optim.Optimizer, scaler: Any, bad_step: int) -> None:
    for step in range(4):
        x, weight = guard.begin((torch.randn(3, 4), torch.zeros(()) if step == bad_step else torch.ones(())))
        if scaler is None:
            guard.run(lambda called, batch: called(*batch), (x, weight)).backward()
            optimizer.step()
        else:
            scaler.scale((guard(x) * weight).sum() / weight).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("root", "first_line"),
    [
        ("layer", "rank 0, step 2, micro-batch 0, forward: code of (root): a NaN value that no watched layer made"),
        ("step", "rank 0, step 2, micro-batch 0, loss: loss is NaN; the model's output was finite"),
    ],
)
def test_a_root_that_calls_itself_is_followed_as_what_it_is(tmp_path: Path, root: str, first_line: str) -> None:
    error, model = trained(tmp_path, root=root)
    first, *rows = str(error).splitlines()
    assert first == first_line
    assert any("return (self(x) * weight).sum() / weight" in row for row in rows)
    assert any(row.startswith("  again:    same") for row in rows)
    assert int(model.norm.num_batches_tracked) == 2  # as before the step, though the root is called within itself


def test_a_batch_that_was_begun_by_hand_is_the_one_in_the_dump(tmp_path: Path) -> None:
    error, _ = trained(tmp_path)
    assert error.report.dump_path is not None
    (micro_batch,) = open_dump([error.report.dump_path]).window(0)
    x, weight = micro_batch.batch
    assert x.shape == (3, 4) and weight == 0 and not micro_batch.is_of_call


def test_a_switched_off_guard_hands_the_batch_back() -> None:
    model = nn.Linear(2, 2)
    guard = NanGuard(model, torch.optim.SGD(model.parameters()), enabled=False)
    batch = object()
    assert guard.begin(batch) is batch


def test_the_loss_is_seen_where_a_scaler_scales_it(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu")
    error, _ = trained(tmp_path, scaler=scaler)
    assert str(error).splitlines()[0].endswith("loss: loss is NaN; the model's output was finite")
    assert error.report.origin is not None and error.report.origin.evidence is not None  # not scaled


def test_a_loss_that_the_loop_has_watched_is_not_looked_at_twice() -> None:
    model = nn.Linear(2, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    with NanGuard(model, optimizer, scaler=scaler, dump_dir=None) as guard:
        for batch in guard.steps([torch.ones(1, 2)]):
            loss = guard(batch).sum()
            guard.watch(total=loss)
            scaled = scaler.scale(loss)
            assert scaled == loss * scaler.get_scale()
            window = guard._context.window
            assert list(window.micro_batches[-1].losses) == ["total"]
    assert "scale" not in vars(scaler) and "step" not in vars(scaler)


def test_a_weight_that_was_written_after_the_update_fails_the_check_before_it_is_saved(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=str(tmp_path))
    for step in range(2):
        guard.run(lambda called, batch: called(batch).sum(), guard.begin(torch.ones(1, 2))).backward()
        optimizer.step()
        if step == 0:
            assert guard.check(checkpoint="saved/one.pt")
    with torch.no_grad():
        model.bias[1] = float("inf")
    with pytest.raises(NonFiniteError) as caught:
        guard.check(checkpoint="saved/two.pt")
    assert "state: bias is +Inf" in str(caught.value).splitlines()[0]
    notes = [note for note in caught.value.report.notes if "checkpoint" in note]
    assert notes == ["last checkpoint that was checked before it was saved: saved/one.pt (weights before step 1)"]


@pytest.mark.parametrize("value", [float("nan"), 1.0])
def test_an_interrupt_after_a_bad_update_leaves_nothing_to_be_saved(value: float) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((2,), -float("inf")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=None)
    guard.run(lambda called, batch: called(batch).sum(), guard.begin(torch.ones(1, 2))).backward()
    optimizer.step()
    with torch.no_grad():
        model.bias[1] = value
    assert guard.on_exception(KeyboardInterrupt()) == (value == 1)
    assert guard.on_exception(KeyboardInterrupt())  # a guard that has gone knows of nothing
