"""Where a second look cannot know the place it names none, and a value is told on the rank that made it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard, NonFiniteError
from tests.ranks import run_ranks

WIDTH = 4
BATCH = 3
FAULT_AT = 2


class Net(nn.Module):
    """Divides by what it is given; ``kept`` is a tensor that it keeps from step to step, as recurrent models do."""

    def __init__(self, keeps: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kept = torch.zeros(BATCH, WIDTH)
        self.keeps = keeps

    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        hidden = self.b(self.a(values) + self.kept) / divisor
        if self.keeps:
            self.kept = hidden.detach()
        return hidden


def _batches(bad: bool) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(3)
    zero = [torch.tensor(float(not (bad and index == FAULT_AT))) for index in range(FAULT_AT + 1)]
    return [(torch.randn(BATCH, WIDTH, generator=made), divisor) for divisor in zero]


def _raised(net: nn.Module, step: Callable[[Any, Any, NanGuard], Tensor], batches: list[Any], **options: Any) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with NanGuard(net, optimizer, **options) as guard:
        for batch in guard.steps(batches):
            try:
                step(net, batch, guard).backward()
                optimizer.step()
            except NonFiniteError as error:
                return error.report.to_dict()
            optimizer.zero_grad()
    return None


def _watched(guard: NanGuard, loss: Tensor) -> Tensor:
    guard.watch(loss=loss)
    return loss


def _of_a_call(net: Any, batch: Any, guard: NanGuard) -> Tensor:
    return _watched(guard, guard(*batch).square().mean())


def _of_a_call_without_square(net: Any, batch: Any, guard: NanGuard) -> Tensor:
    return _watched(guard, guard(*batch).mean())


def _made_before(net: Any, batch: Any, guard: NanGuard) -> Tensor:
    return _watched(guard, guard(batch[0] / batch[1], torch.ones(())).square().mean())


def _evaluated(net: Any, batch: Any, guard: NanGuard) -> Tensor:
    loss = _of_a_call(net, batch, guard)
    net.eval() if float(batch[1]) == 0.0 else net.train()
    return loss


class Negative(Net):
    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        return self.a(values).abs().neg() / divisor  # type: ignore[no-any-return]


def _in_place(net: Any, batch: Any, guard: NanGuard) -> Tensor:
    def step(model: Any, given: Any) -> Tensor:
        given[0].div_(given[1])
        return model(given[0], torch.ones(())).square().mean()  # type: ignore[no-any-return]

    return guard.run(step, batch)  # type: ignore[no-any-return]


def test_a_tensor_that_the_model_keeps_is_bad_before_the_second_run() -> None:
    report = _raised(Net(keeps=True), _of_a_call, _batches(True), dump_dir=None)
    assert report["second_look"]["operator"] is None
    assert report["origin"]["phase"] == "loss", "of the second run's places none is true"
    assert report["second_look"]["text"].endswith("where it began is not known")
    assert report["cause"] == "unknown"


def test_what_the_loop_made_is_not_laid_on_the_operator_that_reads_it() -> None:
    report = _raised(Net(), _made_before, _batches(True), dump_dir=None)
    assert report["second_look"]["operator"] is None and report["cause"] == "unknown"
    code = report["origin"]["inline_code"]
    assert (code["layer"], code["after"], code["before"]) == (None, "batch", "")


def test_a_loss_of_minus_infinity_that_the_model_gave_is_told_where_the_model_made_it() -> None:
    report = _raised(Negative(), _of_a_call_without_square, _batches(True), dump_dir=None)
    origin, look = report["origin"], report["second_look"]
    assert (origin["phase"], origin["kind"], origin["input_kind"]) == ("loss", "-inf", "-inf")
    assert (look["text"], look["operator"]["name"]) == ("same: deterministic", "aten.div.Tensor")
    assert report["cause"].startswith("division by zero: x/0 in `self.a(values).abs().neg() / divisor`")


def test_another_mode_since_is_no_second_look() -> None:
    report = _raised(Net(), _evaluated, _batches(True), dump_dir=None)
    look = report["second_look"]
    assert (look["outcome"], look["operator"]) == ("not_done", None)
    assert "model.train() or model.eval() was called after the forward" in look["text"]


@pytest.mark.parametrize("copies", [False, True])
def test_copies_of_a_batch_that_the_step_changes_are_run_again(copies: bool) -> None:
    report = _raised(Net(), _in_place, _batches(True), dump_dir=None, copy_batch=copies)
    look = report["second_look"]
    if not copies:
        assert look["outcome"] == "not_done" and "copy_batch=True" in look["text"]
        return
    assert look["outcome"] == "same" and look["operator"]["name"] == "aten.div_.Tensor"
    assert look["operator"]["code"] == "given[0].div_(given[1])"


def _contrast(rank: int, world_size: int, directory: str) -> Any:
    torch.manual_seed(1)

    def step(model: Any, batch: Any) -> Tensor:
        return torch.cat(all_gather(model(*batch))).square().mean()  # type: ignore[no-untyped-call,no-any-return]

    def run(net: Any, batch: Any, guard: NanGuard) -> Tensor:
        return guard.run(step, batch)  # type: ignore[no-any-return]

    return _raised(DistributedDataParallel(Net()), run, _batches(rank == 1), dump_dir=directory)


def test_a_value_that_all_ranks_gather_is_told_on_the_rank_that_made_it(tmp_path: Path) -> None:
    for report in run_ranks(_contrast, directory=str(tmp_path)):
        operator = report["second_look"]["operator"]
        assert (operator["rank"], operator["name"]) == (1, "aten.div.Tensor")
        assert report["origin"]["rank"] == 1
        assert report["cause"].startswith("division by zero")
