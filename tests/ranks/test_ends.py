"""How a process ends: by an error that `close` raises, by the job's own error, with several guards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import run_ranks_raw

BAD_STEP, EXIT_CODE = 2, 65


def _ended(rank: int, world_size: int, dump_dir: str, how: str) -> None:
    """Rank 1's batch is bad in step `BAD_STEP`; what happens then is ``how``."""
    from ddp_nanguard import NanGuard

    torch.manual_seed(0)
    model, other = (DistributedDataParallel(nn.Linear(4, 4)) for _ in range(2))
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    policy = "warn" if how == "let through" else "stop"
    options: dict[str, Any] = {"dump_dir": dump_dir, "timeout_s": 10, "on_fault": policy}
    guards = [NanGuard(model, optimizer, **options)]
    if how == "two guards":
        guards.append(NanGuard(other, optimizer, **options))

    def loss_of(step: int) -> Tensor:
        batch = torch.full((2, 4), float("nan") if (rank, step) == (1, BAD_STEP) else 1.0)
        output: Tensor = guards[-1](torch.ones(2, 4)) if how == "two guards" else guards[0](torch.ones(2, 4))
        return (guards[0](output) - batch).square().mean() if how == "two guards" else (output - batch).square().mean()

    def train() -> None:
        for step in range(BAD_STEP + 2):
            loss = loss_of(step)
            guards[-1].watch(loss=loss)
            loss.backward()
            if how == "close" and step == BAD_STEP:
                return
            if how in ("finally", "two guards") and step == BAD_STEP:
                raise RuntimeError("the job's own")
            optimizer.step()
            optimizer.zero_grad()
            if not all(bool(parameter.isfinite().all()) for parameter in model.parameters()):
                raise RuntimeError("the job's own")

    try:
        train()
    finally:
        if how in ("close", "finally"):
            guards[0].close()


EXPECTED = {
    "close": "NonFiniteError: rank 1, step 2, micro-batch 0, loss: loss is NaN",
    "finally": "rank 0 raised RuntimeError on its own, rank 1 raised RuntimeError on its own",
    "two guards": "rank 0 raised RuntimeError on its own, rank 1 raised RuntimeError on its own",
    "let through": "used gradients that were known to be bad and were let through",
}


@pytest.mark.parametrize("how", EXPECTED)
def test_all_ranks_end_with_the_code_one_text_and_one_dump(how: str, tmp_path: Path) -> None:
    dumps = tmp_path / "dumps"
    outcomes = run_ranks_raw(_ended, 2, 40, through_excepthook=True, dump_dir=str(dumps), how=how)
    told = "\n".join(outcome.describe() for outcome in outcomes)
    assert [outcome.exit_code for outcome in outcomes] == [EXIT_CODE, EXIT_CODE], told
    assert all(EXPECTED[how] in outcome.output for outcome in outcomes), told
    assert len([path for path in dumps.iterdir() if path.is_dir() and not path.is_symlink()]) == 1, told
