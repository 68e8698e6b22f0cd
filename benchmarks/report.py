"""Turns the JSON files of the cost benchmarks into one document and its plots.

    python benchmarks/report.py [--counts FILE] [--overhead FILE...] [--profile FILE] [--scale FILE] [--dump FILE]
        [--gpu FILE] --write benchmarks/results/cost.md

Plots go to a directory `plots` beside the document. What there is no file for is said to be not measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import cost_model, plots, profile_step  # noqa: E402  # after the path of this repository
from benchmarks.limit import described as limit_described  # noqa: E402
from benchmarks.machine import described as machine_described  # noqa: E402
from benchmarks.watches import COLUMNS  # noqa: E402
from benchmarks.workloads import MODELS  # noqa: E402

INTRO = """# What it costs

<!-- made by benchmarks/report.py; do not edit -->

Made by these commands, on one machine:

```bash
pip install -c constraints.txt -e '.[test,bench]'
torchrun --nproc-per-node 2 benchmarks/overhead.py --counts --json counts.json
torchrun --nproc-per-node 2 benchmarks/overhead.py --seconds 9 --runs 3 --rounds 400 --warm-up 3 \\
    --columns "unguarded, again" "one all-reduce" default --json default.json
torchrun --nproc-per-node 2 benchmarks/overhead.py --models mlp --wrappers ddp --seconds 12 --runs 1 --rounds 400 \\
    --warm-up 2 --columns deferred "layers=blocks" "layers=every" detect_anomaly "module hooks" \\
    "gradients concatenated" --json rest.json
python benchmarks/profile_step.py --json profile.json
python benchmarks/scale.py --max-ranks 8 --json scale.json
python benchmarks/dump.py --json dump.json
python benchmarks/gpu.py --json gpu.json
python benchmarks/report.py --counts counts.json --overhead default.json rest.json \\
    --profile profile.json --scale scale.json --dump dump.json --gpu gpu.json --write benchmarks/results/cost.md
```
"""

READING = """Every column is a training loop of its own, from equal weights. In each round each takes two turns with its
watch and two with all of it taken off, of the same model in the same memory and on the same batch, one kind around the
other, each behind a barrier; which is outside alternates. A turn is one step, or as many as take 30 ms. `ratio` is the
median over these pairs, `quartiles` are of the same ratios, `runs` the lowest and the highest median of a run. `cpu` is
the ratio of the processor time of the training threads of both ranks. "one all-reduce" is what any check pays that
stops all ranks in one step, before it has looked at anything. "unguarded, again" shows what noise alone makes of a
ratio of one. What compiled code has taken up cannot be taken off: there the other steps are those of a second model
(`--compiled`; where no compiled model is below, none was measured with this state). A column that was measured twice is
shown with the larger number of pairs; of few pairs the quartiles say more than the ratio. The machine was shared: its
load is that of all jobs.
"""

MISSES = """What is beyond 1.02 above, and why:

- `layers="every"`: activations and their gradients are read once more, 160 to 200 MB in a step (the reductions of the
  table), and a hook on each of 35 modules and 40 tensors runs cold.
- The MLP and the tiny modules by default: losses, gradients, weights and the collective are the check itself. Two
  processes on two cores wait for each other in the collective, most of it for their turn ("one all-reduce"). The tiny
  modules have 500 parameters, each seen three
  times.
- The ResNet compiled, everything watched (of an earlier state): batch norm's loops run over channels, so a minimum and
  maximum over the whole tensor is a pass of its own in the compiled code, at half the speed of `aten::aminmax` (kernel
  by kernel with `torch.profiler`: 23 of 25 ms).
"""

MODEL = """The host's part is fitted on the processor time of the points with no more ranks than cores, with the
relative error minimised; the verdict's on the collective timed by itself. Two processes per core and more wait for each
other's turn, so the line over ranks says more about this machine than about a network.

