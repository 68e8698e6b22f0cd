"""``ddp-nanguard replay``: runs one rank's step again, under torchrun every rank's; then traces and experiments."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddp_nanguard.errors import DumpError

from .arguments import Commands, add_dump, add_json, add_replay_source, count, index
from .help_text import add_command

if TYPE_CHECKING:
    from ddp_nanguard.diagnosis.diagnose import Diagnosis
    from ddp_nanguard.diagnosis.experiments import ExperimentResult
    from ddp_nanguard.replay.session import Session

_ALONE = ("rank", "dtype", "repeat", "deterministic", "poison_memory", "minimize", "pdb", "json")
"""Options of a replay of one rank. They have no effect on a replay of all ranks and are refused there."""


def add_replay(commands: Commands) -> None:
    """Add the command ``replay`` to the parser."""
    parser = add_command(commands, "replay", usage="ddp-nanguard replay [OPTIONS] DUMP [-- python train.py ...]")
    add_dump(parser)
    add_replay_source(parser)
    parser.add_argument("--as-rank", type=index, metavar="N", help="with a command: the rank that the script sees")
    add_json(parser)
    _add_more(parser)
    parser.set_defaults(command=run_replay, job=None)


def without_job(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """The arguments of ``replay``, and the command after ``--``; None where it has none, or another command is run."""
    if arguments[:1] != ["replay"] or "--" not in arguments:
        return arguments, None
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


def _add_more(parser: argparse.ArgumentParser) -> None:
    """Add the options that go beyond the plain replay, which is always run and printed first."""
    group = parser.add_argument_group("then, after the plain replay")
    group.add_argument(
        "--trace", action="store_true", help="every operator: where the value is first made, its line, and why"
    )
    group.add_argument("--dtype", choices=("float32", "float64"), help="does it stay finite in this precision?")
    group.add_argument("--repeat", type=count, metavar="N", help="how often does it fail, and always there?")
    group.add_argument("--deterministic", action="store_true", help="with deterministic algorithms")
    group.add_argument(
        "--poison-memory", action="store_true", help="new and freed memory holds NaN until it is written"
    )
    group.add_argument(
        "--minimize", action="store_true", help="the fewest samples, then micro-batches, that still fail"
    )
    group.add_argument("--max-runs", type=count, default=200, metavar="N", help="bound of --minimize, default 200")
    group.add_argument("--pdb", action="store_true", help="stop at the operator, in your frame")


def run_replay(options: argparse.Namespace) -> int:
    """Run ``ddp-nanguard replay DUMP``, in one process or in each process of torchrun. Returns the exit code.

    Raises:
        DumpError: the dump or an option cannot be used.

    Collective: none in one process; under torchrun as `replay_all_ranks`.
    """
    if options.job is not None:
        from .replay_script import replay_script

        return replay_script(options)
    if options.as_rank is not None:
        raise DumpError(f"option --as-rank={options.as_rank} is for a script: give its command after --")
    from ddp_nanguard.replay import launcher

    if launcher.world_size() == 1:
        return _replay_alone(options)
    from .replay_ranks import replay_all_ranks

    given = {name: getattr(options, name) for name in _ALONE}
    unfit = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None and value is not False]
    if unfit:
        raise DumpError(f"option {unfit[0]} is for the replay of one rank: leave it out, or run without torchrun")
    return replay_all_ranks(options)


def _replay_alone(options: argparse.Namespace) -> int:
    """Print the plain replay, which decides the exit code; then the trace and the experiments that were asked for."""
    from ddp_nanguard.diagnosis.diagnose import diagnose
    from ddp_nanguard.diagnosis.trace_text import diagnosis_text
    from ddp_nanguard.replay.outcome import EXIT_CODES, Outcome
    from ddp_nanguard.replay.outcome_text import outcome_text
    from ddp_nanguard.replay.session import open_session

    session = open_session(options.dump, options.rank, options.recipe, options.device)
    outcome = session.plain()
    _say(options, outcome_text(outcome))
    data = outcome.to_dict()
    found = diagnose(session, outcome) if options.trace or options.pdb else None
    if found is not None:
        data |= found.to_dict()
        _say(options, "\n" + diagnosis_text(found))
    if outcome.outcome is not Outcome.CANNOT:
        results = _run_experiments(options, session, found)
        if results:
            data["experiments"] = {result.name: result.to_dict() for result in results}
    if options.json:
        print(json.dumps(data))
    return EXIT_CODES[outcome.outcome]


def _run_experiments(options: argparse.Namespace, session: Session, found: Diagnosis | None) -> list[ExperimentResult]:
    from ddp_nanguard.diagnosis.trace_text import finding_text

    results: list[ExperimentResult] = []
    for result in _experiments(options, session, found):
        _say(options, finding_text(result) if results else "\n" + finding_text(result))
        results.append(result)
    return results


def _say(options: argparse.Namespace, text: str) -> None:
    if not options.json:
        print(text, end="", flush=True)


def _experiments(options: argparse.Namespace, session: Session, found: Diagnosis | None) -> Iterator[ExperimentResult]:
    from ddp_nanguard.diagnosis import experiments
    from ddp_nanguard.diagnosis.minimize import minimize

    if options.dtype:
        yield experiments.in_dtype(session, options.dtype)
    if options.repeat:
        yield experiments.repeat(session, options.repeat)
    if options.deterministic:
        yield experiments.deterministic(session)
    if options.poison_memory:
        yield experiments.poison_memory(session)
    if options.minimize:
        yield minimize(session, _progress, options.max_runs)
        _progress(0, 0)
    if options.pdb and found is not None and found.traced is not None:
        yield experiments.debug(session, found.traced)


def _progress(num_runs: int, num_samples: int) -> None:
    """Rewrite one line on stderr, if that is a terminal; ``num_runs`` 0 clears it."""
    if sys.stderr.isatty():
        text = f"minimize: {num_samples} samples still fail, {num_runs} runs" if num_runs else " " * 60
        print(f"\r{text:<60}", end="" if num_runs else "\r", file=sys.stderr, flush=True)
