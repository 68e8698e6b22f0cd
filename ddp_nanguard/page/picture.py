"""`picture`: timeline and heat map as one PNG, by matplotlib."""

from __future__ import annotations

import io
import textwrap
from typing import Any

import numpy as np

from .content import PageContent
from .magnitudes import BINS_PER_DECADE, INF, NAN, ZERO, Grid
from .timeline import Timeline

WIDTH_INCHES = 9.0
DPI = 160
MAX_NAME, MAX_TITLE = 34, 100
_LINES = ("#0b5cad", "#a0497f", "#00795a", "#6b6100")
_NAN, _INF, _ZERO = "#d55e00", "#f0b400", "#c9ced6"


def picture(content: PageContent) -> tuple[bytes | None, str]:
    """The picture of a page, and what it does not show.

    Returns:
        The PNG, None where there is nothing to draw; and a sentence, "" where all is drawn.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    line, by_step = content.timeline.found, content.by_step.found or content.by_rank.found
    if line is None and by_step is None:
        return None, f"{content.timeline.remark} {content.by_rank.remark}"
    heights = [3.2] * (line is not None) + [_height(by_step)] * (by_step is not None)
    figure: Any = Figure(figsize=(WIDTH_INCHES, sum(heights) + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(content), fontsize=10, x=0.01, ha="left", parse_math=False)
    axes = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    if line is not None:
        _draw_timeline(axes[0], line)
    if by_step is not None:
        _draw_map(axes[-1], by_step, "step" if content.by_step.found is not None else "rank")
    data = io.BytesIO()
    figure.savefig(data, dpi=DPI, format="png")
    return data.getvalue(), "" if line is not None else content.timeline.remark


def _height(found: Grid | None) -> float:
    return 0.0 if found is None else min(9.0, 0.7 + 0.17 * len(found.rows))


def _title(content: PageContent) -> str:
    return "\n".join([f"{content.where}:", *textwrap.wrap(content.what, MAX_TITLE)])


def _draw_timeline(axes: Any, line: Timeline) -> None:
    from matplotlib.ticker import LogFormatter

    for index, each in enumerate(line.series):
        values = np.array([np.nan if value is None else abs(value) for value in each.values])
        color = _LINES[index % len(_LINES)]
        finite = np.where(np.isfinite(values) & (values > 0), values, np.nan)
        axes.plot(line.steps, finite, marker="osD^"[index % 4], ms=4, lw=1.5, color=color, label=each.legend)
        bad = [step for step, value in zip(line.steps, each.values, strict=True) if _is_bad(value)]
        axes.plot(bad, [0.95 - 0.07 * index] * len(bad), "x", color=color, mew=2, transform=axes.get_xaxis_transform())
    axes.set_yscale("log")
    for put in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        put(LogFormatter(minor_thresholds=(1.5, 0.5)))  # 0.6, not 6 x 10^-1
    axes.axvline(line.steps[-1], color=_NAN, lw=1, ls=":")
    _draw_limit(axes, line)
    axes.set_xlabel("step; × is NaN or Inf", fontsize=8)
    axes.tick_params(labelsize=8, which="both")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower left", frameon=False, ncols=4, bbox_to_anchor=(0, 1))


def _is_bad(value: float | None) -> bool:
    return value is not None and not np.isfinite(value)


def _draw_limit(axes: Any, line: Timeline) -> None:
    low, high = axes.get_ylim()
    if line.limit is None:
        return
    text = f"largest {line.limit[0]}: {line.limit[1]:.6g}"
    if line.limit[1] < high * 1e8:
        axes.axhline(line.limit[1], color="black", lw=1, ls="--")
        axes.set_ylim(low, max(high, line.limit[1] * 10))
    axes.text(1.0, 1.02, text, transform=axes.transAxes, fontsize=8, ha="right", color="0.35", parse_math=False)


def _draw_map(axes: Any, found: Grid, title: str) -> None:
    from matplotlib.colors import ListedColormap

    bins = found.bins.astype(np.float64)
    finite = np.where((found.bins >= INF) | (found.bins <= ZERO), np.nan, bins) / BINS_PER_DECADE
    marks = np.select([found.bins == ZERO, found.bins == INF, found.bins == NAN], [0.0, 1.0, 2.0], np.nan)
    image = axes.imshow(finite, aspect="auto", cmap=_blues(), interpolation="nearest")
    axes.imshow(marks, aspect="auto", cmap=ListedColormap([_ZERO, _INF, _NAN]), vmin=0, vmax=2, interpolation="nearest")
    every = max(1, len(found.rows) // 48 + (len(found.rows) > 48))
    shown = range(0, len(found.rows), every)
    axes.set_yticks(shown, [found.rows[row].short(MAX_NAME) for row in shown], parse_math=False)
    places = range(0, len(found.columns), max(1, len(found.columns) // 16))
    axes.set_xticks(places, [str(found.columns[place]) for place in places])
    axes.tick_params(labelsize=7)
    axes.set_xlabel(f"{title}; orange is NaN, yellow Inf, grey 0", fontsize=8)
    if np.isfinite(finite).any():
        bar = axes.figure.colorbar(image, ax=axes, pad=0.01)
        bar.set_label("log10 of the largest value", fontsize=8)
        bar.ax.tick_params(labelsize=7)


def _blues() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("blues", ["#edf3fa", "#a9cbe8", "#3f83c0", "#0a2f5c"])
