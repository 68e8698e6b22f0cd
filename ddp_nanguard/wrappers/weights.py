"""This rank's weights as shards, for a dump."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ddp_nanguard.context import GuardContext
from ddp_nanguard.tensors.shards import TensorShard


def weights(context: GuardContext) -> tuple[list[TensorShard], dict[str, Tensor]]:
    """This rank's parts of the weights, and by name those tensors that cannot be cut."""
    shards: list[TensorShard] = []
    special: dict[str, Tensor] = {}
    for name, parameter in context.wrapper.named_parameters():
        cut = partial(context.wrapper.shards, "model.", name, parameter, parameter)
        _add(shards, special, f"model.{name}", parameter, cut)
    return shards, special


def _add(
    shards: list[TensorShard],
    special: dict[str, Tensor],
    name: str,
    tensor: Tensor,
    cut: Callable[[], list[TensorShard]],
) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        special[name] = tensor.detach()
        return
    try:
        shards += cut()
    except ValueError:
        special[name] = tensor.detach()  # no part of a parameter: this rank's own
