"""``ddp-nanguard explain``: the cause of a fault in one sentence."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from ddp_nanguard.errors import DumpError
from ddp_nanguard.report.command_text import replay_text

from .arguments import Commands, add_dump, add_json, add_replay_source
from .help_text import add_command

if TYPE_CHECKING:
    from ddp_nanguard.diagnosis.diagnose import Diagnosis
    from ddp_nanguard.dump.read import Dump


def add_explain(commands: Commands) -> None:
    """Add the command ``explain`` to the parser."""
    parser = add_command(commands, "explain")
    add_dump(parser)
    add_replay_source(parser)
    parser.add_argument("--no-replay", action="store_true", help="run nothing: ask the report and the history alone")
    add_json(parser)
    parser.set_defaults(command=run_explain)


def run_explain(options: argparse.Namespace) -> int:
    """Run ``ddp-nanguard explain DUMP``: print the reason and its evidence, as text or JSON. Returns 0."""
    from ddp_nanguard.diagnosis.trace_text import explanation_text

    found = _explained(options)
    print(json.dumps(found.to_dict()) if options.json else explanation_text(found), end="\n" if options.json else "")
    return 0


def _why_not(dump: Dump, recipe: str | None, error: DumpError) -> str:
    """Why the step was not run; without a recipe that is no error, and the script would run it."""
    if recipe is not None or dump.manifest.recipe is not None:
        return str(error)
    return f"the step is run too by {replay_text(str(dump.path), dump.manifest.script or 'python train.py')}"


def _explained(options: argparse.Namespace) -> Diagnosis:
    from ddp_nanguard.diagnosis.diagnose import diagnose, without_replay
    from ddp_nanguard.dump.read import open_dump
    from ddp_nanguard.replay.session import open_session

    if options.rank is not None:
        open_dump(options.dump).evidence(options.rank)  # a rank that the dump has not is wrong usage
    if options.no_replay:
        return without_replay(open_dump(options.dump), None, "as --no-replay asks")
    try:
        session = open_session(options.dump, options.rank, options.recipe, options.device)
        outcome = session.plain()
    except DumpError as error:
        dump = open_dump(options.dump)  # a dump that cannot be read is wrong usage, a missing recipe is not
        return without_replay(dump, None, _why_not(dump, options.recipe, error))
    return diagnose(session, outcome)