Assumptions of the extrapolation: ranks do their probes at the same time, so that the host's part does not grow with
them; the verdict is one latency-bound all-reduce of 16 bytes, in a tree of log2(ranks) hops up and down at the assumed
latency per hop; no rank is late for it that would not be late for the gradients' own reduce.
"""

NOT_MEASURED = "Not measured: no GPU was available to us."


def document(
    counts: Any,
    overhead: list[dict[str, Any]],
    profile: list[dict[str, Any]] | None,
    scale: dict[str, Any] | None,
    dump: Any,
    gpu: Any,
) -> str:
    """The whole document, in Markdown."""
    parts = [INTRO, *_counts(counts), *_overhead(overhead), *_profile(profile)]
    parts += [*_scale(scale), *_dump(dump), *_gpu(gpu)]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def grid(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def _counts(found: dict[str, Any] | None) -> list[str]:
    text = (
        "What a step has beyond an unguarded one, counted and asserted (`overhead.py --counts`); no machine blurs it."
    )
    lines = "Not measured." if found is None else "\n".join(f"- {line}" for line in found["counts"])
    return ["## Counts", text, lines]


def _profile(found: list[dict[str, Any]] | None) -> list[str]:
    text = (
        "Milliseconds of one thread in a guarded step (DDP, one rank, everything watched), by what the guard does; "
        "indented lines are part of those above, and the reductions are part of most. A hook between two large "
        "operators runs with cold caches: what takes 5 us in a loop takes 30 to 60 there."
    )
    rows = [text, profile_step.table(found), MISSES] if found is not None else ["Not measured."]
    return ["## Where the time goes", *rows]


# -- step time ---------------------------------------------------------------------------------------------------------


def _overhead(files: list[dict[str, Any]]) -> list[str]:
    parts = ["## Step time"]
    if not files:
        return [*parts, "Not measured."]
    machine = f"{machine_described(files[0]['machine'])}, gloo, {files[0]['ranks']} ranks of one thread"
    models = "\n".join(f"- {name}: {workload.about}" for name, workload in MODELS.items())
    abouts = "\n".join(f"- {name}: {about}" for name, about in files[0]["about"].items())
    parts += [f"{machine}, {files[0]['machine']['date']}.", READING, models, abouts]
    cases = merged(files)
    parts += [f"![](plots/{path})" for path in _plot_names(cases)]
    return parts + [_case(case) for case in cases]


def merged(files: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each case once; a column that is in several files is that with the most pairs."""
    cases: dict[str, dict[str, Any]] = {}
    for case in (case for file in files for case in file["cases"]):
        known = cases.setdefault(case["case"], case)
        if known is not case:
            columns = sorted([*known["columns"], *case["columns"]], key=lambda column: column.get("pairs", 0))
            longest = {column["column"]: column for column in columns}
            remarks = list(dict.fromkeys([*known["remarks"], *case["remarks"]]))
            ordered = [longest[name] for name in COLUMNS if name in longest]
            cases[case["case"]] = {**known, "columns": ordered, "remarks": remarks}
    return list(cases.values())


def _plot_names(cases: list[dict[str, Any]]) -> list[str]:
    names = [f"overhead-{case['wrapper']}{'-compiled' if case['compiled'] else ''}.png" for case in cases]
    return list(dict.fromkeys(names))


def _case(case: dict[str, Any]) -> str:
    load = " to ".join(map(str, case["load"]))
    lines = [f"### {case['case']}\n", f"Unguarded step {case['unguarded_ms']:.1f} ms; load of the machine {load}."]
    if case["compiled"]:
        lines[-1] += f" {case['recompilations']} recompilations, {case['graph_breaks']} graph breaks."
    lines += [f"The guard warned: {text}" for text in case["remarks"]]
    head = ["", "ratio", "quartiles", "runs", "cpu", "added", "pairs"]
    lines += ["", grid(head, [_row(column) for column in case["columns"]])]
    if "limit" in case:
        lines += ["", f"Distance to the limit: {limit_described(case['limit'])}."]
    return "\n".join(lines)


def _row(column: dict[str, Any]) -> list[str]:
    if "missing" in column:
        return [column["column"], column["missing"], "", "", "", "", ""]
    quartiles = "{:.3f} to {:.3f}".format(*column["quartiles"])
    runs = f"{min(column['runs']):.3f} to {max(column['runs']):.3f}"
    added = f"{column['added_ms']:.2f} ms"
    ratio, cpu = f"{column['ratio']:.3f}", f"{column['cpu_ratio']:.3f}"
    name = column["column"]
    return [name, ratio, quartiles, runs, cpu, added, str(column["pairs"])]


# -- scale -------------------------------------------------------------------------------------------------------------


