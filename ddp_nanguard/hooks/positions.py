"""Where the loop is in its data: the iterations of ``guard.steps``, and the batches of each."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Position(NamedTuple):
    """One batch of a loader.

    Attributes:
        epoch: number of the iteration over ``guard.steps``, from 0, or as the loop gives it.
        batch: its index in it, from 0.
    """

    epoch: int
    batch: int


class LoaderPosition:
    """Where a loop is in what it iterates over.

    Attributes:
        now: the batch that was handed out last; None before the first one.
        next_epoch: number of the next iteration, unless the loop gives another one.
    """

    def __init__(self) -> None:
        self.now: Position | None = None
        self.next_epoch = 0
        self._loader: Callable[[], Any] = _nothing

    def begin_epoch(self, loader: Iterable[Any], epoch: int | None) -> int:
        """An iteration begins; its number.

        Args:
            loader: held, weakly where that is possible, only if it can tell its state.
            epoch: the number that the loop gives it, or None.
        """
        number = self.next_epoch if epoch is None else epoch
        self.next_epoch = number + 1
        self._loader = _reference(loader) if hasattr(loader, "state_dict") else _nothing
        return number

    def loader_state(self) -> Any:
        """The state of the loader, whose code may raise; None where it has none."""
        loader = self._loader()
        return None if loader is None else loader.state_dict()


def _reference(loader: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(loader)
    except TypeError:  # a class with slots
        return lambda: loader


def _nothing() -> None:
    return None
