"""Functions of the user's that the guard calls: loggers and notifiers, which must not end one rank alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ddp_nanguard.errors import line_of

_log = logging.getLogger(__name__)

OnMetrics = Callable[[int, dict[str, float]], object]
"""Called with the number of a step and its numbers by name."""
OnEvent = Callable[[dict[str, Any]], object]
"""Called with a fault as JSON-ready data."""


class Callback:
    """A function of the user's. What it raises is said once and goes no further, `KeyboardInterrupt` apart.

    Args:
        name: of the argument that it was given as.
        function: what is called.

    Raises:
        ValueError: it cannot be called.
    """

    def __init__(self, name: str, function: Callable[..., object]) -> None:
        if not callable(function):
            raise ValueError(f"{name}={function!r} cannot be called; give a function, or None")
        self._name = name
        self._function = function
        self._is_told = False

    def __call__(self, *args: Any) -> None:
        """Call it."""
        try:
            self._function(*args)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit: the other ranks train on, and would wait for this one
            if not self._is_told:
                self._is_told = True
                _log.error("%s raised %s; training goes on (said once)", self._name, line_of(error))


def callback(name: str, function: Callable[..., object] | None) -> Callback | None:
    """A `Callback` of a function, None for None."""
    return None if function is None else Callback(name, function)
