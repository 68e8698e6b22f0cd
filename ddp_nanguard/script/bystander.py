"""A guard of a script that replays the dump of another of its guards: it watches nothing."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any

from torch import nn

_taken: list[bool] = []


def take() -> None:
    """Note that a guard of this process has the model of the dump."""
    _taken.append(True)


def stand_by(model: nn.Module, cannot: Callable[[], Any]) -> None:
    """Let the script use a model that is not the dump's, once another guard has that one.

    Guards are made before the loop begins: where the first call comes, and none of them fits, none will.

    Args:
        model: of this guard.
        cannot: ends the process, and says why the model is not that of the dump.
    """
    process = os.getpid()

    def on_call(module: nn.Module, args: Any) -> None:
        if not _taken:
            cannot()

    def on_exit() -> None:
        if not _taken and os.getpid() == process:
            cannot()

    model.register_forward_pre_hook(on_call, prepend=True)
    atexit.register(on_exit)
