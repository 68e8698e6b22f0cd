"""The hooks before and after a watched module; what they do is `forward.ForwardProbe`'s."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from ddp_nanguard.hooks.weak import WeakHook

from .compiled import MinMaxAccumulators, accumulate, is_compiled_alone


class ModuleHook(WeakHook):
    """Reports to a `ForwardProbe`, with the clean name of its module."""

    __slots__ = ("layer",)

    def __init__(self, probe: object, layer: str) -> None:
        super().__init__(probe)
        self.layer = layer


class RootHook(WeakHook):
    """The hook before a root that is not looked at."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Tell that the root begins; nothing while the hook itself is being traced."""
        probe = self.target()
        if probe is not None and not torch.compiler.is_compiling():
            probe.root_begins()


class BeforeHook(ModuleHook):
    """The hook before a watched module."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """Record the call and its inputs; nothing while the hook itself is being traced."""
        if torch.compiler.is_compiling():
            return
        probe = self.target()
        if probe is not None:
            probe.before(self.layer, args, kwargs)


class AfterHook(ModuleHook):
    """The hook after a watched module."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Record the outputs; nothing while the hook itself is being traced."""
        if torch.compiler.is_compiling():
            return
        probe = self.target()
        if probe is not None:
            probe.after(self.layer, output)


class CompiledCallBeforeHook(BeforeHook):
    """The hook before a module whose own call is compiled: runs as Python, since Dynamo would compile it by itself."""

    __slots__ = ()
    __call__ = _disable_dynamo(BeforeHook.__call__)


class CompiledCallAfterHook(AfterHook):
    """See `CompiledCallBeforeHook`."""

    __slots__ = ()
    __call__ = _disable_dynamo(AfterHook.__call__)


class TracedBeforeHook(CompiledCallBeforeHook):
    """The hook before a module inside compiled code: traced, it accumulates the inputs, see `probes.compiled`.

    Where the graph is broken around the module, it runs outside of the graph, like `CompiledCallBeforeHook`.
    """

    __slots__ = ("accumulators",)
    run_outside = CompiledCallBeforeHook.__call__

    def __init__(self, probe: object, layer: str, accumulators: MinMaxAccumulators) -> None:
        super().__init__(probe, layer)
        self.accumulators = accumulators

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """Accumulate the inputs, or record them outside of the graph."""
        if not torch.compiler.is_compiling():
            self.run_outside(module, args, kwargs)
        elif is_compiled_alone():
            torch._dynamo.skip_frame()
        elif torch.is_grad_enabled():
            accumulate(self.accumulators, args)
            accumulate(self.accumulators, kwargs)


class TracedAfterHook(CompiledCallAfterHook):
    """See `TracedBeforeHook`."""

    __slots__ = ("accumulators",)
    run_outside = CompiledCallAfterHook.__call__

    def __init__(self, probe: object, layer: str, accumulators: MinMaxAccumulators) -> None:
        super().__init__(probe, layer)
        self.accumulators = accumulators

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Accumulate the outputs, or record them outside of the graph."""
        if not torch.compiler.is_compiling():
            self.run_outside(module, args, output)
        elif is_compiled_alone():
            torch._dynamo.skip_frame()
        elif torch.is_grad_enabled():
            accumulate(self.accumulators, output)
