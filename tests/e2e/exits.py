"""Exits in a row under torchrun: every worker's code, every worker's text, no hang, no abort.

Usage: python -m tests.e2e.exits [--count 20]

A clean run must end with code 0; a faulty one with 65 on every rank and the same message on every rank.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "digits.py"
LAUNCH_TIMEOUT_S = 120
FAULT_CODE = 65


@dataclass(frozen=True)
class Launch:
    """One run of torchrun.

    Attributes:
        code: torchrun's own exit code.
        worker_codes: codes of the workers that failed, by rank, as torchrun saw them.
        texts: per rank, what the worker printed.
        summary: torchrun's stderr.
    """

    code: int
    worker_codes: dict[int, int]
    texts: list[str]
    summary: str


def environment() -> dict[str, str]:
    paths = [str(REPOSITORY), str(EXAMPLE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def torchrun(*script: str, num_ranks: int = 2) -> Launch:
    """Runs a script, or ``-m`` and a module, with its arguments under torchrun, with a log file per worker."""
    with tempfile.TemporaryDirectory(prefix="torchrun-") as logs:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        command += ["--max-restarts=0", f"--log-dir={logs}", "--redirects=3", "--monitor-interval=0.05"]
        command += script
        job = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=LAUNCH_TIMEOUT_S, check=False
        )
        texts = [_text(worker) for worker in _workers(Path(logs))]
        return Launch(job.returncode, _worker_codes(job.stderr), texts, job.stderr)


def _workers(logs: Path) -> list[Path]:
    return sorted(logs.glob("*/attempt_0/*"), key=lambda path: int(path.name))


def _text(worker: Path) -> str:
    return "".join((worker / name).read_text() for name in ("stdout.log", "stderr.log"))


def _worker_codes(summary: str) -> dict[int, int]:
    found = re.findall(r"rank\s*: (\d+) \(local_rank: \d+\)\s*exitcode\s*: (-?\d+)", summary)
    return {int(rank): int(code) for rank, code in found}


def messages_of(texts: list[str]) -> list[str | None]:
    """The message of each worker, without the rank that torchrun puts before each line."""
    found = [re.search(r"NonFiniteError: .*(?:\n(?:\[rank\d+\]: )?  .*)*", text) for text in texts]
    return [re.sub(r"\n\[rank\d+\]: ", "\n", match[0]) if match else None for match in found]


def clean_exit(out: Path) -> Launch:
    return torchrun(str(EXAMPLE), "--steps=3", f"--out={out}")


def faulty_exit(out: Path) -> Launch:
    return torchrun(str(EXAMPLE), f"--out={out}")


def is_clean(launch: Launch) -> bool:
    return launch.code == 0 and launch.worker_codes == {} and "Signal" not in launch.summary


def is_faulty(launch: Launch, num_ranks: int = 2) -> bool:
    codes = dict.fromkeys(range(num_ranks), FAULT_CODE)
    messages = messages_of(launch.texts)
    agreed = None not in messages and len(set(messages)) == 1 and len(messages) == num_ranks
    return launch.code == 1 and launch.worker_codes == codes and agreed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="exits-") as out:
        num_clean = sum(_shown(clean_exit(Path(out)), is_clean) for _ in range(options.count))
        num_faulty = sum(_shown(faulty_exit(Path(out)), is_faulty) for _ in range(options.count))
    print(f"clean exits with code 0: {num_clean} of {options.count}")
    print(f"faulty exits with code {FAULT_CODE} and the same text on all ranks: {num_faulty} of {options.count}")
    return int((num_clean, num_faulty) != (options.count, options.count))


def _shown(launch: Launch, is_right: Callable[[Launch], bool]) -> bool:
    """Whether a launch ended as it must; one that did not is printed."""
    if is_right(launch):
        return True
    print(f"torchrun {launch.code}, workers {launch.worker_codes}", *launch.texts, launch.summary, sep="\n----\n")
    return False


if __name__ == "__main__":
    sys.exit(main())
