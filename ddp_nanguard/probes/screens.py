"""Screens: a few kernels over many tensors, each of which is non-finite whenever an element of its tensor is.

[Note: screens]
A minimum and maximum of every gradient and weight is one kernel per tensor, and of small tensors mostly overhead. Where
a step only asks *whether*, a norm does: it is NaN where an element is, infinite where one is infinite, and many
tensors share one call. It has no sign, and a 2-norm overflows float32 from elements of 1.8e19 on, so what it reports
is confirmed element by element on the fault path (`blame.confirm`). Replays compare bits, so a tensor must give the
same ones alone and beside others: a norm over the rows of a matrix is that of each row, to the last bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ddp_nanguard.tensors.minmax import is_plain

from .slot_pages import SlotGroup
from .slot_roles import SlotRole
from .slots import SlotBuffer

ROW_SIZE, MIN_ROWS = 4096, 8
"""On a CPU, so many tensors of one shape, of up to so many elements, are copied side by side and reduced as rows."""
LARGE = 2**20
"""On an accelerator tensors from this size on fill the device alone, and ``aminmax`` reads them faster."""
_foreach_norm = torch._foreach_norm
_vector_norm = torch.linalg.vector_norm

_Key = tuple[torch.device, torch.dtype, torch.Size | None]
"""What the tensors of one call have in common: device, dtype, and the shape where they are rows."""


def _key(tensor: Tensor, exact: bool) -> _Key | None:
    """With which other tensors this one is reduced; None where it gets a minimum and maximum of its own.

    Args:
        tensor: of any kind.
        exact: no finite tensor may be reported, since nobody will confirm it.
    """
    if not is_plain(tensor):
        return None
    device, dtype, size = tensor.device, tensor.dtype, tensor.numel()
    if device.type != "cpu":
        return (device, dtype, None) if size < LARGE and _norms_tell(device, dtype) else None
    if exact:
        return None
    if size <= ROW_SIZE:
        return device, dtype, tensor.shape
    # the 2-norm of float16 is computed without vector instructions
    return None if dtype is torch.float16 else (device, dtype, None)


@functools.cache
def _norms_tell(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether norms on an accelerator are what they have to be, of many tensors in one call.

    Host sync: one, before the first step: a norm that loses a NaN among many tensors was a bug of torch once.
    """
    values = [1.0, -2.0, math.nan, math.inf, -math.inf] * 30
    expected = [1.0, 2.0, math.nan, math.inf, math.inf] * 30
    tensors = torch.tensor(values, dtype=dtype, device=device).view(-1, 1).expand(-1, 3).contiguous().unbind()
    try:
        found = torch.hstack(_foreach_norm(tensors, math.inf, _dtype_of_norms(dtype))).tolist()
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return all(a == b or (a != a and b != b) for a, b in zip(found, expected, strict=True))


def _dtype_of_norms(dtype: torch.dtype) -> torch.dtype:
    """Of the largest element, on an accelerator: float32 holds those of half precision, so that all share one page."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class _Group:
    """Tensors of a screen that are reduced by one call."""

    def __init__(self, key: _Key, indices: list[int], roles: list[SlotRole], sources: list[Any]) -> None:
        self.indices = indices
        self.device, dtype, shape = key
        self._are_rows = shape is not None
        self._roles, self._sources = [roles[i] for i in indices], [sources[i] for i in indices]
        self._is_on_cpu = self.device.type == "cpu"
        # in its own dtype the norm of float16 is infinite from 65504 on
        self._dtype = torch.float32 if dtype is torch.float16 and self._are_rows else dtype
        if not self._is_on_cpu:
            self._dtype = _dtype_of_norms(dtype)
        only = indices[0]
        self._pick: Callable[[Any], Any] = itemgetter(*indices) if len(indices) > 1 else lambda them: (them[only],)
        self._is_all = len(indices) == len(sources)

    def look(self, slots: SlotBuffer, tensors: Any, orders: Sequence[int]) -> None:
        """Reduce the group's share of ``tensors`` into slots; raises where a tensor is of another kind by now."""
        if not self._is_all:
            tensors = self._pick(tensors)
        norms = self._norms_on_cpu(tensors) if self._is_on_cpu else _foreach_norm(tensors, math.inf, self._dtype)
        group = SlotGroup(orders, None if self._is_all else self.indices, self._roles, self._sources)
        slots.page(self.device, self._dtype).take_norms(norms, group)

    def _norms_on_cpu(self, tensors: Any) -> list[Tensor]:
        if self._are_rows:
            return [_vector_norm(torch.stack(tensors).reshape(len(tensors), -1), 2.0, 1, dtype=self._dtype)]
        return [torch.stack(_foreach_norm(tensors, 2.0))]


