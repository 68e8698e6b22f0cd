"""`StoreGroup`: the questions of the fault path over the job's store, where no gloo group can be made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from .fault_group import FaultGroup, PeersLostError

_DONE, _FAILED = b"+", b"-"


class StoreGroup(FaultGroup):
    """A `FaultGroup` without a process group: its first rank collects what all have put into the store, and answers.

    Two keys per rank and question, of the bytes of the question; they are removed again. A rank that has died is
    noticed when the time is over, not at once.

    Args:
        store: of the job; blocked while an answer is waited for.
        name: the same on all ranks, and in this store of nothing else.
        rank: position in the group.
        num_ranks: size of the group.
    """

    why_alone = "there is no gloo group of these ranks"

    def __init__(self, store: Store, name: str, rank: int, num_ranks: int) -> None:
        super().__init__(None)
        self.rank, self.num_ranks = rank, num_ranks
        self._store: Any = PrefixStore(f"ddp_nanguard/{name}", store)  # torch's stubs know no bytes in a store
        self._timeout = timedelta(seconds=60)
        self._number = 0

    def bound_waiting(self, timeout_s: float) -> None:
        """From now on waiting for peers ends after ``timeout_s``."""
        self._timeout = timedelta(seconds=timeout_s)

    def reduce_tensor(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """In-place reduction of a CPU tensor over all ranks, as an all-reduce."""

        def combined(parts: list[bytes]) -> bytes:
            return _bytes_of(_REDUCED[op](torch.stack([_like(tensor, part) for part in parts])))

        if tensor.numel() > 0:
            tensor.copy_(_like(tensor, self._ask(_bytes_of(tensor), combined)))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor of this shape, in order of the group's ranks."""
        mine = _bytes_of(tensor)
        every, size = self._ask(mine, b"".join), len(mine)
        return [_like(tensor, every[rank * size : (rank + 1) * size]) for rank in range(self.num_ranks)]

    def _ask(self, mine: bytes, combine: Callable[[list[bytes]], bytes]) -> bytes:
        number, self._number = self._number, self._number + 1
        try:
            self._store.set(f"{number}/{self.rank}", mine)
            if self.rank == 0:
                self._answer(number, combine)
            self._store.wait([f"{number}"], self._timeout)
            answer: bytes = self._store.get(f"{number}")
            self._forget(number)
        except RuntimeError as error:
            raise PeersLostError((str(error).splitlines() or [type(error).__name__])[0]) from error
        if answer[:1] == _FAILED:
            raise PeersLostError(answer[1:].decode())
        return answer[1:]

    def _answer(self, number: int, combine: Callable[[list[bytes]], bytes]) -> None:
        keys = [f"{number}/{rank}" for rank in range(self.num_ranks)]
        try:
            self._store.wait(keys, self._timeout)
            answer = _DONE + combine(self._store.multi_get(keys))
        except RuntimeError:
            # the others need not wait as long again
            silent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            answer = _FAILED + f"no answer of {silent[:8]} within {self._timeout.total_seconds():g} s".encode()
        self._store.set(f"{number}", answer)

    def _forget(self, number: int) -> None:
        """Remove what nobody reads any more: all have read the answer to the question before this one."""
        with contextlib.suppress(RuntimeError):  # not every store can
            self._store.delete_key(f"{number}/{self.rank}")
            if self.rank == 0 and number > 0:
                self._store.delete_key(f"{number - 1}")


_REDUCED: dict[object, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda rows: rows.sum(0, dtype=rows.dtype),
    dist.ReduceOp.MAX: lambda rows: rows.amax(0),
    dist.ReduceOp.MIN: lambda rows: rows.amin(0),
}


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def _like(tensor: Tensor, data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=tensor.dtype).view(tensor.shape)
