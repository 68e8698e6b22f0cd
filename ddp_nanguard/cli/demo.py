"""``ddp-nanguard demo``: trains ``examples/digits.py`` under torchrun until a NaN occurs by itself, then replays it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from .arguments import WRONG_USAGE, output_directory, told_on_stderr
from .job_output import environment_without_job, error_message, worker_texts

SCRIPT = "digits.py"
TRAINING_TIMEOUT_S = 300


def run_demo(wrapper: str = "ddp", num_ranks: int = 2, out: str | None = None, *, as_json: bool = False) -> int:
    """Run the demo and print what happens.

    Args:
        wrapper: ``ddp``, ``fsdp1`` or ``fsdp2``.
        num_ranks: number of processes.
        out: directory for dumps and logs; default a new temporary one.
        as_json: print dump and outcome as JSON; what people read goes to stderr.

    Returns:
        0 if the training was stopped by the guard and the replay gave the same fault with the same bits, else 1; 2 if
        something that the demo needs is missing.
    """
    script = find_script()
    if script is None or importlib.util.find_spec("sklearn") is None:
        print(_missing(script), file=sys.stderr)
        return WRONG_USAGE
    directory = output_directory(out, "nanguard-demo-")
    with told_on_stderr(as_json):
        dump = _train(script, wrapper, num_ranks, directory)
        code = None if dump is None else _replay(script, wrapper, dump)
    if as_json:
        print(json.dumps({"dump": dump and str(dump), "is_same": code == 0, "replay_exit_code": code}))
    return 0 if code == 0 else 1


def find_script() -> Path | None:
    """``examples/digits.py`` of the checkout, else the installed copy; None where there is neither."""
    schemes = [sysconfig.get_path("data"), sysconfig.get_path("data", sysconfig.get_preferred_scheme("user"))]
    places = [Path(__file__).parents[2] / "examples"]
    places += [Path(root) / "share" / "ddp-nanguard" / "examples" for root in schemes]
    return next((place / SCRIPT for place in places if (place / SCRIPT).is_file()), None)


def _missing(script: Path | None) -> str:
    if script is None:
        return f"ddp-nanguard: the demo's script {SCRIPT} was not installed; run the demo from a checkout"
    return "ddp-nanguard: the demo needs scikit-learn for its images; pip install 'ddp-nanguard[demo]'"


def _train(script: Path, wrapper: str, num_ranks: int, directory: Path) -> Path | None:
    """Train until the guard stops the job; print the message and return the dump, or None if a message is missing."""
    dumps, logs = directory / "nan_dumps", directory / "logs"
    before = _dumps_in(dumps)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += [f"--log-dir={logs}", "--redirects=3", str(script), f"--wrapper={wrapper}", f"--out={dumps}"]
    _say(f"1. Training on digits: {num_ranks} ranks, {wrapper}, no fault planted")
    print(f"   $ torchrun --nproc-per-node {num_ranks} {script} --wrapper {wrapper} --out {dumps}\n", flush=True)
    job = subprocess.run(
        command, env=_environment(script), capture_output=True, text=True, timeout=TRAINING_TIMEOUT_S, check=False
    )
    texts = worker_texts(logs)
    messages = [message for text in texts if (message := error_message(text)) is not None]
    # A directory given with --out may hold dumps of earlier demos.
    new = _dumps_in(dumps) - before
    if len(messages) != num_ranks or not new:
        _say("The job ended without a message from every rank; its output:")
        print("\n".join([*texts, job.stderr])[-8000:])
        return None
    _print_progress(texts)
    print(messages[0], end="\n\n")
    _say(f"   {_agreement(messages)}; workers ended with code {', '.join(_exit_codes(job.stderr))}")
    return max(new)


def _replay(script: Path, wrapper: str, dump: Path) -> int:
    """Replay the rank where the fault began, alone in one process; returns the exit code of the replay."""
    _say("\n2. The guilty rank again, alone, in one process, from the dump")
    training = [str(script), "--wrapper", wrapper, "--out", str(dump.parent)]
    print(f"   $ ddp-nanguard replay {dump} --trace -- python {' '.join(training)}\n", flush=True)
    command = [sys.executable, "-m", "ddp_nanguard", "replay", str(dump), "--trace", "--", sys.executable, *training]
    # its output goes where that of this process goes now
    code = subprocess.run(command, env=_environment(script), stdout=sys.stdout, check=False).returncode
    verdict = "The same fault, bit for bit" if code == 0 else "The replay differs"
    _say(f"\n   {verdict} (exit code {code}); now try: ddp-nanguard show {dump}")
    return code


def _environment(script: Path) -> dict[str, str]:
    """The environment without variables of an enclosing job, with the example importable for its recipe."""
    kept = environment_without_job()
    # A checkout need not be installed.
    package = str(Path(__file__).parents[2])
    paths = [str(script.parent), package, *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": kept.get("OMP_NUM_THREADS", "1")}


def _dumps_in(directory: Path) -> set[Path]:
    return {path for path in directory.glob("step-*") if path.suffix != ".partial"}


def _print_progress(texts: list[str]) -> None:
    for line in texts[0].splitlines():
        if line.startswith("epoch "):
            print(f"   {line}")
    print()


def _agreement(messages: list[str]) -> str:
    same = len(set(messages)) == 1
    return f"all {len(messages)} ranks raised this same text" if same else "the ranks raised DIFFERENT texts"


def _exit_codes(summary: str) -> list[str]:
    return sorted(set(re.findall(r"exitcode\s*: (-?\d+)", summary)))


def _say(text: str) -> None:
    print(text, flush=True)
