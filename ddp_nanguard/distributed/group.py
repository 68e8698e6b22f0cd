"""The ranks that step together, and what they say to each other."""

from __future__ import annotations

import copy
import json
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_nanguard.blame.exchange import _SITE_BYTES, JobFault, RankFault, _site_from, _site_text
from ddp_nanguard.report.types import MAX_RANKS_LISTED, MAX_SITES

from .verdict import _SHARE_BITS, Verdict

_NO_KEY = (1 << 63) - 1


_NAME_BYTES = 256


_OPTION_BYTES = 8192


_CONSTRUCTION_TIMEOUT_S = 1800.0  # ranks load their models at different speed


class RankGroup:
    """The ranks that step together.

    Without an initialised process group there is one rank and no communication at all.

    Collective: construction creates a gloo group over ``group``; every rank of it must construct.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float, device: torch.device) -> None:
        self.connected = dist.is_available() and dist.is_initialized()
        self.timeout_s = timeout_s
        self.group = group
        self.rank = dist.get_rank() if self.connected else 0
        self.world_size = dist.get_world_size(group) if self.connected else 1
        self.members = dist.get_process_group_ranks(group or dist.group.WORLD) if self.connected else [0]
        self.device = _verdict_device(group, device) if self.connected else device
        self.peers_lost = False
        self.guard_number = 0
        self.fault_group: dist.ProcessGroup | None = None
        if self.connected:
            self.fault_group = fault_group_of(tuple(self.members))
            self.guard_number = _guards_made[tuple(self.members)] = _guards_made.get(tuple(self.members), 0) + 1
            self.bound_waiting(_CONSTRUCTION_TIMEOUT_S)

    @property
    def index(self) -> int:
        """Position of this rank among those that step together."""
        return self.members.index(self.rank)

    def bound_waiting(self, timeout_s: float | None = None) -> None:
        """From now on waiting for peers on the fault group ends after ``timeout_s``."""
        if self.fault_group is not None:
            limit = timedelta(seconds=self.timeout_s if timeout_s is None else timeout_s)
            dist.distributed_c10d._set_pg_timeout(limit, self.fault_group)

    def all_reduce_verdict(self, severity: Tensor, ran_backward: bool, probe_cost_ppm: int = 0) -> Verdict:
        """The verdict: largest severity over all ranks, whether any of them has run a backward, and largest share.

        Args:
            severity: int64, shape (), on any device.
            ran_backward: whether this rank has, since the last verdict.
            probe_cost_ppm: what the probes cost here, below 2**31; see `probes.budget`.

        Collective: one MAX all-reduce of 16 bytes over ``group``; every rank must call it. Host sync: none until the
        answer is read.
        """
        said = int(ran_backward) << _SHARE_BITS | probe_cost_ppm
        payload = torch.stack((severity, torch.full_like(severity, said)))
        if self.connected:
            payload = payload.to(self.device)
            dist.all_reduce(payload, op=dist.ReduceOp.MAX, group=self.group)
        return Verdict(payload)

    def single_rank(self) -> RankGroup:
        """The same rank without any peer, for the view of a rank whose peers do not answer."""
        lone = copy.copy(self)
        lone.fault_group = None
        return lone

    # -- the fault round ---------------------------------------------------------------------------------------------

    def any_of(self, *flags: bool) -> list[bool]:
        """Each flag OR-ed over all ranks. Collective: one MAX all-reduce on the fault group."""
        if self.fault_group is None:
            return list(flags)
        payload = torch.tensor(flags, dtype=torch.int64, device="cpu")
        dist.all_reduce(payload, op=dist.ReduceOp.MAX, group=self.fault_group)
        return [bool(word) for word in payload.tolist()]

    def exchange_sites(self, fault: RankFault, step: int) -> JobFault:
        """Find the earliest sites over all ranks.

        Collective: at most `MAX_SITES` MIN all-reduces of 8 bytes and one SUM all-reduce of the details for sites, the
        same for names, and one
        all-reduce of two bytes per rank, all on the fault group. Nothing is gathered.
        """
        keyed = [(ranked.key(self.index, step), ranked.site) for ranked in fault.sites[:MAX_SITES]]
        sites = [_site_from(text) for text in self._earliest([(k, _site_text(s)) for k, s in keyed], _SITE_BYTES)]
        names = [(order << 20 | self.index, name) for order, name in enumerate(fault.nonfinite_state[:MAX_SITES])]
        nonfinite_state = self._earliest(names, _NAME_BYTES)
        warn_role = [(order << 20 | self.index, text) for order, text in enumerate(fault.unchecked[:MAX_SITES])]
        unchecked = self._earliest(warn_role, _SITE_BYTES)
        holders, affected = self.ranks_where(
            fault.holds_reduced, any(not ranked.low_confidence for ranked in fault.sites)
        )
        return JobFault(
            sites=tuple(site for site in sites if site is not None),
            nonfinite_state=tuple(dict.fromkeys(nonfinite_state)),
            holders=tuple(holders[:MAX_RANKS_LISTED]),
            affected=tuple(affected[:MAX_RANKS_LISTED]),
            num_affected=len(affected),
            unchecked=tuple(dict.fromkeys(unchecked)),
        )

    def _earliest(self, mine: list[tuple[int, str]], row_bytes: int) -> list[str]:
        """The texts of the smallest keys over all ranks, each once, in order of their keys."""
        waiting = sorted(mine)
        owned: list[str | None] = []
        while len(owned) < MAX_SITES:
            head = waiting[0][0] if waiting else _NO_KEY
            smallest = self._min(head)
            if smallest == _NO_KEY:
                break
            owned.append(waiting.pop(0)[1] if head == smallest else None)
        rows = torch.zeros(len(owned), row_bytes, dtype=torch.uint8, device="cpu")
        for row, text in zip(rows, owned, strict=True):
            if text is not None:
                encoded = text.encode()[:row_bytes]
                row[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        if self.fault_group is not None and owned:
            dist.all_reduce(rows, group=self.fault_group)
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]

    def _min(self, value: int) -> int:
        word = torch.tensor([value], dtype=torch.int64, device="cpu")
        if self.fault_group is not None:
            dist.all_reduce(word, op=dist.ReduceOp.MIN, group=self.fault_group)
        return int(word)

    def ranks_where(self, *flags: bool) -> list[list[int]]:
        """Per flag, the ranks that raise it. Collective: one SUM all-reduce of a byte per flag and rank."""
        marks = torch.zeros(len(flags), self.world_size, dtype=torch.uint8, device="cpu")
        marks[:, self.index] = torch.tensor(flags, dtype=torch.uint8, device="cpu")
        if self.fault_group is not None:
            dist.all_reduce(marks, group=self.fault_group)
        return [[self.members[index] for index in row.nonzero().flatten().tolist()] for row in marks]

    # -- at construction, and at the end -----------------------------------------------------------------------------

    def require_no_problem(self, problem: str | None) -> None:
        """What does not fit on one rank stops the construction on all.

        Raises:
            ValueError: on every rank, with the text of the first rank that has a problem.

        Collective: one MIN all-reduce, and one SUM all-reduce of 8 KiB if there is a problem, on the fault group.
        """
        found = self.first_problem(problem)
        if found is not None:
            raise ValueError(found)

    def first_problem(self, problem: str | None) -> str | None:
        """The text of the first rank that has a problem, with its number; the same on every rank, None where none has.

        Collective: as `require_no_problem`.
        """
        origin_rank = self._min(self.index if problem is not None else _NO_KEY)
        if origin_rank == _NO_KEY:
            return None
        text = self.text_of(origin_rank == self.index, problem or "")
        return text if self.world_size == 1 else f"rank {self.members[origin_rank]}: {text}"

    def require_equal_options(self, options: dict[str, object]) -> None:
        """Every rank must have the same options.

        Raises:
            ValueError: on every rank, naming the option, the first rank that differs and both values.

        Collective: one broadcast, one MIN all-reduce and one SUM all-reduce of at most 8 KiB on the fault group.
        """
        if self.fault_group is None:
            return
        first = json.loads(self.text_of(self.index == 0, json.dumps(options, sort_keys=True)))
        difference = _first_difference(first, json.loads(json.dumps(options, sort_keys=True)))
        origin_rank = self._min(self.index if difference else _NO_KEY)
        if origin_rank == _NO_KEY:
            return
        text = self.text_of(self.index == origin_rank, difference or "")
        raise ValueError(
            f"ranks disagree about an option: rank {self.members[0]} and rank {self.members[origin_rank]}: {text}"
        )

    def text_of(self, is_mine: bool, text: str) -> str:
        """The text of the one rank that says ``is_mine``. Collective: one SUM all-reduce of 8 KiB (fault group)."""
        row = torch.zeros(_OPTION_BYTES, dtype=torch.uint8, device="cpu")
        encoded = text.encode()[:_OPTION_BYTES]
        if is_mine and encoded:
            row[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        if self.fault_group is not None:
            dist.all_reduce(row, group=self.fault_group)
        return bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")

    def barrier(self) -> bool:
        """Wait for all peers, at most ``timeout_s``; whether they came. Collective: one all-reduce (fault group)."""
        if self.fault_group is None:
            return True
        try:
            self._min(0)
        except RuntimeError:
            return False
        return True

    def close(self) -> None:
        """Give the fault group up; it stays for the next guard over the same ranks."""
        self.fault_group = None


_guards_made: dict[tuple[int, ...], int] = {}


_groups: dict[tuple[int, ...], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def fault_group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """One gloo group per set of ranks and life of the default group.

    A group that only its members create is named after its ranks: made a second time it would meet the first one's
    addresses in the store.
    """
    world, group = _groups.get(ranks, (None, None))
    if group is None or world is not dist.group.WORLD:
        group = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
        assert dist.group.WORLD is not None
        _groups[ranks] = (dist.group.WORLD, group)
    return group


def _verdict_device(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """A device that the group's backend can reduce: the model's where possible, else the CPU."""
    backend = str(dist.get_backend(group))
    takes_cpu = any(name in backend for name in ("gloo", "mpi", "fake", "ucc"))
    if device.type == "cpu" and not takes_cpu:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if backend in ("gloo", "mpi") else device


def _first_difference(first: dict[str, object], mine: dict[str, object]) -> str | None:
    for name in sorted(first.keys() | mine.keys()):
        if first.get(name) != mine.get(name):
            return f"{name}={first.get(name)!r} against {name}={mine.get(name)!r}; give every rank the same value"
    return None
