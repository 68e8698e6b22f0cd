"""``ddp-nanguard drill -- torchrun ... train.py``: the user's job with an injected fault; is each promise kept?

The job runs as it is, with ``NANGUARD_INJECT`` and a separate dump_dir in its environment. Everything is read from
outside: exit codes and output of the workers, the dump, a replay in its own process, the process table.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_nanguard.config import ENV_INJECT, ENV_PREFIX, ENV_REPLAY, GuardConfig
from ddp_nanguard.errors import DumpError
from ddp_nanguard.inject.spec import IN_PARAMETERS, WITHOUT_LAYER
from ddp_nanguard.report.types import Phase

from .arguments import WRONG_USAGE, output_directory, told_on_stderr
from .check import Check
from .drill_job import ENV_DRILL_ID, LAUNCHERS, JobResult, kill_all, num_processes, run_job
from .job_output import environment_without_job, error_message

if TYPE_CHECKING:
    from ddp_nanguard.dump.rank_records import InjectedFault
    from ddp_nanguard.dump.read import Dump

PLANTED = "the fault was planted"
MAX_SHOWN = 3000


@dataclass(frozen=True)
class DrillConfig:
    """The job to run, and the faults to inject into it.

    Attributes:
        command: the user's.
        phases: injected one after the other, with one run of the job each.
        step: of the fault, as the guard counts.
        rank: of the fault; None for rank 1, or 0 where the command starts one process.
        layer: of the fault; None leaves the choice to the guard.
        kind: ``nan``, ``inf`` or ``-inf``.
        timeout_s: for the job, and for its replay.
        out: directory for dumps and logs; None for a temporary one, which is removed if every promise holds.
    """

    command: tuple[str, ...]
    phases: tuple[str, ...] = ("forward",)
    step: int = 2
    rank: int | None = None
    layer: str | None = None
    kind: str = "nan"
    timeout_s: float = 600.0
    out: str | None = None


def run_drill(config: DrillConfig, *, as_json: bool = False) -> int:
    """Run the job once per phase and print a table for each.

    Args:
        config: the job and its faults.
        as_json: print the checks by phase as JSON; what people read goes to stderr.

    Returns:
        0 if every promise holds in every phase, 1 if not, 2 where the job cannot be run.
    """
    problem = _problem(config)
    if problem is not None:
        print(f"ddp-nanguard: {problem}", file=sys.stderr)
        return WRONG_USAGE
    directory = output_directory(config.out, "nanguard-drill-")
    with told_on_stderr(as_json):
        rows = {phase: _drill(replace(config, phases=(phase,)), phase, directory / phase) for phase in config.phases}
        holds = _tell_sum(rows, directory)
    if holds and config.out is None:
        shutil.rmtree(directory, ignore_errors=True)
    if as_json:
        phases = {phase: [asdict(row) for row in of_phase] for phase, of_phase in rows.items()}
        print(json.dumps({"holds": holds, "phases": phases, "directory": str(directory)}))
    return 0 if holds else 1


def _tell_sum(rows: dict[str, list[Check]], directory: Path) -> bool:
    """Print whether every promise holds in every phase, and return it."""
    broken = [f"{phase}: {row.promise}" for phase, of_phase in rows.items() for row in of_phase if row.holds is False]
    num_checked = sum(row.holds is not None for of_phase in rows.values() for row in of_phase)
    if not broken:
        print(f"drill: all {num_checked} promises hold")
        return True
    print(f"drill: FAILED: {len(broken)} of {num_checked} promises: {'; '.join(broken)} (dumps and logs: {directory})")
    return False


def _problem(config: DrillConfig) -> str | None:
    if not config.command:
        return "drill needs a command: ddp-nanguard drill -- torchrun --nproc-per-node 2 train.py ..."
    if shutil.which(config.command[0]) is None and config.command[0] != "torchrun":
        return f"there is no command {config.command[0]!r}; give what starts the job: -- torchrun ... train.py"
    if config.layer is not None and set(config.phases) <= set(WITHOUT_LAYER):
        return f"option layer={config.layer!r}: phase {config.phases[0]} belongs to no layer; leave it out"
    return None


def _drill(config: DrillConfig, phase: str, directory: Path) -> list[Check]:
    directory.mkdir(parents=True, exist_ok=True)
    spec = _fault_spec(config, phase)
    text = ",".join(f"{key}={value}" for key, value in spec.items())
    print(f"{ENV_INJECT}={text}\n$ {' '.join(config.command)}", flush=True)
    environment = _environment(directory, phase, text)
    ran = run_job(config.command, config.timeout_s, directory, environment)
    dump = _dump_in(directory / "nan_dumps")
    lack = _nothing_to_plant(ran)
    rows = [_ended(ran, config), _was_planted(ran, dump, spec)] if lack is None else [Check(PLANTED, None, lack)]
    if lack is None and (dump is not None or not any(row.holds is False for row in rows)):
        rows += _about_stop(ran, dump)
        rows += _about_dump(dump, spec, config, environment)
    rows.append(Check("no process left", not ran.left, "; ".join(ran.left) or "none"))
    print("\n".join(map(str, rows)), flush=True)
    if any(row.holds is False for row in rows) and dump is None:
        _show_output(ran)
    print(flush=True)
    return rows


def _fault_spec(config: DrillConfig, phase: str) -> dict[str, Any]:
    rank = config.rank if config.rank is not None else min(1, num_processes(config.command) - 1)
    spec: dict[str, Any] = {"rank": rank, "step": config.step, "phase": phase, "kind": config.kind}
    return spec if config.layer is None or phase in WITHOUT_LAYER else {**spec, "layer": config.layer}


def _environment(directory: Path, phase: str, text: str) -> dict[str, str]:
    """The user's environment with the fault; what would keep the guard from stopping is reset, ``enabled`` is not."""
    names = {ENV_INJECT: text, f"{ENV_PREFIX}DUMP_DIR": str(directory / "nan_dumps"), f"{ENV_PREFIX}ON_FAULT": "stop"}
    names |= {f"{ENV_PREFIX}ON_LOSS": "stop", f"{ENV_PREFIX}REDACT": "0", f"{ENV_PREFIX}LOOK_AGAIN": "1"}
    # Processes of the job are found by this variable, also those whose parent has ended.
    names[ENV_DRILL_ID] = uuid.uuid4().hex
    if phase == Phase.OPTIMIZER:
        # Without the weights from before the update there is nothing to replay it from.
        names |= {f"{ENV_PREFIX}KEEP_PREVIOUS": "1", f"{ENV_PREFIX}VERDICT": "sync"}
    kept = environment_without_job()
    return {**kept, "PYTHONUNBUFFERED": "1", **names}


