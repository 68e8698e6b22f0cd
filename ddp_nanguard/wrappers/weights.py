"""This rank's weights as shards, for a dump."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ddp_nanguard.tensors.shards import TensorShard

from .base import Wrapper


def weights(wrapper: Wrapper) -> tuple[list[TensorShard], dict[str, Tensor]]:
    """This rank's parts of the weights, and by name those tensors that cannot be cut."""
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
    """Add what ``cut`` gives of a tensor, or the tensor itself where it cannot be cut.

    Args:
        shards: gets this rank's parts.
        special: gets tensors that are sparse, quantised or nested, or whose shape tells no part of a parameter.
        name: under which it is dumped.
        tensor: a parameter, a gradient or a piece of optimizer state.
        cut: gives its parts on this rank; a ValueError says that there are none.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        special[name] = tensor.detach()
        return
    try:
        shards += cut()
    except ValueError:
        special[name] = tensor.detach()  # no part of a parameter: this rank's own
