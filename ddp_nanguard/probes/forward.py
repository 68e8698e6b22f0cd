"""Forward: a hook before and after every watched module.

Before: tensors that no probe has just seen are reduced as inputs. After: outputs are reduced. Both get a tensor hook
for backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from ddp_nanguard.hooks.autograd import in_backward
from ddp_nanguard.hooks.weak import WeakHook
from ddp_nanguard.tensors.containers import tensors_in

from .backward import BackwardProbe
from .calls import ModuleCall, TensorRecord, break_cycles
from .compiled import CompiledSlots, MinMaxAccumulators, accumulate, is_compiled_alone
from .recomputation import Recomputation
from .slots import SlotBuffer, SlotRole


class ForwardProbe:
    """Watches the modules of one model.

    Hooks are on the modules only while armed: some layers choose another kernel as soon as they carry hooks, and
    forwards without grad mode are to be left alone.
    """

    def __init__(
        self,
        modules: list[tuple[str, nn.Module]],
        slots: SlotBuffer,
        backward: BackwardProbe,
        skip_types: tuple[str, ...],
    ) -> None:
        self.slots = slots
        self.backward = backward
        self.modules = [(name, module) for name, module in modules if type(module).__name__ not in skip_types]
        self.on_root: Callable[[], None] = _nothing
        self.on_idle: Callable[[], object] = _nothing
        self.calls: list[ModuleCall] = []
        self._past: deque[list[ModuleCall]] = deque()
        self._num_kept = 0
        self.unchecked: set[str] = set()
        self.have_forward = {name for name, m in modules if getattr(type(m), "forward", None) is not nn.Module.forward}
        self.without_forward = {name for name, _ in modules} - self.have_forward
        self.skipped = [name for name, module in modules if type(module).__name__ in skip_types]
        self.compiled_slots: CompiledSlots | None = None
        self._layers: Container[str] = {name for name, _ in self.modules}
        self._gradient_layers: Container[str] = self._layers
        self._recomputation = Recomputation(backward)
        self._in_compiled_code: set[str] = set()
        self._compiled_watched: frozenset[str] = frozenset()
        self._permanent: list[RemovableHandle] = []
        self._handles: dict[str, tuple[RemovableHandle, RemovableHandle]] = {}
        self._stack: list[ModuleCall] = []
        self._counts: dict[str, int] = {}
        self._seen: dict[int, TensorRecord] = {}
        self._micro_batch = 0

    # -- hooks on and off ------------------------------------------------------------------------------------------

    def install_hooks(self) -> None:
        """Put the hooks on; nothing where they are already."""
        for name, module in self.modules:
            if isinstance(module, torch.jit.ScriptModule):
                self.unchecked.add(name)
            elif name in self._layers and name not in self._in_compiled_code and name not in self._handles:
                before, after = _BeforeHook(self, name), _AfterHook(self, name)
                self._handles[name] = (
                    module.register_forward_pre_hook(before, with_kwargs=True),
                    module.register_forward_hook(after, always_call=True),
                )

    def remove_hooks(self) -> None:
        """Take the hooks off, except those that compiled code has taken up."""
        for name in list(self._handles):
            self._unhook_module(name)

    def _unhook_module(self, name: str) -> None:
        for handle in self._handles.pop(name, ()):
            handle.remove()

    def hook_compiled(
        self,
        compiled_modules: frozenset[str],
        compiled_calls: frozenset[str],
        watched: Container[str],
        device: torch.device,
    ) -> None:
        """Modules that `torch.compile` has to do with; called again where more of them have been compiled meanwhile.

        Their hooks stay on, since compiled code goes by the identity of hooks and would be compiled anew; what is
        traced without grad mode does nothing.

        Args:
            compiled_modules: modules inside compiled code; see `probes.compiled`.
            compiled_calls: modules whose own call is compiled: their hooks run outside, and are not compiled by
                themselves.
            watched: which of those inside carry hooks.
            device: of the model.
        """
        for handle in self._permanent:
            handle.remove()
        self._permanent, self._in_compiled_code = [], set(compiled_modules | compiled_calls)
        layers = [name for name, _ in self.modules if name in compiled_modules and name in watched]
        self.compiled_slots = CompiledSlots(layers, device, not self.backward.is_closed) if layers else None
        self._compiled_watched = compiled_calls | set(layers)
        for name, module in self.modules:
            if name in self._in_compiled_code:
                self._unhook_module(name)
            if name in self._compiled_watched and not isinstance(module, torch.jit.ScriptModule):
                before, after = self._lasting_hooks(name, name in compiled_calls)
                self._permanent.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self._permanent.append(module.register_forward_hook(after))  # always_call would break the graph

    def _lasting_hooks(self, name: str, is_edge: bool) -> tuple[_BeforeHook, _AfterHook]:
        if is_edge:
            return _EdgeBeforeHook(self, name), _EdgeAfterHook(self, name)
        assert self.compiled_slots is not None
        before, after = self.compiled_slots.before(name), self.compiled_slots.after(name)
        return _TracedBeforeHook(self, name, before), _TracedAfterHook(self, name, after)

    def close(self) -> None:
        """Every hook off."""
        self.remove_hooks()
        for handle in self._permanent:
            handle.remove()
        self._permanent = []

    def flush_compiled(self) -> None:
        """What compiled code has left belongs to the micro-batch that has just run."""
        if self.compiled_slots is not None:
            self.compiled_slots.move_to(self.slots, self._micro_batch)

    def probe_root_output(self, output: Any) -> None:
        """What the whole model gave, where its root runs inside compiled code."""
        call = ModuleCall("", 1, self._micro_batch, None)
        for tensor in _tensors(output):
            self._record_output(call, tensor, SlotRole.OUTPUT)

    def watch_only(self, layers: Container[str], gradient_layers: Container[str]) -> None:
        """Fewer modules, and hooks on tensors of fewer still. What compiled code has taken up stays."""
        self._layers, self._gradient_layers = layers, gradient_layers
        for name in [name for name in self._handles if name not in layers]:
            self._unhook_module(name)

    def unwatched(self) -> list[str]:
        """Modules that carry no hooks because `watch_only` or `trace` said so."""
        out = [name for name, _ in self.modules if name not in self._layers and name not in self._in_compiled_code]
        return [name for name in out if name in self.have_forward] + self.unwatched_in_compiled_code()

    def compiled_layers(self) -> dict[str, list[str]]:
        """Modules that compiled code has to do with, and those of them that carry hooks; for a dump."""
        return {"traced": sorted(self._in_compiled_code), "watched": sorted(self._compiled_watched)}

    def unwatched_in_compiled_code(self) -> list[str]:
        """Those of them that run in there."""
        out = [
            name for name, _ in self.modules if name in self._in_compiled_code and name not in self._compiled_watched
        ]
        return [name for name in out if name in self.have_forward]

    def begin_micro_batch(self, index: int) -> None:
        """Calls count from 1 again. Tensors of earlier micro-batches are no longer taken for seen."""
        self._micro_batch = index
        self._counts = {}
        self._seen = {}
        self._stack = []
        self._recomputation.reset()

    def begin_root(self) -> None:
        """A forward that raised may have left calls on the stack."""
        self._stack = []

    def release_window(self) -> None:
        """Drop the record of the window; as long as its slots are in the ring it still hangs together."""
        if self._num_kept != self.slots.num_kept:  # by this window, or by that before it where verdicts are deferred
            self._num_kept = self.slots.num_kept
            self._past.append(self.calls)
            if len(self._past) > self.slots.history + 1:
                break_cycles(self._past.popleft())
        self.calls = []
        self._recomputation.release_window()
        self.begin_micro_batch(0)

    def unseen_modules(self, ran: set[str]) -> list[str]:
        """Watched modules that are not among those that ``ran``: not called, scripted, or compiled without hooks."""
        ran = ran | set(self.unwatched())
        return [name for name, _ in self.modules if name not in ran and name in self.have_forward]

    # -- what the hooks do ---------------------------------------------------------------------------------------------

    def before(self, layer: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """A module is about to run."""
        if in_backward():
            self._recomputation.before(layer, _tensors((args, kwargs)))
            return
        stack, has_grad = self._stack, torch.is_grad_enabled()
        if not stack:
            if not has_grad:
                self.on_idle()
                return
            if layer == "":
                self.on_root()
                stack = self._stack
        number = self._counts[layer] = self._counts.get(layer, 0) + 1
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
        """A module has run."""
        if in_backward():
            self._recomputation.after(layer, _tensors(output))
            return
        call = self._pop(layer)
        if call is None:
            return
        role = SlotRole.EVIDENCE if call.parent is not None else SlotRole.OUTPUT
        for tensor in tensors_in(output):
            if _can_be_bad(tensor):
                self._record_output(call, tensor, role)
        self._record_changed_inputs(call)

    def _pop(self, layer: str) -> ModuleCall | None:
        while self._stack:
            call = self._stack.pop()
            if call.layer == layer:
                return call
        return None

    def _record_input(self, call: ModuleCall, tensor: Tensor) -> None:
        seen = self._seen.get(id(tensor))
        if seen is None or not seen.is_still(tensor):
            seen = self._record(call, tensor, "input", SlotRole.EVIDENCE)
        if not seen.is_watched:
            self._watch_gradient(seen, tensor, call)
        seen.consumers.append(call)
        call.inputs.append(seen)

    def _record_output(self, call: ModuleCall, tensor: Tensor, role: SlotRole) -> None:
        seen = self._seen.get(id(tensor))
        if seen is None or not seen.is_still(tensor):
            seen = self._record(call, tensor, "output", role)
        elif role is SlotRole.OUTPUT:
            self.slots.reduce(role, tensor, seen)  # a child's output: the verdict reads those of the root apart
        if not seen.is_watched:
            self._watch_gradient(seen, tensor, call)
        call.outputs.append(seen)

    def _record_changed_inputs(self, call: ModuleCall) -> None:
        """A module may change its input in place and give back something else."""
        for taken in call.inputs:
            tensor = taken.ref()
            if tensor is not None and not taken.is_still(tensor) and self._seen.get(id(tensor)) is taken:
                self._record_output(call, tensor, SlotRole.EVIDENCE)

    def _record(self, call: ModuleCall, tensor: Tensor, slot: str, role: SlotRole) -> TensorRecord:
        record = self._seen[id(tensor)] = TensorRecord(tensor, call, slot)
        record.order = self.slots.reduce(role, tensor, record)
        if record.order is None:
            self.unchecked.add(f"{slot} of {call.layer or '(root)'}: {tensor.dtype} {type(tensor).__name__}")
        return record

    def _watch_gradient(self, record: TensorRecord, tensor: Tensor, call: ModuleCall) -> None:
        """Until it is watched: what reentrant checkpointing returns is what its block gave, with a later graph."""
        if tensor.grad_fn is not None and call.layer in self._gradient_layers:
            record.is_watched = True
            self.backward.watch(tensor, record)


def _tensors(value: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(value) if _can_be_bad(tensor)]


def _can_be_bad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _nothing() -> None:
    return None


class _ModuleHook(WeakHook):
    __slots__ = ("layer",)

    def __init__(self, probe: ForwardProbe, layer: str) -> None:
        super().__init__(probe)
        self.layer = layer


class _BeforeHook(_ModuleHook):
    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if torch.compiler.is_compiling():
            return
        probe = self.target()
        if probe is None:
            return
        meter = probe.slots.meter
        if meter is None:
            probe.before(self.layer, args, kwargs)
        else:
            meter.run(probe.before, self.layer, args, kwargs)


class _AfterHook(_ModuleHook):
    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        probe = self.target()
        if probe is None:
            return
        meter = probe.slots.meter
        if meter is None:
            probe.after(self.layer, output)
        else:
            meter.run(probe.after, self.layer, output)


class _EdgeBeforeHook(_BeforeHook):
    """Of a module whose own call is compiled: it runs outside, and is not to be compiled by itself."""

    __slots__ = ()
    __call__ = _disable_dynamo(_BeforeHook.__call__)


class _EdgeAfterHook(_AfterHook):
    """See `_EdgeBeforeHook`."""

    __slots__ = ()
    __call__ = _disable_dynamo(_AfterHook.__call__)


class _TracedBeforeHook(_EdgeBeforeHook):
    """Of a module inside compiled code; where the graph is broken around it, it runs outside like `_EdgeBeforeHook`."""

    __slots__ = ("accumulators",)
    run_outside = _EdgeBeforeHook.__call__

    def __init__(self, probe: ForwardProbe, layer: str, accumulators: MinMaxAccumulators) -> None:
        super().__init__(probe, layer)
        self.accumulators = accumulators

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if not torch.compiler.is_compiling():
            self.run_outside(module, args, kwargs)
        elif is_compiled_alone():
            torch._dynamo.skip_frame()
        elif torch.is_grad_enabled():
            accumulate(self.accumulators, args)
            accumulate(self.accumulators, kwargs)


class _TracedAfterHook(_EdgeAfterHook):
    """See `_TracedBeforeHook`."""

    __slots__ = ("accumulators",)
    run_outside = _EdgeAfterHook.__call__

    def __init__(self, probe: ForwardProbe, layer: str, accumulators: MinMaxAccumulators) -> None:
        super().__init__(probe, layer)
        self.accumulators = accumulators

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.run_outside(module, args, output)
        elif is_compiled_alone():
            torch._dynamo.skip_frame()
        elif torch.is_grad_enabled():
            accumulate(self.accumulators, output)
