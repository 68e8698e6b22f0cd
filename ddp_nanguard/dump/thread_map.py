"""A few threads for files: hashing, writing and syncing release the interpreter lock."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from ddp_nanguard.tensors.accelerator import on_same_stream

T = TypeVar("T")
R = TypeVar("R")

NUM_THREADS = 4


def thread_map(act: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Apply ``act`` to each item in a few threads and return the results in the order of the items.

    The first error in that order is raised, and items that have not begun are left out. Items for which no thread can
    be started are processed by the calling thread.

    Host sync: that of ``act``.
    """
    todo, act = list(items), on_same_stream(act)
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="ddp-nanguard-files") as pool:
        futures = _submitted(pool, act, todo)
        try:
            done = [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return done + [act(item) for item in itertools.islice(todo, len(done), None)]


def _submitted(pool: ThreadPoolExecutor, act: Callable[[T], R], items: list[T]) -> list[Future[R]]:
    """One future per item; fewer where no thread can be started, as when the interpreter shuts down."""
    futures: list[Future[R]] = []
    try:
        for item in items:
            futures.append(pool.submit(act, item))
    # An interpreter that shuts down starts no threads; futures that were submitted may never run.
    except RuntimeError:
        pool.shutdown(cancel_futures=True)
        return list(itertools.takewhile(lambda each: not each.cancelled(), futures))
    return futures
