"""How a process ends after a fault: together with its peers, with one exit code, never by a timeout.

See `abort` for how a rank that raised on its own tells its peers.

[Note: where no exception is uncaught]
``sys.excepthook`` is for scripts. In a child of `multiprocessing`, and so in whatever is started by
``torch.multiprocessing.spawn``, a caller above the user's function catches every exception. But that child runs
multiprocessing's own finalizers while the exception is still on its way, after ``spawn`` has written it down for the
parent and before the parent can know: there peers are met, since a parent ends the other children once one has ended.
A process that outlives its function (an actor of Ray, a pool, a notebook) has no such place: there is `record`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import multiprocessing.util
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol

from ddp_nanguard.errors import NonFiniteError, line_of
from ddp_nanguard.hooks.frames import is_users_own

from .launcher import forget_stop, tell_launcher

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
_finalizers: list[multiprocessing.util.Finalize] = []
_child_codes: list[int] = []
_FIRST, _LAST = 1_000_000, -1_000_000  # of all finalizers: queues, for example, are still to be flushed in between
_SETTLED = "_ddp_nanguard_code"


def watch_exit(handler: ExitHandler) -> None:
    """Chain ``sys.excepthook``, once for all guards of the process; see also [Note: where no exception is uncaught].

    An uncaught `NonFiniteError` ends the worker with its exit code: the previous hook, flush, meet the peers (who
    may still write), atexit callbacks, ``os._exit``. SystemExit would not do: with DDP alive, the interpreter's own
    shutdown can hang or abort and lose the code.
    """
    forget_stop()
    _exit_handlers.add(handler)
    if not _previous:
        _previous.append(sys.excepthook)
        sys.excepthook = _ended
    is_watched = any(each.still_active() for each in _finalizers)  # none is in a process forked from one that was
    if not is_watched and multiprocessing.parent_process() is not None:
        for act, priority in ((_child_ends, _FIRST), (_child_exits, _LAST)):
            _finalizers.append(multiprocessing.util.Finalize(None, act, exitpriority=priority))


def unwatch_exit(handler: ExitHandler) -> None:
    """The previous hook again when the last guard has gone, unless somebody has chained another one since."""
    _exit_handlers.discard(handler)
    if _exit_handlers:
        return
    # a hook that somebody chained after ours still calls ours: it has to stay
    if sys.excepthook is _ended:
        sys.excepthook = _previous.pop()
    if not _child_codes:
        while _finalizers:
            _finalizers.pop().cancel()


@contextlib.contextmanager
def record() -> Iterator[None]:
    """Around what a rank runs, where its process outlives it: actors of Ray, pools, notebooks. A decorator, too.

    ::

        @ddp_nanguard.record()
        def train(config): ...

    An exception that leaves it is treated as one that ends a script, and goes on to the caller: after a fault all ranks
    meet here, and a rank that raises on its own after its values went bad writes its part of the dump and tells its
    peers, which write theirs and end. Scripts and processes of `torch.multiprocessing` need it not.

    Collective: as at the end of a script: none, but for a barrier after a fault.
    """
    try:
        yield
    except Exception as error:
        settle(error)
        raise


def exit_process(exit_code: int) -> None:
    """End the process: atexit callbacks, flush, ``os._exit``."""
    atexit._run_exitfuncs()
    _flush()
    os._exit(exit_code)


def end_if_fault(error: Exception, has_peers: bool) -> None:
    """End the process as an uncaught exception would, if it has to do with a fault and peers wait; else return.

    Without peers, and at a prompt, all is written when it returns, and the exception may go on to whoever is above.
    """
    code = settle(error)
    if code is not None and has_peers and not _is_at_prompt():
        _show_safely(error)
        _flush()
        exit_process(code)


def _ended(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    _show(kind, error, traceback)
    if _is_at_prompt():  # the person at it has seen the error
        return
    code = settle(error)
    if code is not None:
        exit_process(code)


def _is_at_prompt() -> bool:
    return bool(sys.flags.interactive) or hasattr(sys, "ps1")


def _child_ends() -> None:
    """A child of multiprocessing ends, see [Note: where no exception is uncaught]; its parent does not know yet."""
    leaves = sys.exc_info()[1]
    error = leaves.__context__ if isinstance(leaves, SystemExit) and leaves.code else leaves
    if error is None or isinstance(error, SystemExit):
        return
    is_told = error is not leaves  # spawn has written it down, but tells that of the child only that ends first
    if is_told and not isinstance(error, NonFiniteError) and _exit_handlers:
        _show_safely(error)
    code = settle(error)
    if code is not None:
        _child_codes.append(code)
        if not is_told:  # multiprocessing would print it at the very end only
            _show_safely(error)


def _child_exits() -> None:
    """The last finalizer of all: with DDP alive, what would follow can hang or lose the code."""
    if _child_codes:
        exit_process(_child_codes[0])


def _show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    previous = _previous[0] if _previous else sys.__excepthook__
    if isinstance(error, NonFiniteError):
        traceback = _users_frames(traceback)
        error = error.with_traceback(traceback)
    previous(kind, error, traceback)


def _show_safely(error: BaseException) -> None:
    with contextlib.suppress(Exception):  # a hook of the job may raise
        _show(type(error), error, error.__traceback__)


def settle(error: BaseException) -> int | None:
    """What is to be done before an exception ends this rank, once: tell, write, meet.

    Returns:
        The exit code, None where the exception is none of ours.
    """
    if not isinstance(error, Exception):
        return None
    if _SETTLED not in error.__dict__:
        _flush()
        error.__dict__[_SETTLED] = _met(error) if isinstance(error, NonFiniteError) else _asked(error)
    code: int | None = error.__dict__[_SETTLED]
    return code


def _met(error: NonFiniteError) -> int:
    tell_launcher(f"{type(error).__name__}: {error}", error.report.origin_rank, error.exit_code)
    error.barrier()  # a launcher ends all workers once one has failed, and peers may still write their dumps
    return error.exit_code


def _asked(error: Exception) -> int | None:
    """The first guard that has something to tell tells it, the same one on each rank: one report, one dump."""
    for handler in sorted(_exit_handlers, key=lambda each: each.exit_order):
        if (code := _code_of(handler, error)) is not None:
            return code
    return None


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


def _users_frames(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback down to the user's own line; the frames below it, ours and torch's, explain nothing."""
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    while len(entries) > 1 and not is_users_own(entries[-1].tb_frame):
        entries.pop()
    shown: TracebackType | None = None
    for entry in reversed(entries):
        shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shown
