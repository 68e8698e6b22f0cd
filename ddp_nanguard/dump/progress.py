"""One line on stderr about long writing or reading: ``dump: 1.2 of 4.0 GiB, 310 MB/s``."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

SILENT_S = 2.0
"""Nothing is reported before this time."""
EVERY_S = 10.0
"""Interval where lines stay, as in a log file."""
EVERY_ON_TERMINAL_S = 0.25
GIB = 2**30

OnBytes = Callable[[int], None]
"""Called with the number of bytes done since the last call, by any thread."""


def ignore_bytes(_: int) -> None:
    """An `OnBytes` for callers without a progress line."""


class Progress:
    """Counts bytes and reports them: on a terminal in one line that is rewritten, else in a new line every 10 s.

    Args:
        what: the first words of the line.
        total_bytes: expected in all.
        speaks: whether this process reports at all.
        stream: None for stderr, or for no output under pytest.
    """

    def __init__(self, what: str, total_bytes: int, speaks: bool = True, stream: TextIO | None = None) -> None:
        self._what = what
        self._total_bytes = total_bytes
        default = None if "pytest" in sys.modules else sys.stderr
        self._stream = (stream if stream is not None else default) if speaks else None
        self._is_terminal = _is_terminal(self._stream)
        self._done_bytes = 0
        self._start_s = time.monotonic()
        self._next_s = self._start_s + SILENT_S
        self._width = 0
        # `tell` is called by several threads that write or read files.
        self._lock = threading.Lock()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width and self._is_terminal:
            self._write(f"\r{'':<{self._width}}\r")

    def tell(self, num_bytes: int) -> None:
        """Add ``num_bytes`` to what is done, and report if it is time to. May be called by any thread."""
        with self._lock:
            self._done_bytes += num_bytes
            now_s = time.monotonic()
            if now_s >= self._next_s:
                self._next_s = now_s + (EVERY_ON_TERMINAL_S if self._is_terminal else EVERY_S)
                self._say(now_s - self._start_s)

    def _say(self, seconds: float) -> None:
        done, total = self._done_bytes / GIB, max(self._total_bytes, self._done_bytes) / GIB
        text = f"{self._what}: {done:.1f} of {total:.1f} GiB, {self._done_bytes / 1e6 / seconds:.0f} MB/s"
        self._width = max(self._width, len(text))
        self._write(f"\r{text:<{self._width}}" if self._is_terminal else f"{text}\n")

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except Exception:  # of a job that has put a stream of its own there
            self._stream = None  # a closed stderr must not end the fault path


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and not stream.closed and stream.isatty()
    except Exception:  # of a job that has put a stream of its own there
        return False
