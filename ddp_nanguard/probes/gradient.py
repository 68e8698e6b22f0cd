"""Gradients of parameters: on this rank before the reduce, after it, and those that no hook has seen.

[Note: waiting gradients]
Between two large operators a hook that reduces costs ten times what it costs in a loop: code and data have left the
cache. Where `.grad` stays what this rank has accumulated until the backward ends, the hooks only note the execution
order, and all gradients are reduced together in the engine's first callback, which comes before the wrapper's own.
Gradients that the wrapper would have freed meanwhile wait up to a number of bytes; at that limit all are looked at. A
pass inside the pass may end with the wrapper's callback, so its gradients do not wait.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_, itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ddp_nanguard.tensors.minmax import is_plain

from .backward import BackwardProbe
from .calls import version_of
from .screens import Screen, ScreenCache
from .slot_roles import SlotRole
from .slots import SlotBuffer

_current_graph_task = torch._C._current_graph_task_id
_PLAIN = frozenset((Tensor,))
_MAX_ORDERS = 256  # gradients that arrive in another order each time must not fill the memory


@dataclass(frozen=True, slots=True)
class GradientSource:
    """Source of a slot: the gradient of a parameter.

    Attributes:
        name: clean name of the parameter.
        micro_batch: index in the step; None after the reduce, and where one backward serves several micro-batches.
        reduced: whether it was taken after the gradient communication.
        at_update: whether it was taken as the update would use it: no hook saw it, or the loop has changed it since.
    """

    name: str
    micro_batch: int | None
    reduced: bool
    at_update: bool = False


@dataclass(frozen=True, slots=True)
class NormSource:
    """Source of a slot: the L2 norm of all gradients after a backward pass."""


@dataclass(frozen=True, slots=True)
class ParameterNormSource:
    """Source of a slot: the L2 norm of the gradient of one parameter after a backward pass.

    Attributes:
        name: clean name of the parameter.
    """

    name: str


@dataclass(frozen=True, slots=True)
class TotalNormSource:
    """Source of a slot: the norm by which this rank's gradients were clipped."""


class Queue(Protocol):
    """Where hooks leave gradients of one backward pass; a `wrappers.base.GradientQueue`."""

    graph_task: int
    entries: list[Tensor]

    def take(self) -> tuple[tuple[str, ...], list[Tensor]]:
        """Names of parameters and their gradients, in the order of the hooks; empties and closes it."""