# -- the promises ------------------------------------------------------------------------------------------------------


def _ended(ran: JobResult, config: DrillConfig) -> Check:
    if ran.stopped_because is not None:
        return Check("stopped", False, f"{ran.stopped_because}; killed with its children")
    if ran.code == 0:
        return Check("stopped", False, f"the job went through to its end (code 0) in {ran.seconds:.0f} s")
    return Check("stopped", True, f"after {ran.seconds:.0f} s, code {ran.code}")


def _nothing_to_plant(ran: JobResult) -> str | None:
    """Why the fault has no place in this job, such as a batch of integers alone; None where it has one."""
    refused = [said for said in ran.said if said.startswith("NOT planted") and "no floating tensor" in said]
    return f"nothing to plant it in: {refused[0]}" if refused else None


def _was_planted(ran: JobResult, dump: Path | None, spec: dict[str, Any]) -> Check:
    name = PLANTED
    if _injected(_opened(dump), spec["rank"]):
        return Check(name, True, f"by the guard on rank {spec['rank']}")
    done = [said for said in ran.said if said.startswith("planted")]
    refused = [said for said in ran.said if said.startswith("NOT planted")]
    wrong = [line for text in ran.texts for line in text.splitlines() if "ValueError" in line and ENV_INJECT in line]
    if done:
        return Check(name, True, done[0])
    if refused or wrong:
        return Check(name, False, (refused or wrong)[0].split("ValueError: ")[-1])
    if ran.said:
        return Check(name, False, f"a guard was built, but its step {spec['step']} was not reached: {ran.said[0]}")
    return Check(name, False, "no sign of a guard: the job builds no NanGuard, or ended before it")


def _about_stop(ran: JobResult, dump: Path | None) -> list[Check]:
    opened = _opened(dump)
    expected = opened.manifest.options.exit_code if opened is not None else GuardConfig.exit_code
    count = opened.world_size if opened is not None else len(ran.texts)
    codes = [ran.codes.get(rank) for rank in range(count)]
    together = all(code == expected for code in codes)
    shown = ", ".join("none" if code is None else str(code) for code in codes)
    rows = [Check("every worker's exit code", together, f"{shown}; promised: {expected}")]
    messages = [stop.text for stop in ran.told]
    messages = messages or [message for text in ran.texts if (message := error_message(text)) is not None]
    same = len(messages) == count and len(set(messages)) == 1
    if same:
        return [*rows, Check("one text on all ranks", True, messages[0].splitlines()[0])]
    given = f"{len(messages)} of {count} ranks gave a message, {len(set(messages))} different"
    return [*rows, Check("one text on all ranks", False, given)]


def _about_dump(
    dump: Path | None, spec: dict[str, Any], config: DrillConfig, environment: dict[str, str]
) -> list[Check]:
    if dump is None:
        return [Check("the dump", False, "there is none")]
    complete = _complete(dump)
    opened = _opened(dump)
    if opened is None:
        return [complete]
    return [_named(opened, spec), complete, _replayed(opened, config, environment)]


