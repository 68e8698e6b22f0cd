"""`Parts`: what a guard is composed of, and how it is put together from what the user gave."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .blame import Habit, resolved
from .board import Board
from .config import GuardConfig
from .given import Given, checked, guarded, require_fitting_group
from .probes.backward import BackwardProbe
from .probes.budget import Budget
from .probes.calls import Call
from .probes.forward import ForwardProbe
from .probes.gradient import GradientProbe
from .probes.state import StateProbe
from .scaler import BeforeStep, WatchedScaler
from .testing import Plan, compared, planned
from .verdict import Peers
from .window import Previous, Window
from .wrappers import GradientWatch, Wrapper, compiled_modules

_log = logging.getLogger(__name__)


@dataclass
class Parts:
    """What a guard is composed of."""

    config: GuardConfig
    peers: Peers
    wrapper: Wrapper
    optimizers: list[torch.optim.Optimizer]
    board: Board
    backward: BackwardProbe
    forward: ForwardProbe
    budget: Budget
    gradient: GradientProbe
    local_gradients: GradientWatch | None
    state: StateProbe
    window: Window
    previous: Previous | None
    scaler: WatchedScaler | None
    recipe: str | None
    recipe_directory: str | None
    device: torch.device
    module_names: frozenset[str]
    named_buffers: Callable[[], list[tuple[str, Tensor]]]
    registered: dict[str, Any] = field(default_factory=dict)
    known_habits: frozenset[Habit] = frozenset()
    let_through: int | None = None
    reduced_in: set[int] = field(default_factory=set)
    injection: Plan | None = None
    compiled: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    armed: bool = False
    saw_initial_buffers: bool = False
    is_late: bool = False
    late_hyper_parameters: list[tuple[str, float | Tensor]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The same on all ranks of this guard and no other guard of the job."""
        group = self.peers.fault_group
        return f"{group.group_name}/{self.peers.guard_number}" if group is not None else "alone"

    def is_ignored(self, name: str) -> bool:
        """Whether an ``ignore`` pattern covers a layer or a parameter."""
        return is_ignored(name, self.config.ignore)

    def owner_of(self, name: str) -> str:
        """The layer of a parameter, buffer or optimizer state: the longest module name that its name begins with."""
        while "." in name:
            name = name.rsplit(".", 1)[0]
            if name in self.module_names:
                return name
        return ""

    def sharers_of(self, name: str, calls: list[Call]) -> list[str]:
        """The layers that hold a parameter, the one that names it first, and those that took it as an argument."""
        aliases = [alias for alias, kept in self.wrapper.aliases().items() if kept == name]
        # a module that is registered twice is one layer: its second name is no module's
        others = [alias for alias in aliases if self.wrapper.owner_of(alias) in self.module_names]
        parameter = dict(self.wrapper.named_parameters()).get(name)
        takers = [call.layer for call in calls for taken in call.inputs if taken.ref() is parameter is not None]
        return list(dict.fromkeys([*(self.owner_of(each) for each in (name, *others)), *takers]))

    # -- compiled code -----------------------------------------------------------------------------------------------

    @property
    def root_is_traced(self) -> bool:
        """Whether the root runs inside compiled code, where its own hooks do not run."""
        return "" in self.compiled[0]

    def follow_compilation(self) -> None:
        """Put traceable hooks on what has been compiled. To be called until the first forward, which fixes them."""
        found = compiled_modules(self.wrapper.model)
        if found != self.compiled:
            self.compiled = found
            if {"forward", "backward"} & set(self.config.watch):
                self.forward.trace(*found, self.budget.layers_in_compiled_code, self.device)

    def settle_regions(self) -> None:
        """What compiled code has left since the micro-batch began goes to the board."""
        if self.window.micro_batches:
            self.forward.settle()

    # -- probes on and off ---------------------------------------------------------------------------------------------

    def arm(self) -> bool:
        """Hooks on; whether they were off."""
        if self.armed:
            return False
        self.armed = True
        if {"forward", "backward"} & set(self.config.watch):
            self.forward.arm()
        if self.local_gradients is not None:
            self.local_gradients.arm()
        return True

    def disarm(self) -> None:
        """Hooks off: a forward without grad mode is left alone."""
        if self.armed:
            self.armed = False
            self.forward.disarm()
            if self.local_gradients is not None:
                self.local_gradients.disarm()

    def see_initial_state(self) -> None:
        """Parameters and optimizer state before the first step."""
        if "state" in self.config.watch:
            self.state.see_before()

    def see_initial_buffers(self) -> None:
        """Buffers before the first step, after the wrapper's broadcast."""
        if not self.saw_initial_buffers and "state" in self.config.watch:
            self.state.see_buffers_before()
        self.saw_initial_buffers = True

    def see_doomed_buffers(self) -> None:
        """Buffers that the wrapper is about to overwrite with another rank's: a bad one would leave no trace."""
        if "state" in self.config.watch and not self.window.buffers() and self.wrapper.overwrites_buffers():
            self.state.see_doomed_buffers()

    def see_before_verdict(self, step: int) -> None:
        """Once per window: gradients that no hook has covered, buffers, now and then optimizer state."""
        self.settle_regions()
        watch = self.config.watch
        if "backward" in watch or "reduce" in watch:
            self.gradient.see_waiting()  # of a backward that raised
            self.gradient.see_uncovered()
        if "state" in watch:
            self.state.see_written_buffers()
            if (step - self.config.first_step) % self.config.state_every == 0:
                self.state.see_optimizer_state()

    def register(self, things: dict[str, Any]) -> None:
        """Take more things to look after."""
        for name, thing in things.items():
            if name in self.registered:
                raise ValueError(f"register({name}=...): the name is taken; give another one")
            if isinstance(thing, nn.Module):
                self.state.registered[name] = thing
                self.module_names |= {f"{name}.{path}" if path else name for path, _ in thing.named_modules()}
            elif isinstance(thing, torch.Generator) or type(thing).__module__.startswith("numpy.random"):
                self.window.generators[name] = thing
            elif not hasattr(thing, "state_dict"):
                raise ValueError(
                    f"register({name}={type(thing).__name__}): "
                    "give a module, a random generator, or an object with state_dict()"
                )
            self.registered[name] = thing

    def unhook(self) -> None:
        """Nothing of the guard is left on the model and the scaler."""
        self.disarm()
        self.forward.close()
        if self.local_gradients is not None:
            self.local_gradients.remove()
        self.backward.close()
        if self.scaler is not None:
            self.scaler.close()
        guarded.discard(self.wrapper.root)

    def close(self) -> None:
        """Nothing is held any more."""
        self.board.discard()
        self.window.clear()
        self.forward.forget_window()
        self.peers.close()


