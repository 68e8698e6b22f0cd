"""State that is non-finite on purpose is told once and stops no job; what became so in training does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.report.types import FaultReport

INF, NAN = float("inf"), float("nan")
ON_PURPOSE = "taken for so on purpose"


class Net(nn.Module):
    """Has a running minimum that nothing reads; ``write`` gives what it holds after a call, by the call's number."""

    def __init__(self, lowest: Tensor, write: dict[int, float] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("lowest", lowest)
        self._write, self._num_calls = write or {}, [0]

    def forward(self, x: Tensor) -> Tensor:
        self._num_calls[0] += 1
        if self._num_calls[0] in self._write:
            self.lowest.fill_(self._write[self._num_calls[0]])
        return self.layer(x)


class MinimumSgd(torch.optim.SGD):
    """Keeps a running minimum per parameter, which begins at infinity, and what was before, which begins as NaN."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("lowest", torch.tensor(INF))
            self.state[parameter].setdefault("before", torch.full((2,), NAN))
        return super().step(closure)


def _run(
    net: nn.Module,
    before: Callable[[int], object] = lambda step: None,
    *,
    bad_loss_at: int | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    registered: nn.Module | None = None,
    **options: Any,
) -> FaultReport | None:
    """Five steps; the report of the fault, None without one."""
    torch.manual_seed(0)
    optimizer = optimizer or torch.optim.Adam(net.parameters(), lr=1e-3)
    guard = NanGuard(net, optimizer, dump_dir=None, state_every=2, **options)
    if registered is not None:
        guard.register(ema=registered)
    try:
        for step in range(5):
            before(step)
            loss = guard(torch.ones(3, 2)).mean() * (NAN if step == bad_loss_at else 1.0)
            guard.watch(loss=loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except NonFiniteError as error:
        return error.report
    finally:
        guard.close()
    return None


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if ON_PURPOSE in record.getMessage()]


def _with_best(value: float) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("best", torch.tensor(value))
    return module


def _with_mask() -> Net:
    net = Net(torch.zeros(1))
    net.mask = nn.Parameter(torch.full((3, 3), -INF).triu(1), requires_grad=False)
    return net


def _minimum_in_optimizer() -> dict[str, Any]:
    net = Net(torch.zeros(1))
    return {"net": net, "optimizer": MinimumSgd(net.parameters(), lr=0.1)}


LEGAL: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a running minimum": (lambda: {"net": Net(torch.tensor(INF))}, "lowest"),
    "one that falls and is reset": (lambda: {"net": Net(torch.tensor(INF), {1: 2.0, 3: INF, 4: 1.0})}, "lowest"),
    "a buffer of NaN that nobody reads": (lambda: {"net": Net(torch.tensor([NAN, 1.0]))}, "lowest"),
    "a frozen mask": (lambda: {"net": _with_mask()}, "mask"),
    "a registered module": (lambda: {"net": Net(torch.zeros(1)), "registered": _with_best(INF)}, "ema.best"),
    "optimizer state": (_minimum_in_optimizer, "layer.weight.lowest"),
}


@pytest.mark.parametrize(("job", "name"), LEGAL.values(), ids=LEGAL)
def test_state_that_is_non_finite_on_purpose_is_told_once(
    job: Callable[[], dict[str, Any]], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert _run(**job()) is None
    (told,) = _told(caplog)
    assert name in told
    assert f"ignore=['{name}'" in told


def test_a_buffer_that_the_loop_resets_to_infinity(caplog: pytest.LogCaptureFixture) -> None:
    net = Net(torch.zeros(2))
    assert _run(net, lambda step: net.lowest.fill_(INF) if step == 3 else None) is None
    assert len(_told(caplog)) == 1


def test_state_that_is_ignored_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert _run(Net(torch.tensor(INF)), ignore=["lowest"]) is None
    assert not _told(caplog)


@pytest.mark.parametrize("step", [0, 3])
def test_it_is_not_blamed_for_another_fault(step: int) -> None:
    report = _run(Net(torch.tensor(INF)), bad_loss_at=step)
    assert report is not None
    assert report.origin is not None
    assert (str(report.origin.phase), report.origin.step) == ("loss", step)
    assert report.nonfinite_state == ()
    assert "non-finite before anything went wrong, which is no fault by itself: lowest" in report.notes


ILLEGAL: dict[str, tuple[Net, int]] = {
    "infinite after it was finite": (Net(torch.zeros(2), {3: INF}), 2),
    "NaN after it was infinite": (Net(torch.tensor(INF), {3: NAN}), 2),
}


@pytest.mark.parametrize(("net", "step"), ILLEGAL.values(), ids=ILLEGAL)
def test_a_buffer_that_the_forward_makes_bad_stops_the_job(net: Net, step: int) -> None:
    report = _run(net)
    assert report is not None
    assert report.origin is not None
    assert (str(report.origin.phase), report.origin.slot, report.origin.step) == ("state", "lowest", step)


def test_a_weight_that_reaches_the_loss_is_the_origin() -> None:
    net = Net(torch.tensor(INF))
    nn.init.constant_(net.layer.weight, INF)
    report = _run(net)
    assert report is not None
    assert report.origin is not None
    assert (str(report.origin.phase), report.origin.slot) == ("state", "layer.weight")
    assert report.nonfinite_state == ("layer.weight",)


def test_optimizer_state_that_overflows_is_a_fault() -> None:
    net = Net(torch.zeros(1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def overflow(step: int) -> None:
        if step == 2:
            optimizer.state[net.layer.weight]["exp_avg_sq"][0, 0] = INF

    report = _run(net, overflow, optimizer=optimizer)
    assert report is not None
    assert report.nonfinite_state == ("layer.weight.exp_avg_sq",)
    name = "layer.weight.exp_avg_sq"
    assert report.notes == (f"if {name} is infinite on purpose: ignore=[{name!r}]",)


def test_a_loss_beside_damaged_weights_is_no_harmless_one() -> None:
    net = Net(torch.zeros(1))

    def damage(step: int) -> None:
        if step == 2:
            nn.init.constant_(net.layer.weight, NAN)

    report = _run(net, damage, on_loss="warn")
    assert report is not None
    assert "in no danger" not in report.cause
