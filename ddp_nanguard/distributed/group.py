"""The ranks that step together: their verdict, and the questions that they ask each other about a fault."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_nanguard.errors import OutOfStepError, line_of

from .connect import CONSTRUCTION_TIMEOUT_S, fault_group_over, name_of
from .fault_group import FaultGroup, PeersLostError
from .verdict import Ballot, Verdict

_T = TypeVar("_T")


class RankGroup:
    """The ranks that step together.

    Without an initialised process group there is one rank and no communication at all.

    Args:
        group: whose ranks step together; None for the whole world.
        timeout_s: how long a peer is waited for on the fault path.
        device: of the model.
        alone: there are no peers, whatever process group there is: the replay of one rank.

    Attributes:
        members: global ranks, in the group's order.
        fault_group: the same ranks, for everything but the verdict: over gloo, or see [Note: no gloo group].
        name: the same on all ranks of this guard and no other guard of the job.
        peers_lost: whether a collective on it has failed, see [Note: a lost peer].
        guard_number: how many guards these ranks had made before; the same on all of them.

    Collective: construction makes a gloo group over ``group``; every rank of it must construct.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, timeout_s: float, device: torch.device, alone: bool = False
    ) -> None:
        self.connected = not alone and dist.is_available() and dist.is_initialized()
        self.timeout_s = timeout_s
        self.group = group
        self.rank = dist.get_rank() if self.connected else 0
        self.world_size = dist.get_world_size(group) if self.connected else 1
        self.members = dist.get_process_group_ranks(group or dist.group.WORLD) if self.connected else [0]
        # - the verdict travels over the training group: all ranks have issued their gradient communication by then
        self.device = _verdict_device(group, device) if self.connected else device
        # - everything else over a group of its own, which no watchdog of the training group looks at
        self.peers_lost = False
        self.guard_number = 0
        self.fault_group = FaultGroup(None)
        self.name = "alone"
        if self.connected:
            ranks = tuple(self.members)
            self.guard_number = _guards_made[ranks] = _guards_made.get(ranks, 0) + 1
            self.name = f"{name_of(ranks)}/{self.guard_number}"
            self.fault_group = fault_group_over(ranks, self.guard_number)
            self.bound_waiting(CONSTRUCTION_TIMEOUT_S)

    @property
    def index(self) -> int:
        """Position of this rank among those that step together."""
        return self.members.index(self.rank)

    @property
    def writes_alone(self) -> bool:
        """Whether each rank writes its part of a dump without the others."""
        return self.peers_lost or self.fault_group.group is None

    def bound_waiting(self, timeout_s: float | None = None) -> None:
        """From now on waiting for peers on the fault group ends after ``timeout_s``."""
        self.fault_group.bound_waiting(self.timeout_s if timeout_s is None else timeout_s)

    def single_rank(self) -> RankGroup:
        """The same rank without any peer: it answers for itself and issues no collective."""
        lone = copy.copy(self)
        lone.fault_group = FaultGroup(None)
        return lone

    def close(self) -> None:
        """Give the fault group up; it stays for the next guard over the same ranks."""
        self.fault_group = FaultGroup(None)

    # -- the verdict: the one collective of a clean step -----------------------------------------------------------

    def all_reduce_verdict(self, severity: Tensor, ran_backward: bool, step: int = 0, closes: bool = False) -> Verdict:
        """Largest severity over all ranks, and whether any of them has run a backward.

        Args:
            severity: int64, shape (), on any device.
            ran_backward: whether this rank has, since the last verdict.
            step: its number; another one on another rank is noticed, see [Note: taken for nothing else].
            closes: whether the guard is being closed, which all ranks do in the same step.

        Collective: one MAX all-reduce of 16 bytes over ``group``; every rank must call it. Host sync: none until the
        verdict is read.
        """
        ballot = Ballot(ran_backward, step, closes, self.guard_number, self.rank)
        payload = ballot.packed(severity)
        if self.connected:
            payload = payload.to(self.device)
            dist.all_reduce(payload, op=dist.ReduceOp.MAX, group=self.group)
        return Verdict(payload, ballot)

    def meet(self) -> None:
        """Issue one verdict when the guard is built, so that what it needs is made now and fails now.

        A group over which nothing else communicates gets its communicator with its first collective: in the middle of a
        step, that would be at the peak of the device's memory.

        Raises:
            RuntimeError: the group cannot reduce 16 bytes.
            OutOfStepError: it met another collective of the job.

        Collective: that of `all_reduce_verdict`. Host sync: one read.
        """
        try:
            self.all_reduce_verdict(torch.zeros((), dtype=torch.int64, device=self.device), False).read()
        except OutOfStepError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                f"the guard's ranks {self.members} cannot reduce 16 bytes on {self.device} ({line_of(error)}); "
                "give the process group over which the model itself communicates as group="
            ) from error

    # -- the fault path: answered for this rank alone where peers are lost ---------------------------------------------

    def ask(self, question: Callable[[RankGroup], _T]) -> _T:
        """What a question to all ranks gives, or, where peers are lost, what it gives for this rank alone.

        Args:
            question: issues collectives through the group that it is given, the same ones on every rank.

        Collective: those of the question; none once peers are lost.
        """
        if not self.peers_lost:
            try:
                return question(self)
            except PeersLostError:
                self.peers_lost = True
        return question(self.single_rank())

    def any_of(self, *flags: bool) -> list[bool]:
        """Each flag OR-ed over all ranks. Collective: one MAX all-reduce of 8 bytes per flag (fault group)."""
        return self.ask(lambda ranks: [bool(word) for word in ranks.fault_group.largest(*map(int, flags))])

    def barrier(self) -> bool:
        """Wait for all peers, at most ``timeout_s``; whether they came. Collective: one all-reduce (fault group)."""
        try:
            self.fault_group.smallest(0)
        except PeersLostError:
            self.peers_lost = True
            return False
        return True

    # -- construction: a lost peer is an error -------------------------------------------------------------------------

    def require_no_problem(self, problem: str | None) -> None:
        """What does not fit on one rank stops the construction on all.

        Raises:
            ValueError: on every rank, with the text of the first rank that has a problem.
            PeersLostError: a rank is gone.

        Collective: one MIN all-reduce, and one SUM all-reduce of 8 KiB if there is a problem, on the fault group.
        """
        found = self.first_problem(problem)
        if found is not None:
            raise ValueError(found)

    def require_equal_options(self, options: dict[str, object], text_of_first: str) -> str | None:
        """Every rank must have the same options, but for a text, of which the first rank's is taken for all.

        Args:
            options: of this rank.
            text_of_first: name of the option that may be another text on each rank, as with a time stamp in it.

        Returns:
            The first rank's text, on every rank, where any rank has another one; None where nothing is to be changed.

        Raises:
            ValueError: on every rank, naming the option, the first rank that differs and both values.
            PeersLostError: a rank is gone.

        Collective: two SUM all-reduces of 8 KiB and one MAX all-reduce of 16 bytes at most, on the fault group.
        """
        if self.fault_group.num_ranks == 1:
            return None
        mine = json.dumps(options, sort_keys=True)
        first = json.loads(self.text_of(self.index == 0, mine))
        text, others = _with_text_of(first, json.loads(mine), text_of_first)
        difference = _first_difference(first, others)
        refusing, changed = self._first_where(difference is not None, text is not None)
        if refusing is None:
            return None if changed is None else str(first[text_of_first])
        said = self.text_of(self.index == refusing, difference or "")
        raise ValueError(
            f"ranks disagree about an option: rank {self.members[0]} and rank {self.members[refusing]}: {said}"
        )

    def _first_where(self, *flags: bool) -> list[int | None]:
        """Per flag, the index of the first rank that raises it. Collective: one MAX all-reduce of 8 bytes per flag."""
        num_ranks = self.world_size
        left = self.fault_group.largest(*(num_ranks - self.index if flag else 0 for flag in flags))
        return [num_ranks - count if count else None for count in left]

    # -- what questions are made of; a lost peer is a PeersLostError ---------------------------------------------------

    def ranks_where(self, *flags: bool) -> list[list[int]]:
        """Per flag, the ranks that raise it. Collective: one SUM all-reduce of a byte per flag and rank."""
        marks = torch.zeros(len(flags), self.world_size, dtype=torch.uint8, device="cpu")
        marks[:, self.index] = torch.tensor(flags, dtype=torch.uint8, device="cpu")
        self.fault_group.reduce_tensor(marks, dist.ReduceOp.SUM)
        return [[self.members[index] for index in row.nonzero().flatten().tolist()] for row in marks]

    def text_of(self, is_mine: bool, text: str) -> str:
        """The text of the one rank that says ``is_mine``. Collective: one SUM all-reduce of 8 KiB."""
        return self.fault_group.sum_of_rows([text if is_mine else None])[0]

    def first_problem(self, problem: str | None) -> str | None:
        """The text of the first rank that has a problem, with its number; the same on every rank, None where none has.

        Collective: one MIN all-reduce of 8 bytes, and one SUM all-reduce of 8 KiB if there is a problem.
        """
        found = self.fault_group.first_problem(problem)
        if found is None:
            return None
        index, text = found
        return text if self.world_size == 1 else f"rank {self.members[index]}: {text}"