class Screen:
    """Looks at the tensors of a fixed list of sources, see [Note: screens].

    Args:
        sources: one per tensor; None for one that is not looked at.
        roles: what each counts for.
    """

    def __init__(self, sources: Sequence[Any], roles: Sequence[SlotRole]) -> None:
        self._kept = [index for index, source in enumerate(sources) if source is not None]
        self._keeps_all = len(self._kept) == len(sources)
        self._sources = [sources[index] for index in self._kept]
        self._roles = [roles[index] for index in self._kept]
        # - How they are reduced, and for which types of tensors that was decided
        self._types: list[type] = []
        self._groups: list[_Group] = []
        self._each: list[int] = []

    def look(self, slots: SlotBuffer, tensors: Sequence[Tensor], orders: Sequence[int] | None = None) -> None:
        """Reduce the tensors into slots; a few kernels, no host read.

        Args:
            slots: where the results go.
            tensors: one per source, local to this rank.
            orders: execution orders; default the next ones.
        """
        if slots.is_capturing():
            return None
        if torch.is_grad_enabled():  # not so in a backward and at a verdict, and a context takes as long as a kernel
            with torch.no_grad():
                return self.look(slots, tensors, orders)
        if not self._keeps_all:
            tensors = [tensors[index] for index in self._kept]
            orders = None if orders is None else [orders[index] for index in self._kept]
        if orders is None:
            orders = range(slots.order + 1, slots.order + 1 + len(tensors))
            slots.order += len(tensors)
        types = list(map(type, tensors))
        if types != self._types:
            self._plan(tensors, slots.exact)
            self._types = types
        for group in self._groups:
            self._look_at(group, slots, tensors, orders)
        for index in self._each:
            slots.reduce(self._roles[index], tensors[index], self._sources[index], orders[index])
        return None

    def _plan(self, tensors: Sequence[Tensor], exact: bool) -> None:
        found: dict[_Key | None, list[int]] = {}
        for index, tensor in enumerate(tensors):
            found.setdefault(_key(tensor, exact), []).append(index)
        for key in [key for key, of in found.items() if key is not None and key[2] is not None and len(of) < MIN_ROWS]:
            if key[1] is not torch.float16:
                found.setdefault((key[0], key[1], None), []).extend(found.pop(key))
        self._each = found.pop(None, [])
        self._groups = [
            _Group(key, sorted(of), self._roles, self._sources) for key, of in found.items() if key is not None
        ]

    def _look_at(self, group: _Group, slots: SlotBuffer, tensors: Sequence[Tensor], orders: Sequence[int]) -> None:
        try:
            group.look(slots, tensors, orders)
        except (RuntimeError, NotImplementedError, TypeError):
            # sparse for once, of another shape, on another device: to look closer each time would cost more than this
            self._types = []
            for index in group.indices:
                slots.reduce(self._roles[index], tensors[index], self._sources[index], orders[index])


class ScreenCache:
    """Screens by what they look at, made once and used in every step."""

    def __init__(self) -> None:
        self._screens: dict[Any, Screen] = {}

    def get(self, key: Any, make: Callable[[], Screen]) -> Screen:
        """The screen under a key, made where there is none."""
        screen = self._screens.get(key)
        if screen is None:
            if len(self._screens) >= _MAX_SCREENS:
                self._screens.clear()
            screen = self._screens[key] = make()
        return screen


_MAX_SCREENS = 4096  # gradients that arrive in another order each time must not fill the memory
