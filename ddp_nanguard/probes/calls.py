"""Calls of modules and the tensors they take and give: the host-side record that blame is later read from.

[Note: tensor records]
A `TensorRecord` is one version of one tensor that a probe has looked at. A module's input is probed only where it has
no record yet (same object, same ``_version``). So one pass over the data per tensor is enough to tell the code between
two modules from the module after it: an input without a record was made by the code in between.
"""

from __future__ import annotations

import weakref
from typing import ClassVar

from torch import Tensor


class ModuleCall:
    """One call of one module in a micro-batch.

    Attributes:
        layer: clean name of the module.
        number: from 1 in the micro-batch; None in compiled code.
        parent: the call it ran in, None for the root.
        takes_tensors: whether a tensor of any kind was found among its arguments.
        is_ordered: whether it is known which calls came before it; not so in compiled code.
        inputs, outputs: sightings of its tensors.
        children: calls made in it, in order.
    """

    __slots__ = (
        "children",
        "inputs",
        "layer",
        "micro_batch",
        "number",
        "outputs",
        "parent",
        "takes_tensors",
    )

    is_ordered: ClassVar[bool] = True

    def __init__(self, layer: str, number: int | None, micro_batch: int, parent: ModuleCall | None) -> None:
        self.layer = layer
        self.number = number
        self.micro_batch = micro_batch
        self.parent = parent
        self.takes_tensors = False
        self.inputs: list[TensorRecord] = []
        self.outputs: list[TensorRecord] = []
        self.children: list[ModuleCall] = []
        if parent is not None:
            parent.children.append(self)

    def ancestors(self) -> list[ModuleCall]:
        """The calls it ran in, innermost first."""
        found: list[ModuleCall] = []
        call = self.parent
        while call is not None:
            found.append(call)
            call = call.parent
        return found


class TensorRecord:
    """One version of one tensor.

    Attributes:
        call: the call that gave it (``slot`` is ``output``) or first took it (``input``).
        order: execution order of its slot, None where its kind cannot be checked.
        consumers: calls that took it as an input.
        is_watched: whether its gradient is probed.
    """

    __slots__ = ("call", "consumers", "is_watched", "order", "ref", "shape", "slot", "version")

    def __init__(self, tensor: Tensor, call: ModuleCall, slot: str) -> None:
        self.ref = weakref.ref(tensor)
        self.version = version_of(tensor)
        self.shape = tensor.shape
        self.call = call
        self.slot = slot
        self.order: int | None = None
        self.is_watched = False
        self.consumers: list[ModuleCall] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is no element to look at."""
        return self.shape.numel() == 0

    def is_still(self, tensor: Tensor) -> bool:
        """Whether the tensor is this one, unchanged."""
        if self.ref() is not tensor:
            return False
        try:
            return self.version == tensor._version
        except RuntimeError:  # see `version_of`
            return self.version == -1


def break_cycles(calls: list[ModuleCall]) -> None:
    """Calls that nobody will ask about any more refer to each other no longer, so that all of them go at once."""
    for call in calls:
        call.inputs.clear()
        call.outputs.clear()
        call.children.clear()


def version_of(tensor: Tensor) -> int:
    """Counter of in-place changes; -1 for inference tensors, which have none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1
