"""Whether a second run was given what training was: what was compared and differs, and what was not compared.

Only where everything that goes into a step was the same may a step that comes out otherwise be put down to the device.
All of this is read on the fault path, against what a clean step leaves behind anyway: versions, sums, norms of weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import CellType, ModuleType
from typing import Any

from numpy import ndarray
from torch import Tensor, nn

from ddp_nanguard.capture.model_calls import ModelCall
from ddp_nanguard.capture.record import StepRecord
from ddp_nanguard.capture.surroundings import surroundings
from ddp_nanguard.context import GuardContext
from ddp_nanguard.probes.gradient import GradientSource
from ddp_nanguard.probes.slots import SlotBuffer, SlotStats
from ddp_nanguard.probes.state import StateSource
from ddp_nanguard.report.wording import listed
from ddp_nanguard.wrappers.aside import is_of_torch, own_attributes

from .compare import same_bits

MAX_ITEMS = 4096
"""Plain values that are read of a model's Python objects."""
MAX_BYTES = 2**20
"""Of an array or a text that is read whole."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass
class Inputs:
    """What went into the second run on this rank, beside what did into training.

    Attributes:
        different: what was compared and is not the same, one phrase each.
        unseen: what was not compared, one phrase each.
    """

    different: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)


def inputs_of(context: GuardContext, record: StepRecord) -> Inputs:
    """Compare what is there before the second run with what training left of it. Collective: none. Host sync: many."""
    found = Inputs()
    calls = [call for call in record.window.calls.calls if call.has_returned]
    modules = [module for _, module in context.wrapper.named_modules()]
    now = surroundings(modules)
    found.different += dict.fromkeys(text for call in calls for text in call.around.different(now))
    _add_arguments(calls, found, context.config.copy_batch)
    _add_weights(context, record, found)
    if record.window.calls.had_gradients:
        found.unseen.append("gradients from before the step, onto which its own were accumulated")
    if len(record.window.micro_batches) > 1:
        found.unseen.append("what the loop does to gradients between the backward passes")
    return found


def _add_arguments(calls: list[ModelCall], found: Inputs, copies: bool) -> None:
    unseen = [] if copies else [path for call in calls for path in call.unseen_arguments()]
    if unseen:
        found.unseen.append(f"the bits of large arguments ({listed(dict.fromkeys(unseen), 3)})")
    kinds = dict.fromkeys(kind for call in calls if not call.is_step for kind in _odd_kinds((call.args, call.kwargs)))
    if kinds:
        found.unseen.append(f"arguments of type {listed(kinds, 3)}")


def _odd_kinds(arguments: Any) -> Iterator[str]:
    """Names of types among arguments that are neither tensors nor plain values nor containers of such."""
    if isinstance(arguments, Mapping):
        arguments = list(arguments.values())
    if isinstance(arguments, (list, tuple)):
        for item in arguments:
            yield from _odd_kinds(item)
    elif not isinstance(arguments, (Tensor, *_PLAIN)):
        yield type(arguments).__name__


# -- weights -----------------------------------------------------------------------------------------------------------


def _add_weights(context: GuardContext, record: StepRecord, found: Inputs) -> None:
    """Weights by where they lie, and by their norms after the last update, which ride with every verdict."""
    if record.window.calls.weights_were_elsewhere() and not context.wrapper.is_sharded:
        found.different.append("weights (their memory was swapped since the forward)")
    then = {s.source: (s.minimum, s.maximum) for s in record.slots.slot_stats() if _is_weight(s)}
    now = _weights_now(context, {source.when for source in then}) if record.is_current else {}
    changed = [source.name for source, values in then.items() if source in now and not same_bits(values, now[source])]
    if changed:
        names = listed(dict.fromkeys(changed), 3)
        found.unseen.append(f"weights that other code than the update has written, perhaps since the forward ({names})")
    looked = {source.name for source in then if source in now}
    rest = [name for name, _ in context.state.parameters() if name not in looked]
    if rest:
        found.unseen.append(f"the bits of weights ({listed(rest, 3)})")


def _is_weight(stats: SlotStats) -> bool:
    source = stats.source
    return isinstance(source, StateSource) and source.kind == "parameter" and source.when in ("before", "update")


def _weights_now(context: GuardContext, when: set[str]) -> dict[Any, tuple[float, float]]:
    """The same norms of the weights as they are now; training's slots are left alone."""
    state, slots = context.state, context.state.slots
    state.slots = SlotBuffer(1, exact=slots.exact)
    try:
        if "before" in when:
            state.probe_before_first_step()
        for optimizer in context.optimizers if "update" in when else []:
            state.probe_update(optimizer)
        return {s.source: (s.minimum, s.maximum) for s in state.slots.slot_stats() if _is_weight(s)}
    finally:
        state.slots = slots


