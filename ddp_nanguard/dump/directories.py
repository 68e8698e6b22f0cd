"""Directories of dumps: reserving a name, making it final, rotation. Safe between jobs and ranks with a common root."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from ddp_nanguard.errors import DumpError

from .files import write_json
from .names import LATEST, LOCK_FILE, MANIFEST, PARTIAL, WRITER_JSON, DumpName, rank_name, ranks_in
from .rank_records import Writer
from .records import read_record
from .typed_json import as_json

_log = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 10.0
ABANDONED_S = 3600.0
DOOMED = ".old-"


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the lock of a dump_dir; continue without it where locks do not work, since renames are atomic anyway."""
    lock = FileLock(root / LOCK_FILE)
    try:
        lock.acquire(timeout=LOCK_TIMEOUT_S)
    except (Timeout, OSError, NotImplementedError):
        yield
        return
    try:
        yield
    finally:
        lock.release()


def dumps_in(root: Path) -> list[tuple[DumpName, Path]]:
    """The dump directories in ``root``, whole and partial, sorted by step; [] where ``root`` cannot be read."""
    try:
        found = [(DumpName.parse(path.name), path) for path in root.iterdir() if path.is_dir()]
    except OSError:
        return []
    return sorted((name, path) for name, path in found if name is not None)


def is_whole(path: Path) -> bool:
    """Whether a dump directory was finished: no ``.partial`` in its name, and a manifest."""
    return not path.name.endswith(PARTIAL) and (path / MANIFEST).is_file()


def free_number(root: Path, step: int) -> int:
    """One more than the largest number of a dump of this step in ``root``; 1, for a plain name, without any."""
    taken = [name.number for name, _ in dumps_in(root) if name.step == step]
    return max(taken, default=0) + 1


def reserve(root: Path, name: DumpName, nonce: str) -> bool:
    """Make the partial directory of a dump, or join it where a peer with the same nonce has made it.

    Args:
        root: the dump_dir.
        name: of the dump.
        nonce: the same on all ranks that write this dump, and on no other.

    Returns:
        False if the name is taken by another dump.

    Raises:
        OSError: the root cannot be written.
    """
    partial = root / str(DumpName(name.step, name.number, partial=True))
    if _nonce_of(partial) == nonce:
        return True
    with locked(root):
        if (root / str(DumpName(name.step, name.number))).exists():
            return False
        return _make(partial, nonce) or _nonce_of(partial) == nonce


def _make(path: Path, nonce: str) -> bool:
    """Make a directory with its writer file in one atomic step; False if the name is taken."""
    # Filled under another name and renamed: a directory without its writer file could not be told from a peer's.
    temporary = path.parent / f".new-{uuid.uuid4().hex}"
    temporary.mkdir()
    try:
        writer = Writer(socket.gethostname(), os.getpid(), time.time(), nonce)
        write_json(temporary, WRITER_JSON, as_json(writer))
        temporary.rename(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True


def _nonce_of(path: Path) -> str | None:
    try:
        return read_record(path, WRITER_JSON, Writer).nonce
    except DumpError:
        return None


def release(root: Path, name: DumpName, nonce: str) -> None:
    """Remove a reserved directory, because peers could not reserve the name; only one of this nonce is removed."""
    partial = root / str(DumpName(name.step, name.number, partial=True))
    if _nonce_of(partial) == nonce:
        shutil.rmtree(partial, ignore_errors=True)


def finish(root: Path, name: DumpName) -> DumpName:
    """Drop ``.partial`` from the name, and return the name; the next free number if it has been taken meanwhile."""
    partial = root / str(DumpName(name.step, name.number, partial=True))
    with locked(root):
        while True:
            try:
                # A rename onto a directory that is not empty fails, so a taken name is never overwritten.
                partial.rename(root / str(name))
                return name
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                name = DumpName(name.step, name.number + 1)


def point_latest(dump: Path) -> None:
    """Let the link ``latest`` beside a dump lead to it; where there can be no link there is none."""
    temporary = dump.parent / f".{LATEST}-{uuid.uuid4().hex}"
    link = dump.parent / LATEST
    with contextlib.suppress(OSError, NotImplementedError):
        if link.exists() and not link.is_symlink():
            return  # not ours
        temporary.symlink_to(dump.name)
        try:
            temporary.replace(link)
        except OSError:
            temporary.unlink()


def open_rank_dir(root: Path, step: int, rank: int, run_id: str) -> Path:
    """Make this rank's partial directory in the directory that ranks without peers share.

    Ranks of one run find the same directory by the run's id, although they cannot communicate.

    Args:
        root: the dump_dir.
        step: of the fault.
        rank: global rank.
        run_id: the same on all ranks of the run.

    Raises:
        FileExistsError: the rank has files there already.
        OSError: the root cannot be written.
    """
    nonce = f"alone {run_id}"
    with locked(root):
        for name, path in reversed(dumps_in(root)):
            if name.step == step and not name.partial and _nonce_of(path) == nonce:
                with contextlib.suppress(FileExistsError):
                    return _own_directory(path, rank)
        name = DumpName(step, free_number(root, step))
        while not _make(root / str(name), nonce):
            name = DumpName(step, name.number + 1)
        return _own_directory(root / str(name), rank)


def _own_directory(path: Path, rank: int) -> Path:
    if (path / rank_name(rank)).exists():
        raise FileExistsError(path)
    directory = path / f"{rank_name(rank)}{PARTIAL}"
    directory.mkdir()
    return directory


def rotate(root: Path, keep: int, current: Path) -> None:
    """Remove the oldest whole dumps beyond ``keep``; never a partial one, nor one in which a rank is still writing.

    Args:
        root: the dump_dir.
        keep: number of dumps to keep, ``current`` included; 0 or less keeps all.
        current: the dump that has just been written, which stays.
    """
    if keep <= 0:
        return
    with locked(root):
        whole = [path for _, path in dumps_in(root) if is_whole(path) and path != current]
        oldest_first = sorted(whole, key=lambda path: (path / MANIFEST).stat().st_mtime_ns)
        for path in oldest_first[: max(0, len(oldest_first) + 1 - keep)]:
            if not _is_being_written(path):
                # renamed first: what is half removed must not look like a dump
                _log.warning("the oldest dump %s is removed: dump_keep=%d", path, keep)
                path.rename(root / f"{DOOMED}{uuid.uuid4().hex}")
    for path in root.glob(f"{DOOMED}*"):
        shutil.rmtree(path, ignore_errors=True)


# A rank without peers writes into a dump that a peer of its run has finished. A directory that has not changed for an
# hour is taken for one whose writer died.
def _is_being_written(path: Path) -> bool:
    now = time.time()
    return any(now - child.stat().st_mtime < ABANDONED_S for child in path.glob(f"rank-*{PARTIAL}"))


def abandon(partial: Path, rank: int) -> None:
    """Remove a rank's files from a broken dump, and the dump itself once no rank has files in it."""
    shutil.rmtree(partial / rank_name(rank), ignore_errors=True)
    if not ranks_in(partial):
        shutil.rmtree(partial, ignore_errors=True)


def free_bytes(path: Path) -> int:
    """Free bytes of the disk that holds ``path``, or that will once it is made."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def size_of(path: Path) -> int:
    """Total size in bytes of all files below ``path``."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
