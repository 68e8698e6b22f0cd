"""This rank's weights as shards, for a dump."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ddp_nanguard.tensors.shards import TensorShard

from .base import Wrapper


def weights(wrapper: Wrapper) -> tuple[list[TensorShard], dict[str, Tensor]]:
    """This rank's shards of the weights, and by name the tensors that cannot be stored as shards."""
    shards: list[TensorShard] = []
    special: dict[str, Tensor] = {}
    for name, parameter in wrapper.named_parameters():
        cut = partial(wrapper.shards, "model.", name, parameter, parameter)
        add_tensor(shards, special, f"model.{name}", parameter, cut)
    return shards, special


def add_tensor(
    shards: list[TensorShard],
    special: dict[str, Tensor],
    name: str,
    tensor: Tensor,
    cut: Callable[[], list[TensorShard]],
) -> None:
    """Add the shards that ``cut`` gives of a tensor, or the tensor itself where it has none.

    Args:
        shards: gets this rank's shards.
        special: gets tensors that are sparse, quantised or nested, or whose shape matches no part of a parameter.
        name: under which it is dumped.
        tensor: a parameter, a gradient or an optimizer state tensor.
        cut: gives its shards on this rank; raises a ValueError where there are none.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        special[name] = tensor.detach()
        return
    try:
        shards += cut()
    except ValueError:
        special[name] = tensor.detach()  # no part of a parameter: this rank's own
