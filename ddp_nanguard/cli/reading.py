"""``ddp-nanguard list`` and ``show``: what a run has left, from the JSON of its dumps alone; nothing imports torch."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys

from .arguments import Commands, add_dump, add_json
from .help_text import add_command


def add_list(commands: Commands) -> None:
    """Add the command ``list`` to the parser."""
    parser = add_command(commands, "list")
    parser.add_argument(
        "directories", nargs="+", metavar="DIR", help="dump_dir of a run, or of each of its nodes; or one above"
    )
    add_json(parser)
    parser.set_defaults(command=run_list)


def add_show(commands: Commands) -> None:
    """Add the command ``show`` to the parser."""
    parser = add_command(commands, "show")
    add_dump(parser)
    add_json(parser)
    parser.set_defaults(command=run_show)


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
        what = "is no directory" if os.path.exists(missing) else "does not exist"
        print(f"ddp-nanguard: {missing} {what}", file=sys.stderr)
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
