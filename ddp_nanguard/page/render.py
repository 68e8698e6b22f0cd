"""`dump_page` and `index_page`: HTML of the templates beside this module, with all that it needs inside.

[Note: packed scripts] plotly.js is 4.8 MB of text. It comes from the installed plotly package, compressed and as base64
in the page, and is unpacked there by the browser's own ``DecompressionStream``; so are the numbers of the charts.
Nothing is loaded from anywhere: a policy in the page's head forbids it.
"""

from __future__ import annotations

import base64
import functools
import gzip
import json
import shlex
from collections.abc import Sequence
from typing import Any

from ddp_nanguard.dump.incidents import Incident
from ddp_nanguard.dump.listing import DumpSummary
from ddp_nanguard.report.text import human_size
from ddp_nanguard.report.types import json_safe

from .content import PageContent
from .magnitudes import BINS_PER_DECADE, INF, MISSING, NAN, ZERO, Grid
from .timeline import Timeline, number_text

MAX_TABLE_ROWS = 60
"""Rows of a heat map that its table shows."""
MAX_NAME, MAX_NARROW_NAME = 36, 16
"""Characters of a layer's name beside a heat map, and on a phone; the whole name is told on hover."""


def dump_page(content: PageContent) -> str:
    """The report page of one dump."""
    charts = {
        "rank": content.rank,
        "timeline": _timeline_data(content),
        "maps": {"steps": _grid_data(content.by_step.found), "ranks": _grid_data(content.by_rank.found)},
    }
    has_charts = any(part.found is not None for part in (content.timeline, content.by_step, content.by_rank))
    return _rendered(
        "dump.html",
        page=content,
        charts=packed(json.dumps(json_safe(charts), separators=(",", ":"))) if has_charts else "",
        plotly=_packed_plotly() if has_charts else "",
        step_table=_table(content.by_step.found),
    )


def index_page(dumps: Sequence[DumpSummary], found: Sequence[Incident], roots: Sequence[str]) -> str:
    """The index of all dumps below some directories, those of one fault together.

    Args:
        dumps: of `list_dumps`.
        found: of `incidents`.
        roots: the directories, as they were given.
    """
    by_path = {dump.path: dump for dump in dumps}
    groups = [(incident, [by_path[path] for path in incident.paths]) for incident in found]
    grouped = {path for incident in found for path in incident.paths}
    singles = [dump for dump in dumps if dump.path not in grouped]
    return _rendered("index.html", groups=groups, singles=singles, dumps=dumps, roots=roots)


def packed(text: str) -> str:
    """A text as base64 of its gzip, the same for the same text."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


@functools.cache
def _packed_plotly() -> str:
    from plotly.offline import get_plotlyjs

    return packed(get_plotlyjs())


def _rendered(template: str, **values: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("ddp_nanguard.page"),
        autoescape=True,  # names of layers and files are data
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"size": human_size, "number": number_text, "quoted": shlex.quote}
    return environment.get_template(template).render(**values)


def _timeline_data(content: PageContent) -> dict[str, Any] | None:
    line: Timeline | None = content.timeline.found
    if line is None:
        return None
    limit = {"dtype": line.limit[0], "value": line.limit[1]} if line.limit is not None else None
    series = [{"name": each.name, "legend": each.legend, "values": each.values} for each in line.series]
    return {"steps": line.steps, "series": series, "limit": limit, "weights": content.weights}


def _grid_data(found: Grid | None) -> dict[str, Any] | None:
    if found is None:
        return None
    rows = [
        {"text": row.text, "short": row.short(MAX_NAME), "narrow": row.short(MAX_NARROW_NAME)} for row in found.rows
    ]
    bins = base64.b64encode(found.bins.tobytes()).decode()
    return {"rows": rows, "columns": found.columns, "bins": bins, "origin": found.origin}


def _table(found: Grid | None) -> dict[str, Any] | None:
    """The rows of a heat map as text: for readers without scripts."""
    if found is None:
        return None
    rows = [(row.text, list(map(_bin_text, bins))) for row, bins in zip(found.rows, found.bins.tolist(), strict=True)]
    return {"columns": found.columns, "rows": rows[:MAX_TABLE_ROWS], "left_out": max(0, len(rows) - MAX_TABLE_ROWS)}


def _bin_text(number: int) -> str:
    known = {MISSING: "–", ZERO: "0", NAN: "NaN", INF: "Inf"}
    return known.get(number, f"{10 ** (number / BINS_PER_DECADE):.0e}")
