"""``ddp-nanguard replay --trace`` and ``ddp-nanguard explain``: their options and what they print."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from .errors import DumpError

if TYPE_CHECKING:
    from .cli import Commands
    from .replay.diagnosis import Diagnosis


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of ``replay`` that go beyond the plain replay."""
    parser.add_argument("--trace", action="store_true", help="then every operator: where the value is born, and why")


def add_explain(commands: Commands) -> None:
    """The command ``explain``."""
    parser = commands.add_parser(
        "explain",
        help="why it happened: one sentence and the evidence",
        description="Runs the step under a trace where the dump can be replayed alone; else asks the report.",
    )
    parser.add_argument("dump", nargs="+", metavar="DUMP", help="a dump, or its parts on several nodes")
    parser.add_argument("--rank", type=int, help="default: the rank where the fault began")
    parser.add_argument("--recipe", metavar="MODULE:FUNCTION", help="default: the one that the dump names")
    parser.add_argument("--device", help="default: a GPU if there is one")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(command=run_explain)


def is_wanted(options: argparse.Namespace) -> bool:
    """Whether ``replay`` was asked for more than the plain replay."""
    return bool(options.trace)


def run_replay(options: argparse.Namespace) -> int:
    """``ddp-nanguard replay DUMP --trace``: the plain replay is always said first, and gives the exit code."""
    from .replay.diagnosis import diagnose
    from .replay.outcome import EXIT_CODES
    from .replay.session import open_session
    from .report.outcome_text import outcome_text
    from .report.trace_text import reason_text, trace_text

    session = open_session(options.dump, options.rank, options.recipe, options.device)
    outcome = session.plain()
    if not options.json:
        print(outcome_text(outcome), flush=True)
    found = diagnose(session, outcome)
    if options.json:
        print(json.dumps(found.to_dict()))
    else:
        print(trace_text(found.traced) if found.traced else f"no trace: {found.obstacle}\n")
        print(reason_text(found.reason), end="")
    return EXIT_CODES[outcome.outcome]


def run_explain(options: argparse.Namespace) -> int:
    """``ddp-nanguard explain DUMP``."""
    from .report.trace_text import explanation_text

    found = _explained(options)
    print(json.dumps(found.to_dict()) if options.json else explanation_text(found), end="\n" if options.json else "")
    return 0


def _explained(options: argparse.Namespace) -> Diagnosis:
    from .dump.read import open_dump
    from .replay.diagnosis import diagnose, without_replay
    from .replay.session import open_session

    try:
        session = open_session(options.dump, options.rank, options.recipe, options.device)
        outcome = session.plain()
    except DumpError as error:
        dump = open_dump(options.dump)  # a dump that cannot be read is wrong usage, a missing recipe is not
        return without_replay(dump, None, str(error))
    return diagnose(session, outcome)
