"""From what a loop calls its optimizer to the optimizers whose ``step`` changes the weights.

Libraries hand out objects around an optimizer: a proxy that is an Optimizer by class and keeps no hooks of its own
(accelerate), a copy that shares the tables of hooks with the original (Lightning), a plain object or a container of
several, also one that is an Optimizer by class (torchtitan). Hooks belong on what is inside. An optimizer proper that
steps by another one (SAM, Lookahead) keeps its place: there both are hooked, and the inner step counts where the outer
one is not running.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.optim import Optimizer

_NAMES = ("optimizer", "_optimizer", "optim", "base_optimizer", "inner_optimizer", "optimizers", "__wrapped__")
"""Where an object may keep what it wraps without a ``__dict__``, or with one that it takes from there."""
_HOOKS = "_optimizer_step_pre_hooks"
_DEPTH = 4


def each_given(optimizer: object) -> list[object]:
    """What the loop has given, one by one: an optimizer, an object around some, or a container of these."""
    if optimizers_in(optimizer):
        return [optimizer]
    values = optimizer.values() if isinstance(optimizer, Mapping) else optimizer
    return list(values) if isinstance(values, Iterable) else [optimizer]


def optimizers_in(given: object, depth: int = _DEPTH) -> list[Optimizer]:
    """The optimizers that a wrapper, or a container of some, leads to; itself where it is one proper.

    Args:
        given: by the loop.
        depth: how many wrappers are opened.
    """
    inside = [found for each in _kept(given) for found in _inside(each, depth)]
    if isinstance(given, Optimizer) and _HOOKS in vars(given):
        shared = [each for each in inside if vars(each)[_HOOKS] is vars(given)[_HOOKS]]
        return _once(shared) or _iterated(given) or [given]
    return _once(inside) if _is_stepped(given) else []


def _iterated(given: Optimizer) -> list[Optimizer]:
    """Those that an optimizer by class iterates over: it holds them for several parts of a model (torchtitan).

    It has no state of its own, which the guard would look at and dump; no optimizer proper can be iterated over.
    """
    found: list[object] = []
    with contextlib.suppress(Exception):
        found = list(given) if isinstance(given, Iterable) else []
    return [each for each in found if isinstance(each, Optimizer)]


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Those that an optimizer steps by: kept by it, with a parameter of its own."""
    own = _parameters(optimizer)
    inside = [found for each in _kept(optimizer) for found in _inside(each, _DEPTH)]
    return [each for each in _once(inside) if each is not optimizer and own & _parameters(each)]


def _inside(kept: object, depth: int) -> list[Optimizer]:
    if isinstance(kept, (list, tuple, Mapping)):
        items = list(kept.values()) if isinstance(kept, Mapping) else list(kept)
        return [found for item in items[:64] if _is_stepped(item) for found in optimizers_in(item, depth - 1)]
    return optimizers_in(kept, depth - 1) if depth > 0 and _is_stepped(kept) else []


def _kept(given: object) -> Iterator[Any]:
    """What an object keeps; nothing where its own code raises."""
    with contextlib.suppress(TypeError):
        yield from vars(given).values()
    for name in (*getattr(type(given), "__slots__", ()), *_NAMES):
        try:
            yield getattr(given, name)
        except Exception:
            continue


def _is_stepped(value: object) -> bool:
    """Whether it looks like an optimizer: a scheduler, which steps too, has no gradients to clear."""
    try:
        return all(callable(getattr(value, name, None)) for name in ("step", "zero_grad"))
    except Exception:
        return False


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _once(optimizers: list[Optimizer]) -> list[Optimizer]:
    return list({id(each): each for each in optimizers}.values())
