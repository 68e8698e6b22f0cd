"""How a process ends after a fault: together with its peers, with one exit code, never by a timeout.

[Note: who tells whom]
A rank whose own code raised cannot reach a collective any more, and its peers wait in one. It writes its local part,
sets a key in the store and ends; a thread on every rank looks for that key, so that each peer learns of it within a few
seconds whatever its main thread waits for, writes its own local part and ends too.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .errors import NonFiniteError

_log = logging.getLogger(__name__)

_OWN_DIRECTORY = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH_DIRECTORY = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class Faller(Protocol):
    """Who is asked when another exception than ours ends the process."""

    def fell(self, error: BaseException) -> int | None:
        """Write what there is to write; the exit code, or None where the error is none of ours."""


_fallers: weakref.WeakSet[Any] = weakref.WeakSet()
_previous: list[Hook] = []


def watch_exit(faller: Faller) -> None:
    """Chain ``sys.excepthook``, once for all guards of the process.

    An uncaught `NonFiniteError` ends the worker with its exit code: the previous hook, flush, meet the peers (who
    may still write), atexit callbacks, ``os._exit``. SystemExit would not do: with DDP alive, the interpreter's own
    shutdown can hang or abort and lose the code.
    """
    _fallers.add(faller)
    if not _previous:
        _previous.append(sys.excepthook)
        sys.excepthook = _ended


def unwatch_exit(faller: Faller) -> None:
    """The previous hook again when the last guard has gone, unless somebody has chained another one since."""
    _fallers.discard(faller)
    if not _fallers and sys.excepthook is _ended:
        sys.excepthook = _previous.pop()


def leave(exit_code: int) -> None:
    """End the process: atexit callbacks, flush, ``os._exit``."""
    atexit._run_exitfuncs()
    _flush()
    os._exit(exit_code)


def _ended(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    previous = _previous[0] if _previous else sys.__excepthook__
    if isinstance(error, NonFiniteError):
        traceback = _users_frames(traceback)
        previous(kind, error.with_traceback(traceback), traceback)
        _flush()
        error.meet()
        leave(error.exit_code)
    previous(kind, error, traceback)
    if isinstance(error, Exception):
        _flush()
        codes = [code for faller in list(_fallers) if (code := faller.fell(error)) is not None]
        if codes:
            leave(codes[0])


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


class Distress:
    """A key in the job's store that says that a rank has fallen, and the thread that looks for it.

    The thread polls a connection of its own, a few times per ``timeout_s``; it costs the training loop nothing and
    issues no collective. Nothing here keeps the owner of ``on_call`` alive.

    Args:
        name: the same on all ranks of one guard, and no other guard's.
        rank: of this process.
        num_ranks: that step together.
        timeout_s: how long peers are waited for.
        on_call: bound method, called on the thread with the fallen rank's text.
    """

    def __init__(self, name: str, rank: int, num_ranks: int, timeout_s: float, on_call: Callable[[str], None]) -> None:
        self._key = f"ddp_nanguard/distress/{name}"
        self._rank = rank
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        shared: Any = dist.distributed_c10d._get_default_store()
        self._store = shared.clone()  # a connection of its own
        self._stop = threading.Event()
        interval_s = min(max(timeout_s / 20, 0.2), 5.0)
        arguments = (self._stop, self._store, self._key, interval_s, weakref.WeakMethod(on_call))
        thread = threading.Thread(target=_look_out, args=arguments, name="ddp_nanguard-distress", daemon=True)
        thread.start()
        self._close = weakref.finalize(self, _end_thread, self._stop, thread, 10 * interval_s)

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

    def hears_within(self, seconds: float) -> bool:
        """Whether a rank falls within so many seconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.was_called():
                return True
            time.sleep(0.05)
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
        """Stop looking. Also happens when this object goes, and at exit."""
        self._close()


def _look_out(
    stop: threading.Event, store: Any, key: str, interval_s: float, on_call: weakref.WeakMethod[Callable[[str], None]]
) -> None:
    while not stop.wait(interval_s):
        try:
            if not store.check([key]):
                continue
            text = store.get(key).decode(errors="replace")
        except RuntimeError:
            return  # the store is gone: so is the job
        owner = on_call()
        if owner is not None and not stop.is_set():
            owner(text)
        return


def _end_thread(stop: threading.Event, thread: threading.Thread, timeout_s: float) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(timeout=timeout_s)


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
