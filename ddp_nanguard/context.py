"""`GuardContext`: what a guard is composed of, and how it is put together from what the user gave."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from .capture.record import Previous
from .capture.window import AccumulationWindow
from .config import GuardConfig
from .distributed.group import RankGroup
from .probes.backward import BackwardProbe
from .probes.budget import Budget
from .probes.calls import ModuleCall
from .probes.forward import ForwardProbe
from .probes.gradient import GradientProbe
from .probes.slots import SlotBuffer
from .probes.sources import KnownNonFinite
from .probes.state import StateProbe
from .testing import InjectionSpec
from .wrappers import GradientWatch, Wrapper, compiled_modules
from .wrappers.grad_scaler import WatchedScaler

_log = logging.getLogger(__name__)


@dataclass
class GuardContext:
    """What a guard is composed of."""

    config: GuardConfig
    ranks: RankGroup
    wrapper: Wrapper
    optimizers: list[torch.optim.Optimizer]
    slots: SlotBuffer
    backward: BackwardProbe
    forward: ForwardProbe
    budget: Budget
    gradient: GradientProbe
    local_gradients: GradientWatch | None
    state: StateProbe
    window: AccumulationWindow
    previous: Previous | None
    scaler: WatchedScaler | None
    recipe: str | None
    recipe_directory: str | None
    device: torch.device
    module_names: frozenset[str]
    named_buffers: Callable[[], list[tuple[str, Tensor]]]
    registered: dict[str, Any] = field(default_factory=dict)
    known_nonfinite: frozenset[KnownNonFinite] = frozenset()
    let_through: int | None = None
    reduced_in: set[int] = field(default_factory=set)
    injection: InjectionSpec | None = None
    compiled: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    hooks_installed: bool = False
    probed_initial_buffers: bool = False
    is_late: bool = False
    late_hyper_parameters: list[tuple[str, float | Tensor]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The same on all ranks of this guard and no other guard of the job."""
        group = self.ranks.fault_group
        return f"{group.group_name}/{self.ranks.guard_number}" if group is not None else "alone"

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

    def sharers_of(self, name: str, calls: list[ModuleCall]) -> list[str]:
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
                self.forward.hook_compiled(*found, self.budget.layers_in_compiled_code, self.device)

    def flush_compiled(self) -> None:
        """What compiled code has left since the micro-batch began goes to the board."""
        if self.window.micro_batches:
            self.forward.flush_compiled()

    # -- probes on and off ---------------------------------------------------------------------------------------------

    def install_hooks(self) -> bool:
        """Hooks on; whether they were off."""
        if self.hooks_installed:
            return False
        self.hooks_installed = True
        if {"forward", "backward"} & set(self.config.watch):
            self.forward.install_hooks()
        if self.local_gradients is not None:
            self.local_gradients.install_hooks()
        return True

    def remove_hooks(self) -> None:
        """Hooks off: a forward without grad mode is left alone."""
        if self.hooks_installed:
            self.hooks_installed = False
            self.forward.remove_hooks()
            if self.local_gradients is not None:
                self.local_gradients.remove_hooks()

    def probe_initial_state(self) -> None:
        """Parameters and optimizer state before the first step."""
        if "state" in self.config.watch:
            self.state.probe_before_first_step()

    def probe_initial_buffers(self) -> None:
        """Buffers before the first step, after the wrapper's broadcast."""
        if not self.probed_initial_buffers and "state" in self.config.watch:
            self.state.probe_buffers_before_first_step()
        self.probed_initial_buffers = True

    def probe_buffers_before_broadcast(self) -> None:
        """Buffers that the wrapper is about to overwrite with another rank's: a bad one would leave no trace."""
        if "state" in self.config.watch and not self.window.buffers() and self.wrapper.overwrites_buffers():
            self.state.probe_buffers_before_broadcast()

    def probe_before_verdict(self, step: int) -> None:
        """Once per window: gradients that no hook has covered, buffers, now and then optimizer state."""
        self.flush_compiled()
        watch = self.config.watch
        if "backward" in watch or "reduce" in watch:
            self.gradient.flush_pending()  # of a backward that raised
            self.gradient.probe_unhooked()
        if "state" in watch:
            self.state.probe_buffers_after_forward()
            if (step - self.config.first_step) % self.config.state_every == 0:
                self.state.probe_optimizer_state()

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
        self.remove_hooks()
        self.forward.close()
        if self.local_gradients is not None:
            self.local_gradients.remove()
        self.backward.close()
        if self.scaler is not None:
            self.scaler.close()
        guarded.discard(self.wrapper.root)

    def close(self) -> None:
        """Nothing is held any more."""
        self.slots.discard()
        self.window.clear()
        self.forward.release_window()
        self.ranks.close()


def is_ignored(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether one of the fnmatch patterns covers the name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# -- putting it together ---------------------------------------------------------------------------------------------


guarded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Root modules that have a guard."""
