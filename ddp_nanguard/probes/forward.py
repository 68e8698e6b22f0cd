"""Forward: a hook before and after every watched module.

The hook before a module reduces those inputs that have no record yet (see [Note: tensor records] in `calls`); the hook
after it reduces the outputs. Inputs and outputs get a tensor hook, which looks at their gradients in backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ddp_nanguard.hooks.autograd import in_backward
from ddp_nanguard.tensors.containers import tensors_in

from .backward import BackwardProbe
from .calls import ModuleCall, TensorRecord, break_cycles
from .compiled import CompiledSlots
from .layers import WatchedLayers
from .module_hooks import (
    AfterHook,
    BeforeHook,
    CompiledCallAfterHook,
    CompiledCallBeforeHook,
    RootHook,
    TracedAfterHook,
    TracedBeforeHook,
)
from .recomputation import Recomputation
from .slot_roles import SlotRole
from .slots import SlotBuffer


class ForwardProbe:
    """Watches inputs and outputs of the modules of one model.

    Hooks are on the modules only from `install_hooks` to `remove_hooks`: some layers choose another kernel as soon as
    they carry hooks, and forwards without grad mode are to be left alone.

    Args:
        modules: clean name and module, the root ("") included.
        slots: where the hooks leave their results.
        backward: watches the gradients of what is recorded here.
        skip_types: class names of modules that get no hooks.
        watched: modules that carry hooks. Where there are none the root carries one that only tells that it begins.
        root_is_step: whether the outermost call of the root is the training step, which a trainer runs as its forward,
            and no call of a layer.

    Attributes:
        modules: those that may carry hooks.
        watched: see above; narrowed by `watch_as_compiled`.
        on_root: called when the root's forward begins in grad mode.
        on_idle: called when a module runs without grad mode and outside of any watched call: hooks are not needed.
        calls: the calls of the open window, in execution order.
        unchecked: what could not be looked at so far, in words.
        have_forward, without_forward: names of all modules, by whether their class defines ``forward``.
        skipped: names of modules that ``skip_types`` leaves out.
        compiled_slots: of the watched modules inside compiled code; None where there are none.
    """

    def __init__(
        self,
        modules: list[tuple[str, nn.Module]],
        slots: SlotBuffer,
        backward: BackwardProbe,
        skip_types: tuple[str, ...],
        watched: WatchedLayers,
        root_is_step: bool = False,
    ) -> None:
        self.root_is_step = root_is_step
        self.slots = slots
        self.backward = backward
        self.modules = [(name, module) for name, module in modules if type(module).__name__ not in skip_types]
        self.on_root: Callable[[], None] = _nothing
        self.on_idle: Callable[[], object] = _nothing

        # - Coverage: what the report says about modules that no hook reaches
        self.unchecked: set[str] = set()
        self.have_forward = {name for name, m in modules if getattr(type(m), "forward", None) is not nn.Module.forward}
        self.without_forward = {name for name, _ in modules} - self.have_forward
        self.skipped = [name for name, module in modules if type(module).__name__ in skip_types]

        # - Hooks that come and go
        self.watched = watched
        self._root = next(module for name, module in modules if name == "")
        self._handles: dict[str, tuple[RemovableHandle, ...]] = {}

        # - Hooks of modules that `torch.compile` has to do with; they stay on, see `hook_compiled`
        self.compiled_slots: CompiledSlots | None = None
        self._in_compiled_code: set[str] = set()
        self._compiled_watched: frozenset[str] = frozenset()
        self._lasting_handles: list[RemovableHandle] = []

        # - The open window, and the calls of the steps whose slots are still in the ring: slots name calls and records
        # as their sources, so these must hold together until the ring has dropped the step
        self.calls: list[ModuleCall] = []
        self._past_calls: deque[list[ModuleCall]] = deque()
        self._num_kept = 0

        # - The open micro-batch. Records are found by the `id` of a tensor, which another one can have later:
        # `TensorRecord.is_still` tells them apart
        self._stack: list[ModuleCall] = []
        self._is_in_step = False  # with `root_is_step`, between beginning and end of that call
        self._call_counts: dict[str, int] = {}
        self._records: dict[int, TensorRecord] = {}
        self._micro_batch = 0
        self._recomputation = Recomputation(backward)

    # -- hooks on and off ------------------------------------------------------------------------------------------

    def install_hooks(self) -> None:
        """Put the hooks on the watched modules; those that carry theirs already are left alone."""
        for name, module in self.modules:
            if isinstance(module, torch.jit.ScriptModule):
                self.unchecked.add(name)
            elif name in self.watched.layers and name not in self._in_compiled_code and name not in self._handles:
                before, after = BeforeHook(self, name), AfterHook(self, name)
                self._handles[name] = (
                    module.register_forward_pre_hook(before, with_kwargs=True),
                    module.register_forward_hook(after, always_call=True),
                )
        if not ({""} & (self._handles.keys() | self._in_compiled_code)):
            self._handles[""] = (self._root.register_forward_pre_hook(RootHook(self)),)

    def remove_hooks(self) -> None:
        """Take the hooks off, except those of modules in compiled code."""
        for name in list(self._handles):
            self._unhook_module(name)

    def _unhook_module(self, name: str) -> None:
        for handle in self._handles.pop(name, ()):
            handle.remove()

    def hook_compiled(
        self,
        compiled_modules: frozenset[str],
        compiled_calls: frozenset[str],
        device: torch.device,
    ) -> None:
        """Put lasting hooks on the watched modules that `torch.compile` has to do with; none where none is watched.

        They stay on until `close`, since Dynamo guards the identity of hooks and would compile anew without them; what
        is traced without grad mode does nothing. Called again where more modules have been compiled meanwhile.

        Args:
            compiled_modules: clean names of modules that run inside compiled code; see `probes.compiled`.
            compiled_calls: names of modules whose own call is compiled (``module.compile()``). Their hooks run outside
                of the graph, as Python.
            device: of the model.
        """
        for handle in self._lasting_handles:
            handle.remove()
        self._lasting_handles, self._in_compiled_code = [], set(compiled_modules | compiled_calls)
        inside = self.watched.in_compiled_code & compiled_modules
        layers = [name for name, _ in self.modules if name in inside]
        self.compiled_slots = CompiledSlots(layers, device, not self.backward.is_closed) if layers else None
        self._compiled_watched = (compiled_calls if self.watched.layers else frozenset()) | set(layers)
        for name, module in self.modules:
            if name in self._in_compiled_code:
                self._unhook_module(name)
            if name in self._compiled_watched and not isinstance(module, torch.jit.ScriptModule):
                before, after = self._lasting_hooks(name, name in compiled_calls)
                self._lasting_handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self._lasting_handles.append(module.register_forward_hook(after))  # always_call would break the graph

    def _lasting_hooks(self, name: str, is_compiled_call: bool) -> tuple[BeforeHook, AfterHook]:
        if is_compiled_call:
            return CompiledCallBeforeHook(self, name), CompiledCallAfterHook(self, name)
        assert self.compiled_slots is not None
        before, after = self.compiled_slots.before(name), self.compiled_slots.after(name)
        return TracedBeforeHook(self, name, before), TracedAfterHook(self, name, after)

    def close(self) -> None:
        """Take every hook off, those in compiled code included; the model is as it was."""
        self.remove_hooks()
        for handle in self._lasting_handles:
            handle.remove()
        self._lasting_handles = []

    def flush_compiled(self) -> None:
        """Move what compiled code has accumulated into the slots of the micro-batch that has just run."""
        if self.compiled_slots is not None:
            self.compiled_slots.move_to(self.slots, self._micro_batch)

    def probe_root_output(self, output: Any) -> None:
        """Reduce the output of the whole model where its root runs inside compiled code and makes no call itself."""
        call = ModuleCall("", 1, self._micro_batch, None)
        for tensor in _tensors(output):
            self._record_output(call, tensor, SlotRole.OUTPUT)

    def watch_as_compiled(self, traced: Iterable[str], watched: Iterable[str]) -> None:
        """Watch the modules that a compiled run watched, although nothing is compiled here; for a replay.

        Args:
            traced: its modules inside compiled code, see `compiled_layers`.
            watched: those of them that carried hooks.
        """
        self.watched = self.watched.as_compiled(traced, watched)

    def unwatched(self) -> list[str]:
        """Names of modules that carry no hooks since they are not among the watched ones."""
        left_out = [
            name
            for name, _ in self.modules
            if name not in (self._compiled_watched if name in self._in_compiled_code else self.watched.layers)
        ]
        return [name for name in left_out if name in self.have_forward]

    def compiled_layers(self) -> dict[str, list[str]]:
        """Names of modules that compiled code has to do with (``traced``), and those that carry hooks (``watched``).

        A dump holds this, so that a replay without compilation watches the same modules, see `watch_as_compiled`.
        """
        return {"traced": sorted(self._in_compiled_code), "watched": sorted(self._compiled_watched)}

    def begin_micro_batch(self, index: int) -> None:
        """Begin micro-batch ``index``: calls count from 1 again, and tensors of earlier ones have no record."""
        self._micro_batch = index
        self._call_counts = {}
        self._records = {}
        self._stack = []
        self._recomputation.reset()

    def begin_root(self) -> None:
        """Empty the stack of calls before the root runs: a forward that raised may have left some on it."""
        self._stack, self._is_in_step = [], False

    def release_window(self) -> None:
        """Begin a new window. The calls of the old one stay linked as long as its slots are in the ring."""
        # the count has grown for this window, or for the one before it where verdicts are deferred
        if self._num_kept != self.slots.num_kept:
            self._num_kept = self.slots.num_kept
            self._past_calls.append(self.calls)
            if len(self._past_calls) > self.slots.history + 1:
                break_cycles(self._past_calls.popleft())
        self.calls = []
        self._recomputation.release_window()
        self.begin_micro_batch(0)

    def unseen_modules(self, ran: set[str]) -> list[str]:
        """Names of watched modules that are not in ``ran``: not called, scripted, or compiled without hooks."""
        ran = ran | set(self.unwatched())
        return [name for name, _ in self.modules if name not in ran and name in self.have_forward]

    # -- what the hooks do ---------------------------------------------------------------------------------------------

    def root_begins(self) -> None:
        """Tell that the root's forward begins; all that is done at a module where none is watched."""
        if torch.is_grad_enabled():
            if not in_backward() and not self.slots.is_capturing():
                self.on_root()
        else:
            self.on_idle()

    def before_root(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do what the root's hook would have done, which was put on too late for this call."""
        if "" in self.watched.layers:
            self.before("", args, kwargs)
        else:
            self.root_begins()

    def before(self, layer: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Record a call and its inputs. Called by the hook before a module.

        Args:
            layer: clean name of the module.
            args: its positional arguments.
            kwargs: its keyword arguments; None where the hook got none.
        """
        # a forward inside backward is activation checkpointing: it is no call of its own
        if in_backward():
            self._recomputation.before(layer, _tensors((args, kwargs)))
            return
        stack, has_grad = self._stack, torch.is_grad_enabled()
        if not stack:
            if not has_grad:
                self.on_idle()
                return
            if self.slots.is_capturing():
                return
            if layer == "" and not self._is_in_step:
                self.on_root()
                stack = self._stack
                if self.root_is_step:
                    self._is_in_step = True
                    return
        number = self._call_counts[layer] = self._call_counts.get(layer, 0) + 1
        call = ModuleCall(layer, number, self._micro_batch, stack[-1] if stack else None)
        self.calls.append(call)
        stack.append(call)
        if not has_grad:
            self._recomputation.note(call)
        for tensor in tensors_in((args, kwargs) if kwargs else args):
            call.takes_tensors = True
            if _can_be_bad(tensor):
                self._record_input(call, tensor)

    def after(self, layer: str, output: Any) -> None:
        """Record the outputs of a call, and the inputs that it changed. Called by the hook after a module.

        Args:
            layer: clean name of the module.
            output: what it returned, in any container; None where it raised.
        """
        if in_backward():
            self._recomputation.after(layer, _tensors(output))
            return
        call = self._pop(layer)
        if call is None:
            self._is_in_step = self._is_in_step and layer != ""
            return
        role = SlotRole.EVIDENCE if call.parent is not None else SlotRole.OUTPUT
        for tensor in tensors_in(output):
            if _can_be_bad(tensor):
                self._record_output(call, tensor, role)
        self._record_changed_inputs(call)

    def _pop(self, layer: str) -> ModuleCall | None:
        # calls above it on the stack raised, or lost their hooks in the middle, and get no outputs
        while self._stack:
            call = self._stack.pop()
            if call.layer == layer:
                return call
        return None

    def _record_input(self, call: ModuleCall, tensor: Tensor) -> None:
        record = self._records.get(id(tensor))
        if record is None or not record.is_still(tensor):
            record = self._record(call, tensor, "input", SlotRole.EVIDENCE)
        elif record.order is None:  # it may have been in flight
            record.order = self.slots.reduce(SlotRole.EVIDENCE, tensor, record)
        if not record.is_watched:
            self._watch_gradient(record, tensor)
        record.consumers.append(call)
        call.inputs.append(record)

    def _record_output(self, call: ModuleCall, tensor: Tensor, role: SlotRole) -> None:
        record = self._records.get(id(tensor))
        if record is None or not record.is_still(tensor):
            record = self._record(call, tensor, "output", role)
        elif role is SlotRole.OUTPUT:
            # a child returned it before; the verdict needs the root's outputs in slots of their own role
            self.slots.reduce(role, tensor, record)
        if not record.is_watched:
            self._watch_gradient(record, tensor)
        call.outputs.append(record)

    def _record_changed_inputs(self, call: ModuleCall) -> None:
        """Record as outputs the inputs that a module changed in place and did not return."""
        for record in call.inputs:
            tensor = record.ref()
            if tensor is not None and not record.is_still(tensor) and self._records.get(id(tensor)) is record:
                self._record_output(call, tensor, SlotRole.EVIDENCE)

    def _record(self, call: ModuleCall, tensor: Tensor, slot: str, role: SlotRole) -> TensorRecord:
        record = self._records[id(tensor)] = TensorRecord(tensor, call, slot)
        record.order = self.slots.reduce(role, tensor, record)
        if record.order is None:
            self.unchecked.add(f"{slot} of {call.layer or '(root)'}: {tensor.dtype} {type(tensor).__name__}")
        return record

    def _watch_gradient(self, record: TensorRecord, tensor: Tensor) -> None:
        """Put a tensor hook on it, if it has a graph and modules are watched at all.

        To be tried until it is watched: reentrant checkpointing returns the tensors that its block returned, and they
        get their graph only then.
        """
        if tensor.grad_fn is not None and self.watched.layers:
            record.is_watched = True
            self.backward.watch(tensor, record)


def _tensors(value: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(value) if _can_be_bad(tensor)]


def _can_be_bad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _nothing() -> None:
    return None
