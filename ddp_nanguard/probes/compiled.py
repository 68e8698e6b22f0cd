"""Compiled regions: what hooks leave behind that `torch.compile` has traced into its graph.

[Note: sticky slots]
Traced code may neither count nor ask a tensor for its version: both would be guarded and compile again in every call.
So each module inside a compiled region has four places, fixed for the life of the guard, in which the minimum and the
maximum of all that it took and gave, and of their gradients, pile up; a NaN sticks. Once per micro-batch, outside of
the graph, they move to the board and are emptied. Which call of a module it was, and in which order modules ran, the
slots do not know.

Every place has a storage of its own over memory that all share: views of one tensor would make the compiler treat each
of them as an alias of the others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .slots import SlotBuffer

What = Literal["taken", "given", "taken gradient", "given gradient"]
ACCUMULATED: tuple[What, ...] = ("taken", "given", "taken gradient", "given gradient")

_REDUCIBLE = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


class CompiledSource(NamedTuple):
    """Note of a slot that traced code filled: everything of one kind that a module saw in a micro-batch."""

    layer: str
    micro_batch: int
    what: What


class MinMaxAccumulators(NamedTuple):
    """Where a traced hook writes: values and gradients; float64, shape (2,) each. None where nobody asks."""

    values: Tensor
    gradients: Tensor | None


class CompiledSlots:
    """The slots of modules that run inside compiled code.

    Args:
        layers: clean names of these modules.
        device: where they compute.
        probes_gradients: whether gradients are looked at too.

    Memory: 64 bytes per module on the device.
    """

    def __init__(self, layers: list[str], device: torch.device, probes_gradients: bool) -> None:
        self.layers = layers
        self._probes_gradients = probes_gradients
        self._empty = torch.tensor([math.inf, -math.inf], dtype=torch.float64, device=device).repeat(len(layers), 4, 1)
        self._values = self._empty.clone()
        self._accumulators = [[_own_storage(accumulator) for accumulator in row] for row in self._values]
        self._index = {layer: index for index, layer in enumerate(layers)}

    def before(self, layer: str) -> MinMaxAccumulators:
        """For the hook before a module."""
        taken, _, gradient, _ = self._accumulators[self._index[layer]]
        return MinMaxAccumulators(taken, gradient if self._probes_gradients else None)

    def after(self, layer: str) -> MinMaxAccumulators:
        """For the hook after a module."""
        _, given, _, gradient = self._accumulators[self._index[layer]]
        return MinMaxAccumulators(given, gradient if self._probes_gradients else None)

    def move_to(self, slots: SlotBuffer, micro_batch: int) -> None:
        """The micro-batch has ended: its slots to the board, empty ones instead. Two kernels, no host read."""
        sources = [CompiledSource(layer, micro_batch, what) for layer in self.layers for what in ACCUMULATED]
        slots.fill(self._values.view(-1, 2), sources)
        self._values.copy_(self._empty)


def _own_storage(accumulator: Tensor) -> Tensor:
    own: Tensor = torch.utils.dlpack.from_dlpack(accumulator)
    torch._dynamo.mark_static_address(own, guard=False)  # captured graphs then write to it without a copy
    return own


# -- what is traced -----------------------------------------------------------------------------------------------


def is_compiled_alone() -> bool:
    """For a hook that is being traced: whether as a function by itself, since the graph is broken around its module.

    With ``fullgraph=True`` only the root's own hooks are, and what is compiled may not be left alone.
    """
    translator = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx()
    return translator.f_globals["__name__"].startswith(f"{__package__}.") and not translator.one_graph


is_compiled_alone._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as `assume_constant_result` does


def is_transformed() -> bool:
    """Whether what is being traced runs inside `torch.vmap` or `torch.func.grad`, in which places take no part."""
    return torch._C._functorch.maybe_current_level() is not None


is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def accumulate(accumulators: MinMaxAccumulators, value: Any) -> None:
    """Traced: minimum and maximum of every floating tensor in a container, and of its gradient.

    Leaf tensors get no hook: it would be registered anew in every call, and stay.
    """
    if isinstance(value, Tensor):
        if value.dtype in _REDUCIBLE and value.numel() > 0 and not is_transformed():
            _accumulate(accumulators.values, value)
            if accumulators.gradients is not None and value.requires_grad and not value.is_leaf:
                value.register_hook(_accumulator_hook(accumulators.gradients))  # type: ignore[no-untyped-call]  # torch's own
    elif isinstance(value, (tuple, list)):
        for item in value:
            accumulate(accumulators, item)
    elif isinstance(value, dict):
        for item in value.values():
            accumulate(accumulators, item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for name in value.__dataclass_fields__:
            accumulate(accumulators, getattr(value, name, None))


def _accumulator_hook(accumulator: Tensor) -> Callable[[Tensor], None]:
    return lambda gradient: _accumulate(accumulator, gradient)


def _accumulate(accumulator: Tensor, value: Tensor) -> None:
    low, high = torch.aminmax(value.detach())
    both = torch.stack((torch.minimum(accumulator[0], low), torch.maximum(accumulator[1], high)))
    accumulator.data.copy_(both)  # checkpointing takes the place for an input and minds its version
