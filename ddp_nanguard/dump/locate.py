"""Finds the dump directory that a path given by the user refers to."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ddp_nanguard.errors import DumpError

from . import directories as place
from .names import MANIFEST, DumpName

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def as_paths(paths: Paths) -> list[Path]:
    """One path or several, as a list of `Path`."""
    return [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(path) for path in paths]


def as_dump(path: Path) -> Path:
    """The dump that a link beside it, such as ``latest``, leads to; any other path as it is."""
    if not path.is_symlink() or DumpName.parse(path.name) is not None:
        return path
    target = path.resolve()
    if DumpName.parse(target.name) is None:
        return path
    beside = path.with_name(target.name)
    return beside if beside.exists() and beside.resolve() == target else target


def _what_is_in(root: Path) -> str:
    names = [str(name) for name, dump in place.dumps_in(root) if place.is_whole(dump)] if root.is_dir() else []
    if not names:
        return "see what a run has left: ddp-nanguard list DIR"
    return f"{root} holds {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"


def directory_of(path: Path) -> Path:
    """The dump that ``path`` refers to: itself, or the only whole one in a dump_dir.

    Raises:
        DumpError: it is neither; the message lists what is there.
    """
    try:
        is_directory = path.is_dir()
    except OSError as error:  # a name that is too long, which no directory has
        raise DumpError(f"{str(path)[:80]}... is no directory: {error.strerror}; give the path of a dump") from None
    if not is_directory:
        raise DumpError(f"{path} is no directory; {_what_is_in(path.parent)}")
    path = as_dump(path)
    if DumpName.parse(path.resolve().name) is not None or (path / MANIFEST).exists():
        return path
    whole = [dump for _, dump in place.dumps_in(path) if place.is_whole(dump)]
    if len(whole) == 1:
        return whole[0]
    if whole:
        raise DumpError(f"{path} holds {len(whole)} whole dumps; give one of them, see: ddp-nanguard list {path}")
    raise DumpError(
        f"{path} is no dump and holds none that is whole: there is no {MANIFEST}, see: ddp-nanguard list {path}"
    )
