"""A rank that ends on its own: its code raised, or a peer's did. Nothing here waits for a collective.

See [Note: who tells whom] in `distributed.abort`.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from ddp_nanguard.capture.record import StepRecord
from ddp_nanguard.context import GuardContext, Reach
from ddp_nanguard.distributed.abort import AbortSignal
from ddp_nanguard.distributed.exit import exit_process
from ddp_nanguard.distributed.launcher import tell_launcher
from ddp_nanguard.errors import OutOfStepError, says_nonfinite
from ddp_nanguard.report.types import RAISED
from ddp_nanguard.tensors.accelerator import answers, aside

from .policy import FaultPolicy

STUCK_AFTER_S = 0.5
"""How long the stream of a rank is given that waits for a peer which has raised."""
PEER_GRACE_S = 1.0
"""How long a rank whose own code raised, with finite values, waits for a peer that may have raised first."""


class SingleRankExit:
    """Writes this rank's part of a dump when it, or a peer, is not going to reach a collective any more.

    Args:
        context: of the guard.
        policy: writes the dump.
        record: gives the step that is to be dumped: the one that is running, or the one before it where that was bad
            and its verdict has not been read yet.

    A thread polls the job's store; see `AbortSignal`.
    """

    def __init__(self, context: GuardContext, policy: FaultPolicy, record: Callable[[], StepRecord]) -> None:
        self._context = context
        self._policy = policy
        self._record = record
        ranks, timeout_s = context.ranks, context.config.timeout_s
        self._abort: AbortSignal | None = None
        if ranks.world_size > 1:
            told = self._on_abort, self._on_deadlock
            self._abort = AbortSignal(ranks.name, ranks.rank, ranks.world_size, timeout_s, *told, ranks.group)

    def on_uncaught_exception(self, error: BaseException) -> int | None:
        """The job's own exception ends this process.

        If this rank's slots are bad, its device has failed, or a peer raised before: write the local part, tell the
        peers, wait for theirs.

        Returns:
            The exit code, None where the exception has nothing to do with a fault.
        """
        with self._apart(self._context.config.timeout_s / 4):
            return self._end_with(error)

    def _end_with(self, error: BaseException) -> int | None:
        record = self._record()
        # the step before this one was bad, or a peer has raised: then this exception is a consequence
        is_told = not record.is_current or (self._abort is not None and self._abort.is_set())
        is_told = is_told or not self._context.reach.answers
        is_seen = not is_told and self._policy.has_findings(record, error)
        if not (is_told or is_seen or says_nonfinite(error) or self._hears_of_peer()):
            return None
        name = type(error).__name__
        if self._abort is not None:  # peers look at their own step at once, so that each can tell what all saw
            self._abort.set(f"raised {name} {RAISED}")
        report = self._policy.dump_single_rank(record, name, self._meet)
        if report is None:  # the other thread is at it, and ends the process when it has done
            time.sleep(self._context.config.timeout_s)
        elif self._abort is not None:
            self._abort.wait_for_all()
        return self._context.config.exit_code

    def sees_damage(self) -> bool:
        """Whether this rank's weights or other lasting state are bad now; False on a sharded model.

        Collective: none. Host sync: many.
        """
        if self._context.wrapper.is_sharded:
            return False
        with self._apart(STUCK_AFTER_S):
            return self._policy.sees_damage(self._record())

    def _meet(self, index: int, seen: str) -> dict[int, str]:
        return {index: seen} if self._abort is None else self._abort.meet(index, seen)

    def _hears_of_peer(self) -> bool:
        return self._abort is not None and self._abort.wait(PEER_GRACE_S)

    def _on_abort(self, text: str) -> None:
        """A peer has raised, and this rank's main thread may wait for it for ever. Runs on the polling thread."""
        if self._abort is None:
            return
        with self._apart(STUCK_AFTER_S):
            is_written = self._policy.dump_with_peer(self._record(), text, self._meet)
        if is_written:
            self._abort.wait_for_all()
            exit_process(self._context.config.exit_code)

    @contextlib.contextmanager
    def _apart(self, within_s: float) -> Iterator[None]:
        """Read the device without waiting for what the job has launched, which may wait for a peer for ever.

        Args:
            within_s: how long that is given to end all the same.
        """
        context = self._context
        devices = (*context.window.other_devices, context.device)  # the last one is the current one, aside
        if not all(answers(device, context.config.timeout_s / 4) for device in devices):
            context.reach = Reach(answers=False)
            yield
            return
        context.reach = Reach(up_to=context.slots.finished_up_to(within_s, devices[:-1]))
        with contextlib.ExitStack() as streams:
            for device in devices:
                streams.enter_context(aside(device))
            yield

    def _on_deadlock(self, places: str) -> None:
        """All ranks wait, in different collectives. Runs on the polling thread: no exception reaches the main one."""
        config = self._context.config
        error = OutOfStepError(
            f"ranks are not in the same step, and have waited for each other for {config.timeout_s:g} s: {places}; "
            "give every rank the same batches and steps, and let all of them issue each collective"
        )
        text = f"{OutOfStepError.__name__}: {error}"
        with contextlib.suppress(Exception):
            sys.stderr.write(f"{text}\n")
        tell_launcher(text, None, config.exit_code)
        if self._abort is not None:
            self._abort.wait_for_all()
        exit_process(config.exit_code)

    def close(self) -> None:
        """Stop listening."""
        if self._abort is not None:
            self._abort.close()
