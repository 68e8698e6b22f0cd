"""How a process ends after a fault: together with its peers, with one exit code, never by a timeout.

[Note: who tells whom]
A rank whose own code raised cannot reach a collective any more, and its peers wait in one. It writes its local part,
sets a key in the
store and ends; a thread on every rank looks for that key, so that each peer learns of it within a few seconds whatever
its main thread waits
for, writes its own local part and ends too.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from .errors import NonFiniteError

_log = logging.getLogger(__name__)

_OWN_DIRECTORY = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH_DIRECTORY = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class ExitHook:
    """Chains ``sys.excepthook``: an uncaught `NonFiniteError` ends the worker with ``exit_code``.

    Order: the previous hook, flush, ``meet`` (the peers may still write), atexit callbacks, ``os._exit``. SystemExit
    would not do: with DDP
    alive, the interpreter's own shutdown can hang or abort and lose the code.
    """

    def __init__(self, exit_code: int, meet: Callable[[], object], on_other: Callable[[BaseException], bool]) -> None:
        self._exit_code = exit_code
        self._meet = meet
        self._on_other = on_other
        self._previous: Hook = sys.excepthook
        self._installed: Hook = self._ended
        sys.excepthook = self._installed

    def close(self) -> None:
        """The previous hook again, unless somebody chained another one since."""
        if sys.excepthook is self._installed:
            sys.excepthook = self._previous
        self._installed = self._previous
        self._closed()

    def _closed(self) -> None:
        self._meet = _nothing
        self._on_other = _not_ours

    def _ended(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, NonFiniteError):
            traceback = _users_frames(traceback)
            error = error.with_traceback(traceback)
        self._previous(kind, error, traceback)
        if isinstance(error, NonFiniteError):
            self._flush()
            self._meet()
            self.leave()
        elif isinstance(error, Exception) and self._on_other(error):
            self._flush()
            self.leave()

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()

    def leave(self) -> None:
        """End the process: atexit callbacks, flush, ``os._exit``."""
        atexit._run_exitfuncs()
        self._flush()
        os._exit(self._exit_code)


class Distress:
    """A key in the job's store that says that a rank has fallen, and the thread that looks for it.

    The thread polls a connection of its own, a few times per ``timeout_s``; it costs the training loop nothing and
    issues no collective.
    """

    def __init__(self, name: str, rank: int, num_ranks: int, timeout_s: float, on_call: Callable[[str], None]) -> None:
        self._key = f"ddp_nanguard/distress/{name}"
        self._rank = rank
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._interval_s = min(max(timeout_s / 20, 0.2), 5.0)
        self._on_call = on_call
        self._stop = threading.Event()
        shared: Any = dist.distributed_c10d._get_default_store()
        self._store = shared.clone()  # a connection of its own
        self._thread = threading.Thread(target=self._watch, name="ddp_nanguard-distress", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def call(self, text: str) -> None:
        """Tell the peers, unless one of them has called already."""
        self._stop.set()
        try:
            if not self._store.check([self._key]):
                self._store.set(self._key, f"rank {self._rank}: {text}"[:500])
        except RuntimeError as error:
            _log.warning("peers could not be told: %s", error)

    def was_called(self) -> bool:
        """Whether a rank has fallen."""
        try:
            return bool(self._store.check([self._key]))
        except RuntimeError:
            return False

    def wait_for_all(self) -> None:
        """Wait until all ranks have written their part, at most ``timeout_s``: the first exit ends the others."""
        deadline = time.monotonic() + self._timeout_s
        try:
            written = self._store.add(f"{self._key}/written", 1)
            while written < self._num_ranks and time.monotonic() < deadline:
                time.sleep(0.05)
                written = self._store.add(f"{self._key}/written", 0)
        except RuntimeError as error:
            _log.warning("peers could not be waited for: %s", error)

    def close(self) -> None:
        """Stop looking."""
        self._stop.set()
        atexit.unregister(self.close)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=10 * self._interval_s)

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                if not self._store.check([self._key]):
                    continue
                text = self._store.get(self._key).decode(errors="replace")
            except RuntimeError:
                return  # the store is gone: so is the job
            if not self._stop.is_set():
                self._on_call(text)
            return


def _users_frames(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback down to the user's own line; the frames below it, ours and torch's, explain nothing."""
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    while len(entries) > 1 and _is_inner(entries[-1].tb_frame.f_code.co_filename):
        entries.pop()
    shown: TracebackType | None = None
    for entry in reversed(entries):
        shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shown


def _is_inner(path: str) -> bool:
    return path.startswith((_OWN_DIRECTORY, _TORCH_DIRECTORY))


def _nothing() -> None:
    return None


def _not_ours(error: BaseException) -> bool:
    return False
