"""``ddp-nanguard``: parses the command line and calls one function per command.

Exit codes: 0, 2 for wrong usage or a dump that cannot be used (one line on stderr); ``replay`` has more, and ``run``
those of its job.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from ddp_nanguard.errors import DumpError
from ddp_nanguard.report.types import PHASES

from . import completion, doctor, explain, replay, report
from .arguments import WRONG_USAGE, Commands, add_job, add_json, count, index, job_of, seconds
from .help_text import add_command, overview
from .reading import add_list, add_show

Command = Callable[[argparse.Namespace], int]


def run() -> NoReturn:
    """Entry point of the console script and of ``python -m ddp_nanguard``."""
    code = main()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # with DDP alive the interpreter's own shutdown can hang or abort and lose the code
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        arguments: without the program's name; None for those of the process.
    """
    given, job = replay.without_job(sys.argv[1:] if arguments is None else list(arguments))
    options = _parser().parse_args(given)
    if job is not None:
        options.job = job
    command: Command = options.command
    try:
        return command(options)
    except DumpError as error:
        print(f"ddp-nanguard: {error}", file=sys.stderr)
        return WRONG_USAGE
    except BrokenPipeError:
        # the reader of a pipe has seen enough; nothing may be flushed into it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = overview()
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(prog="ddp-nanguard", metavar="COMMAND", required=True, help=argparse.SUPPRESS)
    after_a_stop = (add_show, explain.add_explain, replay.add_replay, add_list, report.add_report)
    for add in (*after_a_stop, doctor.add_doctor, _add_drill, _add_demo, _add_run):
        add(commands)
    completion.add_completion(commands, parser)
    return parser


class _Version(argparse.Action):
    """Looks the version up when it is asked for, which takes as long as everything else here."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        import importlib.metadata

        try:
            version = importlib.metadata.version("ddp-nanguard")
        except importlib.metadata.PackageNotFoundError:
            version = "(not installed)"
        print(f"ddp-nanguard {version}")
        parser.exit()


def _add_demo(commands: Commands) -> None:
    parser = add_command(commands, "demo")
    parser.add_argument("--wrapper", choices=("ddp", "fsdp1", "fsdp2"), default="ddp", help="default: ddp")
    parser.add_argument("--nproc", type=count, default=2, metavar="N", help="number of ranks, default 2")
    parser.add_argument("--out", metavar="DIR", help="where the dump goes; default: a temporary directory")
    add_json(parser)
    parser.set_defaults(command=run_demo)


def _add_drill(commands: Commands) -> None:
    parser = add_command(
        commands, "drill", usage="ddp-nanguard drill [OPTIONS] -- torchrun --nproc-per-node N train.py ..."
    )
    parser.add_argument(
        "--phase", choices=(*PHASES, "all"), default="forward", help="where it goes bad; default: forward"
    )
    parser.add_argument("--step", type=index, default=2, metavar="N", help="as the guard counts; default: 2")
    parser.add_argument("--rank", type=index, help="default: 1, or 0 where the command starts one process")
    parser.add_argument("--layer", help="default: a layer with parameters, in the middle of the model")
    parser.add_argument("--kind", choices=("nan", "inf", "-inf"), default="nan", help="default: nan")
    parser.add_argument("--timeout", type=seconds, default=600.0, metavar="S", help="of the job and of its replay, 600")
    parser.add_argument("--out", metavar="DIR", help="where dumps and logs go; default: a temporary directory")
    add_json(parser)
    add_job(parser)
    parser.set_defaults(command=run_drill)


def _add_run(commands: Commands) -> None:
    parser = add_command(
        commands, "run", usage="ddp-nanguard run [OPTIONS] -- torchrun --nproc-per-node N train.py ..."
    )
    parser.add_argument(
        "--termination-log",
        metavar="FILE",
        help="gets the error of a stopped job; default: /dev/termination-log, where there is one",
    )
    add_job(parser)
    parser.set_defaults(command=run_job)


def run_job(options: argparse.Namespace) -> int:
    """Run ``ddp-nanguard run -- COMMAND``. Returns the exit code.

    Raises:
        DumpError: as `supervise.run_job`; this system cannot wait for signals.
    """
    if not hasattr(signal, "sigwaitinfo"):  # the other commands read dumps anywhere
        raise DumpError(f"run needs Linux, this is {sys.platform}: start the job by its own command")
    from . import supervise

    return supervise.run_job(options)


def run_drill(options: argparse.Namespace) -> int:
    """Run ``ddp-nanguard drill -- COMMAND``. Returns the exit code."""
    from . import drill

    job = job_of(options)
    phases = PHASES if options.phase == "all" else (options.phase,)
    config = drill.DrillConfig(
        job, phases, options.step, options.rank, options.layer, options.kind, options.timeout, options.out
    )
    return drill.run_drill(config, as_json=options.json)


def run_demo(options: argparse.Namespace) -> int:
    """Run ``ddp-nanguard demo``. Returns the exit code."""
    from . import demo

    return demo.run_demo(options.wrapper, options.nproc, options.out, as_json=options.json)
