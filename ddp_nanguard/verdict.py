"""The one collective of a clean step, and the fault round.

[Note: severity]
Each rank turns its slots into one integer on the device; the verdict is the MAX over ranks. Integers, because NaN is
lost in a MAX over floats
(and which rank holds it decides whether). Only when the verdict is not clean do ranks talk about details, on a CPU
group of its own with a timeout of its own, so that neither a watchdog of the training group nor a dead peer takes the
evidence along.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .blame import RankedSite
from .severity import Severity
from .site import MAX_RANKS_LISTED, MAX_SITES, Site

_NO_KEY = (1 << 63) - 1
_SHARE_BITS = 31
_SITE_BYTES = 1024
_NAME_BYTES = 256
_OPTION_BYTES = 8192
_CONSTRUCTION_TIMEOUT_S = 1800.0  # ranks load their models at different speed


@dataclass(frozen=True)
class LocalFault:
    """What one rank brings to the fault round."""

    sites: list[RankedSite]
    damaged: list[str]
    holds_reduced: bool
    unchecked: list[str]


@dataclass(frozen=True)
class SharedFault:
    """What all ranks know after the fault round."""

    sites: tuple[Site, ...]
    damaged: tuple[str, ...]
    holders: tuple[int, ...]
    affected: tuple[int, ...]
    num_affected: int
    unchecked: tuple[str, ...]


class Answer:
    """A verdict, still on the device.

    Args:
        words: int64, shape (2,).
    """

    def __init__(self, words: Tensor) -> None:
        self._words = words
        self._host: Tensor | None = None
        self._arrival: torch.cuda.Event | None = None

    def at_least(self, severity: int) -> Tensor:
        """1.0 where the verdict is as severe, else 0.0; float32, shape (), on the device.

        The words set out for the host, to be read later without a wait. Host sync: none.
        """
        if self._words.is_cuda:
            self._host = torch.empty_like(self._words, device="cpu", pin_memory=True)
            self._host.copy_(self._words, non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
            self._arrival.record()
        return (self._words[0] >= severity).to(torch.float32)

    def read(self) -> tuple[Severity, bool, int]:
        """Severity, whether any rank ran a backward, and the largest share. Host sync: one read."""
        if self._arrival is not None:
            self._arrival.synchronize()
        worst, most = (self._words if self._host is None else self._host).tolist()
        return Severity(worst), bool(most >> _SHARE_BITS), most & ((1 << _SHARE_BITS) - 1)


class Peers:
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
        self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD) if self.connected else [0]
        self.device = _verdict_device(group, device) if self.connected else device
        self.lost = False
        self.guard_number = 0
        self.fault_group: dist.ProcessGroup | None = None
        if self.connected:
            self.fault_group = fault_group_of(tuple(self.ranks))
            self.guard_number = _guards_made[tuple(self.ranks)] = _guards_made.get(tuple(self.ranks), 0) + 1
            self.bound_waiting(_CONSTRUCTION_TIMEOUT_S)

    @property
    def index(self) -> int:
        """Position of this rank among those that step together."""
        return self.ranks.index(self.rank)

    def bound_waiting(self, timeout_s: float | None = None) -> None:
        """From now on waiting for peers on the fault group ends after ``timeout_s``."""
        if self.fault_group is not None:
            limit = timedelta(seconds=self.timeout_s if timeout_s is None else timeout_s)
            dist.distributed_c10d._set_pg_timeout(limit, self.fault_group)

    def ask(self, severity: Tensor, ran_backward: bool, share_ppm: int = 0) -> Answer:
        """The verdict: largest severity over all ranks, whether any of them has run a backward, and largest share.

        Args:
            severity: int64, shape (), on any device.
            ran_backward: whether this rank has, since the last verdict.
            share_ppm: what the probes cost here, below 2**31; see `probes.budget`.

        Collective: one MAX all-reduce of 16 bytes over ``group``; every rank must call it. Host sync: none until the
        answer is read.
        """
        said = int(ran_backward) << _SHARE_BITS | share_ppm
        words = torch.stack((severity, torch.full_like(severity, said)))
        if self.connected:
            words = words.to(self.device)
            dist.all_reduce(words, op=dist.ReduceOp.MAX, group=self.group)
        return Answer(words)

    def alone(self) -> Peers:
        """The same rank without any peer, for the view of a rank whose peers do not answer."""
        lone = copy.copy(self)
        lone.fault_group = None
        return lone

    # -- the fault round ---------------------------------------------------------------------------------------------

    def any_of(self, *flags: bool) -> list[bool]:
        """Each flag OR-ed over all ranks. Collective: one MAX all-reduce on the fault group."""
        if self.fault_group is None:
            return list(flags)
        words = torch.tensor(flags, dtype=torch.int64, device="cpu")
        dist.all_reduce(words, op=dist.ReduceOp.MAX, group=self.fault_group)
        return [bool(word) for word in words.tolist()]

    def share(self, fault: LocalFault, step: int) -> SharedFault:
        """Find the earliest sites over all ranks.

        Collective: at most `MAX_SITES` MIN all-reduces of 8 bytes and one SUM all-reduce of the details for sites, the
        same for names, and one
        all-reduce of two bytes per rank, all on the fault group. Nothing is gathered.
        """
        keyed = [(ranked.key(self.index, step), ranked.site) for ranked in fault.sites[:MAX_SITES]]
        sites = [_site_from(text) for text in self._earliest([(k, _site_text(s)) for k, s in keyed], _SITE_BYTES)]
        names = [(order << 20 | self.index, name) for order, name in enumerate(fault.damaged[:MAX_SITES])]
        damaged = self._earliest(names, _NAME_BYTES)
        remarks = [(order << 20 | self.index, text) for order, text in enumerate(fault.unchecked[:MAX_SITES])]
        unchecked = self._earliest(remarks, _SITE_BYTES)
        holders, affected = self.ranks_where(fault.holds_reduced, any(not ranked.weak for ranked in fault.sites))
        return SharedFault(
            sites=tuple(site for site in sites if site is not None),
            damaged=tuple(dict.fromkeys(damaged)),
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
        return [[self.ranks[index] for index in row.nonzero().flatten().tolist()] for row in marks]

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
        culprit = self._min(self.index if problem is not None else _NO_KEY)
        if culprit == _NO_KEY:
            return None
        text = self.text_of(culprit == self.index, problem or "")
        return text if self.world_size == 1 else f"rank {self.ranks[culprit]}: {text}"

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
        culprit = self._min(self.index if difference else _NO_KEY)
        if culprit == _NO_KEY:
            return
        text = self.text_of(self.index == culprit, difference or "")
        raise ValueError(f"ranks disagree about an option: rank {self.ranks[0]} and rank {self.ranks[culprit]}: {text}")

    def text_of(self, is_mine: bool, text: str) -> str:
        """The text of the one rank that says ``is_mine``. Collective: one SUM all-reduce of 8 KiB (fault group)."""
        row = torch.zeros(_OPTION_BYTES, dtype=torch.uint8, device="cpu")
        encoded = text.encode()[:_OPTION_BYTES]
        if is_mine and encoded:
            row[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        if self.fault_group is not None:
            dist.all_reduce(row, group=self.fault_group)
        return bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")

    def meet(self) -> bool:
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


def _site_text(site: Site) -> str:
    text = json.dumps(site.to_dict())
    if len(text.encode()) > _SITE_BYTES:
        text = json.dumps(replace(site, evidence=None, slot=site.slot[-200:]).to_dict())
    return text


def _site_from(text: str) -> Site | None:
    try:
        return Site.from_dict(json.loads(text))
    except (ValueError, KeyError):
        return None
