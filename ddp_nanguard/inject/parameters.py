"""Parameters of a layer, and the part of them that this rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from ddp_nanguard.wrappers import Wrapper


@dataclass(frozen=True)
class OwnParameter:
    """A parameter of a layer, and the part of it that this rank holds."""

    name: str
    parameter: nn.Parameter
    held_as: str


def own_parameters(wrapper: Wrapper, layer: str, trained: bool) -> Iterator[OwnParameter]:
    """Floating parameters of a layer itself of which this rank holds something."""
    for held_as, parameter in wrapper.named_parameters():
        if parameter.is_floating_point() and (parameter.requires_grad or not trained):
            for shard in wrapper.shards("", held_as, parameter, parameter):
                if shard.name.rpartition(".")[0] == layer and shard.tensor.numel():
                    yield OwnParameter(shard.name, parameter, held_as)


def part_of(wrapper: Wrapper, own: OwnParameter, tensor: Tensor) -> Tensor | None:
    """This rank's part of a parameter, or of a tensor that lies like it."""
    shards = wrapper.shards("", own.held_as, own.parameter, tensor)
    return next((shard.tensor for shard in shards if shard.name == own.name and shard.tensor.numel()), None)


def held_parts(wrapper: Wrapper, layer: str, trained: bool = False) -> Iterator[Tensor]:
    """What this rank holds of a layer's own parameters, as views."""
    for own in own_parameters(wrapper, layer, trained):
        part = part_of(wrapper, own, own.parameter)
        if part is not None:
            yield part
