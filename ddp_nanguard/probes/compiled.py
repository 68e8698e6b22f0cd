"""Compiled regions: the slots that hooks fill after `torch.compile` has traced them into its graph.

[Note: sticky slots]
Traced code may neither count nor ask a tensor for its version: Dynamo would guard both and compile again in every call.
So each module inside a compiled region has four accumulators, fixed for the life of the guard: a minimum and a maximum
over all its inputs, over all its outputs, and over the gradients of each; a NaN sticks. Once per micro-batch, outside
of the graph, they move to the `SlotBuffer` and are emptied. The slots do not know which call of a module it was, nor in
which order modules ran.

Every accumulator has a storage of its own over memory that all share: views of one tensor would make the compiler treat
each of them as an alias of the others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .slots import SlotBuffer

Accumulated = Literal["input", "output", "input gradient", "output gradient"]
ACCUMULATORS: tuple[Accumulated, ...] = ("input", "output", "input gradient", "output gradient")
"""The four accumulators of a module in their order in memory: inputs, outputs, and the gradients of each."""

_REDUCIBLE = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


class CompiledSource(NamedTuple):
    """Source of a slot that traced code filled: all inputs, or all outputs, or their gradients, in a micro-batch.

    Attributes:
        layer: clean name of the module.
        micro_batch: index in the step.
        what: all inputs, all outputs, or the gradients of either.
    """

    layer: str
    micro_batch: int
    what: Accumulated


class MinMaxAccumulators(NamedTuple):
    """Where a traced hook writes: (minimum, maximum) of values and of gradients; float64, shape (2,) each.

    ``gradients`` is None where activation gradients are not watched.
    """

    values: Tensor
    gradients: Tensor | None


class CompiledSlots:
    """The accumulators of all modules that run inside compiled code, see [Note: sticky slots].

    Args:
        layers: clean names of these modules.
        device: where they compute.
        probes_gradients: whether gradients are looked at too.

    Memory: 64 bytes per module on the device.
    """

    def __init__(self, layers: list[str], device: torch.device, probes_gradients: bool) -> None:
        self.layers = layers
        self._probes_gradients = probes_gradients
        # float64 for every dtype: the hook's minimum and maximum of bfloat16 or float32 fit without rounding
        empty = torch.tensor([math.inf, -math.inf], dtype=_widest(device), device=device)
        self._empty = empty.repeat(len(layers), 4, 1)
        self._values = self._empty.clone()
        self._accumulators = [[_own_storage(accumulator) for accumulator in row] for row in self._values]
        self._index = {layer: index for index, layer in enumerate(layers)}

    def before(self, layer: str) -> MinMaxAccumulators:
        """The accumulators for the hook before a module: its inputs and their gradients."""
        inputs, _, gradient, _ = self._accumulators[self._index[layer]]
        return MinMaxAccumulators(inputs, gradient if self._probes_gradients else None)

    def after(self, layer: str) -> MinMaxAccumulators:
        """The accumulators for the hook after a module: its outputs and their gradients."""
        _, outputs, _, gradient = self._accumulators[self._index[layer]]
        return MinMaxAccumulators(outputs, gradient if self._probes_gradients else None)

    def move_to(self, slots: SlotBuffer, micro_batch: int) -> None:
        """Copy what a micro-batch accumulated into ``slots`` and empty the accumulators. Two kernels, no host read."""
        sources = [CompiledSource(layer, micro_batch, what) for layer in self.layers for what in ACCUMULATORS]
        slots.fill(self._values.view(-1, 2), sources)
        self._values.copy_(self._empty)


def _own_storage(accumulator: Tensor) -> Tensor:
    own: Tensor = torch.utils.dlpack.from_dlpack(accumulator)
    torch._dynamo.mark_static_address(own, guard=False)  # captured graphs then write to it without a copy
    return own


# -- what is traced -----------------------------------------------------------------------------------------------


def is_compiled_alone() -> bool:
    """Whether the hook that calls this is being traced by itself, because the graph is broken around its module.

    Such a hook is to run uncompiled. With ``fullgraph=True`` that holds for the root's own hooks only, and skipping
    them would be an error, so the answer is False.
    """
    translator = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx()
    return translator.f_globals["__name__"].startswith(f"{__package__}.") and not translator.one_graph


is_compiled_alone._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as ``assume_constant_result`` does


def is_transformed() -> bool:
    """Whether the traced code runs inside `torch.vmap` or `torch.func.grad`, whose tensors no accumulator can take."""
    return torch._C._functorch.maybe_current_level() is not None


is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def accumulate(accumulators: MinMaxAccumulators, value: Any) -> None:
    """Accumulate every floating tensor in a container, and hook its gradient. Runs inside traced code.

    Leaf tensors get no hook: it would be registered anew in every call, and stay.

    Args:
        accumulators: of the module and the side (inputs or outputs).
        value: a tensor, or any nesting of tuples, lists, dicts and dataclasses; all else is left alone.
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
    accumulator.data.copy_(both)  # checkpointing takes the accumulator for an input and compares its version


def _widest(device: torch.device) -> torch.dtype:
    """float64; where the device has none, as MPS, nothing on it is wider than float32."""
    try:
        return torch.zeros((), dtype=torch.float64, device=device).dtype  # some devices have none for computing
    except (TypeError, RuntimeError):
        return torch.float32
