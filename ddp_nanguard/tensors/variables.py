"""What code that raised had computed, from the variables of its frames."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from types import FrameType

from torch import Tensor

from .minmax import kind_in


def bad_variables(error: BaseException) -> Iterator[tuple[str, Tensor, list[FrameType]]]:
    """Variables of an exception's frames that autograd follows and that are NaN or +Inf, outermost frame first.

    What an outer frame holds was computed before the call that led to the inner one. -Inf masks scores on purpose.

    Returns:
        Name, tensor, and the frames down to the one that holds it. Host sync: as `kind_in`, one per tensor.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for index, frame in enumerate(frames):
        for name, value in list(frame.f_locals.items()):
            if isinstance(value, Tensor) and value.grad_fn is not None and kind_in(value, allow_negative_inf=True):
                yield name, value, frames[: index + 1]
