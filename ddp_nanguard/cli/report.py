"""``ddp-nanguard report``: the page of a dump, or the index of all dumps below a directory, as one HTML file."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_nanguard.errors import DumpError

from .arguments import WRONG_USAGE, Commands, index
from .help_text import add_command

if TYPE_CHECKING:
    from ddp_nanguard.page.content import PageContent


def add_report(commands: Commands) -> None:
    """Add the command ``report`` to the parser."""
    parser = add_command(commands, "report")
    parser.add_argument("paths", nargs="+", metavar="DUMP|DIR", help="a dump, or its parts; or a directory of dumps")
    parser.add_argument("-o", "--out", metavar="FILE", help="default: report.html; index.html for a directory")
    parser.add_argument("--png", metavar="FILE", help="timeline and heat map of a dump as a picture")
    parser.add_argument("--rank", type=index, metavar="R", help="whose steps and batch; default: where it began")
    parser.add_argument("--batch-contents", action="store_true", help="show values of the batch, not only its shapes")
    parser.set_defaults(command=run_report)


def run_report(options: argparse.Namespace) -> int:
    """Run ``ddp-nanguard report DUMP|DIR``: write the page, the picture or both. Returns 0, or 2 without the extra."""
    wants_page = options.out is not None or options.png is None
    if (options.png is not None and _lacks("report --png", "matplotlib")) or (
        wants_page and _lacks("report", "jinja2", "plotly")
    ):
        return WRONG_USAGE
    return _write_page(options) if _is_dump(options.paths) else _write_index(options)


def _lacks(command: str, *packages: str) -> bool:
    """Whether one of the packages is not installed; then a line names them and the extra."""
    if all(importlib.util.find_spec(package) is not None for package in packages):
        return False
    needed = " and ".join(packages)
    print(f"ddp-nanguard {command} needs {needed}: pip install 'ddp-nanguard[report]'", file=sys.stderr)
    return True


def _is_dump(paths: list[str]) -> bool:
    """Whether the paths are a dump, or parts of one; else they are directories to look below."""
    from ddp_nanguard.dump.locate import as_dump
    from ddp_nanguard.dump.names import MANIFEST, DumpName

    dumps = [as_dump(Path(path)) for path in paths]
    return all(DumpName.parse(path.resolve().name) is not None or (path / MANIFEST).exists() for path in dumps)


def _write_page(options: argparse.Namespace) -> int:
    from ddp_nanguard.dump.read import open_dump
    from ddp_nanguard.page.content import page_content

    content = page_content(open_dump(options.paths, verify=False), options.rank, contents=options.batch_contents)
    if options.png is not None:
        _write_picture(content, options.png)
    if options.out is not None or options.png is None:
        from ddp_nanguard.page.render import dump_page

        _write("report.html" if options.out is None else options.out, dump_page(content))
    return 0


def _write_picture(content: PageContent, file: str) -> None:
    from ddp_nanguard.page.picture import picture

    data, left_out = picture(content)
    if data is None:
        raise DumpError(f"option --png={file}: {left_out}")
    with _told("--png", file):
        Path(file).write_bytes(data)
    print(f"{file}: {left_out}" if left_out else file)


def _write(file: str, page: str) -> None:
    with _told("--out", file):
        Path(file).write_text(page, encoding="utf-8")
    size = len(page.encode())
    print(f"wrote {Path(file).absolute()} ({f'{size / 1e6:.1f} MB' if size > 1e5 else f'{size / 1e3:.0f} KB'})")


@contextlib.contextmanager
def _told(option: str, file: str) -> Iterator[None]:
    """A file that cannot be written is wrong usage."""
    try:
        yield
    except OSError as error:
        raise DumpError(f"option {option}={file}: {error.strerror}; give a file that can be written") from None


def _write_index(options: argparse.Namespace) -> int:
    from ddp_nanguard.dump.incidents import incidents
    from ddp_nanguard.dump.listing import list_dumps
    from ddp_nanguard.page.render import index_page

    for name in ("png", "rank", "batch_contents"):
        if getattr(options, name) not in (None, False):
            flag = f"--{name.replace('_', '-')}"
            raise DumpError(f"option {flag} is for one dump; {' '.join(options.paths)} is none, see: ddp-nanguard list")
    dumps = list_dumps(options.paths)
    if not dumps:
        raise DumpError(f"{' '.join(options.paths)}: no dumps in or below it; give the dump_dir of a run")
    _write("index.html" if options.out is None else options.out, index_page(dumps, incidents(dumps), options.paths))
    return 0
