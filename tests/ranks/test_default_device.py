"""Jobs that have set another default device and dtype: guarded, stopped, dumped and replayed as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard.dump import open_dump
from tests.ranks import run_ranks
from tests.ranks.small import ended, guard_of
from tests.replaying import replay_alone


def recipe() -> Any:
    from ddp_nanguard import Recipe

    model = _model()
    _set_defaults()  # from here on, in the whole replay
    return Recipe(model=model, step=_step, optimizer=_adamw)


def _set_defaults() -> None:
    """A meta tensor holds nothing: whatever is made on the default device by mistake is noticed."""
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.bfloat16)


def _model() -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cpu"):
        layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)]
        return nn.Sequential(*layers).float()


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def _step(model: Any, batch: dict[str, Tensor]) -> Tensor:
    weights = batch["weights"].to_dense() + batch["parts"].to_padded_tensor(0.0)
    return (model(batch["rows"]).sum(1) * weights.sum(1)).sum()


def _batch(bad: bool) -> dict[str, Tensor]:
    with torch.device("cpu"):
        rows = torch.ones(2, 4, dtype=torch.float32) / (0.0 if bad else 1.0)
        weights = torch.eye(2, dtype=torch.float32)
        parts = torch.nested.nested_tensor([weights[0], weights[1]], dtype=torch.float32)
        return {"rows": rows, "weights": weights.to_sparse(), "parts": parts}


def _train(rank: int, world_size: int, dump_dir: str) -> str | None:
    model = DistributedDataParallel(_model())
    optimizer = _adamw(model.parameters())
    batches = [_batch(rank == 1 and step == 2) for step in range(3)]
    _set_defaults()
    guard = guard_of(
        model, optimizer, dump_dir=dump_dir, replay=f"{__name__}:recipe", layers="every", grad_norm_warn=1e9
    )

    def train() -> None:
        for batch in guard.steps(batches):
            loss = _step(guard, batch)
            guard.watch(loss=loss, number=1.0)
            loss.backward()
            guard.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    return ended(train)


def test_defaults_of_the_job_are_nothing_to_guard_dump_and_replay(tmp_path: Path) -> None:
    first, second = run_ranks(_train, dump_dir=str(tmp_path))
    assert first == second
    assert first is not None and first.startswith("NonFiniteError: rank 1, step 2"), first
    (path,) = tmp_path.glob("step-*2")
    dump = open_dump(path)
    assert dump.manifest.problems == () and not dump.manifest.alone
    assert dump.ranks == [0, 1] and dump.manifest.weights.complete
    assert dump.report.second_look is not None and "deterministic" in str(dump.report.second_look), dump.report
    assert not [note for note in dump.report.notes if "not done" in note or "left out" in note]
    (replayed,) = replay_alone([str(path)], None, "--trace")
    assert (replayed.code, replayed.outcome["outcome"]) == (0, "same"), replayed