class GradientProbe:
    """Watches the gradients of all parameters.

    Args:
        parameters: clean name and parameter, as the optimizer holds them.
        slots: where the results go.
        backward: tells whether a backward pass is running.
        local: maps a tensor to this rank's part of it, without communication.
        is_ignored: whether a parameter of this name is not watched.
        left_out: names of parameters that no optimizer holds: no scaler looks at their gradients.
        pending_bytes: of local gradients that may wait, see [Note: waiting gradients]; 0 lets none wait, None all.

    Attributes:
        micro_batch: index that local gradients are attributed to; None where it is not known.
        queue: of the hooks, where nothing but parameters is watched in a backward pass and so no order is to be kept
            between the two; else None.
    """

    def __init__(
        self,
        parameters: list[tuple[str, nn.Parameter]],
        slots: SlotBuffer,
        backward: BackwardProbe,
        local: Callable[[Tensor], Tensor],
        is_ignored: Callable[[str], bool],
        left_out: frozenset[str] = frozenset(),
        pending_bytes: int | None = 0,
    ) -> None:
        self.slots = slots
        self.backward = backward
        self.micro_batch: int | None = 0
        self.queue: Queue | None = None
        self._local = local
        self._is_ignored = is_ignored
        self._left_out = left_out
        self._parameters = [(name, parameter) for name, parameter in parameters if not is_ignored(name)]
        self._names = tuple(name for name, _ in self._parameters)
        self._name_of = {id(parameter): name for name, parameter in self._parameters}

        # - Sources are made once and used in every step
        self._reduced_sources = {name: GradientSource(name, None, reduced=True) for name, _ in self._parameters}
        self._local_sources: dict[tuple[int | None, str], GradientSource] = {}
        self._unhooked_sources: dict[str, GradientSource] = {}
        self._screens = ScreenCache()

        # - Pending gradients, see [Note: waiting gradients]: three lists side by side and no object per gradient, since
        # there is one for each parameter in each step. They are held strongly, which is what the limit in bytes is for
        self._pending: list[Tensor] = []
        self._pending_names: list[str] = []
        self._pending_orders: list[int] = []
        self._pending_bytes = pending_bytes
        self._bytes_left = pending_bytes or 0

        # - Those that the pass has left in `.grad`, looked at already, in the order of the parameters; until its end
        self._local_looked: Sequence[Tensor] = ()
        self._in_order: dict[tuple[str, ...], Callable[[Any], Sequence[Tensor]] | None] = {}

        # - What was looked at in this window by name of the parameter, and at which version: a gradient that was
        # clipped, or assigned by hand, is read again before the update
        self._seen = _Seen()

    def probe_local(self, name: str, gradient: Tensor) -> None:
        """Look at a gradient of this rank before any communication, now or at the end of the backward pass.

        Called by the parameters' hooks in every micro-batch; see [Note: waiting gradients].

        Args:
            name: clean name of the parameter.
            gradient: what this rank has accumulated; a tensor that is not plain is read at once where bytes are
                limited.
        """
        backward, slots = self.backward, self.slots
        if not (backward.is_entered and backward.ran):
            backward.enter()
            if not backward.is_entered:
                return
        can_wait = gradient.layout is torch.strided and (self._pending_bytes is None or self._has_room(gradient))
        if not can_wait or _current_graph_task() != backward.graph_task:
            self._probe_now(name, gradient)
            return
        # blame goes by this order, so it is that of the hooks even where the gradient is looked at later
        slots.order = order = slots.order + 1
        self._pending.append(gradient)
        self._pending_names.append(name)
        self._pending_orders.append(order)
        if self.queue is not None and self._pending_bytes is None:
            self.queue.graph_task = backward.graph_task

    def flush_pending(self) -> None:
        """Look at the gradients that `probe_local` has left pending, see [Note: waiting gradients]."""
        gradients, orders, names = self._pending, self._pending_orders, tuple(self._pending_names)
        self._pending, self._pending_orders, self._pending_names = [], [], []
        self._bytes_left = self._pending_bytes or 0
        if self.queue is not None and self.queue.entries:
            queued_names, queued = self.queue.take()
            gradients, names = gradients + queued, names + queued_names
            orders += range(self.slots.order + 1, self.slots.order + 1 + len(queued))
            self.slots.order += len(queued)
        if gradients:
            self._local_screen(names).look(self.slots, gradients, orders)
            in_order = self._all_in_order(names) if self._pending_bytes is None else None
            self._local_looked = in_order(gradients) if in_order is not None else ()

    def _all_in_order(self, names: tuple[str, ...]) -> Callable[[Any], Sequence[Tensor]] | None:
        """What sorts gradients of these names in the order of the parameters; None where they are not of all."""
        if names not in self._in_order:
            if len(self._in_order) >= _MAX_ORDERS:
                self._in_order.clear()
            positions = {name: index for index, name in enumerate(names)}
            complete = len(names) > 1 and positions.keys() == set(self._names) and len(names) == len(self._names)
            self._in_order[names] = itemgetter(*(positions[name] for name in self._names)) if complete else None
        return self._in_order[names]

    def _has_room(self, gradient: Tensor) -> bool:
        if not self._bytes_left or gradient.nbytes > self._bytes_left:
            return False
        self._bytes_left -= gradient.nbytes
        return True

    def _probe_now(self, name: str, gradient: Tensor) -> None:
        self.flush_pending()  # they came before it
        self._local_screen((name,)).look(self.slots, (gradient,))

    def _local_screen(self, names: tuple[str, ...]) -> Screen:
        micro_batch = self.micro_batch
        return self._screens.get((micro_batch, names), lambda: self._screen([self._local_source(n) for n in names]))

    def _local_source(self, name: str) -> GradientSource | None:
        if self._is_ignored(name):
            return None
        key = self.micro_batch, name
        if key not in self._local_sources:
            self._local_sources[key] = GradientSource(name, self.micro_batch, reduced=False)
        return self._local_sources[key]

    def _screen(self, sources: Sequence[GradientSource | None]) -> Screen:
        return Screen(sources, [self._role(source.name) if source else SlotRole.GRADIENT for source in sources])

    def probe_reduced(self) -> None:
        """Look at the gradients that the optimizer will use, after they have been communicated."""
        names, gradients = self._gradients()
        screen = self._screens.get(names, lambda: self._screen([self._reduced_sources[name] for name in names]))
        screen.look(self.slots, self._locals(gradients))
        self._seen.mark(names, gradients)

    def take_local(self) -> Sequence[Tensor]:
        """The local gradients of all parameters, if the pass that ends has looked at them all at once; else none."""
        looked, self._local_looked = self._local_looked, ()
        return looked

    def mark_checked(self, looked: Sequence[Tensor] = (), is_sure: bool = False) -> None:
        """Take the gradients for checked.

        Args:
            is_sure: as of `_Seen.mark`.
            looked: what `take_local` gave, where nothing was communicated; default those that are there now.
        """
        self._seen.mark(*((self._names, looked) if looked else self._gradients()), is_sure)

    def _gradients(self) -> tuple[tuple[str, ...], list[Tensor]]:
        """Names and gradients of the parameters that have one, not local yet."""
        gradients = [parameter.grad for _, parameter in self._parameters]
        present = [gradient for gradient in gradients if gradient is not None]
        if len(present) == len(gradients):
            return self._names, present
        named = zip(self._names, gradients, strict=True)
        return tuple(name for name, gradient in named if gradient is not None), present

    def _locals(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensor if type(tensor) is Tensor else self._local(tensor) for tensor in tensors]

    def probe_norm(self, of_each: bool = False) -> None:
        """Reduce the L2 norm of this rank's gradients, or of its shards of them, as it is before clipping.

        One slot; no host read. Sparse gradients and other kinds that are not dense take no part.

        Args:
            of_each: whether the norm of each parameter gets a slot as well; ignored parameters get none.
        """
        local = [(name, self._local(p.grad)) for name, p in self._parameters if p.grad is not None]
        dense = [(name, g if g.dtype is torch.float64 else g.float()) for name, g in local if is_plain(g)]
        if dense:
            norms = torch._foreach_norm([gradient for _, gradient in dense], 2.0)
            self.slots.reduce(SlotRole.NORM, torch.linalg.vector_norm(torch.stack(norms)), NormSource())
            if of_each:
                self._take_norms_of_each([name for name, _ in dense], norms)

    def _take_norms_of_each(self, names: list[str], norms: Sequence[Tensor]) -> None:
        kept = [(name, norm) for name, norm in zip(names, norms, strict=True) if not self._is_ignored(name)]
        if kept:
            sources = [ParameterNormSource(name) for name, _ in kept]
            self.slots.take_norms(
                torch.stack([norm for _, norm in kept]), [SlotRole.PARAMETER_NORM] * len(kept), sources
            )

    def probe_unhooked(self) -> None:
        """Look at gradients that were assigned by hand, or changed in place (clipped) since a hook saw them."""
        names, gradients = self._gradients()
        changed = self._seen.changed(names, gradients)
        if changed:
            found = tuple(names[index] for index in changed)
            screen = self._screens.get(
                ("unhooked", found), lambda: self._screen([self._unhooked_source(name) for name in found])
            )
            screen.look(self.slots, self._locals([gradients[index] for index in changed]))
            self._seen.mark(names, gradients, is_sure=True)

    def _unhooked_source(self, name: str) -> GradientSource:
        return self._unhooked_sources.setdefault(name, GradientSource(name, None, reduced=False, at_update=True))

    def total_norm(self, parameters: list[nn.Parameter], order: float) -> Tensor | None:
        """The norm of all gradients, bit for bit that of torch's ``get_total_norm``; its parts are a look at each.

        Norms that were made before are not used again: what is written to ``grad.data`` has no version.

        Args:
            parameters: those of the model.
            order: of the norm, above 0.

        Returns:
            None where torch would not take one norm of each gradient in a row: not plain, or on several devices.
        """
        found = [(id(p), p.grad) for p in parameters if p.grad is not None]
        gradients = [gradient for _, gradient in found]
        if len({(gradient.device, gradient.dtype) for gradient in gradients}) != 1 or not all(map(is_plain, gradients)):
            return None
        norms = torch.stack(torch._foreach_norm(gradients, order))
        names = [self._name_of.get(key) for key, _ in found]
        if None not in names:
            self._take_norms(norms, [name for name in names if name is not None])
        else:
            kept = [(name, norm) for name, norm in zip(names, norms.unbind(), strict=True) if name is not None]
            self._take_norms(torch.stack([norm for _, norm in kept]), [name for name, _ in kept]) if kept else None
        total: Tensor = torch.linalg.vector_norm(norms, order)
        return total

    def _take_norms(self, norms: Tensor, names: list[str]) -> None:
        roles = [self._role(name) for name in names]
        self.slots.take_norms(norms, roles, [self._unhooked_source(name) for name in names])

    def take_total(self, norm: Tensor) -> None:
        """Look at the norm of all gradients of this rank, shape (); which of them is bad is found out where it is."""
        self.slots.take_norms(norm.detach().view(1), [SlotRole.GRADIENT], [TotalNormSource()])

    def nonfinite_now(self, extremes: Callable[[Tensor], tuple[float, float] | None]) -> Iterator[Any]:
        """Source and extremes of each gradient that is bad now. Host sync: as ``extremes`` of each gradient."""
        for name, gradient in zip(*self._gradients(), strict=True):
            found = extremes(self._local(gradient))
            if found is not None and not (math.isfinite(found[0]) and math.isfinite(found[1])):
                yield self._unhooked_source(name), found

    def unchanged(self, name: str) -> Tensor | None:
        """This rank's part of a parameter's gradient, if it is there as it was looked at last; else None."""
        names, gradients = self._gradients()
        if name not in names:
            return None
        index = names.index(name)
        return None if index in self._seen.changed(names, gradients) else self._local(gradients[index])

    def begin_root(self) -> None:
        """A forward begins: from now on the loop alone decides how long its gradients live."""
        self._seen.loosen()

    def release_window(self) -> None:
        """Forget which gradients were checked or are pending: the window is over."""
        self._seen = _Seen()
        self._pending, self._pending_orders, self._pending_names, self._local_looked = [], [], [], ()
        if self.queue is not None and self.queue.entries:
            self.queue.take()

    def _role(self, name: str) -> SlotRole:
        return SlotRole.LEFT_OUT if name in self._left_out else SlotRole.GRADIENT


