"""Jobs that set precision and backends the way torch recommends: dumped whole, and set again by a replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddp_nanguard.dump import open_dump
from tests.ranks import run_ranks
from tests.ranks.small import ended, guard_of
from tests.replaying import replay_alone


def recipe() -> Any:
    from ddp_nanguard import Recipe

    return Recipe(model=_model(), step=lambda model, batch: model(batch).sum(), optimizer=_sgd)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _train(rank: int, world_size: int, dump_dir: str) -> str | None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    torch.backends.cuda.enable_flash_sdp(False)
    model = _model()
    optimizer = _sgd(model.parameters())
    guard = guard_of(model, optimizer, dump_dir=dump_dir, replay="tests.ranks.test_precision:recipe")

    def train() -> None:
        for batch in guard.steps([torch.ones(2, 4), torch.full((2, 4), torch.inf)]):
            guard(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return ended(train)


def test_a_job_with_precision_set_per_backend_is_dumped_whole_and_replayed_with_it(tmp_path: Path) -> None:
    (text,) = run_ranks(_train, world_size=1, process_group=False, dump_dir=str(tmp_path))
    assert text is not None and text.startswith("NonFiniteError: rank 0, step 1"), text
    (path,) = tmp_path.glob("step-*1")
    dump = open_dump(path)
    assert dump.manifest.problems == ()
    for its in (dump.manifest.settings, dump.evidence(0).settings):
        assert its.float32_matmul_precision is None
        assert its.backends["cuda.matmul.fp32_precision"] == "tf32"
        assert its.backends["mkldnn.matmul.fp32_precision"] == "bf16"
        assert its.backends["cuda.flash_sdp_enabled"] is False
    (replayed,) = replay_alone([str(path)], {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    assert (replayed.code, replayed.outcome["outcome"]) == (0, "same"), replayed
    assert replayed.outcome["differs"] == ["CUBLAS_WORKSPACE_CONFIG not set then, :4096:8 now"]
