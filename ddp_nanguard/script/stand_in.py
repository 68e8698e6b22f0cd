"""`StandIn`: a process group in which one process stands for all ranks.

[Note: a stand-in]
A script of N ranks that runs alone must still see N of them: it divides by the world size, and picks its rank's part.
Each collective therefore has the answer that it would have if every rank had given what this one gives: a sum is N
times the own value, a gathering N copies of it. DDP's gradients are then this rank's own, which is what a replay alone
compares. What another rank alone knows has no answer (`script.meeting`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.futures import Future

from ddp_nanguard.diagnosis.trace.storage_names import name_unknown

from .reduction import reduce_equal

__frame_role__ = "passes on"  # what a collective leaves is written by an operator of the step, see `hooks.frames`

NAME = "nanguard_alone"
"""Of the backend."""


_ProcessGroup: Any = dist.ProcessGroup  # torch's stubs declare overloads that no group in Python can have


class StandIn(_ProcessGroup):  # type: ignore[misc]  # see there
    """A group of ``size`` ranks that consists of this process.

    Args:
        rank: which of them this process is.
        size: their number.
        name: by which torch finds the group.
    """

    def __init__(self, rank: int, size: int, name: str = NAME) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._name, self._description = name, name

    # -- what torch asks of a group --------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802  # torch's own name
        """Of the backend."""
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """As torch has set it."""
        return self._name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_desc(self) -> str:
        """As torch has set it."""
        return self._description

    def new_group(self, ranks: Sequence[int], *, group_name: str = NAME, **_: Any) -> StandIn | None:
        """A group of some of the ranks, whatever backend was asked for; None where this one is not among them.

        The name is torch's own: it lets a default group make the groups of a job.
        """
        return StandIn(list(ranks).index(self._rank), len(ranks), group_name) if self._rank in ranks else None

    # -- values ----------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """What equal values of all ranks reduce to."""
        for tensor in tensors:
            reduce_equal(tensor, self._size, opts)
        return _done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """As `allreduce`."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """As `allreduce`."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """The own values, also where another rank is the source: all ranks are this one."""
        if getattr(opts, "rootRank", self._rank) != self._rank:
            _left_as_they_are("broadcast", tensors)
        return _done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """N copies."""
        with torch.no_grad():
            for parts, given in zip(outputs, inputs, strict=True):
                for part in parts:
                    part.copy_(given)
        return _done([part for parts in outputs for part in parts])

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """N copies; torch sorts the outputs by rank first."""
        return self.allgather([[parts[index] for parts in outputs] for index in range(len(inputs))], inputs)

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        with torch.no_grad():
            output.view(self._size, -1).copy_(given.reshape(1, -1).expand(self._size, -1))
        return _done([output])

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        """N copies, one after the other."""
        return self._allgather_base(output, given, opts)

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """As `all_gather_single`, for several."""
        for output, given in zip(outputs, inputs, strict=True):
            self._allgather_base(output, given)
        return _done(outputs)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        with torch.no_grad():
            output.copy_(given.reshape(self._size, -1)[self._rank].view(output.shape))
        reduce_equal(output, self._size, opts)
        return _done([output])

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        """This rank's part of what equal values of all ranks reduce to."""
        return self._reduce_scatter_base(output, given, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """As `reduce_scatter_single`, of lists."""
        with torch.no_grad():
            for output, parts in zip(outputs, inputs, strict=True):
                output.copy_(parts[self._rank])
                reduce_equal(output, self._size, opts)
        return _done(outputs)

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """As `reduce_scatter_single`, for several."""
        for output, given in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, given, opts)
        return _done(outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """N copies, where this rank is the one that gathers."""
        return self.allgather(outputs, inputs) if outputs else _done(inputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """This rank's part, where this rank is the one that scatters; else the values as they are."""
        if not inputs:
            _left_as_they_are("scatter", outputs)
        with torch.no_grad():
            for output, parts in zip(outputs, inputs, strict=False):
                output.copy_(parts[self._rank])
        return _done(outputs)

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        """From each rank what this one sends to itself, as far as the sizes agree."""
        sizes = input_sizes or [given.shape[0] // self._size] * self._size
        start = sum(sizes[: self._rank])
        own = given[start : start + sizes[self._rank]]
        with torch.no_grad():
            for part in torch.split(output, output_sizes or [output.shape[0] // self._size] * self._size):
                part.copy_(own if part.shape == own.shape else torch.zeros_like(part))
        return _done([output])

    def all_to_all_single(self, output: Tensor, given: Tensor, *sizes: Any) -> dist.Work:
        """As `alltoall_base`."""
        return self.alltoall_base(output, given, *sizes)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """From each rank what this one sends to itself, as far as the shapes agree."""
        own = inputs[self._rank]
        with torch.no_grad():
            for output in outputs:
                output.copy_(own if output.shape == own.shape else torch.zeros_like(output))
        return _done(outputs)

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> dist.Work:
        """Nobody takes it."""
        return _done(tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        """Nobody sends: the values stay."""
        _left_as_they_are("recv", tensors)
        return _done(tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        """As `recv`."""
        return self.recv(tensors, -1, tag)

    def barrier(self, opts: Any = None) -> dist.Work:
        """All are here."""
        return _done([torch.zeros(1, dtype=torch.uint8, device="cpu")])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """All are here."""


def _left_as_they_are(collective: str, tensors: list[Tensor]) -> None:
    """What another rank alone has is not known: a trace must not take it for memory that nobody writes."""
    for tensor in tensors:
        name_unknown(tensor, f"what another rank gives in {collective}, which a replay alone has not")


def _done(result: list[Tensor]) -> dist.Work:
    devices: Any = [result[0].device] if result and result[0].is_cuda else None
    future: Future[list[Tensor]] = Future(devices=devices)
    future.set_result(result)
    make: Any = vars(_distributed_c10d)["_create_work_from_future"]  # not in the stubs
    return make(future)  # type: ignore[no-any-return]
