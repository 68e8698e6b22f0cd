"""The command line in a fresh process, forked from the server that has torch loaded: 0.1 s where a new one takes 3."""

from __future__ import annotations

import os

from tests.e2e.exits import environment
from tests.ranks import Outcome, run_ranks, run_ranks_raw
from tests.replaying import Replayed, captured, torchrun_variables


def command(*arguments: str, timeout_s: float = 90) -> Replayed:
    """``ddp-nanguard`` with these arguments: its exit code and what it printed."""
    (ended,) = run_ranks(
        _run,
        world_size=1,
        timeout_s=timeout_s,
        process_group=False,
        num_threads=None,
        env=environment(),
        arguments=list(arguments),
    )
    return ended  # type: ignore[no-any-return]  # a body returns anything


def _run(rank: int, world_size: int, arguments: list[str]) -> Replayed:
    from ddp_nanguard.cli.main import main

    return captured(lambda: main(arguments))


def replay_launch(dump: str, world_size: int) -> list[Outcome]:
    """``ddp-nanguard replay`` on several ranks, as torchrun starts it, for what ends before the ranks meet."""
    env = {**environment(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    return run_ranks_raw(_launch, world_size=world_size, process_group=False, env=env, dump=dump)


def _launch(rank: int, world_size: int, dump: str) -> int:
    from ddp_nanguard.cli.main import main

    os.environ |= torchrun_variables(rank, world_size)
    return main(["replay", dump])
