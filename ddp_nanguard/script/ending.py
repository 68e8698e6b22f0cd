"""How a script that replays a dump ends: with the outcome and its exit code, before any further line of it has run."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from ddp_nanguard.dump.read import Dump
from ddp_nanguard.errors import DumpError
from ddp_nanguard.replay.outcome import EXIT_CODES, Outcome, not_replayable, recorded_alone
from ddp_nanguard.replay.outcome_text import outcome_text

from .request import ReplayRequest

WRONG_USAGE = 2
WAITS_FOR = "waits_for_rank"
"""Key of what a child leaves that is to be started again as another rank."""


def end(request: ReplayRequest, data: dict[str, Any], text: str, code: int) -> NoReturn:
    """Print the text, leave the data where they are read, and end the process.

    Not by an exception: the script may catch it, and with DDP alive the interpreter's own shutdown can hang.
    """
    if request.result is not None:
        result = Path(request.result)  # whole or not there: the parent waits for it
        part = result.with_suffix(".part")
        part.write_text(json.dumps({**data, "exit_code": code}))
        part.replace(result)
    sys.stderr.flush()
    print(text, end="", flush=True)
    os._exit(code)


def end_cannot(
    request: ReplayRequest, dump: Dump, rank: int, alone: bool, reason: str, waits_for: int | None = None
) -> NoReturn:
    """End with the outcome ``cannot``.

    Args:
        request: of this process.
        dump: the dump.
        rank: whose step it is.
        alone: whether this process stands for it.
        reason: one sentence that names the remedy.
        waits_for: the rank whose object the script waits for: the parent, where there is one, starts it again as that.
    """
    site = None
    with contextlib.suppress(DumpError):
        site = recorded_alone(dump, rank, alone)
    result = not_replayable(rank, site, reason)
    is_retried = waits_for is not None and request.may_be_another_rank
    data = {**result.to_dict(), **({WAITS_FOR: waits_for} if is_retried else {})}
    end(request, data, "" if is_retried else outcome_text(result), EXIT_CODES[Outcome.CANNOT])


def end_wrong_usage(reason: str) -> NoReturn:
    """End as the command does where a dump cannot be used."""
    print(f"ddp-nanguard: {reason}", file=sys.stderr, flush=True)
    os._exit(WRONG_USAGE)
