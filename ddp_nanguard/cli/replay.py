"""``ddp-nanguard replay`` beyond the plain replay, and ``ddp-nanguard explain``: their options and what they print."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddp_nanguard.errors import DumpError

if TYPE_CHECKING:
    from ddp_nanguard.diagnosis.diagnose import Diagnosis
    from ddp_nanguard.diagnosis.experiments import ExperimentResult
    from ddp_nanguard.replay.session import Session

    from .arguments import Commands


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of ``replay`` that go beyond the plain replay, which is always run and said first."""
    group = parser.add_argument_group("then, after the plain replay")
    group.add_argument(
        "--trace", action="store_true", help="every operator: where the value is born, its line, and why"
    )
    group.add_argument("--dtype", choices=("float32", "float64"), help="does it stay finite in this precision?")
    group.add_argument("--repeat", type=_count, metavar="N", help="how often does it fail, and always there?")
    group.add_argument("--deterministic", action="store_true", help="with deterministic algorithms")
    group.add_argument(
        "--poison-memory", action="store_true", help="new and freed memory holds NaN until it is written"
    )
    group.add_argument(
        "--minimize", action="store_true", help="the fewest samples, then micro-batches, that still fail"
    )
    group.add_argument("--max-runs", type=_count, default=200, metavar="N", help="bound of --minimize, default 200")
    group.add_argument("--pdb", action="store_true", help="stop at the operator, in your frame")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


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
    parser.add_argument("--no-replay", action="store_true", help="run nothing: ask the report and the history alone")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(command=run_explain)


def is_wanted(options: argparse.Namespace) -> bool:
    """Whether ``replay`` was asked for more than the plain replay."""
    return bool(
        options.trace
        or options.dtype
        or options.repeat
        or options.deterministic
        or options.poison_memory
        or options.minimize
        or options.pdb
    )


def run_replay(options: argparse.Namespace) -> int:
    """The plain replay, said first and the exit code; then the trace and the experiments asked for."""
    from ddp_nanguard.diagnosis.diagnose import diagnose
    from ddp_nanguard.replay.outcome import EXIT_CODES, Outcome
    from ddp_nanguard.replay.session import open_session

    from .outcome_text import outcome_text
    from .trace_text import diagnosis_text, finding_text

    session = open_session(options.dump, options.rank, options.recipe, options.device)
    outcome = session.plain()
    _say(options, outcome_text(outcome))
    data = outcome.to_dict()
    found = diagnose(session, outcome) if options.trace or options.pdb else None
    if found is not None:
        data |= found.to_dict()
        _say(options, "\n" + diagnosis_text(found))
    if outcome.outcome is not Outcome.CANNOT:
        findings: list[ExperimentResult] = []
        for finding in _experiments(options, session, found):
            _say(options, "\n" + finding_text(finding) if not findings else finding_text(finding))
            findings.append(finding)
        data["experiments"] = {finding.name: finding.to_dict() for finding in findings}
    if options.json:
        print(json.dumps(data))
    return EXIT_CODES[outcome.outcome]


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
    """One line that is written over, where a person watches."""
    if sys.stderr.isatty():
        text = f"minimize: {num_samples} samples still fail, {num_runs} runs" if num_runs else " " * 60
        print(f"\r{text:<60}", end="" if num_runs else "\r", file=sys.stderr, flush=True)


def run_explain(options: argparse.Namespace) -> int:
    """``ddp-nanguard explain DUMP``."""
    from .trace_text import explanation_text

    found = _explained(options)
    print(json.dumps(found.to_dict()) if options.json else explanation_text(found), end="\n" if options.json else "")
    return 0


def _explained(options: argparse.Namespace) -> Diagnosis:
    from ddp_nanguard.diagnosis.diagnose import diagnose, without_replay
    from ddp_nanguard.dump.read import open_dump
    from ddp_nanguard.replay.session import open_session

    if options.no_replay:
        return without_replay(open_dump(options.dump), None, "--no-replay")
    try:
        session = open_session(options.dump, options.rank, options.recipe, options.device)
        outcome = session.plain()
    except DumpError as error:
        dump = open_dump(options.dump)  # a dump that cannot be read is wrong usage, a missing recipe is not
        return without_replay(dump, None, str(error))
    return diagnose(session, outcome)
