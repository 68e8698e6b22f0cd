"""Who finds what: the public failure cases of ``tests/cases`` through this package and what people use today.

    pip install -c constraints.txt -e '.[test,bench]'
    python benchmarks/diagnosis.py [--cases A01 D ...] [--tools NAME ...]
        [--write benchmarks/results/diagnosis.md] [--json FILE]

Each case is trained on two real processes (gloo, CPU) once per tool, from the same weights, on the same data, in the
same loop. The tools are in `peers`, what counts as a right answer is in `judging`, the document in `diagnosis_text`.
A tool whose package is missing is listed as not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  # after the path of this repository
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.diagnosis_text import document, table  # noqa: E402
from benchmarks.judging import MODULES, Mark, corpus, expected_of, group_of, judge  # noqa: E402
from benchmarks.peers import TOOLS, Statement, Stop, Tool  # noqa: E402
from tests import rank_processes  # noqa: E402
from tests.cases.harness import Case, wrapped  # noqa: E402
from tests.rank_processes import Outcome, run_ranks_raw  # noqa: E402

WAIT_S = 1.0
"""How long a rank that has stopped stays alive for a peer that is still in a collective."""

DEADLINE_S = 60.0
LOST = ("gloo", "Connection closed", "Connection reset", "Broken pipe", "Socket")

# -- on the ranks ------------------------------------------------------------------------------------------------------


def train(rank: int, world_size: int, module: str, name: str, tool: str, step: int, directory: str) -> Stop:
    """Body of a rank: the case with the tool attached."""
    stop, run = Stop(), Run(importlib.import_module(module).CASES[name], TOOLS[tool](), rank, directory)
    try:
        run.train()
    except Exception as error:
        stop.kind = "alarm" if run.tool.is_alarm(error) else "broke"
        if stop.kind == "broke" and any(word in str(error) for word in LOST):
            stop.kind = "left"
        stop.error, stop.traceback = _error_text(error), traceback.format_exc()
        stop.report = error.report.to_dict() if hasattr(error, "report") else None
    stop.step, stop.unchanged, stop.parameters = run.step, run.is_unchanged(step), run.parameters
    _stay_for_peers(rank, world_size)
    return stop


def _error_text(error: Exception) -> str:
    name = type(error).__name__
    return f"{name}: {error}" if name not in ("AlarmError", "NonFiniteError") else str(error)


def _stay_for_peers(rank: int, world_size: int) -> None:
    """Alive until every rank has ended by itself, or `WAIT_S` is over."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"ended-{rank}", "yes")
    with contextlib.suppress(dist.DistStoreError, RuntimeError):  # a FileStore that waits in vain raises the latter
        store.wait([f"ended-{peer}" for peer in range(world_size)], timedelta(seconds=WAIT_S))


class Run:
    """One rank's training of a case with one tool."""

    def __init__(self, case: Case, tool: Tool, rank: int, directory: str) -> None:
        self.case, self.tool, self.rank, self.directory = case, tool, rank, directory
        self.step = 0
        self.weights: list[list[torch.Tensor]] = []
        """Local, as they were before each update."""
        self.parameters: list[str] = []

    def train(self) -> None:
        case, tool = self.case, self.tool
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            plain = case.build()
        tool.attach(plain)
        self.model, self.scaler = wrapped(plain, case.wrap), case.scaler()
        self.parameters = [name for name, _ in self.model.named_parameters()]
        self.optimizer = case.optimizer(self.model.parameters())
        called, self.stepped = tool.start(case, self.model, self.optimizer, self.scaler, self.directory)
        for index, items in enumerate(tool.batches(case.batch(self.rank, i) for i in range(case.batches))):
            self._micro_batch(called, items, index)
            if (index + 1) % case.accumulation == 0:
                self._update(index)
        tool.finish()

    def _micro_batch(self, called: Any, items: Any, index: int) -> None:
        case, tool = self.case, self.tool
        case.before(self.model, self.optimizer, self.rank, index)
        with tool.around():
            losses = tool.step(case, called, items)
            total = case.total(losses)
            (total if self.scaler is None else self.scaler.scale(total)).backward()
        tool.after_backward(self.model, total)

    def _update(self, index: int) -> None:
        self.tool.before_update(self.model)
        self.case.before_update(self.model, self.optimizer, self.rank, index)
        self.weights.append([tensor.clone() for tensor in local(self.model)])
        if self.scaler is None:
            self.stepped.step()
        else:
            self.scaler.step(self.stepped)
            self.scaler.update()
        self.optimizer.zero_grad()
        self.step += 1

    def is_unchanged(self, step: int) -> bool:
        """Whether the weights are, to the byte, those from before the update of a step."""
        if len(self.weights) <= step:
            return True
        pairs = zip(self.weights[step], local(self.model), strict=True)
        return all(torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)) for a, b in pairs)


