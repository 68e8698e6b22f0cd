"""Ranks that wait for each other in different collectives: noticed from their stacks, told by all of them.

[Note: deadlock]
A collective of the job that one rank alone issues can meet a verdict of the same kind, which then says so. A barrier, a
gathering or a broadcast cannot: both ranks wait until the group's own timeout. So the thread that listens for peers
looks now and then where the main thread is. Where that has waited in one collective over the guard's group for
``timeout_s`` it says so in the store; where every rank has, and not all in the same one, none of them can go on: the
collectives of one group are met in their order. A rank that computes, or that waits in another group, says nothing, and
then all wait for it.
"""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType
from typing import Any

import torch.distributed as dist

_COLLECTIVES = "torch.distributed.distributed_c10d"
_PACKAGE = __name__.partition(".")[0]
_BETWEEN_TWO = {"send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list"}
"""Point to point: of these different ones do meet."""


class DeadlockWatch:
    """Tells where this rank waits, and whether all ranks do in different places.

    Args:
        store: that all ranks share.
        key: prefix of the keys, the same on all ranks.
        group: of the verdict; None is the world.
        rank: position of this rank in it.
        timeout_s: how long a rank has to wait.
    """

    def __init__(self, store: Any, key: str, group: dist.ProcessGroup | None, rank: int, timeout_s: float) -> None:
        self._store = store
        self._group = group
        self._keys = [f"{key}/waits/{peer}" for peer in range(dist.get_world_size(group))]
        self._own = self._keys[rank]
        self._timeout_s = timeout_s
        self._place: tuple[int, str] | None = None
        self._since = 0.0
        self._is_told = False

    def look(self) -> str | None:
        """Where each rank waits, if all do and not in the same collective; to be called now and then."""
        place = _waiting_place(self._group)
        if place != self._place:
            self._place, self._since = place, time.monotonic()
            if self._is_told:
                self._store.set(self._own, "")
                self._is_told = False
            return None
        if place is None or time.monotonic() - self._since < self._timeout_s:
            return None
        if not self._is_told:
            self._store.set(self._own, place[1])
            self._is_told = True
        return self._all_wait()

    def _all_wait(self) -> str | None:
        if not self._store.check(self._keys):
            return None
        places = [self._store.get(key).decode(errors="replace") for key in self._keys]
        if not all(places) or len({place.partition(" at ")[0] for place in places}) < 2:
            return None
        return ", ".join(f"rank {rank} in {place}" for rank, place in enumerate(places[:8]))


def _waiting_place(group: dist.ProcessGroup | None) -> tuple[int, str] | None:
    """The call of a collective over a group in which the main thread is, and its name and place in the job."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    call: FrameType | None = None
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module == _COLLECTIVES:
            call = frame
        elif call is not None and not module.startswith("torch."):
            return (id(call), _text(call, frame)) if _is_over(call, group) else None
        frame = frame.f_back
    return None


def _is_over(call: FrameType, group: dist.ProcessGroup | None) -> bool:
    if call.f_code.co_name in _BETWEEN_TWO:
        return False
    given = call.f_locals.get("group")
    return (given or dist.group.WORLD) is (group or dist.group.WORLD)


def _text(call: FrameType, caller: FrameType) -> str:
    if str(caller.f_globals.get("__name__", "")).partition(".")[0] == _PACKAGE:
        return "a verdict of the guard"
    return f"{call.f_code.co_name}() at {caller.f_code.co_filename}:{caller.f_lineno}"
