"""What equal values of all ranks reduce to, in place: the arithmetic of `stand_in`, no operators of the step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def reduce_equal(tensor: Tensor, size: int, options: Any) -> None:
    """Reduce ``size`` values like this one, by the operation that the options of a collective name."""
    operation = getattr(options, "reduceOp", dist.ReduceOp.SUM)
    with torch.no_grad():
        if operation == dist.ReduceOp.SUM:
            tensor.mul_(size)
        elif operation == dist.ReduceOp.PRODUCT:
            tensor.pow_(size)
        elif operation == dist.ReduceOp.BXOR and size % 2 == 0:
            tensor.zero_()
