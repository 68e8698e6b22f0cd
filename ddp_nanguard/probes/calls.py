"""Calls of modules, and the tensors that they take and return: the record on the host that blame is read from.

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
        number: of this module's calls in the micro-batch, from 1; None in compiled code.
        micro_batch: index in the step.
        parent: the call that it ran in; None for the root.
        takes_tensors: whether a tensor of any dtype was found among its arguments.
        is_ordered: whether it is known which calls came before it; False in compiled code.
        inputs, outputs: records of its floating and complex tensors.
        children: calls made in it, in order.

    Calls and records refer to each other in cycles: `break_cycles` undoes them.
    """

    # one object per module call and tensor, so no dict in any of them
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
        """The calls that this one ran in, innermost first; empty for the root."""
        found: list[ModuleCall] = []
        call = self.parent
        while call is not None:
            found.append(call)
            call = call.parent
        return found


class TensorRecord:
    """One version of one tensor that a probe has looked at, see [Note: tensor records].

    Attributes:
        ref: weak reference to the tensor, which must be free to die with its graph.
        version: its ``_version`` when it was recorded, see `version_of`.
        shape: its shape then.
        call: the call that returned it (``slot`` is ``output``) or first took it (``slot`` is ``input``).
        order: execution order of its slot; None where its kind of tensor cannot be checked.
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
        """Whether the tensor has no element, and so nothing that could be non-finite."""
        return self.shape.numel() == 0

    def is_still(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is the recorded object and has not been changed in place since."""
        # the reference decides first: records are found by `id`, which a later tensor can have again
        if self.ref() is not tensor:
            return False
        try:
            return self.version == tensor._version
        except RuntimeError:  # see `version_of`
            return self.version == -1


def break_cycles(calls: list[ModuleCall]) -> None:
    """Take the calls of a step apart, so that reference counting frees them and their records.

    Left to the garbage collector, 16 steps of calls cost a large part of the time of a step of small modules.

    Args:
        calls: that no report can ask for any more.
    """
    for call in calls:
        call.inputs.clear()
        call.outputs.clear()
        call.children.clear()


def version_of(tensor: Tensor) -> int:
    """A tensor's counter of in-place changes; -1 for inference tensors, which have none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1
