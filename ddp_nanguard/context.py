"""`GuardContext`: everything that belongs to one guard. `build` makes it from the arguments of `NanGuard`."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .capture.record import PreviousStep, StepRecord
from .capture.window import AccumulationWindow
from .config import GuardConfig
from .distributed.group import RankGroup
from .errors import Undone
from .hooks.callbacks import Callback
from .inject.spec import InjectionSpec
from .probes.backward import BackwardProbe
from .probes.calls import ModuleCall
from .probes.clipping import clip_and_look, clip_grad_norm_
from .probes.forward import ForwardProbe
from .probes.gradient import GradientProbe
from .probes.slot_roles import SlotRole
from .probes.slots import SlotBuffer
from .probes.sources import STATE_SLOT, KnownNonFinite, LossSource
from .probes.state import StateProbe
from .report.types import INFINITE_KINDS, KINDS, Phase
from .tensors.minmax import kind_in
from .tensors.variables import bad_variables
from .wrappers import GradientWatch, Wrapper, compiled_modules
from .wrappers.grad_scaler import WatchedScaler

COPY_GRACE_S = 1.0
"""How long copies of batches are given that are on their way from a device which waits for a peer."""


@dataclass(frozen=True)
class Reach:
    """How much of a rank's device can be read by a thread that must not wait for the job's own stream.

    Attributes:
        answers: whether the device answers at all.
        up_to: execution order of the last slot that is known to have been written, as are all before it; gradients may
            still be written to. None: everything has been.
    """

    answers: bool = True
    up_to: int | None = None

    def covers(self, order: int) -> bool:
        """Whether the slot of this execution order has been written for sure."""
        return self.up_to is None or order <= self.up_to

    @property
    def waits_s(self) -> float | None:
        """How long to wait for what the device is still to do; None: until it has done it."""
        if not self.answers:
            return 0.0
        return None if self.up_to is None else COPY_GRACE_S

    def lacks(self) -> str | None:
        """What was not looked at for that, in words."""
        if not self.answers:
            return "this rank's device does not answer: nothing on it was looked at or written"
        if self.up_to is not None:
            return "this rank's device waits for a peer: nothing after its own backward was looked at"
        return None


@dataclass
class GuardContext:
    """Everything that belongs to one guard: passed around so that the parts need not know each other.

    Attributes:
        config: the options.
        ranks: the ranks that step together.
        wrapper: the model, and how it is wrapped.
        optimizers, scaler: of the training loop; the scaler is None without one.
        slots: where the probes leave their results.
        backward, forward, gradient, state: the probes.
        local_gradients: hooks that see gradients before any communication; None where no gradient is watched.
        window: micro-batches of the step that is running.
        previous: the copy for ``keep_previous``; None without the option.
        recipe, recipe_directory: ``module:function`` for a replay, and where that module lies; None where not given.
        device: of the model.
        module_names: clean names of all modules, those of registered modules included.
        named_buffers: gives clean name and buffer of the model; called each time, since buffers can be replaced.
        registered: further objects by name, see `NanGuard.register`.
        known_nonfinite: what the dump of a replay says was non-finite in clean steps; in training the ring of clean
            steps tells it, and this holds only the state that is so on purpose, see [Note: legal infinities].
        is_replay: whether the dump tells what is legal: nothing else is, see [Note: legal infinities].
        outputs: what the model returned last, for a rank that raises before any loss.
        legal_text: names of the latter for reports, the same on all ranks.
        injection: the fault that the environment injects into this job; None in all others.
        is_second_look: whether it belongs to a second look, on a model that has a guard.
        num_looks: runs of second looks so far, the same on all ranks.
        paused: a context in which the monitor of this guard follows nothing, set by that.
        compiled: names of modules inside compiled code, and of modules whose own call is compiled.
        has_hooks: whether the hooks of the forward are on the modules.
        undone: what the fault path could not do on this rank.
        checkpoint: the last one that was checked before it was saved, and the step that was to follow; None before.
        reach: how much of this rank's device can be read; all of it, but for a rank that ends on its own.
        on_event, on_metrics: functions of the user's; None without.
    """

    # - Given by the user, and what follows from it

    config: GuardConfig
    ranks: RankGroup
    wrapper: Wrapper
    optimizers: list[torch.optim.Optimizer]
    scaler: WatchedScaler | None

    # - Probes, all of which leave their results in the same slots
    slots: SlotBuffer
    backward: BackwardProbe
    forward: ForwardProbe
    gradient: GradientProbe
    state: StateProbe
    local_gradients: GradientWatch | None

    # - What is kept for a dump
    window: AccumulationWindow
    previous: PreviousStep | None
    recipe: str | None
    recipe_directory: str | None

    # - Facts about the model
    device: torch.device
    module_names: frozenset[str]
    named_buffers: Callable[[], list[tuple[str, Tensor]]]

    # - What changes in the life of the guard
    registered: dict[str, Any] = field(default_factory=dict)
    known_nonfinite: frozenset[KnownNonFinite] = frozenset()
    is_replay: bool = False
    checkpoint: tuple[str, int] | None = None
    outputs: list[weakref.ref[Tensor]] = field(default_factory=list)
    legal_text: str = ""
    injection: InjectionSpec | None = None
    is_second_look: bool = False
    num_looks: int = 0
    paused: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    compiled: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    has_hooks: bool = False
    undone: Undone = field(default_factory=Undone)
    reach: Reach = Reach()
    on_event: Callback | None = None
    on_metrics: Callback | None = None

    def record(self, step: int) -> StepRecord:
        """The record of the step that is running. It refers to the open window and slots and copies nothing.

        Args:
            step: its number.

        Host sync: none.
        """
        none: list[tuple[str, float | Tensor]] = []
        what = "hyper-parameters were not read"
        numbers = self.undone.attempt(what, lambda: list(self.state.hyper_parameters()), none)
        return StepRecord(step, self.window, self.forward.calls, self.slots, numbers, self.scaler)

    def keep_clean_step(self, step: int) -> None:
        """Put the slots of a clean step into the ring; with ``keep_previous``, copy all that its update can change.

        Args:
            step: its number.

        Host sync: none.
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

    def is_legal(self, name: str, kind: str) -> bool:
        """Whether a state holds that kind of value on purpose."""
        return (self.owner_of(name), f"{STATE_SLOT}{name}", kind) in self.known_nonfinite

    def allow(self, legal: Mapping[str, str]) -> None:
        """From now on this state may hold what it holds.

        Args:
            legal: name and kind: with NaN infinities are allowed too, with an infinity that of the other sign.
        """
        kinds = {name: KINDS if kind == "nan" else INFINITE_KINDS for name, kind in legal.items()}
        known = {(self.owner_of(name), f"{STATE_SLOT}{name}", kind) for name in legal for kind in kinds[name]}
        self.known_nonfinite |= known
        self.follow_known()

    def follow_known(self) -> None:
        """Have the probe of state look at what is known to be non-finite accordingly."""
        known = [(slot, kind) for _, slot, kind in self.known_nonfinite if slot.startswith(STATE_SLOT)]
        slots_with_nan = {slot for slot, kind in known if kind == "nan"}
        if known:
            self.state.allow({slot.removeprefix(STATE_SLOT): slot in slots_with_nan for slot, _ in known})

    def owner_of(self, name: str) -> str:
        """The layer of a parameter, buffer or optimizer state: the longest module name that ``name`` begins with."""
        while "." in name:
            name = name.rsplit(".", 1)[0]
            if name in self.module_names:
                return name
        return ""

    def sharers_of(self, name: str, calls: list[ModuleCall]) -> list[str]:
        """The layers that can have caused a parameter's gradient, each once.

        First the layer that the parameter is named after, then others that hold it too (tied weights), then those that
        took it as an argument in one of the calls.

        Args:
            name: clean name of the parameter.
            calls: the calls of the step.
        """
        aliases = [alias for alias, kept in self.wrapper.aliases().items() if kept == name]
        # a module that is registered twice is one layer: its second name is no module's
        others = [alias for alias in aliases if self.wrapper.owner_of(alias) in self.module_names]
        parameter = dict(self.wrapper.named_parameters()).get(name)
        taken_by = [call.layer for call in calls for record in call.inputs if record.ref() is parameter is not None]
        return list(dict.fromkeys([*(self.owner_of(each) for each in (name, *others)), *taken_by]))

    @property
    def sees_output_outside(self) -> bool:
        """Whether the model's output is looked at where the model returns it, since no hook of the root does.

        With a scaler that is so without watched layers too: it tells a forward that is bad from an overflow.
        """
        if self.forward.root_is_step:
            return False  # what it returns is the loss
        if self.forward.watched.layers:
            return self.root_is_traced
        return self.scaler is not None and not self.config.watched.isdisjoint((Phase.FORWARD, Phase.BACKWARD))

    def look_at_last_outputs(self) -> None:
        """Look at what the model returned last, where no probe has: only the fault path of a rank that raises does.

        Host sync: as `kind_in`, for each of the tensors that are still there.
        """
        if self.forward.watched.layers or self.sees_output_outside or self.forward.root_is_step:
            return
        present = [tensor for tensor in (each() for each in self.outputs) if tensor is not None]
        self.outputs = []
        if any(kind_in(tensor) for tensor in present):
            self.forward.probe_root_output(tuple(present))  # all of them, in the order in which a replay meets them

    def look_at_raise(self, error: BaseException) -> None:
        """Look at what the code that raised had computed: it has given no output and no loss that could be looked at.

        Host sync: as `kind_in`, for each tensor of the graph among the variables of the frames.
        """
        found = next(bad_variables(error), None)
        if found is None:
            return
        name, tensor, frames = found
        in_root = any(frame.f_locals.get("self") is self.wrapper.root for frame in frames)
        if in_root and not self.forward.root_is_step:
            self.forward.probe_root_output((tensor,))
        else:
            micro_batches = self.window.micro_batches
            source = LossSource(name, micro_batches[-1].index if micro_batches else 0)
            self.slots.reduce(SlotRole.LOSS, tensor.detach(), source)

    # -- compiled code -----------------------------------------------------------------------------------------------

    @property
    def root_is_traced(self) -> bool:
        """Whether the root runs inside compiled code, where its own hooks do not run, or has none there."""
        return "" in self.compiled[0] or ("" in self.compiled[1] and not self.forward.watched.layers)

    def follow_compilation(self) -> None:
        """Put hooks that can be traced on modules that have been compiled since the last call.

        To be called before each forward: compiled code keeps the hooks that it finds when it is first run.
        """
        found = compiled_modules(self.wrapper.model)
        if found != self.compiled:
            self.compiled = found
            self.forward.hook_compiled(*found, self.device)

    def flush_compiled(self) -> None:
        """Move what compiled code has accumulated into the slots of the last micro-batch; nothing before the first."""
        if self.window.micro_batches:
            self.forward.flush_compiled()

    # -- probes on and off ---------------------------------------------------------------------------------------------

    def install_hooks(self) -> bool:
        """Put the hooks on modules and parameters; returns whether they were off."""
        if self.has_hooks:
            return False
        self.has_hooks = True
        self.forward.install_hooks()
        if self.local_gradients is not None:
            self.local_gradients.install_hooks()
        return True

    def remove_hooks(self) -> None:
        """Take the hooks off, so that a forward without grad mode is left alone. Nothing where they are off."""
        if self.has_hooks:
            self.has_hooks = False
            self.forward.remove_hooks()
            if self.local_gradients is not None:
                self.local_gradients.remove_hooks()

    def probe_initial_state(self) -> None:
        """Probe parameters and optimizer state before the first step, unless phase ``state`` is not watched."""
        if Phase.STATE in self.config.watched:
            self.state.probe_before_first_step()

    def probe_initial_buffers(self) -> None:
        """Probe the buffers before the first step, after the wrapper's broadcast; nothing in later steps."""
        if Phase.STATE in self.config.watched:
            self.state.probe_buffers_before_first_step()

    def probe_buffers_before_broadcast(self) -> None:
        """Probe the buffers that the wrapper is about to overwrite with another rank's: no later probe can see them."""
        if Phase.STATE in self.config.watched and not self.window.buffers() and self.wrapper.overwrites_buffers():
            self.state.probe_buffers_before_broadcast()

    def probe_before_verdict(self, step: int, weights_too: bool = False) -> None:
        """Probe what is looked at once per window, right before the verdict.

        That is gradients that no hook has seen as they are now, buffers and registered modules, and every
        ``state_every`` steps the optimizer state.

        Args:
            step: its number, which decides about the optimizer state on all ranks alike.
            weights_too: whether the weights are looked at as well, as they are now.
        """
        self.flush_compiled()
        if not self.config.watched.isdisjoint((Phase.BACKWARD, Phase.REDUCE)):
            # only a backward that raised has left any: nothing else flushes those
            self.gradient.flush_pending()
            self.gradient.probe_unhooked()
        if Phase.STATE in self.config.watched:
            self.state.probe_buffers_after_forward()
            if weights_too:
                self.state.probe_weights()
            if (step - self.config.first_step) % self.config.state_every == 0:
                self.state.probe_optimizer_state()

    def clip_grad_norm_(self, *args: Any) -> Tensor:
        """See `NanGuard.clip_grad_norm_`; where gradients are watched, a look at them too."""
        if self.config.watched.isdisjoint((Phase.BACKWARD, Phase.REDUCE)):
            return clip_grad_norm_(self.wrapper.model, *args)
        return clip_and_look(self.gradient, self.wrapper.model, *args)

    def register(self, things: dict[str, Any]) -> None:
        """Take further modules, random generators and stateful objects by name, see `NanGuard.register`.

        Raises:
            ValueError: the name is taken, or the object is of no kind that can be recorded.
        """
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
        """Take every hook off the model and the scaler; a new guard may be made of the model afterwards."""
        self.remove_hooks()
        self.forward.close()
        if self.local_gradients is not None:
            self.local_gradients.remove()
        self.backward.close()
        if self.scaler is not None:
            self.scaler.close()
        if not self.is_second_look:
            guarded.discard(self.wrapper.root)

    def close(self) -> None:
        """Release every tensor and call record, and give the fault group up."""
        self.slots.discard()
        self.window.clear()
        self.forward.release_window()
        self.ranks.close()


guarded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Unwrapped models that have a guard: a second one would count every step twice. Weak, so it keeps no model alive."""
