"""How ranks wait for each other in a second look: as long as any of them shows a sign of life, and no longer.

[Note: signs of life]
The step may communicate, so a rank that raises, stalls or dies in it leaves its peers in a collective that never ends
and cannot be left. Every rank therefore has a thread, which adds to a counter in the job's store whenever its main
thread has done something, and reads that counter. Where nobody has done anything for ``timeout_s``, the thread ends its
process: the dump is written by then, and the report is told. Ranks that have finished wait for the others by the same
counter. A slow rank, such as one that traces every operator, is waited for. What a rank failed of stands in the store
too, so that all that end because of it give the same reason.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ddp_nanguard.report.wording import listed

_log = logging.getLogger(__name__)

AFTER_FAILURE_S = 5.0
"""How long nothing may happen once a rank has failed: its peers may wait for it in vain."""


class SignsOfLife:
    """One run of a step that all ranks make together; a context manager around it.

    Args:
        name: the same on all ranks, and of no other run of the job.
        index: of this rank among those that take part.
        ranks: that take part, by their numbers in the job.
        timeout_s: how long nothing may happen on any rank.
        progress: a number that changes as the step goes on; read on another thread.
        on_silence: called on that thread with the reason when nothing has happened for ``timeout_s`` while the step
            runs here.
    """

    def __init__(
        self,
        name: str,
        index: int,
        ranks: Sequence[int],
        timeout_s: float,
        progress: Callable[[], int],
        on_silence: Callable[[str], None],
    ) -> None:
        self._key = f"ddp_nanguard/look/{name}"
        self._index, self._ranks = index, ranks
        self._timeout_s = timeout_s
        self._progress = progress
        self._on_silence = on_silence
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: Any = None
        # what was seen last, and when
        self._beats, self._done_here, self._last_s = 0, -1, time.monotonic()

    def __enter__(self) -> SignsOfLife:
        if len(self._ranks) > 1:
            shared: Any = dist.distributed_c10d._get_default_store()
            self._store = shared.clone()  # the shared one may be blocked by a main thread that waits in it
            self._thread = threading.Thread(target=self._listen, name="ddp_nanguard-second-look", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def met(self, problem: str | None) -> bool:
        """The step has ended here: whether all ranks have come to its end; waits for them as long as they live.

        Args:
            problem: why this rank could not run it to its end; None where it could.

        Collective: none; a few operations on the store.
        """
        self._stop.set()
        if self._thread is None:
            return True
        self._thread.join()
        try:
            self._tell_end(problem)
            while self._store.add(f"{self._key}/ended", 0) < len(self._ranks):
                time.sleep(0.02)
                self._hear()
                if self._is_silent():
                    return False
        except RuntimeError as error:
            _log.warning("second look: the job's store does not answer: %s", error)
            return False
        return True

    def _tell_end(self, problem: str | None) -> None:
        if problem is not None:
            self._tell_failure(f"rank {self._ranks[self._index]}: {problem}")
        self._store.set(f"{self._key}/ended/{self._index}", "1")
        self._store.add(f"{self._key}/beats", 1)
        self._store.add(f"{self._key}/ended", 1)

    def _tell_failure(self, text: str) -> None:
        """The first failure is that of all: the others follow from it."""
        if not self._has_failed():
            self._store.set(f"{self._key}/failed", text)

    def why_silent(self) -> str:
        """Why nothing happens any more; the same on all ranks that can reach the job's store."""
        try:
            # said before anybody ends: then the connections break, which would be no reason at all
            self._tell_failure(self._silence())
            return str(self._store.get(f"{self._key}/failed").decode(errors="replace"))
        except RuntimeError:
            return "the job's store does not answer any more, so peers are gone"

    def _silence(self) -> str:
        silence = f"no rank has shown a sign of life for {self._timeout_s:g} s"
        running = [r for i, r in enumerate(self._ranks) if not self._store.check([f"{self._key}/ended/{i}"])]
        if not 0 < len(running) < len(self._ranks):
            return silence
        return f"{silence}; {'ranks' if len(running) > 1 else 'rank'} {listed(running)} did not come to the end"

    # -- on the thread -------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        interval_s = min(max(self._timeout_s / 40, 0.02), 0.5)
        while not self._stop.wait(interval_s):
            try:
                self._beat()
                self._hear()
            except RuntimeError:
                pass  # the store is gone: what this rank does itself is all that can be seen
            if self._is_silent() and not self._stop.is_set():
                self._on_silence(self.why_silent())
                return

    def _beat(self) -> None:
        now = self._progress()
        if now != self._done_here:
            self._done_here, self._last_s = now, time.monotonic()
            self._store.add(f"{self._key}/beats", 1)

    def _hear(self) -> None:
        beats = self._store.add(f"{self._key}/beats", 0)
        if beats != self._beats:
            self._beats, self._last_s = beats, time.monotonic()

    def _is_silent(self) -> bool:
        quiet_s = time.monotonic() - self._last_s
        if quiet_s > self._timeout_s:
            return True
        return quiet_s > min(AFTER_FAILURE_S, self._timeout_s) and self._has_failed()

    def _has_failed(self) -> bool:
        try:
            return bool(self._store.check([f"{self._key}/failed"]))
        except RuntimeError:
            return False
