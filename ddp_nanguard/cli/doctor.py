"""``ddp-nanguard doctor``: whether this machine, and a job, have what the guard needs; under torchrun on all ranks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from .arguments import Commands, add_job, add_json, job_of
from .help_text import add_command

if TYPE_CHECKING:
    from .check import Check


def add_doctor(commands: Commands) -> None:
    """Add the command ``doctor`` to the parser."""
    parser = add_command(commands, "doctor", usage="ddp-nanguard doctor [OPTIONS] [-- python train.py ...]")
    parser.add_argument("--dump-dir", metavar="DIR", help="that the job gives the guard; default: NANGUARD_DUMP_DIR")
    add_json(parser)
    add_job(parser)
    parser.set_defaults(command=run_doctor)


def run_doctor(options: argparse.Namespace) -> int:
    """Run ``ddp-nanguard doctor``: rank 0 prints what was found. Returns 1 where something stands in the way, else 0.

    Collective: under torchrun those of `checks_of_all_ranks`.
    """
    from ddp_nanguard.replay import launcher

    from .doctor_checks import checks_of_all_ranks

    checks = checks_of_all_ranks(options.dump_dir, job_of(options))
    holds = not any(check.holds is False for check in checks)
    if launcher.rank() == 0:
        print(
            json.dumps({"holds": holds, "checks": [asdict(check) for check in checks]})
            if options.json
            else _table(checks)
        )
    return 0 if holds else 1


def _table(checks: Sequence[Check]) -> str:
    failed = [check.promise for check in checks if check.holds is False]
    end = f"doctor: FAILED: {'; '.join(failed)}" if failed else "doctor: nothing stands in the way"
    return "\n".join([*map(str, checks), end])
