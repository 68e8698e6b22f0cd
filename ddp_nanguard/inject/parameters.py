"""Which parameters of a layer this rank holds, whole or in part, under any wrapper."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from ddp_nanguard.wrappers import Wrapper


@dataclass(frozen=True)
class OwnParameter:
    """A parameter of a layer of which this rank holds at least one element.

    Attributes:
        name: clean name in the unwrapped model.
        parameter: as the wrapper holds it; a flat one holds several original parameters.
        held_as: name of ``parameter`` in the wrapper.
    """

    name: str
    parameter: nn.Parameter
    held_as: str


def own_parameters(wrapper: Wrapper, layer: str, trained: bool) -> Iterator[OwnParameter]:
    """Floating parameters that belong to a layer itself and of which this rank holds at least one element.

    Args:
        wrapper: of the model.
        layer: clean name; parameters of its children are not among them.
        trained: whether frozen parameters are left out.
    """
    for held_as, parameter in wrapper.named_parameters():
        if parameter.is_floating_point() and (parameter.requires_grad or not trained):
            # under FSDP1 one flat parameter holds those of several layers, so the layer is told by the shard's name
            for shard in wrapper.shards("", held_as, parameter, parameter):
                if shard.name.rpartition(".")[0] == layer and shard.tensor.numel():
                    yield OwnParameter(shard.name, parameter, held_as)


def part_of(wrapper: Wrapper, own: OwnParameter, tensor: Tensor) -> Tensor | None:
    """This rank's part of a parameter, or of a tensor that is sharded like it (its gradient); None if it is empty."""
    shards = wrapper.shards("", own.held_as, own.parameter, tensor)
    return next((shard.tensor for shard in shards if shard.name == own.name and shard.tensor.numel()), None)


def held_parts(wrapper: Wrapper, layer: str, trained: bool = False) -> Iterator[Tensor]:
    """This rank's parts of a layer's own parameters, as views that can be written to."""
    for own in own_parameters(wrapper, layer, trained):
        part = part_of(wrapper, own, own.parameter)
        if part is not None:
            yield part
