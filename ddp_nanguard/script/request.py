"""`ReplayRequest`: what the environment asks of a script that replays a dump."""

from __future__ import annotations

import argparse
import os
import shlex
from dataclasses import dataclass

from ddp_nanguard.config import ENV_REPLAY, ENV_REPLAY_OPTIONS, replay_texts
from ddp_nanguard.errors import DumpError

TRACE_ALONE = "trace"
"""An experiment that changes nothing: what the trace says is printed, the outcome is not."""


@dataclass(frozen=True)
class ReplayRequest:
    """What the environment asks for.

    Attributes:
        paths: the dump's directories.
        trace: whether the operators are traced.
        rank: the rank whose step this process runs alone; None where each process runs the step of its own rank.
        as_rank: alone, the rank that the script sees.
        may_be_another_rank: alone, whether the parent starts it again where the script waits for another rank's object.
        world_size: alone, the number of ranks that the script sees.
        experiment: alone, what is changed: ``plain``, ``float32``, ``deterministic``, ...; `TRACE_ALONE` where only the
            trace is wanted; None for a replay that is compared with the record.
        stop_at: alone, the operator at which a debugger opens, as (order, name); None for none.
        result: alone, the file for the result; None where nobody reads one.
    """

    paths: tuple[str, ...]
    trace: bool = False
    rank: int | None = None
    as_rank: int = 0
    may_be_another_rank: bool = False
    world_size: int = 1
    experiment: str | None = None
    stop_at: tuple[int, str] | None = None
    result: str | None = None

    @classmethod
    def from_environment(cls) -> ReplayRequest:
        """The request of this process.

        Raises:
            DumpError: a variable does not fit.
        """
        paths, text = replay_texts()
        options = _parser().parse_args(shlex.split(text))
        stop_at = (int(options.stop_at[0]), options.stop_at[1]) if options.stop_at else None
        return cls(**{**vars(options), "paths": tuple(paths.split(os.pathsep)), "stop_at": stop_at})

    def to_environment(self) -> dict[str, str]:
        """The variables that ask for this."""
        options = ["--trace"] if self.trace else []
        options += ["--may-be-another-rank"] if self.may_be_another_rank else []
        for name in ("rank", "as_rank", "world_size", "experiment", "result"):
            value = getattr(self, name)
            options += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
        options += ["--stop-at", *map(str, self.stop_at)] if self.stop_at is not None else []
        return {ENV_REPLAY: os.pathsep.join(self.paths), ENV_REPLAY_OPTIONS: shlex.join(options)}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]  # this one does not end the process
        raise DumpError(f"environment variable {ENV_REPLAY_OPTIONS}: {message}; valid: --trace")


def _parser() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--as-rank", type=int, default=0)
    parser.add_argument("--may-be-another-rank", action="store_true")
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--experiment")
    parser.add_argument("--stop-at", nargs=2)
    parser.add_argument("--result")
    return parser