class _Seen:
    """Which gradients were looked at in the window, and at which version.

    They are held until the verdict or the next forward, and from then on by weak references, which take longer to make
    than all else here: the loop may drop its gradients before the verdict, and a forward needs the memory.
    """

    def __init__(self) -> None:
        self._is_sure = True
        self._names: tuple[str, ...] = ()
        self._held: Sequence[Tensor] = ()
        self._references: list[weakref.ref[Tensor]] = []
        self._versions: list[int] = []

    def mark(self, names: tuple[str, ...], gradients: Sequence[Tensor], is_sure: bool = False) -> None:
        """Note that all gradients that are there have been looked at.

        Args:
            names: of their parameters.
            gradients: those that are there.
            is_sure: whether nothing is going to change them but what raises their version.
        """
        # what writes many DTensors in one call (``torch._foreach_mul_``, by which clipping scales) raises none
        self._is_sure = is_sure or _PLAIN.issuperset(map(type, gradients))
        self._names, self._held, self._references, self._versions = names, gradients, [], _versions(gradients)

    def loosen(self) -> None:
        """Hold them by weak references from now on."""
        if self._held:
            self._references, self._held = list(map(weakref.ref, self._held)), ()

    def changed(self, names: tuple[str, ...], gradients: list[Tensor]) -> list[int]:
        """Indices of those that are others than those looked at, or may have been changed in place since."""
        if not self._is_sure:
            return list(range(len(gradients)))
        versions = _versions(gradients)
        seen: Sequence[Tensor | None] = self._held or [reference() for reference in self._references]
        if names == self._names and versions == self._versions and all(map(is_, seen, gradients)):
            return []
        known = dict(zip(self._names, zip(seen, self._versions, strict=True), strict=True))
        now = enumerate(zip(names, gradients, versions, strict=True))
        return [i for i, (name, g, version) in now if name not in known or not _is(g, version, *known[name])]


def _is(gradient: Tensor, version: int, seen: Tensor | None, seen_version: int) -> bool:
    return seen is gradient and version == seen_version


def _versions(gradients: Sequence[Tensor]) -> list[int]:
    if not _PLAIN.issuperset(map(type, gradients)):  # of a DTensor either part may be written by itself
        return [version_of(g) + version_of(getattr(g, "_local_tensor", g)) for g in gradients]
    try:
        return [gradient._version for gradient in gradients]
    except RuntimeError:  # one of them is an inference tensor, see `version_of`
        return list(map(version_of, gradients))
