"""`Recipe`: the one thing that replay needs from the user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Recipe:
    """Rebuilds the model and one training step. The same function can serve training.

    Attributes:
        model: the plain module, freshly built; its weights come from the dump.
        step: ``step(model, batch)`` gives the loss that is backpropagated, shape (), or a dict of named losses whose sum is.
        optimizer: parameters -> optimizer; without it a hyper-parameter fault is replayed from the dump's ``state.json``.
        wrap: module -> wrapped module, for the replay on many ranks; by default as the dump records.
        batch_types: builders of custom batch classes by type name.
    """

    model: nn.Module
    step: Callable[[Any, Any], Tensor | dict[str, Tensor]]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    wrap: Callable[[nn.Module], nn.Module] | None = None
    batch_types: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
