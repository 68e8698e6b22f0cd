"""What only a GPU can show: slots on the device, its random state in the dump, the process usable after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.counting import counting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.5)
        self.divide = _Divide()
        self.last = nn.Linear(16, 1)

    def forward(self, values: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
        return self.last(self.divide(self.drop(self.first(values)), divisor))  # type: ignore[no-any-return]


class _Divide(nn.Module):
    def forward(self, values: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
        return (values * divisor) / divisor


def _build(dump_dir: Path | None, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    from ddp_nanguard import NanGuard

    torch.manual_seed(0)
    model = _Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    path = str(dump_dir) if dump_dir else None
    return model, optimizer, NanGuard(model, optimizer, dump_dir=path, **options)


def _step(guard: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    loss = guard(batch["values"], batch["divisor"]).square().mean()
    guard.watch(loss=loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _batches(count: int, bad: int | None = None) -> list[dict[str, torch.Tensor]]:
    values = torch.randn(8, 16, device="cuda")
    return [
        {"values": values, "divisor": torch.full((1,), 0.0 if index == bad else 1.0, device="cuda")}
        for index in range(count)
    ]


def test_a_clean_step_reads_the_host_once() -> None:
    counts = []
    for enabled in (False, True):
        _, optimizer, guard = _build(None, enabled=enabled)
        batches = iter(guard.steps(_batches(6)))
        for _ in range(4):
            _step(guard, optimizer, next(batches))
        with counting() as counted:
            _step(guard, optimizer, next(batches))
        counts.append(counted)
        guard.close()
    difference = counts[1] - counts[0]
    assert sum(difference["host_reads"].values()) == 1, difference


def test_the_process_is_usable_after_a_stop_and_the_dump_holds_the_device_state(tmp_path: Path) -> None:
    from ddp_nanguard import NonFiniteError
    from ddp_nanguard.dump.read import open_dump

    model, optimizer, guard = _build(tmp_path / "dumps")
    states: list[torch.Tensor] = []

    def train() -> None:
        for batch in guard.steps(_batches(5, bad=2)):
            states.append(torch.cuda.get_rng_state())
            _step(guard, optimizer, batch)

    with pytest.raises(NonFiniteError) as caught:
        train()
    origin = caught.value.report.to_dict()["origin"]
    assert (origin["step"], origin["phase"], origin["layer"], origin["kind"]) == (2, "forward", "divide", "nan")
    dump = open_dump(caught.value.report.dump_path)
    (micro_batch,) = dump.window(0)
    assert micro_batch.random_state.device_type == "cuda"
    assert micro_batch.random_state.device is not None
    assert torch.equal(micro_batch.random_state.device, states[-1])
    guard.close()
    optimizer.zero_grad()
    model(*_batches(1)[0].values()).sum().backward()
    torch.cuda.synchronize()
    assert all(parameter.grad is not None and bool(parameter.grad.isfinite().all()) for parameter in model.parameters())


def test_bits_are_the_same_with_the_guard_on_and_off() -> None:
    ends = []
    for enabled in (False, True):
        model, optimizer, guard = _build(None, enabled=enabled)
        torch.manual_seed(1)
        for batch in guard.steps(_batches(20)):
            _step(guard, optimizer, batch)
        guard.close()
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(off, on) for off, on in zip(*ends, strict=True))
