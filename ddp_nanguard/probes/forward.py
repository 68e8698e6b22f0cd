"""Forward: a hook before and after every watched module.

Before: tensors that no probe has just seen are reduced as inputs. After: outputs are reduced. Both get a tensor hook
for backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ddp_nanguard.board import Board, Region
from ddp_nanguard.hooks import Hook
from ddp_nanguard.scan import tensors_in

from .backward import BackwardProbe
from .calls import Call, Sighting, in_backward
from .recomputation import Recomputation


class ForwardProbe:
    """Watches the modules of one model.

    Hooks are on the modules only while armed: some layers choose another kernel as soon as they carry hooks, and
    forwards without grad mode are to be left alone.
    """

    def __init__(
        self, modules: list[tuple[str, nn.Module]], board: Board, backward: BackwardProbe, skip_types: tuple[str, ...]
    ) -> None:
        self.board = board
        self.backward = backward
        self.modules = [(name, module) for name, module in modules if type(module).__name__ not in skip_types]
        self.on_root: Callable[[], None] = _nothing
        self.on_idle: Callable[[], object] = _nothing
        self.calls: list[Call] = []
        self.unchecked: set[str] = set()
        self.have_forward = {name for name, m in modules if getattr(type(m), "forward", None) is not nn.Module.forward}
        self.skipped = [name for name, module in modules if type(module).__name__ in skip_types]
        self._recomputation = Recomputation(backward)
        self._handles: list[RemovableHandle] = []
        self._stack: list[Call] = []
        self._counts: dict[str, int] = {}
        self._seen: dict[int, Sighting] = {}
        self._micro_batch = 0

    # -- hooks on and off ------------------------------------------------------------------------------------------

    def arm(self) -> None:
        """Put the hooks on; nothing where they are already."""
        if self._handles:
            return
        for name, module in self.modules:
            if isinstance(module, torch.jit.ScriptModule):
                self.unchecked.add(name)
                continue
            before, after = _BeforeHook(self, name), _AfterHook(self, name)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, always_call=True))

    def disarm(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

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

    def forget_window(self) -> None:
        """Drop the record of the window."""
        self.calls = []
        self.begin_micro_batch(0)

    def silent_modules(self) -> list[str]:
        """Watched modules that no hook saw in the window: not run, compiled, or scripted."""
        ran = {call.layer for call in self.calls}
        return [name for name, _ in self.modules if name not in ran and name in self.have_forward]

    # -- what the hooks do ---------------------------------------------------------------------------------------------

    def before(self, layer: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is about to run."""
        if in_backward():
            self._recomputation.before(layer, self.calls, _tensors((args, kwargs)))
            return
        if not self._stack and not torch.is_grad_enabled():
            self.on_idle()
            return
        if layer == "" and not self._stack:
            self.on_root()
        number = self._counts[layer] = self._counts.get(layer, 0) + 1
        call = Call(layer, number, self._micro_batch, self._stack[-1] if self._stack else None)
        self.calls.append(call)
        self._stack.append(call)
        for tensor in tensors_in((args, kwargs) if kwargs else args):
            call.takes_tensors = True
            if _can_be_bad(tensor):
                self._take(call, tensor)

    def after(self, layer: str, output: Any) -> None:
        """A module has run."""
        if in_backward():
            self._recomputation.after(layer, _tensors(output))
            return
        call = self._pop(layer)
        if call is None:
            return
        region = Region.EVIDENCE if call.parent is not None else Region.OUTPUT
        for tensor in tensors_in(output):
            if _can_be_bad(tensor):
                self._give(call, tensor, region)
        self._look_at_changed_inputs(call)

    def _pop(self, layer: str) -> Call | None:
        while self._stack:
            call = self._stack.pop()
            if call.layer == layer:
                return call
        return None

    def _take(self, call: Call, tensor: Tensor) -> None:
        seen = self._seen.get(id(tensor))
        if seen is None or not seen.is_still(tensor):
            seen = self._sight(call, tensor, "input", Region.EVIDENCE)
        self._watch_late(seen, tensor)
        seen.consumers.append(call)
        call.inputs.append(seen)

    def _give(self, call: Call, tensor: Tensor, region: Region) -> None:
        seen = self._seen.get(id(tensor))
        if seen is None or not seen.is_still(tensor):
            seen = self._sight(call, tensor, "output", region)
        elif region is Region.OUTPUT:
            self.board.reduce(region, tensor, seen)  # a child's output: the verdict reads those of the root apart
        self._watch_late(seen, tensor)
        call.outputs.append(seen)

    def _look_at_changed_inputs(self, call: Call) -> None:
        """A module may change its input in place and give back something else."""
        for taken in call.inputs:
            tensor = taken.ref()
            if tensor is not None and self._seen.get(id(tensor)) is taken and not taken.is_still(tensor):
                self._give(call, tensor, Region.EVIDENCE)

    def _sight(self, call: Call, tensor: Tensor, slot: str, region: Region) -> Sighting:
        sighting = self._seen[id(tensor)] = Sighting(tensor, call, slot)
        sighting.order = self.board.reduce(region, tensor, sighting)
        if sighting.order is None:
            self.unchecked.add(f"{slot} of {call.layer or '(root)'}: {tensor.dtype} {type(tensor).__name__}")
        if tensor.grad_fn is not None:
            call.had_graph = call.had_graph or slot == "output"
            sighting.is_watched = True
            self.backward.watch(tensor, sighting)
        return sighting

    def _watch_late(self, sighting: Sighting, tensor: Tensor) -> None:
        """What reentrant checkpointing returns is what its block gave, with a graph put on afterwards."""
        if not sighting.is_watched and tensor.grad_fn is not None:
            sighting.is_watched = True
            self.backward.watch(tensor, sighting)


def _tensors(value: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(value) if _can_be_bad(tensor)]


def _can_be_bad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _nothing() -> None:
    return None


class _BeforeHook(Hook):
    __slots__ = ("layer",)

    def __init__(self, probe: ForwardProbe, layer: str) -> None:
        super().__init__(probe)
        self.layer = layer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if torch.compiler.is_compiling():
            return
        probe = self.target()
        if probe is not None:
            probe.before(self.layer, args, kwargs or {})


class _AfterHook(Hook):
    __slots__ = ("layer",)

    def __init__(self, probe: ForwardProbe, layer: str) -> None:
        super().__init__(probe)
        self.layer = layer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        probe = self.target()
        if probe is not None:
            probe.after(self.layer, output)
