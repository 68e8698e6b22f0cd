"""`GuardContext`: what one guard is composed of. `build` puts it together from what the user gave."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .capture.record import PreviousStep, StepRecord
from .capture.window import AccumulationWindow
from .config import GuardConfig
from .distributed.group import RankGroup
from .inject.spec import InjectionSpec
from .probes.backward import BackwardProbe
from .probes.budget import Budget
from .probes.calls import ModuleCall
from .probes.forward import ForwardProbe
from .probes.gradient import GradientProbe
from .probes.slots import SlotBuffer
from .probes.sources import KnownNonFinite
from .probes.state import StateProbe
from .report.types import Phase
from .wrappers import GradientWatch, Wrapper, compiled_modules
from .wrappers.grad_scaler import WatchedScaler

_T = TypeVar("_T")


@dataclass
class GuardContext:
    """What one guard is composed of. The parts do not know each other unless their own docstring says so.

    Attributes:
        config: the options.
        ranks: those that step together.
        wrapper: the model, and how it is wrapped.
        optimizers, scaler: of the training loop.
        slots: where probes leave what they saw.
        backward, forward, gradient, state: the probes.
        local_gradients: hooks that see gradients before any communication; None where no gradient is watched.
        budget: thins the probes out until they fit.
        window: micro-batches of the step that is running.
        previous: the copy for ``keep_previous``; None without the option.
        recipe, recipe_directory: ``module:function`` for a replay, and where that module lies.
        device: of the model.
        module_names: clean names of all modules.
        named_buffers: reads the buffers afresh.
        registered: further objects by name, see `NanGuard.register`.
        known_nonfinite: what a replay is told to be non-finite in clean steps; the history tells it in training.
        injection: the fault that the environment plants in this job, None in all others.
        compiled: modules inside compiled code, and modules whose own call is compiled.
        has_hooks: whether the hooks of the forward are on the modules.
    """

    config: GuardConfig
    ranks: RankGroup
    wrapper: Wrapper
    optimizers: list[torch.optim.Optimizer]
    scaler: WatchedScaler | None
    slots: SlotBuffer
    backward: BackwardProbe
    forward: ForwardProbe
    gradient: GradientProbe
    state: StateProbe
    local_gradients: GradientWatch | None
    budget: Budget
    window: AccumulationWindow
    previous: PreviousStep | None
    recipe: str | None
    recipe_directory: str | None
    device: torch.device
    module_names: frozenset[str]
    named_buffers: Callable[[], list[tuple[str, Tensor]]]
    registered: dict[str, Any] = field(default_factory=dict)
    known_nonfinite: frozenset[KnownNonFinite] = frozenset()
    injection: InjectionSpec | None = None
    compiled: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    has_hooks: bool = False

    def record(self, step: int) -> StepRecord:
        """The step that is running, for the fault path. Host sync: none."""
        numbers = list(self.state.hyper_parameters())
        return StepRecord(step, self.window, self.forward.calls, self.slots, numbers, self.scaler)

    def timed(self, probe: Callable[..., _T], *args: Any) -> _T:
        """Run a probe; it is timed in the few steps that `Budget` measures."""
        meter = self.slots.meter
        return probe(*args) if meter is None else meter.run(probe, *args)

    def keep_clean_step(self, step: int) -> None:
        """Put the slots of a clean step into the history.

        With ``keep_previous`` all that its update can change is copied, and the record kept beside it. Host sync: none.
        """
        past = self.slots.push_history(step)
        if self.previous is not None:
            record = self.record(step)
            # the open window is about to be cleared and filled anew
            record.window, record.slots = self.window.frozen_copy(), past
            tensors = [self.wrapper.local(parameter) for _, parameter in self.state.parameters()]
            self.previous.snapshot(record, tensors, self.optimizers)

    def is_ignored(self, name: str) -> bool:
        """Whether an ``ignore`` pattern covers a layer or a parameter."""
        return self.config.is_ignored(name)

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

    @property
    def watches_activations(self) -> bool:
        """Whether modules carry hooks at all."""
        return self.config.watches(Phase.FORWARD, Phase.BACKWARD)

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
            if self.watches_activations:
                self.forward.hook_compiled(*found, self.budget.layers_in_compiled_code, self.device)

    def flush_compiled(self) -> None:
        """What compiled code has left since the micro-batch began goes to the board."""
        if self.window.micro_batches:
            self.forward.flush_compiled()

    # -- probes on and off ---------------------------------------------------------------------------------------------

    def install_hooks(self) -> bool:
        """Hooks on; whether they were off."""
        if self.has_hooks:
            return False
        self.has_hooks = True
        if self.watches_activations:
            self.forward.install_hooks()
        if self.local_gradients is not None:
            self.local_gradients.install_hooks()
        return True

    def remove_hooks(self) -> None:
        """Hooks off: a forward without grad mode is left alone."""
        if self.has_hooks:
            self.has_hooks = False
            self.forward.remove_hooks()
            if self.local_gradients is not None:
                self.local_gradients.remove_hooks()

    def probe_initial_state(self) -> None:
        """Parameters and optimizer state before the first step."""
        if self.config.watches(Phase.STATE):
            self.state.probe_before_first_step()

    def probe_initial_buffers(self) -> None:
        """Buffers before the first step, after the wrapper's broadcast; nothing in later steps."""
        if self.config.watches(Phase.STATE):
            self.state.probe_buffers_before_first_step()

    def probe_buffers_before_broadcast(self) -> None:
        """Buffers that the wrapper is about to overwrite with another rank's: a bad one would leave no trace."""
        if self.config.watches(Phase.STATE) and not self.window.buffers() and self.wrapper.overwrites_buffers():
            self.state.probe_buffers_before_broadcast()

    def probe_before_verdict(self, step: int) -> None:
        """Once per window: gradients that no hook has covered, buffers, now and then optimizer state."""
        self.flush_compiled()
        if self.config.watches(Phase.BACKWARD, Phase.REDUCE):
            self.gradient.flush_pending()  # of a backward that raised
            self.gradient.probe_unhooked()
        if self.config.watches(Phase.STATE):
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


guarded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Unwrapped models that have a guard: a second one would count every step twice."""
