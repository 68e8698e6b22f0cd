"""What the guard costs: training steps with and without it in alternation, and of what people use today beside it.

    pip install -c constraints.txt -e '.[test,bench]'
    torchrun --nproc-per-node 2 benchmarks/overhead.py [--runs 3] [--json FILE] [--plot DIRECTORY] [--compiled]
    torchrun --nproc-per-node 2 benchmarks/overhead.py --counts

One process group, one thread per rank. Per model and wrapper all columns are built side by side from equal weights; in
each round every column takes two turns with its watch and two with all of it taken off, of the same model in the same
memory and on the same batch, one kind around the other, each behind a barrier; which is outside alternates. A turn is
one step, or as many in a row as take 30 ms: taken singly, short steps find the code of the other kind in the caches. A
figure is the median of the ratios of these pairs, with quartiles over all of them and the medians of each run. Peers
take turns, one per round. The processor time of the training thread, summed over ranks, is compared likewise: it says
less about waiting, and is not disturbed by other jobs on the machine. `--compiled` measures compiled models instead,
whose hooks cannot be taken off: the other step of a pair is that of a second model; compiling takes longer than
measuring.
`--counts` measures next to nothing and asserts what can be counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  # after the path of this repository
import torch.distributed as dist  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from benchmarks import counts, limit  # noqa: E402
from benchmarks.machine import load, machine  # noqa: E402
from benchmarks.watches import COLUMNS, CONTROLS, GUARDS, PEERS, Watch, is_installed  # noqa: E402
from benchmarks.workloads import MODELS, Case, Loop, Seconds  # noqa: E402

GENEROUS = 3.0
TURN_SECONDS = 0.03


@dataclass
class Column:
    """Steps of one loop, paired with unguarded ones: its own, or those of another loop."""

    loop: Loop
    plain: Loop | None = None
    runs: list[list[tuple[Seconds, Seconds]]] = field(default_factory=list)

    def pair(self, batch: torch.Tensor, plain_first: bool, in_a_row: int) -> tuple[Seconds, Seconds]:
        """Two turns each, every one behind a barrier, one kind around the other so that drift cancels; their means."""
        plain, watched = self._plain_steps, self.loop.steps
        found: dict[Any, list[Seconds]] = {plain: [], watched: []}
        for turn in (plain, watched, watched, plain) if plain_first else (watched, plain, plain, watched):
            dist.barrier()
            found[turn] += turn(batch, in_a_row)
        return _mean(found[watched]), _mean(found[plain])

    def _plain_steps(self, batch: torch.Tensor, in_a_row: int) -> list[Seconds]:
        steps = self.loop.unwatched_steps if self.plain is None else self.plain.steps
        return steps(batch, in_a_row)

    def row(self) -> dict[str, Any]:
        pairs = [pair for run in self.runs for pair in run]
        walls = [mine.wall / plain.wall for mine, plain in pairs]
        low, middle, high = statistics.quantiles(walls if len(walls) > 1 else 2 * walls, n=4)
        return {
            "column": self.loop.watch.name,
            "ratio": round(middle, 4),
            "quartiles": [round(low, 4), round(high, 4)],
            "runs": [round(statistics.median(m.wall / p.wall for m, p in run), 4) for run in self.runs if run],
            "cpu_ratio": round(statistics.median(mine.cpu / plain.cpu for mine, plain in pairs), 4),
            "pairs": len(pairs),
            "step_ms": round(1000 * statistics.median(mine.wall for mine, _ in pairs), 3),
            "added_ms": round(1000 * statistics.median(mine.wall - plain.wall for mine, plain in pairs), 3),
        }


def _mean(steps: list[Seconds]) -> Seconds:
    return Seconds(statistics.mean(step.wall for step in steps), statistics.mean(step.cpu for step in steps))


@dataclass(frozen=True)
class Extent:
    """How much is measured: at most so many rounds and seconds per run, after warm-up."""

    runs: int
    rounds: int
    seconds: float
    warm_up: int
    columns: list[str]


class Remarks(logging.Handler):
    """What the guard warns of: figures of a guard whose hooks do not run in compiled code would be worth nothing."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: list[str] = []
        logging.getLogger("ddp_nanguard").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())

    def taken(self) -> list[str]:
        logging.getLogger("ddp_nanguard").removeHandler(self)
        return list(dict.fromkeys(self._texts))


