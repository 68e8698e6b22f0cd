"""`InMemoryDump`: a fault as its dump is going to hold it, while it is still in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ddp_nanguard.context import GuardContext
from ddp_nanguard.dump.format import dtype_of
from ddp_nanguard.dump.manifest import manifest_of
from ddp_nanguard.dump.rank_records import RankEvidence
from ddp_nanguard.dump.read import Dump
from ddp_nanguard.dump.records import Manifest
from ddp_nanguard.dump.request import DumpRequest
from ddp_nanguard.errors import DumpError
from ddp_nanguard.tensors.shards import TensorShard
from ddp_nanguard.wrappers.weights import weights


class InMemoryDump(Dump):
    """What a replay asks of a dump, for this rank alone and without optimizer state.

    Memory: references, and where weights are sharded one whole copy of them on the host, from construction until
    `forget_weights`.
    """

    def __init__(self, context: GuardContext, request: DumpRequest) -> None:
        self.paths = [Path("this process")]
        self.report = request.report
        self.ranks = [request.rank]
        self.manifest = _manifest(request)
        self._request = request
        shards, self._special = weights(context.wrapper)
        self._is_sharded = context.wrapper.is_sharded and context.ranks.world_size > 1
        self._gives = context.wrapper.replica_index == 0
        self._shards: dict[str, list[TensorShard]] = {}
        for shard in shards:
            self._shards.setdefault(shard.name, []).append(shard)
        self._whole = self._empty() if self._is_sharded else {}

    def _empty(self) -> dict[str, Tensor]:
        """Made before ranks wait for each other: a rank without the memory must not leave the others waiting."""
        shapes = {name: entry for name, entry in self.manifest.shapes.items() if name not in self._special}
        return {
            name: torch.zeros(shapes[name].shape, dtype=dtype_of(shapes[name].dtype), device="cpu")
            for name in sorted(shapes)
        }

    def gather(self, group: dist.ProcessGroup | None) -> None:
        """Put sharded weights together.

        Collective: one MAX all-reduce of each parameter's bytes over ``group`` (gloo); nothing where weights are whole.
        """
        for name, whole in self._whole.items():
            if self._gives:
                self._lay_own(name, whole)
            dist.all_reduce(whole.reshape(-1).view(torch.uint8), op=dist.ReduceOp.MAX, group=group)
            self._lay_own(name, whole)  # replicas may disagree, and it is this rank's step

    @torch.no_grad()
    def _lay_own(self, name: str, whole: Tensor) -> None:
        for shard in self._shards.get(name, []):
            region = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.tensor.shape, strict=True))
            whole.view(shard.stored_shape)[region].copy_(shard.tensor)

    def forget_weights(self) -> None:
        """The host copy is no longer needed."""
        self._whole = {}

    def evidence(self, rank: int) -> RankEvidence:
        """See `Dump.evidence`."""
        return self._request.evidence

    def history(self, rank: int) -> dict[str, np.ndarray[Any, Any]]:
        """See `Dump.history`."""
        return self._request.history

    def buffers(self, rank: int) -> dict[str, Tensor]:
        """See `Dump.buffers`; on the device."""
        return self._request.buffers

    def special(self, rank: int) -> dict[str, Tensor]:
        """See `Dump.special`; on the device."""
        return self._special

    def plain_state(self) -> dict[str, Any]:
        """See `Dump.plain_state`."""
        return self._request.plain_state

    def names(self) -> list[str]:
        """Of the weights."""
        return sorted(self._shards)

    def _load(self, name: str, rank: int | None) -> Tensor:
        if name in self._whole:
            return self._whole[name]
        if self._is_sharded or name not in self._shards:
            raise DumpError(f"no tensor {name!r} is at hand; the recipe must build the model of the run")
        (shard,) = self._shards[name]
        return shard.tensor.reshape(shard.true_shape)


def _manifest(request: DumpRequest) -> Manifest:
    """The optimizer's state does not matter: no update is run."""
    options = replace(request.config, dump_weights=True, dump_optimizer=False)
    shapes = {name: entry for name, entry in request.shapes.items() if name.startswith("model.")}
    return replace(manifest_of(request), options=options, shapes=shapes)
