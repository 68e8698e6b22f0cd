"""State: parameters, buffers, optimizer state and hyper-parameters, before the first step and after updates."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .screens import Screen, ScreenCache
from .slot_roles import SlotRole
from .slots import SlotBuffer

# others may be infinite on purpose, such as a clipping norm that is off
_NEVER_INFINITE = frozenset({"lr", "weight_decay", "momentum", "dampening", "eps", "betas", "alpha", "rho", "lr_decay"})

StateKind = Literal["parameter", "buffer", "optimizer state", "hyper-parameter"]
When = Literal["before", "update", "written", "before broadcast", "check"]


@dataclass(frozen=True, slots=True)
class StateSource:
    """Source of a slot: a parameter, a buffer, a tensor of optimizer state, or a hyper-parameter.

    Attributes:
        kind: which of these.
        name: clean name; for optimizer state ``<parameter>.<key>``, for hyper-parameters ``g0.lr``.
        when: ``before`` the step, after an ``update``, ``written`` by the forward (buffers), ``before
            broadcast`` of the buffers, by which DDP overwrites this rank's with rank 0's, or at a ``check`` that no
            update has preceded.
    """

    kind: StateKind
    name: str
    when: When


class StateProbe:
    """Looks at parameters, buffers, optimizer state and hyper-parameters.

    Args:
        slots: where the results go.
        parameters: clean name and parameter of the model.
        named_buffers: gives clean name and buffer; called each time, since buffers can be replaced.
        optimizers: in the order in which their hyper-parameters are numbered.
        local: maps a tensor to this rank's part of it, without communication.
        is_ignored: whether a name is not watched.

    Attributes:
        registered: further modules by name, such as an EMA copy.
    """

    def __init__(
        self,
        slots: SlotBuffer,
        parameters: list[tuple[str, nn.Parameter]],
        named_buffers: Callable[[], list[tuple[str, Tensor]]],
        optimizers: list[torch.optim.Optimizer],
        local: Callable[[Tensor], Tensor],
        is_ignored: Callable[[str], bool],
    ) -> None:
        self.slots = slots
        self.registered: dict[str, nn.Module] = {}
        self._names = {id(parameter): name for name, parameter in parameters}
        self._parameters = parameters
        self._named_buffers = named_buffers
        self._optimizers = optimizers
        self._local = local
        self._is_ignored = is_ignored
        self._probed_buffers = False
        self._good_values: list[object] = []  # of all parameter groups, if they were good and cannot have changed
        # Sources are made once and used in every step; None for an ignored name
        self._sources: dict[tuple[StateKind, When], dict[str, StateSource | None]] = {}
        self._screens = ScreenCache()
        # - State that is non-finite on purpose, and whether it may be NaN
        self._legal: dict[str, bool] = {}
        # By `id` of an optimizer: its parameters, which tell when a group was added, and how they are looked at
        self._updated: dict[int, tuple[list[nn.Parameter], Screen]] = {}

    def allow(self, legal: Mapping[str, bool]) -> None:
        """From now on this state may be infinite.

        Args:
            legal: by name, whether it may be NaN as well: then it is not looked at any more.
        """
        self._legal.update(legal)
        self._sources, self._screens, self._updated = {}, ScreenCache(), {}

    # -- what is there -----------------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters of the model, then those that only an optimizer holds, then those of registered modules."""
        yield from self._parameters
        for optimizer in self._optimizers:
            for name, parameter in self.named_parameters_of(optimizer):
                if id(parameter) not in self._names:
                    yield name, parameter
        for prefix, module in self.registered.items():
            yield from ((f"{prefix}.{name}", parameter) for name, parameter in module.named_parameters())

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Floating buffers of the model and of registered modules."""
        for name, buffer in self._named_buffers():
            if buffer.is_floating_point() or buffer.is_complex():
                yield name, buffer
        for prefix, module in self.registered.items():
            for name, buffer in module.named_buffers():
                if buffer.is_floating_point() or buffer.is_complex():
                    yield f"{prefix}.{name}", buffer

    def optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors in the optimizers' state, as ``<parameter>.<key>``; none before their first step."""
        for optimizer in self._optimizers:
            for name, parameter in self.named_parameters_of(optimizer):
                for key, value in state_of(optimizer, parameter).items():
                    if isinstance(value, Tensor):
                        yield f"{name}.{key}", value

    def named_parameters_of(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
        """Name and parameter of all that one optimizer holds; what the model does not have is ``optimizer.g0.p3``."""
        index = self._optimizers.index(optimizer)
        prefix = "optimizer" if index == 0 else f"optimizer{index}"
        for group_index, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                yield self._names.get(id(parameter), f"{prefix}.g{group_index}.p{position}"), parameter

    def hyper_parameters(self) -> Iterator[tuple[str, float | Tensor]]:
        """Numbers in the parameter groups, as ``g0.lr``; those of a second optimizer as ``optimizer1.g0.lr``."""
        for index, optimizer in enumerate(self._optimizers):
            prefix = "" if index == 0 else f"optimizer{index}."
            for group_index, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    if key != "params":
                        yield from _numbers(f"{prefix}g{group_index}.{key}", value)

    # -- looking at it -------------------------------------------------------------------------------------------------

    def probe_before_first_step(self) -> None:
        """Reduce parameters and optimizer state before the first step."""
        self._probe("parameter", "before", self.parameters())
        self.probe_optimizer_state()

    def probe_buffers_before_broadcast(self) -> None:
        """Reduce the buffers that DDP is about to overwrite with rank 0's: a bad one is a warning, no trigger."""
        self._probe("buffer", "before broadcast", iter(self._named_buffers()))

    def probe_buffers_before_first_step(self) -> None:
        """Reduce the buffers before the first step; a second call does nothing."""
        if not self._probed_buffers:
            self._probed_buffers = True
            self._probe("buffer", "before", self.buffers())

    def probe_optimizer_state(self) -> None:
        """Reduce the whole optimizer state: one pass over it, so only every ``state_every`` steps."""
        self._probe("optimizer state", "before", self.optimizer_state())

    def probe_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Reduce the weights that an optimizer has just updated; the next verdict judges them."""
        present = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        screen = self._screen_of_updated(optimizer, present)
        screen.look(self.slots, [p if type(p) is nn.Parameter else self._local(p) for p in present])

    def _screen_of_updated(self, optimizer: torch.optim.Optimizer, present: list[nn.Parameter]) -> Screen:
        """Made anew only when the optimizer holds other parameters."""
        known, screen = self._updated.get(id(optimizer), ([], None))
        if screen is None or len(known) != len(present) or any(map(operator.is_not, known, present)):
            names = [name for name, _ in self.named_parameters_of(optimizer)]
            screen = Screen([self._source("parameter", "update", name) for name in names], self._roles(names))
            self._updated[id(optimizer)] = (present, screen)
        return screen

    def probe_buffers_after_forward(self) -> None:
        """Reduce the buffers after the window's forwards, and parameters and buffers of registered modules."""
        self._probe("buffer", "written", self.buffers())
        for prefix, module in self.registered.items():
            named = ((f"{prefix}.{name}", parameter) for name, parameter in module.named_parameters())
            self._probe("parameter", "written", named)

    def probe_weights(self) -> None:
        """Reduce the parameters as they are now, where nothing tells whether they were written since the last look."""
        self._probe("parameter", "check", self.parameters())

    def probe_hyper_parameters(self) -> bool:
        """Reduce the hyper-parameters that are tensors; returns whether one that the host holds is bad."""
        values = self._values_of_groups()
        if len(values) == len(self._good_values) and all(map(operator.is_, values, self._good_values)):
            return False  # most steps find the very objects of the step before
        bad = False
        for name, value in self.hyper_parameters():
            if isinstance(value, Tensor):
                self.slots.reduce(SlotRole.STATE, value, StateSource("hyper-parameter", name, "before"))
            else:
                bad = bad or is_bad_number(name, value)
        self._good_values = [] if bad or not all(map(_cannot_change, values)) else values
        return bad

    def _values_of_groups(self) -> list[object]:
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        return [value for group in groups for key, value in group.items() if key != "params"]

    def _probe(self, kind: StateKind, when: When, named: Iterator[tuple[str, Tensor]]) -> None:
        if kind == "buffer":  # where -inf is allowed, which no norm shows
            role = SlotRole.WARN if when == "before broadcast" else SlotRole.BUFFER
            for name, tensor in named:
                if (source := self._source(kind, when, name)) is not None:
                    self.slots.reduce(SlotRole.OPEN if name in self._legal else role, self._local(tensor), source)
        elif found := list(named):
            names = tuple(name for name, _ in found)
            screen = self._screens.get((kind, when, names), lambda: self._screen(kind, when, names))
            screen.look(self.slots, [self._local(tensor) for _, tensor in found])

    def _screen(self, kind: StateKind, when: When, names: tuple[str, ...]) -> Screen:
        return Screen([self._source(kind, when, name) for name in names], self._roles(names))

    def _roles(self, names: Iterable[str]) -> list[SlotRole]:
        return [SlotRole.OPEN if name in self._legal else SlotRole.STATE for name in names]

    def _may_be(self, name: str, when: When) -> bool:
        """Whether nothing that the state can hold is bad."""
        return self._legal.get(name, False) or (name in self._legal and when == "before broadcast")

    def _source(self, kind: StateKind, when: When, name: str) -> StateSource | None:
        sources = self._sources.setdefault((kind, when), {})
        if name not in sources:
            is_left_out = self._is_ignored(name) or self._may_be(name, when)
            sources[name] = None if is_left_out else StateSource(kind, name, when)
        return sources[name]


def state_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Mapping[Any, Any]:
    """What an optimizer keeps of a parameter; nothing where that is no mapping, as no optimizer of torch has it."""
    found = optimizer.state.get(parameter)
    return found if isinstance(found, Mapping) else {}


def _cannot_change(value: object) -> bool:
    """Whether the object will be what it is: no tensor and no list, into which the loop may write."""
    if isinstance(value, tuple):
        return all(map(_cannot_change, value))
    return value is None or isinstance(value, (bool, int, float, str))


def is_bad_number(name: str, value: float) -> bool:
    """Whether a hyper-parameter is NaN, or infinite where infinity makes no sense (``g0.lr``, ``g0.betas[0]``)."""
    key = name.rsplit(".", 1)[-1].split("[")[0]
    return math.isnan(value) or (math.isinf(value) and key in _NEVER_INFINITE)


def _numbers(name: str, value: object) -> Iterator[tuple[str, float | Tensor]]:
    if isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point()):
        yield name, value
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _numbers(f"{name}[{index}]", item)
