"""Which modules are looked at in every step: what the option ``layers`` means for a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn


@dataclass(frozen=True)
class WatchedLayers:
    """The modules whose inputs, outputs and their gradients are looked at, by clean name.

    Attributes:
        layers: modules that carry hooks.
        in_compiled_code: those that carry hooks where they run inside compiled code. There it is more than the blocks,
            since a module outside of any block would be seen by nobody.
    """

    layers: frozenset[str] = frozenset()
    in_compiled_code: frozenset[str] = frozenset()

    def as_compiled(self, traced: Iterable[str], watched: Iterable[str]) -> WatchedLayers:
        """As a run watched it in which ``traced`` ran inside compiled code and ``watched`` carried hooks there."""
        return WatchedLayers(self.layers - frozenset(traced) | frozenset(watched), self.in_compiled_code)


def watched_layers(option: Literal["none", "blocks", "every"], modules: list[tuple[str, nn.Module]]) -> WatchedLayers:
    """What an option watches of a model.

    Args:
        option: nothing, the root and all modules that hold others, or every module.
        modules: clean name and module, root included.
    """
    if option == "none":
        return WatchedLayers()
    every = frozenset(name for name, _ in modules)
    if option == "every":
        return WatchedLayers(every, every)
    blocks = frozenset(name for name, module in modules if any(True for _ in module.children()))
    called = {name for name, module in modules if getattr(type(module), "forward", None) is not nn.Module.forward}
    return WatchedLayers(
        blocks | {""}, frozenset(name for name in every if name in blocks or _is_outside(name, called))
    )


def _is_outside(name: str, called: set[str]) -> bool:
    """Whether no module around ``name``, the root left out, is called itself. A ``ModuleList`` never is."""
    parts = name.split(".")
    return not any(".".join(parts[:end]) in called for end in range(1, len(parts)))