def measure(case: Case, extent: Extent) -> dict[str, Any]:
    """All columns of one case. Collective: as the training steps, and a few of its own between them."""
    before = load()
    remarks = Remarks()
    torch._dynamo.reset()
    counters.clear()
    torch._dynamo.config.recompile_limit = 64  # every loop has a model of its own, of the same code
    torch._dynamo.config.skip_nnmodule_hook_guards = False  # else one without hooks lends its graph to all
    plain = Loop(case, Watch()) if case.compiled else None
    wanted = [make for make in (*CONTROLS, *GUARDS, *PEERS) if make().name in extent.columns]
    guards, _ = _built(case, [make for make in wanted if make not in PEERS], plain)
    others, missing = _built(case, [make for make in wanted if make in PEERS and not case.compiled], plain)
    in_a_row = _warm_up(case, extent, guards + others)
    graphs, breaks = _graphs(), sum(counters["graph_break"].values())
    for _ in range(extent.runs):
        _run(case, extent, guards, others, in_a_row)
    rows = [*(column.row() for column in guards + others), *missing]
    for column in guards + others:
        column.loop.close()
    return {
        "case": str(case),
        **{name: getattr(case, name) for name in ("model", "wrapper", "compiled")},
        "unguarded_ms": _unguarded_ms(guards),
        "in_a_row": in_a_row,
        "load": [before, load()],
        "recompilations": _graphs() - graphs,
        "graph_breaks": breaks,
        "remarks": remarks.taken(),
        "columns": rows,
    }


def _warm_up(case: Case, extent: Extent, columns: list[Column]) -> int:
    """Returns how many steps make a turn. Collective: that number of the first rank is broadcast."""
    for column in columns:
        for _ in range(extent.warm_up):
            column.loop.step(case.batch())
    pairs = [pair for _ in range(extent.warm_up) for _, pair in _round(case, columns, 0, in_a_row=1)]
    step = statistics.median(plain.wall for _, plain in pairs)
    in_a_row = torch.tensor([math.ceil(TURN_SECONDS / step)])
    dist.broadcast(in_a_row, 0)
    return int(in_a_row.item())


def _built(
    case: Case, made: Sequence[Callable[[], Watch]], plain: Loop | None
) -> tuple[list[Column], list[dict[str, Any]]]:
    """Columns, and rows that say why there is none."""
    columns: list[Column] = []
    missing = []
    for make in made:
        watch = make()
        if is_installed(watch):
            columns.append(Column(Loop(case, watch), plain))
        else:
            missing.append({"column": watch.name, "missing": "not installed"})
    return columns, missing


def _run(case: Case, extent: Extent, guards: list[Column], others: list[Column], in_a_row: int) -> None:
    for column in guards + others:
        column.runs.append([])
    end = time.monotonic() + extent.seconds
    for index in range(extent.rounds):
        turn = [others[index % len(others)]] if others else []
        for column, pair in _round(case, guards + turn, index, in_a_row):
            column.runs[-1].append(pair)
        if index + 1 >= len(others) and _is_over(end):
            break
    for column in guards + others:
        column.runs[-1] = _over_ranks(column.runs[-1])


