"""The plots of the cost benchmarks, as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot  # after the choice of a backend without a display
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.watches import COLUMNS

GUARD, PEER, LIGHT = "#1f6feb", "#57606a", "#d0d7de"
GOAL = 1.02


def overhead(cases: list[dict[str, Any]], directory: Path) -> list[Path]:
    """A plot per wrapper and way to compile, a panel per model."""
    groups: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for case in cases:
        groups.setdefault((case["wrapper"], bool(case["compiled"])), []).append(case)
    paths = []
    for (wrapper, is_compiled), members in groups.items():
        name = f"overhead-{wrapper}{'-compiled' if is_compiled else ''}.png"
        paths.append(_saved(_overhead(members), directory, name))
    return paths


def _overhead(cases: list[dict[str, Any]]) -> Figure:
    figure, panels = pyplot.subplots(1, len(cases), figsize=(2.2 + 2.6 * len(cases), 4.4), sharey=True, squeeze=False)
    present = {column["column"] for case in cases for column in case["columns"]}
    names = [name for name in COLUMNS if name in present]
    for panel, case in zip(panels[0], cases, strict=True):
        _panel(panel, case, names)
    panels[0][0].set_yticks(range(len(names)), names)
    panels[0][0].set_ylim(len(names) - 0.4, -0.6)
    figure.supxlabel("step time, of the unguarded step (median and quartiles; dotted: 1.02)", fontsize=9)
    return figure


def _panel(panel: Axes, case: dict[str, Any], names: list[str]) -> None:
    panel.set_xscale("log")
    panel.axvline(1.0, color=LIGHT, zorder=0)
    panel.axvline(GOAL, color=LIGHT, linestyle=":", zorder=0)
    for column in case["columns"]:
        place = names.index(column["column"])
        if "missing" in column:
            panel.text(1.0, place, column["missing"], fontsize=7, color=PEER, va="center")
            continue
        color = GUARD if column["column"].startswith(("all", "loss")) else PEER
        panel.plot(column["quartiles"], [place, place], color=color, linewidth=1.5, alpha=0.5)
        panel.plot(column["ratio"], place, "o", color=color, markersize=5)
        panel.annotate(
            f"{column['ratio']:.2f}", (column["ratio"], place), (0, 5), textcoords="offset points", fontsize=7
        )
    panel.set_title(f"{case['case']}\nunguarded {case['unguarded_ms']:.1f} ms", fontsize=9)
    _plain_ticks(panel)


def _plain_ticks(panel: Axes) -> None:
    """1.0, 1.2, 1.5, 2, 3, ... as far as they are needed, instead of powers of ten."""
    low, high = panel.get_xlim()
    wanted = [tick for tick in (0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2, 3, 5, 8) if low <= tick <= high]
    if high / low > 2:
        wanted = [tick for tick in wanted if tick not in (0.9, 1.1, 1.2)]
    panel.set_xticks(wanted)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())


# -- scale -------------------------------------------------------------------------------------------------------------


def scale(found: dict[str, Any], directory: Path) -> list[Path]:
    """Growth with layers, bytes, micro-batches and ranks, with the fitted model; and memory."""
    return [_saved(_growth(found), directory, "scale.png"), _saved(_memory(found["memory"]), directory, "memory.png")]


def _growth(found: dict[str, Any]) -> Figure:
    figure, panels = pyplot.subplots(1, 4, figsize=(13, 3.4))
    axes = {"layers": "layers", "width": "size_bytes", "micro_batches": "micro_batches"}
    labels = ("layers of width 16", "MB probed per step, 10 layers", "micro-batches, 30 layers")
    for panel, (series, key), label in zip(panels, axes.items(), labels, strict=False):
        _series(panel, [point for point in found["points"] if point["series"] == series], key, found["model"], label)
    _ranks(panels[3], [point for point in found["points"] if point["series"] == "ranks"], found["model"])
    panels[0].set_ylabel("added per step, ms")
    panels[0].legend(fontsize=7, frameon=False)
    return figure


def _series(panel: Axes, points: list[dict[str, Any]], key: str, model: dict[str, Any], label: str) -> None:
    across = [point[key] / 1e6 if key == "size_bytes" else point[key] for point in points]
    c = model["host"]["coefficients"]
    predicted = [1e3 * (c["a"] + c["b"] * point["num_probes"] + c["c"] * point["size_bytes"]) for point in points]
    panel.loglog(across, [1e3 * point["added_s"] for point in points], "s", color=PEER, markersize=4, label="wall")
    panel.loglog(across, [1e3 * point["added_cpu_s"] for point in points], "o", color=GUARD, label="processor")
    panel.loglog(across, predicted, "-", color=GUARD, alpha=0.5, label="model")
    panel.set_xlabel(label, fontsize=8)
    _plain_decades(panel.xaxis)
    _plain_decades(panel.yaxis)
    if key != "size_bytes":
        panel.set_xticks(across, [str(value) for value in across])
        panel.xaxis.set_minor_formatter(NullFormatter())


def _plain_decades(axis: Axis) -> None:
    """1, 2, 5, 10, ... instead of powers of ten."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _ranks(panel: Axes, points: list[dict[str, Any]], model: dict[str, Any]) -> None:
    ranks = [point["ranks"] for point in points]
    panel.loglog(ranks, [1e3 * point["added_cpu_s"] for point in points], "o-", color=GUARD, label="processor, added")
    panel.loglog(
        ranks, [1e3 * point["collective_s"] for point in points], "^", color=PEER, label="verdict's collective"
    )
    line = model["verdict"]["ranks"]["coefficients"]
    panel.loglog(ranks, [1e3 * (line["d"] + line["e"] * count) for count in ranks], "-", color=PEER, alpha=0.5)
    _plain_decades(panel.yaxis)
    panel.set_xticks(ranks, [str(count) for count in ranks])
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_xlabel("ranks (processes of this machine)", fontsize=8)
    panel.legend(fontsize=7, frameon=False)


def _memory(rows: list[dict[str, Any]]) -> Figure:
    figure, panel = pyplot.subplots(figsize=(5, 3.4))
    series = [row for row in rows if row["width"] == rows[0]["width"]]
    probes = [row["num_probes"] for row in series]
    panel.loglog(probes, [row["tensors"]["added"] / 1024 for row in series], "o", color=GUARD, label="tensors held")
    panel.loglog(probes, [row["predicted"] / 1024 for row in series], "-", color=GUARD, alpha=0.5, label="formula")
    panel.loglog(probes, [row["objects"]["added"] / 1024 for row in series], "s", color=PEER, label="Python objects")
    panel.loglog(probes, [row["peak"]["unguarded"] / 1024 for row in series], "--", color=LIGHT, label="unguarded peak")
    _plain_decades(panel.xaxis)
    _plain_decades(panel.yaxis)
    panel.set_xlabel("probes per step", fontsize=8)
    panel.set_ylabel("added by the guard, KiB")
    panel.legend(fontsize=7, frameon=False)
    return figure


def _saved(figure: Figure, directory: Path, name: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(directory / name, dpi=110)
    pyplot.close(figure)
    return directory / name
