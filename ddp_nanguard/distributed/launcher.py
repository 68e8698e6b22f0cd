"""What a rank that the guard stopped leaves for those who started it: torchrun, and ``ddp-nanguard run``.

torchrun shows in its summary the text of the rank where the fault began, as the root cause. It returns 1 whatever its
workers return, as do other launchers; so each stopped rank leaves a file for ``ddp-nanguard run``, wherever it was
started by whatever in between, and `read_stop` finds it there.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ENV_RUN = "DDP_NANGUARD_RUN"
"""Environment variable by which ``ddp-nanguard run`` names the directory in which it looks."""
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_ranks: list[int] = []  # of this process, when it made its last guard


@dataclass(frozen=True)
class Stop:
    """What a stopped rank has left.

    Attributes:
        rank: that has left it.
        exit_code: with which it ends.
        text: of the fault, the same on all ranks that could talk to each other.
        began_here: whether the fault began on this rank.
    """

    rank: int
    exit_code: int
    text: str
    began_here: bool


def tell_launcher(text: str, origin_rank: int | None, exit_code: int) -> None:
    """Leave the text where launchers look for it; nothing where there is none, or nothing can be written.

    To be called before peers are met: a launcher ends all ranks of a node when one has ended.

    Args:
        text: of the fault, the same on all ranks.
        origin_rank: where it began; None where that is no single rank.
        exit_code: with which this process is going to end.
    """
    rank = _rank()
    stop = Stop(rank, exit_code, text, rank == origin_rank)
    with contextlib.suppress(OSError):
        _tell_torchrun(stop)
    with contextlib.suppress(OSError):
        _tell_run(stop)


def forget_stop() -> None:
    """Remove what this rank has left before: the job was started again, and goes on.

    The rank is kept for later, since a job may take its group down before it ends.
    """
    _ranks[:] = [_rank()]
    if path := _file_of(_rank()):
        with contextlib.suppress(OSError):
            path.unlink()


def read_stop(directory: Path) -> Stop | None:
    """What the rank where the fault began has left, else the first one; None where the guard stopped none."""
    return next(iter(sorted(read_stops(directory), key=lambda stop: not stop.began_here)), None)


def read_stops(directory: Path) -> list[Stop]:
    """What all ranks have left that the guard stopped, in rank order."""
    return sorted(_stops(directory), key=lambda stop: stop.rank)


def _tell_torchrun(stop: Stop) -> None:
    """Of all failures the earliest is the root cause to it, in whole seconds.

    All ranks end in the same one, so that of the rank where the fault began is dated a second back.
    """
    if path := os.environ.get(_ERROR_FILE):
        extra = {"py_callstack": stop.text, "timestamp": str(int(time.time()) - stop.began_here)}
        Path(path).write_text(json.dumps({"message": {"message": stop.text, "extraInfo": extra}}))


def _tell_run(stop: Stop) -> None:
    if path := _file_of(stop.rank):
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(asdict(stop)))
        unfinished.replace(path)


def _stops(directory: Path) -> Iterator[Stop]:
    for path in directory.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            yield Stop(**json.loads(path.read_text()))


def _file_of(rank: int) -> Path | None:
    directory = os.environ.get(ENV_RUN)
    return Path(directory) / f"rank-{rank}.json" if directory else None


def _rank() -> int:
    """Of this process, as torchrun says, or as the job has set its group up, or had; 0 without either."""
    if (told := os.environ.get("RANK", "")).isdigit():
        return int(told)
    distributed = sys.modules.get("torch.distributed")
    is_up = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return int(distributed.get_rank()) if distributed is not None and is_up else next(iter(_ranks), 0)