def _named(dump: Dump, spec: dict[str, Any]) -> Check:
    """Whether the report names the injected site and no other; backward may turn an inf into NaN (inf times 0)."""
    injected = _injected(dump, spec["rank"])
    planned = {**spec, "layer": injected[0].layer if injected else spec.get("layer"), "micro_batch": 0}
    if spec["phase"] in IN_PARAMETERS:
        planned["micro_batch"] = None
    report = dump.report
    origin = report.origin.to_dict() if report.origin is not None else {}
    if spec["phase"] == Phase.REDUCE:
        origin["rank"] = report.holders[0] if len(report.holders) == 1 else None
    wrong = [
        f"{key} {origin.get(key)!r} instead of {value!r}"
        for key, value in planned.items()
        if origin.get(key) != value and not (key == "kind" and spec["phase"] == Phase.BACKWARD and value != "nan")
    ]
    # what the reduce made is of no single rank in the report; that one rank holds it says where it was planted
    whose = "no single rank, held by rank" if spec["phase"] == Phase.REDUCE else "rank"
    place = [f"{whose} {planned['rank']}", f"step {planned['step']}", planned["phase"], planned["layer"] or ""]
    return Check("named exactly", not wrong, "; ".join(wrong) or " · ".join(filter(None, place)))


def _complete(dump: Path) -> Check:
    from ddp_nanguard.dump.read import open_dump

    try:
        opened = open_dump([str(dump)], verify=True)
    except DumpError as error:
        return Check("the dump is complete", False, str(error))
    manifest, missing = opened.manifest, opened.missing_ranks
    problems = [f"ranks missing: {missing}"] if missing else []
    problems += [manifest.weights.problem] if manifest.weights.problem else []
    problems += manifest.problems
    size = f"{len(opened.ranks)} ranks, {opened.size_bytes / 2**20:.1f} MiB, checksums right"
    return Check("the dump is complete", not problems, "; ".join(problems) or size)


def _replayed(dump: Dump, config: DrillConfig, environment: dict[str, str]) -> Check:
    # A fault of the reduce comes from several ranks, so all of them replay.
    is_together = dump.report.origin is not None and dump.report.origin.phase is Phase.REDUCE
    name = "the replay is the same"
    # The replay takes the fault from the dump; with the variable it would be injected a second time.
    variables = {key: value for key, value in environment.items() if not key.startswith(ENV_PREFIX)}
    command = _replay_command(dump, config, is_together)
    if is_together and dump.manifest.recipe is None:
        variables[ENV_REPLAY] = str(dump.path)
    # A checkout need not be installed.
    package = str(Path(__file__).parents[2])
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [variables.get("PYTHONPATH"), package]))
    replay = subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = replay.communicate(timeout=config.timeout_s)
    except subprocess.TimeoutExpired:
        kill_all(environment[ENV_DRILL_ID])
        replay.communicate()
        return Check(name, False, f"the replay did not end within {config.timeout_s:g} s")
    outcome = _last_json(output)
    who = f"all {dump.world_size} ranks" if is_together else f"rank {outcome.get('rank')} alone"
    if replay.returncode == 0 and outcome.get("outcome") == "same":
        return Check(name, True, f"{who}, bit for bit")
    said = outcome.get("reason") or (errors.strip().splitlines() or ["no output"])[-1]
    return Check(name, False, f"{outcome.get('outcome', 'no outcome')} (code {replay.returncode}): {said}")


def _replay_command(dump: Dump, config: DrillConfig, is_together: bool) -> list[str]:
    """By the recipe that the dump names, else by the job's own script."""
    path, has_recipe = str(dump.path), dump.manifest.recipe is not None
    alone = [sys.executable, "-m", "ddp_nanguard", "replay", path, "--json"]
    if not is_together:
        return alone if has_recipe else [*alone, "--", *config.command]
    launch = [sys.executable, "-m", LAUNCHERS[0], "--standalone", f"--nproc-per-node={dump.world_size}"]
    together = [*launch, "--redirects=0", "-m", "ddp_nanguard", "replay", path]
    return together if has_recipe else list(config.command)


def _dump_in(directory: Path) -> Path | None:
    found = sorted(path for path in directory.glob("step-*") if (path / "manifest.json").is_file())
    return found[0] if found else None


def _opened(dump: Path | None) -> Dump | None:
    """The dump, even if its files are damaged; None where it cannot be read."""
    from ddp_nanguard.dump.read import open_dump

    with contextlib.suppress(DumpError):
        return open_dump([str(dump)], verify=False) if dump is not None else None
    return None


def _injected(dump: Dump | None, rank: int) -> tuple[InjectedFault, ...]:
    with contextlib.suppress(DumpError):
        return dump.evidence(rank).injected if dump is not None else ()
    return ()


def _last_json(text: str) -> dict[str, Any]:
    # The code of the user may print lines too.
    for line in reversed(text.splitlines()):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return {}


def _show_output(ran: JobResult) -> None:
    for rank, text in enumerate(ran.texts):
        print(f"--- the end of what worker {rank} printed:\n{text[-MAX_SHOWN:].rstrip()}")
