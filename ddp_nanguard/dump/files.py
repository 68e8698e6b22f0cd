"""Files of a dump as bytes: written with a digest, synced, listed. Text and JSON need no more than that."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from ddp_nanguard.report.types import json_safe

from .names import FileEntry
from .progress import OnBytes, ignore_bytes

DIGEST_BYTES = 16


class HashedFile:
    """A binary file that is being written, with the digest and the length of its bytes.

    The bytes are hashed as they are written, so that nothing has to be read back.
    """

    def __init__(self, file: IO[bytes], tell: OnBytes) -> None:
        self._file = file
        self._tell = tell
        self.digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self.size_bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        """Write, hash and count; returns the number of bytes."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self.digest.update(view)
        self.size_bytes += len(view)
        self._tell(len(view))
        return len(view)

    def flush(self) -> None:
        """Do nothing: `zipfile` expects the method, and `write_file` flushes."""

    def close(self) -> None:
        """Do nothing: `zipfile` expects the method, and `write_file` closes."""


def write_file(root: Path, path: str, fill: Callable[[HashedFile], object], tell: OnBytes = ignore_bytes) -> FileEntry:
    """Write, sync and list one file; a file that could not be written completely is removed."""
    target = root / path
    try:
        with open(target, "wb") as file:
            hashed = HashedFile(file, tell)
            fill(hashed)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return FileEntry(path, hashed.size_bytes, hashed.digest.hexdigest())


def sync_directory(path: Path) -> None:
    """Make the names within a directory durable; does nothing on file systems that cannot."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def list_file(root: Path, path: str, tell: OnBytes = ignore_bytes) -> FileEntry:
    """The entry of a file that exists already, from reading it.

    Args:
        root: the dump.
        path: of the file in it.
        tell: called with the number of bytes read.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    size_bytes = 0
    with open(root / path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
            size_bytes += len(block)
            tell(len(block))
    return FileEntry(path, size_bytes, digest.hexdigest())


# JSON and text


def write_text(root: Path, path: str, text: str) -> FileEntry:
    """Write a text file in UTF-8, sync it and return its entry."""
    return write_file(root, path, lambda file: file.write(text.encode()))


def write_json(root: Path, path: str, data: Any) -> FileEntry:
    """Write strict JSON: non-finite numbers as strings, objects that JSON does not know as their ``str()``."""
    return write_text(root, path, json.dumps(json_safe(data), indent=1, allow_nan=False, default=str) + "\n")


def append_json(path: Path, data: Any) -> None:
    """Append one line of strict JSON, as `write_json` writes it, whole or not at all, and sync it.

    Raises:
        OSError: it could not be written; what there was before is as it was.
    """
    line = json.dumps(json_safe(data), allow_nan=False, default=str).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        end = os.lseek(descriptor, 0, os.SEEK_END)
        if os.write(descriptor, line) < len(line):  # one call: a line of another process does not get into it
            os.ftruncate(descriptor, end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