def is_ignored(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether one of the fnmatch patterns covers the name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# -- putting it together ---------------------------------------------------------------------------------------------


def build_parts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    scaler: object,
    replay: str | None,
    group: dist.ProcessGroup | None,
    options: dict[str, Any],
    before_scaler_step: BeforeStep,
) -> Parts:
    """Check what was given, on this rank and against the others, and compose the parts.

    Raises:
        ValueError: on every rank if anything does not fit on any rank.

    Collective: a gloo group is made; problems and options are compared on it.
    """
    given: Given | None = None
    problem: str | None = None
    given_group: Any = group
    if given_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("option group: this rank is not in it; build the guard only on its ranks")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        problem = f"option group={group!r} is a {type(group).__name__}; give a torch.distributed process group"
        group = None
    require_fitting_group(group, model)  # raised on this rank alone: over the wrong ranks there is nobody to tell
    try:
        given = checked(model, optimizer, scaler, replay, options) if problem is None else None
    except ValueError as error:
        problem = str(error)
    except Exception as error:  # on one rank alone it would leave the others waiting
        problem = f"the guard cannot be built: {type(error).__name__}: {error}"
    device = _device_of(given.wrapper) if given is not None else torch.device("cpu")
    peers = Peers(group, given.config.timeout_s if given is not None else 60.0, device)
    peers.require_no_problem(problem)
    assert given is not None
    peers.require_equal_options({**given.config.to_dict(), **compared()})
    injection = planned(given.wrapper, peers) if given.config.enabled else None
    peers.bound_waiting()
    if given.config.enabled:
        guarded.add(given.wrapper.root)
    else:
        peers.close()
    parts = _composed(given, peers, replay, device, before_scaler_step)
    parts.injection = injection
    return parts


