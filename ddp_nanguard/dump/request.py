"""`DumpRequest`, the input of `write_dump` on one rank, and `DumpResult`, its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ddp_nanguard.capture.window import MicroBatch
from ddp_nanguard.config import GuardConfig
from ddp_nanguard.distributed.fault_group import FaultGroup
from ddp_nanguard.report.types import FaultReport
from ddp_nanguard.tensors.shards import TensorShard

from .names import PARTIAL
from .rank_records import RankEvidence
from .records import TensorShape, WrapperDescription


def no_plain_state() -> dict[str, Any]:
    """The plain state of a step without optimizer, scaler and registered objects."""
    return {"optimizers": [], "scaler": None, "registered": {}}


@dataclass
class DumpRequest:
    """Everything that one rank contributes to a dump.

    Attributes:
        report: of the fault, the same on every rank.
        rank, world_size: global.
        group: a gloo group of all ranks; None where no peer can be reached, or for a world of one.
        config: for ``dump_dir`` and ``dump_keep``.
        evidence: what this rank observed.
        wrapper: the result of `Wrapper.describe`.
        state: shards of weights (``model.<fqn>``) and optimizer tensors (``optim.<i>.<fqn>.<key>``).
        shapes: of all tensors, also those of which this rank holds nothing.
        aliases: further name -> name in ``state`` of tied tensors.
        plain_state: the state of ``optimizers``, ``scaler`` and ``registered`` objects that is not in ``state``; see
            `UnpackedState`. Any values that `pack` takes.
        special: non-dense tensors of this rank.
        shard_index, num_shards, replica_index: ranks with equal shard_index should hold the same bytes.
        window: the micro-batches of the step.
        buffers: from before the step.
        history: minima and maxima per slot, loss and gradient norm of the last steps.
        recipe: ``module:function``; None without one.
        damaged: names in ``state`` that are non-finite; of replicated ones each rank keeps its own copy.
        run_id: the same on all ranks of a run and on no others; by it ranks that cannot communicate find their
            directory.
        argv: command line of the run.
        recipe_directory: where the module of the recipe lies; None without a recipe.
        command, directory, launcher: what starts the script again, see `Run`.
        why_alone: why there is no ``group`` though there are peers.
    """

    report: FaultReport
    rank: int
    world_size: int
    group: dist.ProcessGroup | None
    config: GuardConfig
    evidence: RankEvidence
    wrapper: WrapperDescription
    state: list[TensorShard] = field(default_factory=list)
    shapes: dict[str, TensorShape] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    plain_state: dict[str, Any] = field(default_factory=no_plain_state)
    special: dict[str, torch.Tensor] = field(default_factory=dict)
    shard_index: int = 0
    num_shards: int = 1
    replica_index: int = 0
    window: list[MicroBatch] = field(default_factory=list)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    history: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    recipe: str | None = None
    damaged: set[str] = field(default_factory=set)
    run_id: str = ""
    argv: tuple[str, ...] = ()
    recipe_directory: str | None = None
    command: tuple[str, ...] = ()
    directory: str = ""
    launcher: dict[str, str] = field(default_factory=dict)
    why_alone: str = FaultGroup.why_alone


@dataclass
class DumpResult:
    """The result of writing a dump; the same on every rank that could be reached.

    Attributes:
        path: of the directory, None if there is none.
        size_bytes: total of all its files.
        problems: one line each; empty when everything was written.
        replicas_disagree: ``rank 1: model.w`` for replicated tensors that differ from replica 0's; only the first of
            them.
        leads: whether this rank has written the files that ranks share; not the same on every rank.
    """

    path: str | None
    size_bytes: int = 0
    problems: list[str] = field(default_factory=list)
    replicas_disagree: list[str] = field(default_factory=list)
    leads: bool = field(default=False, compare=False)

    @property
    def is_partial(self) -> bool:
        """Whether the directory could not be finished, so that nothing reads it."""
        return self.path is not None and self.path.endswith(PARTIAL)
