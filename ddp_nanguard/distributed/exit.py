"""How a process ends after a fault: together with its peers, with one exit code, never by a timeout.

See `abort` for how a rank that raised on its own tells its peers.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import traceback
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from ddp_nanguard.errors import NonFiniteError, line_of
from ddp_nanguard.hooks.frames import is_users_own

from .launcher import tell_launcher

_log = logging.getLogger(__name__)

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class ExitHandler(Protocol):
    """Who is asked when another exception than ours ends the process."""

    @property
    def exit_order(self) -> int:
        """Which one is asked before another; the same on all ranks."""

    def on_uncaught_exception(self, error: BaseException) -> int | None:
        """Write what there is to write; the exit code, or None where the error is none of ours."""


_exit_handlers: weakref.WeakSet[Any] = weakref.WeakSet()
_previous: list[ExceptHook] = []


def watch_exit(handler: ExitHandler) -> None:
    """Chain ``sys.excepthook``, once for all guards of the process.

    An uncaught `NonFiniteError` ends the worker with its exit code: the previous hook, flush, meet the peers (who
    may still write), atexit callbacks, ``os._exit``. SystemExit would not do: with DDP alive, the interpreter's own
    shutdown can hang or abort and lose the code.
    """
    _exit_handlers.add(handler)
    if not _previous:
        _previous.append(sys.excepthook)
        sys.excepthook = _ended


def unwatch_exit(handler: ExitHandler) -> None:
    """The previous hook again when the last guard has gone, unless somebody has chained another one since."""
    _exit_handlers.discard(handler)
    # a hook that somebody chained after ours still calls ours: it has to stay
    if not _exit_handlers and sys.excepthook is _ended:
        sys.excepthook = _previous.pop()


def exit_process(exit_code: int) -> None:
    """End the process: atexit callbacks, flush, ``os._exit``."""
    atexit._run_exitfuncs()
    _flush()
    os._exit(exit_code)


def end_if_fault(handler: ExitHandler, error: Exception) -> None:
    """End the process as an uncaught exception would, if it has to do with a fault; else return.

    Args:
        handler: asked about it.
        error: that somebody has caught.
    """
    code = _code_of(handler, error)
    if code is not None:
        with contextlib.suppress(Exception):  # the process ends with its code, whatever becomes of the text
            traceback.print_exception(error)
        _flush()
        exit_process(code)


def _ended(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    previous = _previous[0] if _previous else sys.__excepthook__
    if isinstance(error, NonFiniteError):
        trace = _users_frames(trace)
        previous(kind, error.with_traceback(trace), trace)
        _flush()
        tell_launcher(f"{kind.__name__}: {error}", error.report.origin_rank)
        error.barrier()  # torchrun ends all workers once one has failed, and peers may still write their dumps
        exit_process(error.exit_code)
    previous(kind, error, trace)
    if isinstance(error, Exception):
        _flush()
        # the first guard that has something to tell tells it, the same one on each rank: one report, one dump
        for handler in sorted(_exit_handlers, key=lambda each: each.exit_order):
            if (code := _code_of(handler, error)) is not None:
                exit_process(code)


def _code_of(handler: ExitHandler, error: Exception) -> int | None:
    try:
        return handler.on_uncaught_exception(error)
    except Exception as other:  # the job's own exception has been told, and ends it
        _log.error("no part of a dump was written: %s", line_of(other))
        return None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # of a job that has put a stream of its own there
            stream.flush()


def _users_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback down to the user's own line; the frames below it, ours and torch's, explain nothing."""
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    while len(entries) > 1 and not is_users_own(entries[-1].tb_frame):
        entries.pop()
    shown: TracebackType | None = None
    for entry in reversed(entries):
        shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shown