def _scale(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return ["## Scale\n\nNot measured."]
    machine = machine_described(found["machine"])
    return [
        f"## Scale\n\n{machine}, gloo, one thread per rank, {found['machine']['date']}. Square linear layers in a row.",
        "![](plots/scale.png)",
        _points(found["points"]),
        "### A model of it",
        MODEL,
        f"```\n{cost_model.described(found['model'])}\n```",
        *_memory(found["memory"]),
        *_fault_round(found["fault_round"]),
    ]


def _points(points: list[dict[str, Any]]) -> str:
    head = ["layers", "width", "micro-batches", "ranks", "probes", "MB probed", "unguarded", "added", "cpu", "verdict"]
    head.append("load")
    rows = []
    for p in points:
        times = [f"{1e3 * p[name]:.2f} ms" for name in ("plain_s", "added_s", "added_cpu_s", "collective_s")]
        shape = [str(p[name]) for name in ("layers", "width", "micro_batches", "ranks", "num_probes")]
        rows.append([*shape, f"{p['size_bytes'] / 1e6:.2f}", *times, f"{p['load']:.1f}"])
    return grid(head, rows)


def _memory(rows: list[dict[str, Any]]) -> list[str]:
    head = ["layers", "width", "probes", "unguarded peak", "tensors held", "formula", "tensors at peak"]
    head += ["Python objects", "process"]
    cells = []
    for row in rows:
        added = [row[name]["added"] for name in ("tensors", "peak", "objects", "process")]
        sizes = [row["peak"]["unguarded"], added[0], row["predicted"], *added[1:]]
        shape = [str(2 * row["pairs"]), str(row["width"]), str(row["num_probes"])]
        cells.append([*shape, *(f"{size / 1024:.0f}" for size in sizes)])
    text = (
        "Added by the guard in clean steps, in KiB, when the ring of 16 steps is full. The formula for tensors is\n"
        "`(1 + history) * 2 * itemsize * slots + 48 * slots + floating buffers`, `slots` being the probes of a step\n"
        "rounded up to a power of two. Python objects are what the host keeps beside the slots, for the window and\n"
        "for the ring; the process is all of it, with the objects of torch itself and what the guard imports."
    )
    return ["## Memory", text, "![](plots/memory.png)", grid(head, cells)]


def _fault_round(rows: list[dict[str, Any]]) -> list[str]:
    head = ["ranks", "bad sites on all ranks", "named", "collectives", "KiB"]
    cells = []
    for row in rows:
        numbers = [row["ranks"], row["ranks"] * row["bad_sites_per_rank"], row["sites"], row["collectives"]]
        cells.append([*map(str, numbers), f"{row['bytes'] / 1024:.1f}"])
    text = (
        "What the step of a fault issues beyond a clean one, counted; every branch of the model is bad on every rank."
    )
    return ["## The fault round", text, grid(head, cells)]


# -- dump and GPU ------------------------------------------------------------------------------------------------------


def _dump(rows: list[dict[str, Any]] | None) -> list[str]:
    if rows is None:
        return ["## Dump and replay\n\nNot measured."]
    head = ["job", "MiB", "dump", "`torch.save`", "extra memory", "opening a dump", "rebuilding"]
    cells = []
    for row in rows:
        speeds = [f"{row[f'{name}_mb_per_s']:.0f} MB/s" for name in ("dump", "save")]
        times = [f"{row[f'{name}_s']:.1f} s" for name in ("open", "rebuild")]
        cells.append([row["job"], f"{row['size_mib']:.0f}", *speeds, f"{row['extra_mib']:.0f} MiB", *times])
    return ["## Dump and replay", grid(head, cells)]


WAYS = ("eager", "compiled", "cuda graphs")
KINDS = ("sync", "deferred", "layers=blocks", "layers=every", "loss, reduce")


def _gpu(found: dict[str, Any] | None) -> list[str]:
    head = ["", "ratio", "quartiles", "ratio of 10 steps", "unguarded step", "host waits in a step"]
    cells = [_gpu_row(found, way, kind) for way in WAYS for kind in KINDS]
    if found is None:
        return ["## On a GPU", NOT_MEASURED, grid(head, cells), _bandwidth([])]
    machine = found["machine"]
    size = "width {width}, {num_blocks} blocks, {batch} x {length} tokens".format(**found["size"])
    text = f"{machine.get('device', 'CPU')}, torch {machine['torch']}, CUDA {machine['cuda']}; a transformer, {size}."
    return ["## On a GPU", text, grid(head, cells), _bandwidth(found.get("bandwidth"))]


def _gpu_row(found: dict[str, Any] | None, way: str, kind: str) -> list[str]:
    name = f"{way}, {kind}"
    whole = {} if found is None else found.get(way, {})
    row = whole.get(kind, whole if "not measured" in whole else {})
    if "ratio" not in row:
        return [name, row.get("not measured", ""), "", "", "", ""]
    quartiles = "{:.3f} to {:.3f}".format(*row["quartiles"])
    times = [f"{row['ratio']:.3f}", quartiles, f"{row['ratio_of_10_steps']:.3f}", f"{row['unguarded_ms']:.1f} ms"]
    return [name, *times, f"{_waits(row['waits'])} ({_waits(whole['unguarded']['waits'])} unguarded)"]


def _waits(waits: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in waits.items() if count) or "none"


def _bandwidth(rows: Any) -> str:
    head = ["tensor", "probe", "sum", "copy (read and write)"]
    if not isinstance(rows, list):
        return "Bandwidth: not measured."
    cells = []
    for row in rows:
        speeds = [f"{row[f'{name}_gb_per_s']:.0f} GB/s" for name in ("probe", "sum", "copy")]
        cells.append([f"{row['size_bytes'] / 2**20:.0f} MiB {row['dtype']}", *speeds])
    return grid(head, cells or [[""] * len(head)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--overhead", type=Path, nargs="+", default=[], help="of overhead.py, eager and compiled")
    for name in ("counts", "profile", "scale", "dump", "gpu"):
        parser.add_argument(
            f"--{name}", type=Path, help={"counts": "of overhead.py --counts"}.get(name, f"of {name}.py")
        )
    parser.add_argument("--write", type=Path, required=True, help="the document")
    options = parser.parse_args()
    overhead = [json.loads(path.read_text()) for path in options.overhead]
    counts, profile, scale, dump, gpu = (
        _loaded(path) for path in (options.counts, options.profile, options.scale, options.dump, options.gpu)
    )
    options.write.write_text(document(counts, overhead, profile, scale, dump, gpu))
    directory = options.write.parent / "plots"
    plots.overhead(merged(overhead), directory)
    if scale is not None:
        plots.scale(scale, directory)


def _loaded(path: Path | None) -> Any:
    return json.loads(path.read_text()) if path is not None else None


if __name__ == "__main__":
    main()
