"""Tracks the module call that the running code belongs to; calls are counted as the guard's probes count them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from ddp_nanguard.hooks.autograd import in_backward

LayerCall = tuple[str, int | None]
"""Clean name of a module, and the number of its call in this micro-batch, from 1."""


class ModuleStack:
    """Follows the forwards of named modules through global hooks while it is entered as a context manager.

    Recomputed forwards, which run inside backward, have a stack of their own: the forward's stack may be non-empty
    then.

    Args:
        named: clean names and modules; modules that are not listed are ignored.
        root_is_step: as of `ForwardProbe`.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Module]], root_is_step: bool = False) -> None:
        self._root_is_step = root_is_step
        self._is_in_step = False
        self._names = {id(module): name for name, module in named}
        self._stack: list[LayerCall] = []
        self._again: list[LayerCall] = []
        self._counts: dict[str, int] = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> ModuleStack:
        self._handles = [
            register_module_forward_pre_hook(self._before),
            # Also when the forward raises: the module would stay on the stack for the rest of the micro-batch.
            register_module_forward_hook(self._after, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def begin_micro_batch(self) -> None:
        """Forget the stacks and count the calls of each module from 1 again."""
        self._stack, self._again, self._counts = [], [], {}
        self._is_in_step = False

    def top(self) -> LayerCall | None:
        """Name and call number of the running module; None in the step's own code.

        In a recomputation the call number is None unless the module was called once: which call is recomputed is
        unknown.
        """
        stack = self._again if in_backward() else self._stack
        return stack[-1] if stack else None

    def _before(self, module: nn.Module, _: Any) -> None:
        name = self._names.get(id(module))
        if name is None:
            return
        if in_backward():
            self._again.append((name, 1 if self._counts.get(name) == 1 else None))
        # The guard's probes skip evaluation forwards too; counting them would give calls other numbers than the
        # report's.
        elif self._root_is_step and name == "" and not self._is_in_step:
            self._is_in_step = torch.is_grad_enabled()
        elif self._stack or torch.is_grad_enabled():
            self._counts[name] = self._counts.get(name, 0) + 1
            self._stack.append((name, self._counts[name]))

    def _after(self, module: nn.Module, _: Any, __: Any) -> None:
        name = self._names.get(id(module))
        stack = self._again if in_backward() else self._stack
        if name is None or all(place[0] != name for place in stack):
            self._is_in_step = self._is_in_step and name != ""
            return
        while stack.pop()[0] != name:
            pass
