"""Runs a few lines under the product's own trace, in this process and without a dump, and asks the rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ddp_nanguard.diagnosis.rules import TraceFacts
from ddp_nanguard.diagnosis.trace.traced_step import TracedJob, Watcher
from ddp_nanguard.wrappers import wrapper_of


class Parameters(nn.Module):
    """A model that is its parameters, ``p0``, ``p1`` and so on."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        super().__init__()
        for index, value in enumerate(values):
            floats = value.is_floating_point() or value.is_complex()
            self.register_parameter(f"p{index}", nn.Parameter(value.clone(), requires_grad=floats))


def facts_of(function: Callable[..., Any], *values: Tensor, batch: Any = None) -> TraceFacts:
    """What the rules are told of one forward and backward of the sum of all that a function returns.

    Args:
        function: of as many parameters as there are values.
        values: the parameters.
        batch: for the trace.
    """
    model = Parameters(values)
    watcher = Watcher()
    with watcher.following(
        TracedJob(wrapper_of(model), [], has_scaler=False, is_compiled=False, root_is_step=False), [0]
    ):
        watcher.begin(batch)
        loss = _total(function(*model.parameters()))
        watcher.keep_loss("loss", loss)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
    return TraceFacts(traced=watcher.result([]))


def _total(output: Any) -> Tensor:
    tensors = output if isinstance(output, (tuple, list)) else [output]
    floats = [each.real if each.is_complex() else each for each in tensors if not _is_whole(each)]
    return sum(each.float().sum() if each.element_size() < 4 else each.sum() for each in floats)  # type: ignore[return-value]


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
