"""The few collectives of the fault path, over a gloo group, all of bounded size."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TEXT_BYTES = 1024
SLOWEST_BYTES_PER_S = 20e6
"""What one rank writes at least."""
SLOWEST_SHARED_BYTES_PER_S = 100e6
"""What a file system takes at least from all ranks together."""


class PeersLostError(RuntimeError):
    """A collective of the fault path failed: a peer died or did not answer in time."""


class RankGroup:
    """The ranks that write one dump together.

    Args:
        group: a gloo group; None stands for this process alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.num_ranks = dist.get_world_size(group) if group is not None else 1

    @contextlib.contextmanager
    def waiting_for(self, sizes_bytes: list[int], timeout_s: float) -> Iterator[None]:
        """Lets ranks wait for a long write: ``timeout_s`` more what a slow disk needs; afterwards ``timeout_s`` again.

        A peer that dies is noticed at once all the same; only one that hangs costs the longer time.

        Args:
            sizes_bytes: what each rank writes.
            timeout_s: the time without any write.
        """
        writing_s = max(max(sizes_bytes) / SLOWEST_BYTES_PER_S, sum(sizes_bytes) / SLOWEST_SHARED_BYTES_PER_S)
        self._set_timeout(timeout_s + writing_s)
        try:
            yield
        finally:
            self._set_timeout(timeout_s)

    def _set_timeout(self, timeout_s: float) -> None:
        if self.group is not None:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), self.group)

    def reduce(self, values: list[int], op: dist.ReduceOp.RedOpType) -> list[int]:
        """Element-wise reduction of a few integers.

        Collective: one all_reduce of ``8 * len(values)`` bytes.
        """
        tensor = torch.tensor(values, dtype=torch.int64)
        self.reduce_tensor(tensor, op)
        return [int(value) for value in tensor]

    def largest(self, *values: int) -> list[int]:
        """Element-wise maximum over all ranks."""
        return self.reduce(list(values), dist.ReduceOp.MAX)

    def total(self, *values: int) -> list[int]:
        """Element-wise sum over all ranks."""
        return self.reduce(list(values), dist.ReduceOp.SUM)

    def reduce_tensor(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """In-place all_reduce of a CPU tensor."""
        if self.group is None:
            return
        try:
            dist.all_reduce(tensor, op=op, group=self.group)
        except RuntimeError as error:
            raise PeersLostError(_first_line(error)) from error

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor of this shape, in order of the group's ranks."""
        if self.group is None:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        try:
            dist.all_gather(gathered, tensor, group=self.group)
        except RuntimeError as error:
            raise PeersLostError(_first_line(error)) from error
        return gathered

    def gather_numbers(self, *values: int) -> list[list[int]]:
        """Every rank's few integers."""
        return [[int(value) for value in row] for row in self.gather(torch.tensor(values, dtype=torch.int64))]

    def gather_data(self, data: dict[str, list[str]]) -> list[dict[str, list[str]]]:
        """Every rank's short lists of lines; lines that do not fit in `TEXT_BYTES` are dropped from the longest list.

        Collective: one all_gather of `TEXT_BYTES` bytes per rank.
        """
        text = _bounded(data)
        tensor = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
        tensor[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in self.gather(tensor)]


def _bounded(data: dict[str, list[str]]) -> bytes:
    data = {key: [line[:300] for line in lines] for key, lines in data.items()}
    while len(text := json.dumps(data).encode()) > TEXT_BYTES:
        longest: list[Any] = max(data.values(), key=lambda lines: len(json.dumps(lines)))
        longest.pop()
    return text


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
