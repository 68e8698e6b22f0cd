"""Files in a few threads: in order, the first error, and without threads where there are none to be had."""

from __future__ import annotations

import threading
import time

import pytest

from ddp_nanguard.dump.thread_map import NUM_THREADS, thread_map


def test_results_are_in_order_and_several_run_at_once() -> None:
    together = threading.Barrier(NUM_THREADS, timeout=5)

    def act(index: int) -> int:
        together.wait()
        time.sleep(0.001 * (NUM_THREADS - index))
        return index

    assert thread_map(act, range(NUM_THREADS)) == list(range(NUM_THREADS))


def test_the_first_error_is_raised_and_the_rest_is_left() -> None:
    begun: list[int] = []
    failed = threading.Event()

    def act(index: int) -> None:
        begun.append(index)
        if index == 1:
            failed.set()
            raise OSError(f"number {index}")
        failed.wait(5)
        time.sleep(0.02)

    with pytest.raises(OSError, match="number 1"):
        thread_map(act, range(100))
    assert len(begun) < 100
