"""The fault group of a guard: a gloo group where one can be made on all ranks, else the job's store.

[Note: no gloo group]
A job that communicates over NCCL alone may have no working gloo: no interface of that name, or a host name that is the
loopback on every node. One rank alone may have none, and would leave the others in the making of the group until its
timeout. So ranks agree over the store of the job, before and after: each tries a gloo group of its own first, then all
make theirs, within `_MESH_S`; if any rank has failed, no rank uses gloo. Faults are then talked about over the store
(`StoreGroup`), and each rank writes its part of a dump alone. That is said once, and training goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from .fault_group import FaultGroup
from .store_group import StoreGroup

_log = logging.getLogger(__name__)

CONSTRUCTION_TIMEOUT_S = 1800.0
"""Ranks load their models at different speed."""
_MESH_S, _MESH_S_PER_RANK = 60.0, 0.1
"""How long gloo may take to connect ranks that are all there."""


@dataclass
class _Connection:
    """What was found out about a set of ranks.

    Attributes:
        world: the default group then.
        gloo: a group over the ranks; None where none could be made on all of them.
    """

    world: object
    gloo: dist.ProcessGroup | None


_connections: dict[tuple[int, ...], _Connection] = {}
_lives: Counter[tuple[int, ...]] = Counter()


def name_of(ranks: tuple[int, ...]) -> str:
    """The same on all of these ranks, and of no other set of ranks; another one after each restart by torchrun.

    The agent's store outlives a restart: that a rank raised before it must end nobody afterwards.
    """
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), ranks
    return hashlib.blake2b(repr(life).encode(), digest_size=8).hexdigest()


def fault_group_over(ranks: tuple[int, ...], guard_number: int) -> FaultGroup:
    """The fault group of a guard; one gloo group per set of ranks and life of the default group.

    A gloo group that only its members create is named after its ranks: made a second time it would meet the first one's
    addresses in the store.

    Args:
        ranks: global ranks that step together; this one is among them.
        guard_number: how many guards these ranks had made before.

    Raises:
        PeersLostError: a rank has not come to construct its guard.

    Collective: over the store of the job, at the first guard of these ranks; every one of them must call it.
    """
    connection = _connections.get(ranks)
    if connection is None or connection.world is not dist.group.WORLD:
        connection = _connections[ranks] = _Connection(dist.group.WORLD, _gloo_group(ranks))
    if connection.gloo is not None or len(ranks) == 1:
        return FaultGroup(connection.gloo)
    # a connection of its own: other threads of the job use the shared one
    return _over_store(_default_store().clone(), f"{name_of(ranks)}/{guard_number}", ranks)


def _default_store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _over_store(store: Any, name: str, ranks: tuple[int, ...]) -> StoreGroup:
    return StoreGroup(store, name, ranks.index(dist.get_rank()), len(ranks))


def _gloo_group(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """A group over these ranks; None, on all of them, where any cannot be in it."""
    _lives[ranks] += 1
    peers = _over_store(_default_store(), f"{name_of(ranks)}/connect/{_lives[ranks]}", ranks)
    peers.bound_waiting(CONSTRUCTION_TIMEOUT_S)
    made: list[dist.ProcessGroup] = []
    found = _first_failure(peers, try_gloo) or _first_failure(peers, lambda: made.append(_new_group(ranks)))
    if found is None:
        return made[0]
    for group in made:
        with contextlib.suppress(Exception):
            dist.destroy_process_group(group)
    if peers.rank == 0:
        _log.warning(
            "no gloo group could be made (rank %d: %s): ranks talk about a fault over the job's store, and each writes "
            "its part of a dump alone; set GLOO_SOCKET_IFNAME to the network interface, as NCCL_SOCKET_IFNAME is",
            ranks[found[0]],
            found[1],
        )
    return None


def _first_failure(peers: FaultGroup, act: Callable[[], object]) -> tuple[int, str] | None:
    """Do something on every rank: the first one where it failed, and why; the same on all of them."""
    problem = None
    try:
        act()
    except Exception as error:
        problem = (str(error).splitlines() or [type(error).__name__])[0]
    return peers.first_problem(problem)


def try_gloo() -> None:
    """Connect this process to itself.

    Raises:
        Exception: of some kind, where gloo finds no interface or address that it can use.
    """
    dist.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=_MESH_S))


def _new_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    timeout = timedelta(seconds=_MESH_S + _MESH_S_PER_RANK * len(ranks))
    group = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True, timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group
