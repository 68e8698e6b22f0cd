"""``loss_warn``, ``grad_norm_warn`` and ``parameter_norm_warn``: said once, with the number, and training goes on."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_nanguard import NanGuard

NAMES = ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias")


def _said(caplog: pytest.LogCaptureFixture, sizes: list[float], **options: Any) -> list[str]:
    """What the log says of steps in which the gradient of parameter n is n + 1, times the size of the step."""
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    guard = NanGuard(model, optimizer, dump_dir=None, **options)
    with caplog.at_level(logging.WARNING, "ddp_nanguard"):
        for size in sizes:
            guard(torch.ones(1, 1))
            loss: Tensor = sum((n + 1) * p.sum() * size for n, p in enumerate(model.parameters()))  # type: ignore[assignment]
            guard.watch(loss=loss * 0 + size, other=-loss.detach().abs() * 1e6)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        guard.close()
    assert guard.step == len(sizes)
    return caplog.messages


def test_a_loss_above_its_ceiling_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    found = _said(caplog, [1.0, 30.0, 2.0, 40.0], loss_warn=20.0)
    assert found == ["step 1: loss exceeds loss_warn=20 (30); this is said once"]


def test_parameters_with_large_gradients_are_named_once_each(caplog: pytest.LogCaptureFixture) -> None:
    found = _said(caplog, [1.0, 4.0, 0.5, 10.0], parameter_norm_warn=19.5)
    assert found == [
        "step 1: gradient norms of 2.bias, 2.weight exceed parameter_norm_warn=19.5 (up to 24); said once of each",
        "step 3: gradient norms of 1.bias, 1.weight, 0.bias exceed parameter_norm_warn=19.5 (up to 40); "
        "said once of each",
    ]


def test_it_is_the_size_of_each_that_counts_and_ignored_ones_do_not(caplog: pytest.LogCaptureFixture) -> None:
    assert _said(caplog, [1.0], parameter_norm_warn=6.5) == [], "together they are larger"
    found = _said(caplog, [2.0], parameter_norm_warn=5.5, ignore=("2.*", "1.bias"))
    assert found == [
        "step 0: the gradient norm of 1.weight exceeds parameter_norm_warn=5.5 (up to 6); said once of each"
    ]


@pytest.mark.parametrize("option", ["loss_warn", "parameter_norm_warn", "grad_norm_warn"])
def test_a_limit_is_a_number_above_0(option: str) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match=rf"^option {option}=0\.0 is out of range; give a number above 0, or None$"):
        NanGuard(model, optimizer, **{option: 0.0})