def _round(
    case: Case, columns: list[Column], index: int, in_a_row: int
) -> list[tuple[Column, tuple[Seconds, Seconds]]]:
    shift = index % len(columns)
    batch = case.batch()
    plain_first = bool(index // len(columns) % 2)
    return [(column, column.pair(batch, plain_first, in_a_row)) for column in columns[shift:] + columns[:shift]]


def _is_over(end: float) -> bool:
    """The first rank decides, so that all make the same number of rounds."""
    word = torch.tensor([time.monotonic() >= end], dtype=torch.int64)
    dist.broadcast(word, 0)
    return bool(word.item())


def _over_ranks(run: list[tuple[Seconds, Seconds]]) -> list[tuple[Seconds, Seconds]]:
    """The slowest rank's wall time, and processor time of all ranks."""
    times = torch.tensor(run, dtype=torch.float64).reshape(-1, 2, 2)
    walls, cpus = times[..., 0].contiguous(), times[..., 1].contiguous()
    dist.all_reduce(walls, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpus)
    both = zip(walls.tolist(), cpus.tolist(), strict=True)
    return [(Seconds(wall[0], cpu[0]), Seconds(wall[1], cpu[1])) for wall, cpu in both]


def _unguarded_ms(columns: list[Column]) -> float:
    return round(1000 * statistics.median(plain.wall for c in columns for run in c.runs for _, plain in run), 3)


def _graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


# -- the table ---------------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    """A line per case and column."""
    head = f"{'':<36}{'ratio':>8}{'quartiles':>18}{'runs':>18}{'cpu':>8}{'added':>12}{'pairs':>7}"
    lines = [head]
    for case in rows:
        loads = " to ".join(map(str, case["load"]))
        compiled = f", {case['recompilations']} recompilations, {case['graph_breaks']} graph breaks"
        lines.append(
            f"{case['case']}: {case['unguarded_ms']:.2f} ms, load {loads}{compiled if case['compiled'] else ''}"
        )
        lines += [_line(column) for column in case["columns"]]
        lines += [f"  WARNING {text}" for text in case["remarks"]]
        if "limit" in case:
            lines.append("  " + limit.described(case["limit"]))
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    if "missing" in row:
        return f"  {row['column']:<34}{row['missing']:>8}"
    quartiles = "{:.3f} to {:.3f}".format(*row["quartiles"])
    runs = f"{min(row['runs']):.3f} to {max(row['runs']):.3f}"
    figures = f"{row['ratio']:>8.3f}{quartiles:>18}{runs:>18}{row['cpu_ratio']:>8.3f}{row['added_ms']:>9.3f} ms"
    return f"  {row['column']:<34}{figures}{row['pairs']:>7}"


# -- the short form ----------------------------------------------------------------------------------------------------


def check_counts() -> list[str]:
    """Asserts what a step of the guard may cost, in collectives, host reads, kernels and graphs.

    Returns:
        A line per case.

    Raises:
        AssertionError: one of them costs more.
    """
    lines = []
    for case in counts.CASES:
        for verdict in ("sync",) if case.compiled else ("sync", "deferred"):
            lines.append(_check(case, verdict))
            if dist.get_rank() == 0:
                print(lines[-1], flush=True)
    ratio = counts.generous_ratio(Case("resnet"))
    assert ratio < GENEROUS, f"a guarded step takes {ratio:.2f} times the processor time of an unguarded one"
    return lines


def _check(case: Case, verdict: str) -> str:
    found = counts.counted(case, verdict)
    counts.require_cheap(found)
    return counts.described(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--counts", action="store_true", help="assert counts only; seconds")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--wrappers", nargs="+", choices=["ddp", "fsdp2"], default=["ddp", "fsdp2"])
    parser.add_argument("--compiled", action="store_true", help="transformer and ResNet, whole and per block")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=200, help="at most, per run and case")
    parser.add_argument("--seconds", type=float, default=10.0, help="at most, per run and case")
    parser.add_argument("--warm-up", type=int, default=4, help="rounds")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=COLUMNS, help="by name; default: all")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--plot", type=Path, help="directory for the plots")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node 2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        _count_all(options) if options.counts else _measure_all(options)
    finally:
        gc.collect()  # what still holds a DDP model would hinder the end of its process group
        dist.destroy_process_group()


def _count_all(options: argparse.Namespace) -> None:
    lines = check_counts()
    if options.json and dist.get_rank() == 0:
        options.json.write_text(json.dumps({"counts": lines}, indent=1) + "\n")


def _measure_all(options: argparse.Namespace) -> None:
    extent = Extent(options.runs, options.rounds, options.seconds, options.warm_up, options.columns)
    rows = []
    for case in _cases(options):
        rows.append(measure(case, extent))
        gc.collect()
        if not case.compiled:
            rows[-1]["limit"] = limit.distance(case)
            gc.collect()
        if dist.get_rank() == 0:
            print(table(rows[-1:]), flush=True)
    if dist.get_rank() == 0:
        _write(rows, options)


def _cases(options: argparse.Namespace) -> list[Case]:
    ways = ("whole", "blocks") if options.compiled else ("",)
    models = [name for name in options.models if not options.compiled or name in ("transformer", "resnet")]
    return [Case(model, wrapper, way) for wrapper in options.wrappers for way in ways for model in models]


def _write(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    if options.json:
        abouts = {watch.name: watch.about for make in (*CONTROLS, *GUARDS, *PEERS) if (watch := make()).about}
        found = {"machine": machine(), "ranks": dist.get_world_size(), "about": abouts, "cases": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.plot:
        from benchmarks import plots

        plots.overhead(rows, options.plot)


if __name__ == "__main__":
    main()
