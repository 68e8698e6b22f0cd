"""Making tensors non-finite: by an operator that a trace can find, or in place.

[Note: corrupted by division]
A value of the forward or the backward is corrupted by an operator with finite inputs, a division by zero, so that a
trace finds the operator as it would find one in the user's code. Of a value of the forward only the first element is
hit. Of a gradient, and of a weight before the step, every element is: one alone may meet a ReLU that was off, or a row
of an embedding that no index looks up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddp_nanguard.tensors.containers import copy_containers, tensors_in
from ddp_nanguard.tensors.minmax import is_plain

__frame_role__ = "injects"  # see `hooks.frames`

_NUMERATORS = {"nan": 0.0, "inf": 1.0, "-inf": -1.0}


def corrupted(tensor: Tensor, kind: str, everywhere: bool = False) -> Tensor:
    """A copy of ``tensor`` with its first element made non-finite; differentiable, see [Note: corrupted by division].

    Args:
        tensor: floating, dense, not empty.
        kind: ``nan``, ``inf`` or ``-inf``.
        everywhere: whether all elements are made non-finite.
    """
    # elements that are not hit get 0 / 1 added, which changes no value
    with torch.no_grad():
        numerator, denominator = torch.zeros_like(tensor), torch.ones_like(tensor)
        first = ... if everywhere else (0,) * tensor.dim()
        numerator[first], denominator[first] = _NUMERATORS[kind], 0.0
        addend = numerator / denominator
    return tensor + addend


class CorruptedGradient(torch.autograd.Function):
    """Identity in the forward; corrupts the gradient that flows back through it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, kind: str, on_backward: Callable[[], None]) -> Tensor:
        """Return a copy of ``values``, so that the code after it may change it in place."""
        ctx.kind, ctx.on_backward = kind, on_backward
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Call ``on_backward`` and return the gradient with every element made non-finite."""
        ctx.on_backward()
        return corrupted(gradient, ctx.kind, everywhere=True), None, None


def with_first_corrupted(value: Any, corrupt: Callable[[Tensor], Tensor]) -> tuple[Any, bool]:
    """A copy of a container with its first floating tensor replaced, and whether there was one.

    Args:
        value: a tensor, or any container of tensors; returned as it is where it holds no floating tensor.
        corrupt: gives the replacement.
    """
    first = next((tensor for tensor in tensors_in(value) if is_plain(tensor)), None)
    done = False

    def keep(tensor: Tensor) -> Tensor:
        nonlocal done
        if tensor is not first or done:
            return tensor
        done = True
        return corrupt(tensor)

    copied = copy_containers(value, keep) if first is not None else value
    return copied, done


@torch.no_grad()
def corrupt_first(tensor: Tensor, kind: str) -> None:
    """Make the first element of a plain tensor non-finite, in place."""
    tensor[(0,) * tensor.dim()] = float(kind)


@torch.no_grad()
def corrupt_all(tensor: Tensor, kind: str) -> None:
    """Make every element of a plain tensor non-finite, in place."""
    tensor.fill_(float(kind))
