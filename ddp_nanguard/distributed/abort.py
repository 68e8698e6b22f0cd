"""How a rank that raised on its own tells its peers.

[Note: who tells whom]
A rank whose own code raised cannot reach a collective any more, and its peers wait in one. It sets a key in the store;
a thread on every rank polls that key, so that each peer learns of it within a few seconds whatever its main thread
waits for. Each leaves in the store what it saw, reads what its peers saw, as far as that comes within the time that
they may take to hear of it, writes its own local part and ends. So all tell the same, though none can communicate.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .deadlock import DeadlockWatch

_log = logging.getLogger(__name__)


class AbortSignal:
    """A key in the job's store that says that a rank has raised on its own, and the thread that looks for it.

    The thread polls a connection of its own, a few times per ``timeout_s``; it costs the training loop nothing and
    issues no collective. Nothing here keeps the owner of ``on_set`` alive.

    Args:
        name: the same on all ranks of one guard, and no other guard's.
        rank: of this process.
        num_ranks: that step together.
        timeout_s: how long peers are waited for.
        on_set: bound method, called on the thread with the text of the rank that has set the key.
        on_deadlock: bound method, called on the thread with where each rank waits.
        group: of the verdict, in which ranks may wait for each other.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        num_ranks: int,
        timeout_s: float,
        on_set: Callable[[str], None],
        on_deadlock: Callable[[str], None],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._key = f"ddp_nanguard/abort/{name}"
        self._rank = rank
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        shared: Any = dist.distributed_c10d._get_default_store()
        # a connection of its own: the shared one may be blocked by a main thread that waits in a store operation
        self._store = shared.clone()
        self._stop = threading.Event()
        # often enough that a peer ends well within timeout_s, seldom enough that many ranks are no load on the store
        interval_s = min(max(timeout_s / 20, 0.2), 5.0)
        self._answers_within_s = min(3 * interval_s + 1.0, timeout_s)
        watch = DeadlockWatch(self._store, self._key, group, dist.get_rank(group), timeout_s)
        told = weakref.WeakMethod(on_set), weakref.WeakMethod(on_deadlock)
        arguments = (self._stop, self._store, self._key, interval_s, watch, *told)
        thread = threading.Thread(target=_poll, args=arguments, name="ddp_nanguard-abort", daemon=True)
        thread.start()
        # the thread must be gone before the interpreter takes the store apart under it
        self._close = weakref.finalize(self, _end_thread, self._stop, thread, 10 * interval_s)

    def set(self, text: str) -> None:
        """Tell the peers, unless one of them has done so already.

        Args:
            text: what this rank did, to follow "rank R".
        """
        self._stop.set()  # this rank's own thread need not hear of it
        try:
            if not self._store.check([self._key]):
                self._store.set(self._key, f"rank {self._rank} {text}"[:500])
        except RuntimeError as error:
            _log.warning("peers could not be told: %s", error)

    def is_set(self) -> bool:
        """Whether a rank has raised on its own."""
        try:
            return bool(self._store.check([self._key]))
        except RuntimeError:
            return False

    def wait(self, seconds: float) -> bool:
        """Whether a rank raises on its own within so many seconds."""
        return self._comes(self._key, seconds)

    def _comes(self, key: str, seconds: float) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=max(seconds, 0.01)))  # 0 would be without end
        except RuntimeError:  # of the timeout, or the store is gone
            return False
        return True

    def meet(self, index: int, seen: str) -> dict[int, str]:
        """What each rank saw, by its position in the group; of this rank, and of the peers that answer soon enough.

        Args:
            index: position of this rank.
            seen: what it saw.
        """
        keys = [f"{self._key}/saw/{peer}" for peer in range(self._num_ranks)]
        deadline = time.monotonic() + self._answers_within_s
        found = {index: seen}
        try:
            self._store.set(keys[index], seen)
            for peer in (peer for peer in range(self._num_ranks) if peer != index):
                if self._comes(keys[peer], deadline - time.monotonic()):
                    found[peer] = self._store.get(keys[peer]).decode(errors="replace")
        except RuntimeError as error:
            _log.warning("peers could not be asked: %s", error)
        return found

    def wait_for_all(self) -> None:
        """Wait until all ranks have written their part, at most ``timeout_s``: the first exit ends the others.

        The last one sets a key that the store makes the others wait for: polled by all, a counter would be a load.
        """
        written, all_written = f"{self._key}/written", f"{self._key}/all-written"
        try:
            if self._store.add(written, 1) >= self._num_ranks:
                self._store.set(all_written, "")
            self._store.wait([all_written], timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            _log.warning("peers were not waited for any longer: %s", (str(error).splitlines() or [""])[0])

    def close(self) -> None:
        """Stop looking. Also happens when this object goes, and at exit."""
        self._close()


def _poll(
    stop: threading.Event,
    store: Any,
    key: str,
    interval_s: float,
    watch: DeadlockWatch,
    on_set: weakref.WeakMethod[Callable[[str], None]],
    on_deadlock: weakref.WeakMethod[Callable[[str], None]],
) -> None:
    while not stop.wait(interval_s):
        try:
            is_set = store.check([key])
            text = store.get(key).decode(errors="replace") if is_set else watch.look()
        except RuntimeError:
            return  # the store is gone: so is the job
        if text is None:
            continue
        owner = on_set() if is_set else on_deadlock()
        if owner is not None and not stop.is_set():
            owner(text)
        return


def _end_thread(stop: threading.Event, thread: threading.Thread, timeout_s: float) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(timeout=timeout_s)
