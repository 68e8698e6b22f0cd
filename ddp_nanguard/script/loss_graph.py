"""Whether a loss takes more than the model gave: labels that never came through the guard are not the recorded ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

_OPERANDS = ("_saved_target", "_saved_other", "_saved_weight", "_saved_index", "_saved_mask", "_saved_condition")
"""What nodes of autograd keep of operands that need no gradient."""


def nodes_of(tensors: Iterable[Tensor]) -> frozenset[Any]:
    """The nodes of autograd that made the tensors; they keep the graph alive."""
    return frozenset(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None)


def takes_more(loss: Tensor, outputs: frozenset[Any]) -> bool:
    """Whether code between the model and the loss met a tensor that needs no gradient.

    Args:
        loss: before its backward.
        outputs: the `nodes_of` what the model gave; not looked into.
    """
    return any(_is_constant(value) for node in _between(loss, outputs) for value in _operands(node))


def _between(loss: Tensor, outputs: frozenset[Any]) -> Iterator[Any]:
    waiting, seen = [loss.grad_fn], set(outputs)
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [each for each, _ in node.next_functions]


def _operands(node: Any) -> Iterator[Any]:
    for name in _OPERANDS:
        with contextlib.suppress(AttributeError, RuntimeError):  # most nodes have none; one may be changed in place
            yield getattr(node, name)


def _is_constant(value: Any) -> bool:
    """Whether it is a tensor without gradient, but no number of Python's, which autograd keeps in 64 bits."""
    if not isinstance(value, Tensor) or value.requires_grad:
        return False
    return value.dim() > 0 or value.dtype not in (torch.float64, torch.int64)
