"""Clipping by norm that is a look at the gradients at the same time."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .gradient import GradientProbe


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
) -> Tensor:
    """Clip with torch's function; with FSDP1's own, whose ranks hold parts of the gradients, where the model has it.

    Raises:
        RuntimeError: the total is not finite, with ``error_if_nonfinite``.
    """
    own = getattr(model, "clip_grad_norm_", None)
    if own is None:
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type, error_if_nonfinite, foreach)
    total: Tensor = own(max_norm, norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"the total norm of order {norm_type} of the gradients is {float(total)}: it clips nothing")
    return total


def clip_and_look(
    probe: GradientProbe,
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """As `clip_grad_norm_`, bit for bit; where its norms can stand for a look, the gradients count as looked at.

    Finite gradients stay finite: the factor is between 0 and 1, or 0 where the norm overflows. So the norms from before
    it will do. Those of order 0 and below are finite over gradients that are not, and FSDP1's total is that of all
    ranks: there the gradients are looked at again before the verdict, as after torch's function.

    Args:
        probe: of the gradients.
        model: whose gradients are clipped.
        max_norm: the largest total norm that is left alone.
        norm_type: order of the norm.
        error_if_nonfinite: raise where the total is not finite, which costs a host read.
        foreach: as in torch.

    Collective: those of the model's own clipping: FSDP. Host sync: none, but for ``error_if_nonfinite``.
    """
    looks = norm_type > 0 and max_norm > -math.inf and not probe.slots.exact
    if not looks or error_if_nonfinite or foreach is False or hasattr(model, "clip_grad_norm_"):
        return clip_grad_norm_(model, max_norm, norm_type, error_if_nonfinite, foreach)
    parameters = list(model.parameters())
    with torch.no_grad():
        total = probe.total_norm(parameters, float(norm_type))
        if total is not None:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, total, foreach)
            probe.mark_checked()
            return total
        total = clip_grad_norm_(model, max_norm, norm_type, error_if_nonfinite, foreach)
        if hasattr(total, "_local_tensor"):  # FSDP2: a DTensor that holds the norm of what this rank has
            probe.take_total(total._local_tensor)
            probe.mark_checked(is_sure=True)
    return total
