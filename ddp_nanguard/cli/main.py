"""``ddp-nanguard``: parses the command line and calls one function per command.

Exit codes: 0, 2 for wrong usage or a dump that cannot be used (one line on stderr); ``replay`` has more.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from ddp_nanguard.errors import DumpError
from ddp_nanguard.report.types import PHASES

from . import explain, replay
from .arguments import WRONG_USAGE, Commands, add_dump, count, index, seconds

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
    parser = argparse.ArgumentParser(prog="ddp-nanguard", description="Lists, shows and replays the dumps of NanGuard.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_list(commands)
    _add_show(commands)
    replay.add_replay(commands)
    explain.add_explain(commands)
    _add_demo(commands)
    _add_drill(commands)
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


def _add_list(commands: Commands) -> None:
    parser = commands.add_parser("list", help="the dumps in one or several dump_dirs")
    parser.add_argument(
        "directories", nargs="+", metavar="DIR", help="dump_dir of a run, or of each of its nodes; or a directory above"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(command=run_list)


def _add_show(commands: Commands) -> None:
    parser = commands.add_parser("show", help="what a dump says about its fault")
    add_dump(parser)
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.set_defaults(command=run_show)


def _add_demo(commands: Commands) -> None:
    parser = commands.add_parser("demo", help="a NaN that nobody planted: stopped, named, dumped, replayed")
    parser.add_argument("--wrapper", choices=("ddp", "fsdp1", "fsdp2"), default="ddp", help="default: ddp")
    parser.add_argument("--nproc", type=count, default=2, metavar="N", help="number of ranks, default 2")
    parser.add_argument("--out", metavar="DIR", help="where the dump goes; default: a temporary directory")
    parser.set_defaults(command=run_demo)


def _add_drill(commands: Commands) -> None:
    parser = commands.add_parser(
        "drill",
        help="your own job with a fault planted: does every promise hold there?",
        usage="ddp-nanguard drill [OPTIONS] -- torchrun --nproc-per-node N train.py ...",
        description="Runs the command with a fault planted, once per phase, and checks what the guard promises.",
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
    parser.add_argument("job", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command of the job")
    parser.set_defaults(command=run_drill)


def run_drill(options: argparse.Namespace) -> int:
    """Run ``ddp-nanguard drill -- COMMAND``. Returns the exit code."""
    from . import drill

    job = tuple(options.job[1:] if options.job[:1] == ["--"] else options.job)
    phases = PHASES if options.phase == "all" else (options.phase,)
    config = drill.DrillConfig(
        job, phases, options.step, options.rank, options.layer, options.kind, options.timeout, options.out
    )
    return drill.run_drill(config)


def run_demo(options: argparse.Namespace) -> int:
    """Run ``ddp-nanguard demo``. Returns the exit code."""
    from . import demo

    return demo.run_demo(options.wrapper, options.nproc, options.out)


def run_list(options: argparse.Namespace) -> int:
    """Run ``ddp-nanguard list DIR...``: print a table of the dumps. Returns 0."""
    from ddp_nanguard.dump.incidents import incidents
    from ddp_nanguard.dump.listing import list_dumps

    from .table import dump_table, incident_lines

    dumps = list_dumps(options.directories)
    again = incidents(dumps)
    if options.json:
        print(
            json.dumps(
                {
                    name: [dataclasses.asdict(each) for each in found]
                    for name, found in (("dumps", dumps), ("incidents", again))
                }
            )
        )
    else:
        print(dump_table(dumps, options.directories) + incident_lines(again), end="")
    for missing in (path for path in options.directories if not os.path.isdir(path)):
        print(f"ddp-nanguard: {missing} is no directory", file=sys.stderr)
    return 0


def run_show(options: argparse.Namespace) -> int:
    """Run ``ddp-nanguard show DUMP``: print the report as text or JSON, without verifying checksums. Returns 0."""
    from ddp_nanguard.dump.outline import DumpOutline
    from ddp_nanguard.dump.records import SCHEMA_VERSION
    from ddp_nanguard.report.text import report_text

    dump = DumpOutline.open(options.dump)
    if options.json:
        print(json.dumps({"schema_version": SCHEMA_VERSION, **dump.report.to_dict()}, indent=1))
    else:
        # it may have been copied, or lie on several nodes
        report = dataclasses.replace(dump.report, dump_path=" ".join(map(str, dump.paths)))
        is_as_written = tuple(dump.ranks) == dump.manifest.ranks_present
        size_bytes = dump.manifest.size_bytes if is_as_written else dump.size_bytes
        manifest = dataclasses.replace(
            dump.manifest, ranks_present=tuple(dump.ranks), size_bytes=size_bytes, report=report
        )
        print(report_text(report, manifest, color=sys.stdout.isatty() and "NO_COLOR" not in os.environ), end="")
    return 0