_guards_made: dict[tuple[int, ...], int] = {}


def _verdict_device(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """A device that the group's backend can reduce: the model's where possible, else the CPU, else the group's own."""
    backends = _backends(group)
    if device.type != "cpu" and backends.get(device.type, "gloo") not in _ON_THE_HOST:
        return device
    if "cpu" in backends or not backends:
        return torch.device("cpu")
    kind = next(iter(backends))
    return torch.device(kind, torch.get_device_module(kind).current_device())


_ON_THE_HOST = ("gloo", "mpi")  # they would copy a tensor of another device to the host themselves


def _backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Types of devices that the group serves, each with the name of its backend, as torch has set them up."""
    # neither the name given to init_process_group, which need not be one, nor what a backend of that name could do
    config = dist.distributed_c10d.get_backend_config(group)
    return dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)


def _with_text_of(first: dict[str, object], mine: dict[str, object], name: str) -> tuple[str | None, dict[str, object]]:
    """The first rank's text of an option where mine is another text, else None; and my options with that text."""
    theirs, own = first.get(name), mine.get(name)
    if isinstance(theirs, str) and isinstance(own, str) and theirs != own:
        return theirs, {**mine, name: theirs}
    return None, mine


def _first_difference(first: dict[str, object], mine: dict[str, object]) -> str | None:
    for name in sorted(first.keys() | mine.keys()):
        if first.get(name) != mine.get(name):
            return f"{name}={first.get(name)!r} against {name}={mine.get(name)!r}; give every rank the same value"
    return None
