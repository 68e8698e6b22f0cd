"""Tensors in containers of any kind: finding them, naming them by path, copying the containers around them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

MAX_COPIED = 32
"""Levels of containers that are copied."""


def tensors_in(value: Any, depth: int = 8) -> Sequence[Tensor]:
    """Every tensor in a container: tuple, list, mapping, dataclass, namedtuple, model output, or any of them nested.

    Args:
        value: the container, or a tensor.
        depth: how many levels are entered.
    """
    if type(value) is Tensor:
        return (value,)
    # The fast path: a hook is almost always given one tensor or a tuple of tensors, and it runs at every module call.
    if type(value) is tuple:
        for item in value:
            if type(item) is not Tensor:
                break
        else:
            return value
    return [tensor for _, tensor in named_tensors_in(value, (), depth)]


def named_tensors_in(
    value: Any, path: tuple[Any, ...] = (), depth: int = 8
) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Like `tensors_in`, with the path of keys, indices and field names that leads to each tensor."""
    if isinstance(value, Tensor):
        yield path, value
        return
    if depth == 0 or isinstance(value, (str, bytes)):
        return
    for key, item in _children(value):
        yield from named_tensors_in(item, (*path, key), depth - 1)


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, (tuple, list)):
        yield from enumerate(value)
        return
    try:  # from here on the job's own code runs, which may raise anything: then there is nothing to be found
        yield from _entries(value)
    except Exception:
        return


def _entries(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    elif hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)) and not callable(value):
        yield from vars(value).items()


def path_text(path: tuple[Any, ...]) -> str:
    """A path as it is written in Python: ``["image"][0]``."""
    return "".join(f'["{key}"]' if isinstance(key, str) else f"[{_repr(key)}]" for key in path)


def _repr(key: Any) -> str:
    try:
        return repr(key)
    except Exception:
        return type(key).__name__


def copy_containers(value: Any, keep: Callable[[Tensor], Tensor], depth: int = MAX_COPIED) -> Any:
    """``value`` with its containers copied and each tensor replaced by ``keep(tensor)``; other leaves are shared.

    Args:
        value: of any kind.
        keep: what stands for a tensor.
        depth: how many levels are copied; what lies deeper, as in a container that holds itself, is shared.
    """
    if isinstance(value, Tensor):
        return keep(value)
    if depth == 0:
        return value
    if type(value) in (list, tuple):
        return type(value)(copy_containers(item, keep, depth - 1) for item in value)
    if type(value) is dict:
        return {key: copy_containers(item, keep, depth - 1) for key, item in value.items()}
    return _copied(value, keep, depth)


def copied_tensors(value: Any) -> list[Tensor]:
    """Tensors that `copy_containers` replaces, in its order: not those in objects that are no containers."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    copy_containers(value, keep)
    return found


def _copied(value: Any, keep: Callable[[Tensor], Tensor], depth: int) -> Any:
    """A copy of a container that has code of its own; a leaf itself."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(copy_containers(item, keep, depth - 1) for item in value))
    if isinstance(value, Mapping) and hasattr(value, "copy") and hasattr(value, "__setitem__"):
        copied: Any = value.copy()
        for key, item in value.items():
            copied[key] = copy_containers(item, keep, depth - 1)
        return copied
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for spec in dataclasses.fields(value):
            if hasattr(value, spec.name):
                # A frozen dataclass refuses assignment.
                object.__setattr__(copied, spec.name, copy_containers(getattr(value, spec.name), keep, depth - 1))
        return copied
    return value
