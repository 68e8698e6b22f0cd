"""Runs every operator of one step under a dispatch mode: which operator made a non-finite value, and how it spread.

[Note: where a value begins]
An operator produces a non-finite value where its output is worse than everything it was given; -Inf, +Inf, NaN, worst
last. A number of the user's code written into a tensor (``masked_fill`` with -inf) is a ``constant``. A value made out
of -inf begins at the operator that made it if that -inf is a mask: a constant, or a value from outside the step. Only
non-finite values are recorded: an operator with finite outputs costs one pass over them and leaves nothing behind.

[Note: lines of backward]
Autograd numbers the nodes of a graph in the order of the forward. For each forward operator the trace records its line
and module under the number of the node just made; in backward the number of the running node leads back to them.
Anomaly mode would format a whole stack per operator instead.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_nanguard.hooks.autograd import in_backward

from .divisor_sources import DivisorSource, DivisorSources
from .events import (
    MAX_ROWS,
    SEVERITY,
    Event,
    EventCategory,
    EventPhase,
    NumberCall,
    describe,
    hit_mask,
    quick_kind,
    worst_kind,
)
from .module_stack import LayerCall, ModuleStack
from .operators import FILLS, Operator, Operators, kinds_of, named_arguments, numbers_of, tensors_of
from .source_lines import CodeLocation, FrameKind, first_spot, is_wrappers_own, stack_of
from .storage_names import StorageTracker

_T = TypeVar("_T")

MAX_KEPT = 64
"""Events whose arguments are copied, so that the rules can inspect them and call the operator again."""
MAX_BEFORE = 4
"""How many operators back `Event.before` reaches."""


class Node:
    """What is known of the forward operator that made an autograd node.

    Attributes:
        spot: the user's code that called it, or None.
        place: the module call it ran in; None in the step's own code.
        operator: name of the overload.
    """

    __slots__ = ("operator", "place", "spot")

    def __init__(self, spot: CodeLocation | None, place: LayerCall | None, operator: str) -> None:
        self.spot = spot
        self.place = place
        self.operator = operator


class _Followed(NamedTuple):
    """An operator that is about to run: where it was called, and its arguments before the call."""

    operator: Operator
    spot: CodeLocation | None
    given: list[tuple[str, Any, Any]]


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Dispatch mode for one step.

    Host sync: several per operator; a collective is waited for.

    Args:
        modules: entered together with the trace; says which module call is running.

    Attributes:
        events: operators with non-finite outputs, in order.
        num_operators: how many operators ran.
        was_compiled: whether some code is compiled by torch.compile; it ran eagerly.
        on_event: called with each event and the frame below it, before the operator's caller continues.
        memory: names and last writers of storages.
        origins: what small finite tensors were computed from.
        divisor_origins: by the order of a division, what its divisor was computed from.
        bad_communication: the first collective that took or returned a non-finite value, or None.
        micro_batch: index of the running micro-batch in the window; set by the caller.
        is_after_backward: whether a backward pass has run since the micro-batch began, or a module was called.
        batch_size: length of dim 0 of its tensors, or None; set by the caller.
        is_lenient: whether a failure to follow an operator ends the following instead of the step; set by the caller.
        failure: what that was; None where there was none.
    """

    supports_higher_order_operators = True

    def __init__(self, modules: ModuleStack) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.events: list[Event] = []
        self.num_operators = 0
        self.was_compiled = False
        self.on_event: Callable[[Event, FrameType], None] | None = None
        self.memory = StorageTracker()
        self.origins = DivisorSources(self.memory.kept_name_of)
        self.divisor_origins: dict[int, DivisorSource] = {}
        self.bad_communication: str | None = None
        self.micro_batch: int | None = None
        self.is_after_backward = False
        self.batch_size: int | None = None
        self.is_lenient = False
        self.failure: str | None = None
        self._by_order: dict[int, Event] = {}
        self._modules = modules
        self._operators = Operators()
        self._nodes: dict[int, Node] = {}
        self._last_number = _newest_node()
        self._num_kept = 0
        self._read: dict[str, Tensor] = {}
        self._recent: deque[tuple[CodeLocation | None, str]] = deque(maxlen=MAX_BEFORE)

    def event(self, order: int) -> Event:
        """The event of the operator at position ``order``; KeyError where its outputs were finite."""
        return self._by_order[order]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        frame = sys._getframe(1)
        followed = self._tried(lambda: self._before(function, args, kwargs, frame))
        output = function(*args, **kwargs)
        if followed is not None:
            if followed.operator.communicates:
                _wait_for(output)
            self._tried(lambda: self._after(function, followed, args, kwargs, output, frame))
        return output

    def _tried(self, follow: Callable[[], _T]) -> _T | None:
        """What ``follow`` gives; None once following has failed, where that must not be the end of the step."""
        if self.failure is not None:
            return None
        try:
            return follow()
        except Exception as error:
            if not self.is_lenient:
                raise
            self.failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            return None

    def _before(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> _Followed | None:
        """What is noted before an operator runs; None where it is not followed."""
        operator = self._operators[function]
        spot = first_spot(frame)
        if operator is None or spot is FrameKind.PROBE:
            return None
        assert not isinstance(spot, FrameKind)
        self.num_operators += 1
        self._note_pass()
        self._note_node(spot, operator)
        if operator.is_view:
            return None
        # Taken before the call: an in-place operator overwrites the values that its output has to be compared with.
        return _Followed(operator, spot, _given(operator, args, kwargs))

    def _after(
        self,
        function: Any,
        followed: _Followed,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        frame: FrameType,
    ) -> None:
        """What is noted when an operator has run."""
        operator, spot, given = followed.operator, followed.spot, followed.given
        if operator.communicates:
            self._note_communication(operator, [given, output])
        if operator.makes_empty:
            for tensor in tensors_of(output):
                self.memory.left_empty(tensor, _empty_name(operator, spot))
        elif operator.reads_number:
            self._note_number(output, args[0])
        else:
            self.origins.note(operator, given, output, spot)
            self._look(function, followed, kwargs, output, frame)
            self._recent.append((spot, operator.base))

    def _note_communication(self, operator: Operator, values: list[Any]) -> None:
        if self.bad_communication is None and any(quick_kind(tensor) is not None for tensor in tensors_of(values)):
            # The first one only: later collectives spread the value.
            self.bad_communication = operator.name

    def _note_pass(self) -> None:
        if in_backward():
            self.is_after_backward = True
        elif self._modules.top() is not None:
            self.is_after_backward = False

    def _note_node(self, spot: CodeLocation | None, operator: Operator) -> None:
        number = _newest_node()  # under no_grad too: in a custom function's forward
        if number > self._last_number:
            self._last_number = number
            self._nodes[number] = Node(spot, self._modules.top(), operator.name)

    def _note_number(self, number: Any, tensor: Tensor) -> None:
        """Record a non-finite number that the host reads: if the code writes it later, that write is no constant."""
        kinds = kinds_of(numbers_of(number))
        if kinds and kinds[0] != "-inf":  # masks are too common
            self._read[kinds[0]] = tensor

    def _look(
        self,
        function: Any,
        followed: _Followed,
        kwargs: dict[str, Any],
        output: Any,
        frame: FrameType,
    ) -> None:
        """Make an event of the operator if it left something non-finite."""
        operator, spot, given = followed
        written = [original for name, original, _ in given if name in operator.writes]
        outputs = list({id(tensor): tensor for tensor in tensors_of([written, output])}.values())
        kinds = [quick_kind(tensor) for tensor in outputs]
        worst = worst_kind(kinds)
        if worst is None:
            return
        event = self._event_of(operator, worst, given, frame)
        event.before = tuple(base for place, base in self._recent if place is not None and place == spot)
        if (
            event.category is EventCategory.PROPAGATED
            and event.outside
            and not event.parents
            and is_wrappers_own(frame)
        ):
            # FSDP gathers and copies a bad weight before any module reads it; blaming its copy would name no line of
            # the user.
            self._pass_on(event, [tensor for tensor, kind in zip(outputs, kinds, strict=True) if kind is not None])
            return
        if event.category is EventCategory.PRODUCED or event.outside:
            self._describe(event, function, operator, given, kwargs, outputs, kinds.index(worst))
        self.events.append(event)
        self._by_order[event.order] = event
        for tensor, kind in zip(outputs, kinds, strict=True):
            if kind is not None:
                self.memory.wrote(event, tensor)
        if self.on_event is not None:
            self.on_event(event, frame)

    def _pass_on(self, event: Event, outputs: list[Tensor]) -> None:
        """Treat FSDP's copy of a bad weight as the weight, so that the event is the user's operator that reads it."""
        for tensor in outputs:
            self.memory.passed_on(tensor, event.outside[0])

    # -- one event ---------------------------------------------------------------------------------------------------

    def _event_of(self, operator: Operator, kind: str, given: list[tuple[str, Any, Any]], frame: FrameType) -> Event:
        sources = _sources(operator, given)
        kinds = [quick_kind(value) for _, value in sources]
        worst = worst_kind(kinds)
        numbers = list(numbers_of([value for _, _, value in given]))
        event = Event(
            self.num_operators, operator.name, kind, EventCategory.PROPAGATED, EventPhase.FORWARD, None, None, ()
        )
        if operator.is_literal or (SEVERITY[kind] > SEVERITY[worst] and _is_as_bad(numbers, kind)):
            event.category = EventCategory.CONSTANT
        elif SEVERITY[kind] > SEVERITY[worst]:
            event.category = EventCategory.PRODUCED
        # of a selection the worst may have stayed behind
        taken = kind if event.category is EventCategory.PROPAGATED and kind in kinds else worst
        bad = [original for (original, _), k in zip(sources, kinds, strict=True) if k == taken and taken is not None]
        if event.category is EventCategory.CONSTANT:
            written = [kind] if operator.is_literal else kinds_of(numbers)
            bad = [self._read[k] for k in written if k in self._read]
            if operator.is_literal:  # from_numpy of a batch
                bad += [original for original, _ in sources if self.memory.name_of(original)]
            event.category = EventCategory.PROPAGATED if bad else EventCategory.CONSTANT
        self._follow(event, bad)
        event.roots = self._roots(event, worst)
        self._place(event, frame)
        event.micro_batch = self.micro_batch
        return event

    def _follow(self, event: Event, bad: list[Tensor]) -> None:
        writers = [(tensor, self.memory.writer(tensor)) for tensor in bad]
        event.parents = tuple(dict.fromkeys(w.order for _, w in writers if w is not None))
        outside = [self.memory.name_of(tensor) or "" for tensor, writer in writers if writer is None]
        event.outside = tuple(dict.fromkeys(outside))

    def _roots(self, event: Event, worst: str | None) -> frozenset[int]:
        found = {root for parent in event.parents for root in self._by_order[parent].roots}
        if event.outside and not (event.category is EventCategory.PRODUCED and worst == "-inf"):
            found.add(event.order)
        if event.category is EventCategory.PRODUCED:
            found = {root for root in found if root == event.order or not self._is_legal(self._by_order[root])}
        # Bounded, since each event takes over the roots of all its parents.
        return frozenset(sorted(found)[:8]) or frozenset({event.order})

    @staticmethod
    def _is_legal(root: Event) -> bool:
        """Whether a root is a mask: infinities that the code wrote, or -inf that existed before the step."""
        if root.category is EventCategory.CONSTANT:
            return root.kind != "nan" and root.base in FILLS
        return bool(root.outside) and root.kind == "-inf"

    def _place(self, event: Event, frame: FrameType) -> None:
        stack = stack_of(frame)
        self.was_compiled = self.was_compiled or FrameKind.COMPILED in stack.kinds
        event.lines = tuple(spot.line() for spot in stack.spots)
        here = self._modules.top()
        outside = EventPhase.LOOP if self.is_after_backward else EventPhase.STEP_CODE
        event.phase = outside if here is None else EventPhase.FORWARD
        if in_backward():
            is_recomputed = FrameKind.CHECKPOINT in stack.kinds and stack.spots
            event.phase = EventPhase.RECOMPUTATION if is_recomputed else EventPhase.BACKWARD
            self._place_node(event)
        elif FrameKind.OPTIMIZER in stack.kinds:
            event.phase = EventPhase.UPDATE
        if here is not None and event.phase is not EventPhase.BACKWARD:
            event.layer, event.call = here

    def _place_node(self, event: Event) -> None:
        node = torch._C._current_autograd_node()
        if node is None:
            return
        event.node = node.name()
        event.sequence = node._sequence_nr()
        made_by = self._nodes.get(event.sequence)
        if made_by is not None:
            event.forward_lines = () if made_by.spot is None else (made_by.spot.line(),)
            event.forward_operator = made_by.operator
            if made_by.place is not None:
                event.layer, event.call = made_by.place

    def _describe(
        self,
        event: Event,
        function: Any,
        operator: Operator,
        given: list[tuple[str, Any, Any]],
        kwargs: dict[str, Any],
        outputs: list[Tensor],
        position: int,
    ) -> None:
        output = outputs[position]
        if "._foreach_" in operator.name:
            given = [(name, *(_item(value, position, len(outputs)) for value in pair)) for name, *pair in given]
            kwargs, position = {key: _item(value, position, len(outputs)) for key, value in kwargs.items()}, 0
        operands = _sources(operator, given)
        event.inputs = tuple(describe(value, self._name_of(original)) for original, value in operands)
        event.output = describe(output)
        event.numbers = tuple(f"{name}={value:g}" for name, value, _ in given if type(value) in (int, float))
        divisor = next((o for (o, _) in operands[1:2]), None) if event.base == "div" else None
        origin = self.origins.of(divisor) if divisor is not None else None
        if origin is not None:
            self.divisor_origins[event.order] = origin
        local = getattr(output, "_local_tensor", output)  # of a DTensor; asking for the whole would take all ranks
        mask = hit_mask(local, event.kind)
        event.num_hit = int(mask.sum())
        if local.dim() and local.shape[0] == self.batch_size and local.shape[0] > 1:
            rows = mask.reshape(mask.shape[0], -1).any(1).nonzero().reshape(-1).tolist()
            event.rows, event.num_rows = tuple(rows[:MAX_ROWS]), len(rows)
        # Copies of arguments take memory, hence a bound. A collective, or an operator on a distributed tensor, cannot
        # be called again on one rank.
        if self._num_kept < MAX_KEPT and not operator.communicates and not _is_on_several_ranks([given, output]):
            self._num_kept += 1
            kept = tuple(_copied(value) for name, _, value in given if name not in kwargs)
            event.made = NumberCall(
                function, kept, {key: _copied(v) for key, v in kwargs.items()}, output.detach().clone(), position
            )

    def _name_of(self, tensor: Tensor) -> str | None:
        return self.memory.name_of(tensor)

    # -- from the fault back -----------------------------------------------------------------------------------------

    def first_nonfinite_op_of(self, event: Event) -> Event:
        """The earliest event that the value of ``event`` began with, masks and constants last."""
        roots = [self._by_order[root] for root in sorted(event.roots)]
        return next(
            (root for root in roots if not self._is_legal(root) and root.category is not EventCategory.CONSTANT),
            roots[0],
        )

    def path(self, first_nonfinite_op: Event, target: Event) -> list[Event]:
        """The events from ``first_nonfinite_op`` to ``target``, both included; shorter where the links are unknown."""
        found = [target]
        while found[-1] is not first_nonfinite_op:
            parents = [
                self._by_order[p] for p in found[-1].parents if first_nonfinite_op.order in self._by_order[p].roots
            ]
            if not parents:
                break
            found.append(min(parents, key=lambda parent: parent.order))
        return found[::-1]


def _wait_for(output: Any) -> None:
    """Wait until the result of a collective has arrived, so that it can be inspected. Blocks alike on every rank."""
    if isinstance(output, torch.ScriptObject):
        dist.Work.unbox(output).wait()
    elif isinstance(output, (list, tuple)):
        for item in output:
            _wait_for(item)
    elif isinstance(output, Tensor):
        torch.ops._c10d_functional.wait_tensor(output)


def _is_on_several_ranks(value: Any) -> bool:
    """Whether calling an operator again with such tensors would communicate."""
    return any(isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1 for tensor in tensors_of(value))


def _newest_node() -> int:
    """Sequence number of the autograd node made last."""
    return int(torch.autograd._get_sequence_nr()) - 1  # type: ignore[attr-defined]  # as torch.fx uses it


def _given(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """The arguments of a call as (name, object passed, its value before the call)."""
    named = named_arguments(operator, args, kwargs)
    if not operator.writes or operator.overwrites:
        return [(name, value, value) for name, value in named]
    return [(name, value, _copied(value) if name in operator.writes else value) for name, value in named]


def _item(value: Any, position: int, length: int) -> Any:
    """The one item of a list that belongs to the output at a position, as a list; anything else as it is."""
    return [value[position]] if isinstance(value, (list, tuple)) and len(value) == length else value


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return type(value)(_copied(item) for item in value) if type(value) in (list, tuple) else value


def _sources(operator: Operator, given: list[tuple[str, Any, Any]]) -> list[tuple[Tensor, Tensor]]:
    """The tensors that the result depends on, as (tensor, its value before the call)."""
    kept = [each for each in given if not (operator.overwrites and each[0] in operator.writes)]
    return [pair for _, original, value in kept for pair in _pairs(original, value)]


def _pairs(original: Any, value: Any) -> Iterable[tuple[Tensor, Tensor]]:
    return zip(tensors_of(original), tensors_of(value), strict=True)


def _is_as_bad(numbers: list[float], kind: str) -> bool:
    kinds = kinds_of(numbers)
    # times -1 and the like: an infinite number makes either infinity
    return bool(kinds) and (kind != "nan" or "nan" in kinds)


def _empty_name(operator: Operator, spot: CodeLocation | None) -> str:
    where = f" at {spot.line().place()}" if spot is not None else ""
    return f"uninitialised memory ({operator.base}{where})"
