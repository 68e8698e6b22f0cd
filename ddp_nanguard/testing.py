"""Fault injection: a non-finite value at a named rank, step, layer and phase of your own training.

    from ddp_nanguard.testing import inject

    inject(model, rank=1, step=3, layer="blocks.0", phase="forward")

or, without touching the script, ``NANGUARD_INJECT="rank=1,step=3,layer=blocks.0,phase=forward,kind=nan"``.

[Note: replay of an injected fault]
Each rank's injected faults are recorded in its evidence. What they have left in the dump (a bad batch, bad weights) is
there again in a replay; what a hook did (``forward``, ``backward``, ``loss``, ``reduce``, ``optimizer``) is injected
again by the replay itself, so a recipe need not call `inject`. As for real faults, ``reduce`` takes all ranks and
``optimizer`` takes ``keep_previous``.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from .inject.injection import Injection
from .inject.injector import install_injection
from .inject.spec import InjectionSpec, validate_spec
from .report.types import PHASES
from .wrappers import wrapper_of


def inject(
    model: nn.Module,
    *,
    rank: int,
    step: int,
    phase: str,
    layer: str | None = None,
    kind: str = "nan",
    micro_batch: int = 0,
) -> Injection:
    """Inject one fault. Call it on every rank, once the model is wrapped; before or after the guard is built.

    Args:
        model: what the training loop calls: plain, DDP, FSDP1 or after ``fully_shard``.
        rank: on which it happens; on the others nothing is hooked.
        step: number of the optimizer step, from 0; with a guard as that one counts.
        phase: ``state``: a weight of ``layer`` before the step. ``input``: the first floating tensor of the batch.
            ``forward``: what ``layer`` returns in its first call. ``loss``: the first loss given to ``guard.watch``.
            ``backward``: the gradient within ``layer``. ``reduce``: a gradient of ``layer`` after it was communicated.
            ``optimizer``: a weight of ``layer`` after the update.
        layer: name in the unwrapped model, "" for the root; None for input and loss. By default one in the middle.
        kind: ``nan``, ``inf`` or ``-inf``.
        micro_batch: index in the step.

    Returns:
        The injection: ``num_fired`` tells whether it happened, ``remove()`` takes its hooks off.

    Steps and micro-batches are counted by the guard of the model, also by one that is built later. Without a guard a
    step is a call of ``step`` of an optimizer that holds a parameter of the model, so one that a GradScaler leaves out
    is not counted.

    Raises:
        ValueError: names the option, the value and the valid ones.

    Collective: none. Host sync: none but in the step of the fault.
    """
    wrapper = wrapper_of(model)
    spec = validate_spec(InjectionSpec(rank, step, phase, layer, kind, micro_batch), wrapper, _ranks(), _own_rank())
    return install_injection(model, spec, "inject()", here=spec.rank == _own_rank())


# -- for the guard ---------------------------------------------------------------------------------------------------


def _ranks() -> list[int]:
    return list(range(dist.get_world_size())) if dist.is_available() and dist.is_initialized() else [0]


def _own_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


__all__ = ["PHASES", "Injection", "InjectionSpec", "inject"]