def _device_of(wrapper: Wrapper) -> torch.device:
    for _, parameter in wrapper.named_parameters():
        return wrapper.local(parameter).device
    return torch.device("cpu")


def _composed(
    given: Given, peers: Peers, recipe: str | None, device: torch.device, before_scaler_step: BeforeStep
) -> Parts:
    config, wrapper = given.config, given.wrapper
    parameters = wrapper.named_parameters()
    modules = wrapper.named_modules()
    named_buffers = _buffer_reader(wrapper)
    board = Board(config.history)
    board.resolve = resolved
    backward = BackwardProbe(board, probes_activations="backward" in config.watch)
    forward = ForwardProbe(modules, board, backward, config.skip_types)

    def ignored(name: str) -> bool:
        return is_ignored(name, config.ignore)

    held = {id(p) for optimizer in given.optimizers for group in optimizer.param_groups for p in group["params"]}
    left_out = {piece.name for name, p in parameters if id(p) not in held for piece in wrapper.pieces("", name, p, p)}
    gradient = GradientProbe(
        parameters, board, backward, wrapper.local, ignored, frozenset(left_out), wrapper.local_gradients_may_wait()
    )
    _warn_of_small_eps(given.optimizers)
    watches_gradients = config.enabled and bool({"backward", "reduce"} & set(config.watch))
    return Parts(
        config=config,
        peers=peers,
        wrapper=wrapper,
        optimizers=given.optimizers,
        board=board,
        backward=backward,
        forward=forward,
        budget=Budget(config.budget if config.enabled else None, forward, device),
        gradient=gradient,
        local_gradients=_unarmed(wrapper, gradient) if watches_gradients else None,
        state=StateProbe(board, parameters, named_buffers, given.optimizers, wrapper.local, ignored),
        window=Window(device, config.copy_batch, config.hold_batches),
        previous=Previous() if config.keep_previous else None,
        scaler=WatchedScaler(given.scaler, before_scaler_step) if given.scaler is not None else None,
        recipe=recipe,
        recipe_directory=given.recipe_directory,
        device=device,
        module_names=frozenset(name for name, _ in modules),
        named_buffers=named_buffers,
    )


def _warn_of_small_eps(optimizers: list[torch.optim.Optimizer]) -> None:
    """``eps`` that rounds to zero in a parameter's dtype: the update divides 0 by 0 where the gradient is zero."""
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            eps = group.get("eps")
            half = [p for p in group["params"] if p.dtype in (torch.float16, torch.bfloat16)]
            if isinstance(eps, float) and half and float(torch.tensor(eps, dtype=half[0].dtype)) == 0.0:
                _log.warning(
                    "optimizer %s, group %d: eps=%g is 0 in %s, so that a zero gradient makes NaN weights; raise eps",
                    type(optimizer).__name__,
                    index,
                    eps,
                    half[0].dtype,
                )


def _unarmed(wrapper: Wrapper, gradient: GradientProbe) -> GradientWatch:
    watch = wrapper.watch_local_gradients(gradient.see_local)
    watch.disarm()
    return watch


def _buffer_reader(wrapper: Wrapper) -> Callable[[], list[tuple[str, Tensor]]]:
    """Reads the buffers afresh without walking the tree each time; a buffer may be replaced between two reads."""
    modules = dict(wrapper.named_modules())
    places = [(name, modules[wrapper.owner_of(name)], name.rpartition(".")[2]) for name, _ in wrapper.named_buffers()]

    def read() -> list[tuple[str, Tensor]]:
        return list(_present(places))

    return read


def _present(places: list[tuple[str, nn.Module, str]]) -> Iterator[tuple[str, Tensor]]:
    for name, module, attribute in places:
        buffer = module._buffers.get(attribute)
        if buffer is not None:
            yield name, buffer