# -- what only the second run shows ------------------------------------------------------------------------------------


def other_gradients(then: list[SlotStats], now: list[SlotStats]) -> list[str]:
    """Names of parameters that got a gradient in one run and none in the other, as where some were frozen."""
    one, other = ({s.source.name for s in stats if _is_local(s)} for stats in (then, now))
    return sorted(one ^ other)


def _is_local(stats: SlotStats) -> bool:
    source = stats.source
    return isinstance(source, GradientSource) and not source.reduced and not source.at_update


def python_state(context: GuardContext, record: StepRecord) -> dict[tuple[str, str], Any]:
    """Plain values that the step holds beside tensors; what a call changes, the first one found otherwise.

    They are the attributes of the model's modules, and what the forwards of the user's own classes and the loop's step
    function take from around them.
    """
    left = [MAX_ITEMS]
    modules = context.wrapper.named_modules()
    found = {
        (name, attribute): _read(value, left, 4)
        for name, module in modules
        for attribute, value in own_attributes(module).items()
    }
    functions = [type(m).forward for m in {type(m): m for _, m in modules}.values() if not is_of_torch(type(m))]
    functions += [call.function for call in record.window.calls.calls if call.is_step]
    for function in functions:
        found |= {(function.__qualname__, name): _read(value, left, 4) for name, value in _taken_from_around(function)}
    return found


def _taken_from_around(function: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of a function's closure, and of the module's globals that its code names."""
    code = getattr(function, "__code__", None)
    if code is None:
        return
    cells = zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False)
    yield from ((name, cell.cell_contents) for name, cell in cells if cell != _EMPTY)
    around = function.__globals__
    yield from ((name, around[name]) for name in code.co_names if name in around and not name.startswith("__"))


_EMPTY = CellType()
"""Of a name that is not bound yet."""


def changed_by_a_call(before: Mapping[tuple[str, str], Any], after: Mapping[tuple[str, str], Any]) -> list[str]:
    """Names of attributes that differ between two readings of `python_state`."""
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return list(dict.fromkeys(f"{owner}.{name}" if owner else name for owner, name in keys))


def _read(value: Any, left: list[int], depth: int) -> Any:
    """A value as data that can be compared later, as far as a number of items and a depth reach."""
    left[0] -= 1
    if left[0] < 0 or depth == 0:
        return None
    try:
        return _read_plain(value) if isinstance(value, (*_PLAIN, Tensor, ndarray)) else _read_parts(value, left, depth)
    except Exception:  # an object of the user's that does not like to be looked at, or changes meanwhile
        return None


def _read_plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), -1 if value.is_inference() else value._version
    if isinstance(value, ndarray):
        return value.shape, value.tobytes() if value.nbytes < MAX_BYTES else None
    return repr(value) if not isinstance(value, (str, bytes)) or len(value) < MAX_BYTES else (id(value), len(value))


def _read_parts(value: Any, left: list[int], depth: int) -> Any:
    if isinstance(value, Mapping):
        items = list(islice(value.items(), left[0]))
        return len(value), [(_read(key, left, 2), _read(item, left, depth - 1)) for key, item in items]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return len(value), [_read(item, left, depth - 1) for item in list(islice(value, left[0]))]
    if callable(value) or isinstance(value, (nn.Module, ModuleType)) or not hasattr(value, "__dict__"):
        return id(value)
    return id(value), _read(vars(value), left, depth - 1)
