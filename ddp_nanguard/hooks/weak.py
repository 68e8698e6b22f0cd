"""Hooks that hold their owner weakly, and that do nothing in a copied or pickled model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.serialization import add_safe_globals


def ignore(*args: Any, **kwargs: Any) -> None:
    """Do nothing: what a hook becomes in a copied or pickled model."""


def _ignoring() -> Callable[..., None]:
    return ignore


# `torch.load` of a whole model that was guarded when it was saved: what its hooks have become does nothing
add_safe_globals([_ignoring])


class WeakHook:
    """A hook that reports to ``target`` while that lives, and that is `ignore` in any copy of the model.

    The target is held weakly: a hook hangs on the module or on its parameters, and a guard that watches the module must
    not live, nor keep DDP alive, through it.
    """

    __slots__ = ("__weakref__", "target")

    def __init__(self, target: object) -> None:
        self.target: Callable[[], Any] = weakref.ref(target)

    # `copy.deepcopy` goes through here too: a copy of the model, such as an EMA, is not watched by the guard of this
    # one
    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _ignoring, ()