def local(model: nn.Module) -> list[torch.Tensor]:
    return [getattr(p, "_local_tensor", p).detach().contiguous() for p in model.parameters()]


# -- in the parent -----------------------------------------------------------------------------------------------------


def compare(cases: list[str] | None = None, tools: list[str] | None = None, jobs: int = 2) -> list[Mark]:
    """Every tool that is there in every case."""
    there = [name for name, make in TOOLS.items() if make().version() is not None and (not tools or name in tools)]
    pairs = [(name, module, case, tool) for name, (module, case) in corpus(cases).items() for tool in there]
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda pair: one(*pair), pairs))


def one(name: str, module: str, case: Case, tool: str) -> Mark:
    """One tool in one case."""
    expected = expected_of(module, name, case)
    mark = Mark(name, tool, group_of(name))
    with tempfile.TemporaryDirectory() as directory:
        where = {"module": module, "name": name, "tool": tool, "step": expected.step, "directory": directory}
        stops = [_stop_of(outcome) for outcome in run_ranks_raw(train, timeout_s=DEADLINE_S, **where)]
        alarms = {rank: stop for rank, stop in enumerate(stops) if stop.kind == "alarm"}
    said: dict[int, Statement] = {rank: TOOLS[tool]().said(stop) for rank, stop in alarms.items()}
    mark.second_look = next((look["outcome"] for stop in alarms.values() if (look := _look(stop)) is not None), "")
    return judge(mark, expected, stops, said)


def _look(stop: Stop) -> dict[str, Any] | None:
    return None if stop.report is None else stop.report["second_look"]


def _stop_of(outcome: Outcome) -> Stop:
    """A rank that still waits at the deadline, or that its peer's end has killed, was left waiting."""
    if outcome.error:
        raise RuntimeError(outcome.describe())
    stop: Stop = outcome.value if outcome.returned else Stop("left", error=outcome.describe())
    stop.output = outcome.output
    return stop


def preload() -> None:
    """What every process would otherwise import by itself."""
    rank_processes.PRELOAD += [*MODULES, "benchmarks.diagnosis"]
    rank_processes.PRELOAD += ["transformers.debug_utils", "sherlorch", "stabilityguard"]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONHASHSEED"] = "0"  # stabilityguard points at whatever a set gives last
    # packages that are loaded once into the fork server leave locks there, which nobody needs to hear of
    os.environ["PYTHONWARNINGS"] = "ignore::UserWarning:multiprocessing.resource_tracker"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="+", help="beginnings of their names, such as A01 or D; default: all")
    parser.add_argument("--tools", nargs="+", choices=list(TOOLS), help="default: all that are installed")
    parser.add_argument("--jobs", type=int, default=2, help="cases at the same time, default 2")
    parser.add_argument("--write", metavar="FILE", help="the document, in Markdown")
    parser.add_argument("--json", metavar="FILE", help="every answer")
    options = parser.parse_args()
    preload()
    start = time.monotonic()
    marks = compare(options.cases, options.tools, options.jobs)
    print(table(marks))
    print(f"\n{time.monotonic() - start:.0f} s")
    if options.write:
        Path(options.write).write_text(document(marks))
    if options.json:
        Path(options.json).write_text(json.dumps([vars(mark) for mark in marks], indent=1))


if __name__ == "__main__":
    main()
