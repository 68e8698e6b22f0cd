"""Which batches ``guard.steps`` passes over: what ``skips.jsonl`` says, the same on every rank.

[Note: one list for all ranks]
Only one rank had the bad batch, but all of them have to leave out the batches of that step, or they would take
different numbers of steps. The file may lie on a node's own disk, and grow while it is read. So the first rank reads it
and all others get what that one has read. That happens where the loop first asks for it, at the beginning of training,
and again after a stop that the loop has caught: places that all ranks reach. A step of training has no part in it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist

from ddp_nanguard.context import GuardContext
from ddp_nanguard.distributed.fault_group import PeersLostError
from ddp_nanguard.dump.skip_list import SkippedStep, read_skips
from ddp_nanguard.hooks.positions import Position
from ddp_nanguard.report.wording import plural

_log = logging.getLogger(__name__)


class SkipLists:
    """Lists that the loop has asked for; see [Note: one list for all ranks].

    Args:
        context: of the guard.
    """

    def __init__(self, context: GuardContext) -> None:
        self._context = context
        self._read: dict[str, frozenset[Position]] = {}

    def positions(self, path: object) -> frozenset[Position]:
        """The positions of all batches in a list; none where there is no such file.

        Args:
            path: of the list; that of the first rank is read.

        Raises:
            ValueError: on every rank, if the list is bad; on those that ask, if others do not.

        Collective: the first time for a path, and the first time after a stop, three all-reduces on the fault group;
        every rank must call it.
        """
        if not isinstance(path, str | os.PathLike):
            raise ValueError(f"guard.steps(skip={path!r}) is no path; give that of a skips.jsonl, or None")
        name = os.fspath(path)
        if not self._context.config.enabled:
            _log.warning("guard.steps(skip=%r): the guard is off, no batch is passed over", name)
            return frozenset()
        if name not in self._read:
            try:
                self._read[name] = self._ask(name)
            except PeersLostError as error:
                raise ValueError(
                    f"guard.steps(skip={name!r}): not all ranks ask for a list ({error}); give skip= on every rank"
                ) from None
        return self._read[name]

    def forget(self) -> None:
        """After a stop the list is longer: it is read anew when the loop asks again."""
        self._read = {}

    def _ask(self, path: str) -> frozenset[Position]:
        ranks = self._context.ranks
        skips, problem = _try_to_read(path) if ranks.index == 0 else ([], None)
        found = ranks.fault_group.first_problem(problem)
        if found is not None:
            raise ValueError(f"guard.steps(skip=...): {found[1]}")
        positions = self._shared([position for skipped in skips for position in skipped.positions])
        if ranks.index == 0:
            _log.warning("%s", _told(path, skips, positions))
        return positions

    def _shared(self, mine: list[tuple[int, int]]) -> frozenset[Position]:
        """The positions that the first rank has read."""
        group = self._context.ranks.fault_group
        (count,) = group.largest(len(mine))
        rows = torch.zeros(count, 2, dtype=torch.int64, device="cpu")
        rows[: len(mine)] = torch.tensor(mine, dtype=torch.int64, device="cpu").view(-1, 2)
        group.reduce_tensor(rows, dist.ReduceOp.SUM)
        return frozenset(Position(epoch, index) for epoch, index in rows.tolist())


def _try_to_read(path: str) -> tuple[list[SkippedStep], str | None]:
    try:
        return read_skips(path), None
    except ValueError as error:
        return [], str(error)


def _told(path: str, skips: list[SkippedStep], positions: Iterable[Position]) -> str:
    if not skips:
        return f"guard.steps: {path} lists no step, no batch is passed over"
    without = sum(not skipped.positions for skipped in skips)
    lacks = f"; {without} without the position of a batch" if without else ""
    count = len(set(positions))
    batches = f"{count} batch{'' if count == 1 else 'es'}"
    return f"guard.steps: passing over {batches} of {plural(len(skips), 'step')} in {path}{lacks}"
