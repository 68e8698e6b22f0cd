"""Small models, batches and steps for jobs that are written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.training import digest

NAN = float("nan")
INF = float("inf")


def small_model(*, norm: bool = False) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 3), nn.BatchNorm1d(3) if norm else nn.Tanh(), nn.Linear(3, 2)]
    return DistributedDataParallel(nn.Sequential(*layers))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def guard_of(*args: Any, **options: Any) -> Any:
    from ddp_nanguard import NanGuard

    return NanGuard(*args, **{"dump_dir": None, "timeout_s": 5, **options})


def rows(bad: bool) -> Tensor:
    return torch.ones(2, 4) / (0.0 if bad else 1.0)


def run_step(guard: Any, optimizer: torch.optim.Optimizer, values: Tensor) -> None:
    guard(values).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def ended(run: Callable[[], object]) -> str | None:
    """The first line of the error that ended it, with its class."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None


def is_finite(model: nn.Module) -> bool:
    return all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def state_of(model: nn.Module) -> dict[str, str]:
    found = [*model.named_parameters(), *model.named_buffers()]
    return {name: digest(torch.view_as_real(t.detach()) if t.is_complex() else t) for name, t in found}
