"""``ddp-nanguard replay DUMP -- COMMAND``: the training script itself runs the step, in processes of its own."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ddp_nanguard.diagnosis.experiments import KEEP_DTYPE, OWN_CASTS, ExperimentResult, changed_result, repeated
from ddp_nanguard.diagnosis.trace_text import finding_text
from ddp_nanguard.dump.read import Dump, open_dump
from ddp_nanguard.errors import DumpError
from ddp_nanguard.replay.outcome import EXIT_CODES, Outcome, first_own_site, not_replayable, why_not_replayable
from ddp_nanguard.replay.outcome_text import outcome_text
from ddp_nanguard.replay.session import origin_rank
from ddp_nanguard.report.command_text import replay_all_text, script_text
from ddp_nanguard.report.types import Phase, Site
from ddp_nanguard.script.ending import WAITS_FOR
from ddp_nanguard.script.launch import Ended, run_script, world_size_of
from ddp_nanguard.script.request import TRACE_ALONE, ReplayRequest
from ddp_nanguard.wrappers import wrapper_class


def replay_script(options: argparse.Namespace) -> int:
    """Run the command as one rank of the dump, and again for each experiment. Returns the exit code.

    Raises:
        DumpError: the dump or an option cannot be used.
    """
    _require_fitting(options)
    dump = open_dump(options.dump)
    rank = options.rank if options.rank is not None else origin_rank(dump)
    dump.evidence(rank)  # raises where the dump has no such rank
    reason = why_not_replayable(dump, alone=True, by_script=True)
    if reason is not None:
        if dump.report.origin is not None and dump.report.origin.phase is Phase.REDUCE:
            paths = os.pathsep.join(options.dump)
            reason += f": {replay_all_text(paths, script_text(options.job), dump.world_size)}"
        return _tell_cannot(options, dump, rank, reason)
    _tell_other_command(dump, options.job)
    runs = _Runs(dump, rank, options)
    wants_trace, is_compiled = options.trace or options.pdb, dump.manifest.wrapper_description.compiled
    ended = runs.run(trace=wants_trace and not is_compiled)
    if ended.data is None:
        return _tell_cannot(options, dump, rank, _no_guard(ended))
    data, code, results = ended.data, int(ended.data.pop("exit_code")), list[ExperimentResult]()
    if code != EXIT_CODES[Outcome.CANNOT]:
        if wants_trace and is_compiled:  # a trace runs it eagerly, which is another step
            data |= _of_trace(runs.run(trace=True, experiment=TRACE_ALONE).data or {})
        results = list(_told(options, runs.experiments(data)))
    if options.json:
        experiments = {result.name: result.to_dict() for result in results}
        print(json.dumps({**data, **({"experiments": experiments} if results else {})}))
    return code


def _tell_other_command(dump: Dump, job: Sequence[str]) -> None:
    """Say what of the command is not as in the run: a fix is tried by it, or it is a slip."""
    recorded = shlex.split(script_text(dump.manifest.run.command))
    given, then = _script_and_arguments(job), _script_and_arguments(recorded)
    if then and given != then:
        print(f"note: this is another command than that of the run, which was: {shlex.join(recorded)}", file=sys.stderr)


def _script_and_arguments(command: Sequence[str]) -> list[str]:
    """From the script or module on, without directories; [] where there is none, as in ``-c``."""
    for position, word in enumerate(command[1:], 1):
        is_value = command[position - 1] in ("-W", "-X")  # of an option of Python's
        if not is_value and (word == "-m" or not word.startswith("-")):
            rest = [part for each in command[position + 1 :] for part in each.split("=", 1)]  # --lr=1 is --lr 1
            return [os.path.basename(word), *rest]
    return []


def _of_trace(data: dict[str, Any]) -> dict[str, Any]:
    """What a traced run adds to the outcome of another one."""
    return {key: data[key] for key in ("trace", "cause", "not_run") if key in data}


def _require_fitting(options: argparse.Namespace) -> None:
    if not options.job:
        raise DumpError("no command after --; give that of the run, such as: -- python train.py")
    if options.recipe is not None:
        raise DumpError(f"option --recipe={options.recipe}: the command after -- is the recipe; leave one of both out")
    if options.device is not None:
        raise DumpError(f"option --device={options.device} is for a recipe; the script chooses its device itself")
    if options.minimize:
        raise DumpError("option --minimize runs the step hundreds of times: it needs a recipe (--recipe)")


def _tell_cannot(options: argparse.Namespace, dump: Dump, rank: int, reason: str) -> int:
    result = not_replayable(rank, first_own_site(dump, rank, alone=True), reason)
    print(json.dumps(result.to_dict()) if options.json else outcome_text(result), end="\n" if options.json else "")
    return EXIT_CODES[Outcome.CANNOT]


def _no_guard(ended: Ended) -> str:
    how = "normally" if ended.code == 0 else f"with code {ended.code}, see its own message"
    return f"the command ended {how}, before it came to a line that makes NanGuard(...)"


def _told(options: argparse.Namespace, results: Iterator[ExperimentResult]) -> Iterator[ExperimentResult]:
    for number, result in enumerate(results):
        if not options.json:
            print(("" if number else "\n") + finding_text(result), end="", flush=True)
        yield result


@dataclasses.dataclass
class _Runs:
    """Runs of one script."""

    dump: Dump
    rank: int
    options: argparse.Namespace
    as_rank: int | None = None

    def run(self, **asked: Any) -> Ended:
        """One run of the command; a second one, as the rank that it waits for, where it waits for one."""
        as_rank = self.options.as_rank if self.as_rank is None else self.as_rank
        request = ReplayRequest(
            paths=tuple(str(path.absolute()) for path in self.dump.paths),
            rank=self.rank,
            as_rank=self.rank if as_rank is None else as_rank,
            may_be_another_rank=as_rank is None,
            world_size=world_size_of(self.dump),
            **asked,
        )
        ended = run_script(self.dump, request, self.options.job, quiet=self.options.json)
        if ended.data is None or WAITS_FOR not in ended.data:
            return ended
        self.as_rank = ended.data[WAITS_FOR]
        print(
            f"the script waits for an object of rank {self.as_rank}: started again as that rank, with batch, weights "
            f"and random states of rank {self.rank}",
            file=sys.stderr,
        )
        return self.run(**asked)

    def experiments(self, data: dict[str, Any]) -> Iterator[ExperimentResult]:
        """Those that were asked for, each in runs of its own.

        Args:
            data: of the first run, with its trace for ``--pdb``.
        """
        options = self.options
        if options.dtype:
            is_sharded = wrapper_class(self.dump.manifest.wrapper_description.kind).is_sharded
            name = f"--dtype {options.dtype}"
            yield (
                ExperimentResult(name, KEEP_DTYPE, None)
                if is_sharded
                else self._changed(name, options.dtype, OWN_CASTS)
            )
        if options.repeat:
            yield self._repeated(options.repeat)
        if options.deterministic:
            yield self._changed("--deterministic", "deterministic")
        if options.poison_memory:
            yield self._changed("--poison-memory", "poison-memory")
        if options.pdb:
            yield self._stopped(data)

    def _changed(self, name: str, experiment: str, remark: str = "") -> ExperimentResult:
        found = self.run(experiment=experiment).data
        if found is None or "site" not in found:
            return ExperimentResult(name, f"cannot: {_why_not(found)}", None)
        return changed_result(name, _site(found), remark)

    def _repeated(self, count: int) -> ExperimentResult:
        runs = [self.run(experiment="plain").data for _ in range(count)]
        lost = next((found for found in runs if found is None or "site" not in found), {})
        if lost != {}:
            return ExperimentResult(f"--repeat {count}", f"cannot: {_why_not(lost)}", None)
        return repeated([_site(found) for found in runs if found is not None])

    def _stopped(self, data: dict[str, Any]) -> ExperimentResult:
        first = (data.get("trace") or {}).get("first_nonfinite_op")
        if first is None:
            return ExperimentResult("--pdb", "no operator to stop at", None)
        found = self.run(stop_at=(first["order"], first["operator"])).data or {}
        return ExperimentResult("--pdb", found.get("text", "this run did not come to the operator of the first"), None)


def _site(found: dict[str, Any]) -> Site | None:
    return None if found["site"] is None else Site.from_dict(found["site"])


def _why_not(found: dict[str, Any] | None) -> str:
    return "the script did not come to its guard" if found is None else str(found.get("reason", "see its own message"))
