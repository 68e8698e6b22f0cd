"""`FaultGroup`: the collectives of the fault path, over a gloo group of its own, all of bounded size.

[Note: a lost peer]
A collective of the fault path can fail because a peer has died or does not answer in time. That is noticed here and
nowhere else: the failed call turns into a `PeersLostError`. A guard then answers the questions of the fault path for
its own rank alone (`RankGroup.ask`), without another collective, and the report says so; the writer of a dump lets each
rank write its own part. Only the construction of a guard ends with the error itself.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NO_KEY = (1 << 63) - 1
"""Larger than every key: a rank that has nothing to say."""
TEXT_BYTES = 8192
DATA_BYTES = 1024
SLOWEST_BYTES_PER_S = 20e6
"""What one rank writes at least."""
SLOWEST_SHARED_BYTES_PER_S = 100e6
"""What a file system takes at least from all ranks together."""


class PeersLostError(RuntimeError):
    """A collective of the fault path failed: a peer died or did not answer in time."""


class FaultGroup:
    """The ranks that handle a fault together.

    Args:
        group: a gloo group; None stands for this process alone, without any communication.

    Attributes:
        rank: position in the group.
        num_ranks: size of the group.
        why_alone: why this rank writes its part of a dump alone, where ``group`` is None and there are peers.

    Raises:
        PeersLostError: any of its methods that communicates, see [Note: a lost peer].
    """

    why_alone = "no collective was possible any more"

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.num_ranks = dist.get_world_size(group) if group is not None else 1

    # -- waiting -----------------------------------------------------------------------------------------------------

    def bound_waiting(self, timeout_s: float) -> None:
        """From now on waiting for peers ends after ``timeout_s``."""
        if self.group is not None:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), self.group)

    @contextlib.contextmanager
    def waiting_for(self, sizes_bytes: list[int], timeout_s: float) -> Iterator[None]:
        """Lets ranks wait for a long write: ``timeout_s`` more what a slow disk needs; afterwards ``timeout_s`` again.

        A peer that dies is noticed at once all the same; only one that hangs costs the longer time.

        Args:
            sizes_bytes: what each rank writes.
            timeout_s: the time without any write.
        """
        writing_s = max(max(sizes_bytes) / SLOWEST_BYTES_PER_S, sum(sizes_bytes) / SLOWEST_SHARED_BYTES_PER_S)
        self.bound_waiting(timeout_s + writing_s)
        try:
            yield
        finally:
            self.bound_waiting(timeout_s)

    # -- numbers -----------------------------------------------------------------------------------------------------

    def reduce(self, values: list[int], op: dist.ReduceOp.RedOpType) -> list[int]:
        """Element-wise reduction of a few integers. Collective: one all-reduce of 8 bytes per value."""
        # device="cpu" throughout: the job may have set another default device, which gloo cannot reduce
        words = torch.tensor(values, dtype=torch.int64, device="cpu")
        self.reduce_tensor(words, op)
        return [int(word) for word in words.tolist()]

    def largest(self, *values: int) -> list[int]:
        """Element-wise maximum over all ranks. Collective: as `reduce`."""
        return self.reduce(list(values), dist.ReduceOp.MAX)

    def smallest(self, value: int) -> int:
        """Minimum over all ranks. Collective: as `reduce`."""
        return self.reduce([value], dist.ReduceOp.MIN)[0]

    def reduce_tensor(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """In-place all-reduce of a CPU tensor."""
        self._communicate(lambda group: dist.all_reduce(tensor, op=op, group=group))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor of this shape, in order of the group's ranks. Collective: one all-gather."""
        if self.group is None:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        self._communicate(lambda group: dist.all_gather(gathered, tensor, group=group))
        return gathered

    def gather_numbers(self, *values: int) -> list[list[int]]:
        """Every rank's few integers. Collective: one all-gather of 8 bytes per value."""
        row = torch.tensor(values, dtype=torch.int64, device="cpu")
        return [[int(value) for value in row] for row in self.gather(row)]

    # -- texts -------------------------------------------------------------------------------------------------------

    def gather_data(self, data: dict[str, list[str]]) -> list[dict[str, list[str]]]:
        """Every rank's short lists of lines; lines that do not fit in `DATA_BYTES` are dropped from the longest list.

        Collective: one all-gather of `DATA_BYTES` bytes per rank.
        """
        return [json.loads(_text_of(row)) for row in self.gather(_row(_bounded(data), DATA_BYTES))]

    def sum_of_rows(self, texts: list[str | None], row_bytes: int = TEXT_BYTES) -> list[str]:
        """Texts of which each is given by one rank, None by the others. Collective: one SUM all-reduce of all rows."""
        rows = torch.stack([_row((text or "").encode(), row_bytes) for text in texts])
        self.reduce_tensor(rows, dist.ReduceOp.SUM)
        return [_text_of(row) for row in rows]

    def first_problem(self, problem: str | None) -> tuple[int, str] | None:
        """The first rank of the group that has a problem, and its text; the same on every rank, None where none has.

        Collective: one MIN all-reduce of 8 bytes, and one SUM all-reduce of 8 KiB if there is a problem.
        """
        index = self.smallest(self.rank if problem is not None else NO_KEY)
        if index == NO_KEY:
            return None
        return index, self.sum_of_rows([problem if index == self.rank else None])[0]

    def earliest_texts(self, mine: list[tuple[int, str]], max_texts: int, row_bytes: int) -> list[str]:
        """The texts of the smallest keys over all ranks, each once, in order of their keys.

        Args:
            mine: keys below `NO_KEY`, which no other rank has, and this rank's texts.
            max_texts: how many are wanted.
            row_bytes: longer texts are cut.

        Collective: at most ``max_texts + 1`` MIN all-reduces of 8 bytes and one SUM all-reduce of the texts. Nothing is
        gathered, so the size does not depend on the number of ranks.
        """
        # Each round the smallest key of all ranks wins and its owner moves on; the others learn that it is not theirs.
        waiting = sorted(mine)
        owned: list[str | None] = []
        while len(owned) < max_texts:
            head = waiting[0][0] if waiting else NO_KEY
            smallest = self.smallest(head)
            if smallest == NO_KEY:
                break
            owned.append(waiting.pop(0)[1] if head == smallest else None)
        return self.sum_of_rows(owned, row_bytes) if owned else []

    def _communicate(self, collective: Callable[[dist.ProcessGroup], object]) -> None:
        if self.group is None:
            return
        try:
            collective(self.group)
        except RuntimeError as error:
            raise PeersLostError((str(error).splitlines() or [type(error).__name__])[0]) from error


def _row(encoded: bytes, row_bytes: int) -> Tensor:
    """Bytes in a row of fixed length, so that rows of all ranks can be added or gathered."""
    row = torch.zeros(row_bytes, dtype=torch.uint8, device="cpu")
    encoded = encoded[:row_bytes]
    if encoded:
        row[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    return row


def _text_of(row: Tensor) -> str:
    return bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")


def _bounded(data: dict[str, list[str]]) -> bytes:
    data = {key: [line[:300] for line in lines] for key, lines in data.items()}
    while len(text := json.dumps(data).encode()) > DATA_BYTES:
        longest: list[Any] = max(data.values(), key=lambda lines: len(json.dumps(lines)))
        longest.pop()
    return text
