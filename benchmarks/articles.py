"""The benchmark of the article on NaNDetector, once more: its model and batch, in one process on a CPU.

    python benchmarks/articles.py [--detector nan_detector.py] [--rounds 400]

An MLP 64-256-256-10 with batches of 64, one thread. The article times the forward alone, each way on a model of its own
one after the other, the first pass included. Here all ways stand side by side with equal weights; in each round every
one takes a training step (forward, backward, fused AdamW), in an order that turns, and both the forward and the whole
step are timed: what a way does in the backward or before the update is no part of a forward. Figures are medians, and
medians of the ratios to the unguarded step of the same round. ``--detector`` is the article's own file (MIT licence,
``Emmimal/pytorch-nan-detector`` on GitHub), which is not part of this repository; it imports matplotlib.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  # after the path of this repository
from torch import Tensor, nn  # noqa: E402

from benchmarks.machine import described, load, machine  # noqa: E402
from benchmarks.watches import Anomaly, Control, Guard, ModuleHooks, Watch  # noqa: E402
from benchmarks.workloads import Case, Loop  # noqa: E402

WARM_UP = 30


class Detector(Watch):
    """The article's, as its own loop uses it: forward hooks, and the norms of gradients after the backward."""

    about = "`NaNDetector(model, verbose=False)`, `check_grad_norms()` after the backward"

    def __init__(self, kind: Any, name: str, **options: Any) -> None:
        self.name, self._kind, self._options = name, kind, options

    def attach(self, model: nn.Module) -> None:
        self._detector = self._kind(model, verbose=False, **self._options).attach()

    def after_backward(self, model: nn.Module) -> None:
        self._detector.check_grad_norms()


class Times(NamedTuple):
    forward: float
    step: float


def one_step(loop: Loop, batch: Tensor) -> Times:
    """Seconds of the forward, and of the whole step."""
    watch = loop.watch
    begin = time.perf_counter()
    for item in watch.batches([batch]):
        with watch.around():
            output = loop.model(item)
            forward = time.perf_counter() - begin
            loss = output.square().mean()
            watch.after_forward(loss)
            loss.backward()
        watch.after_backward(loop.model)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return Times(forward, time.perf_counter() - begin)


def measured(watches: list[Watch], rounds: int) -> dict[str, list[Times]]:
    """All ways, round by round."""
    loops = [Loop(Case("mlp", "plain"), watch) for watch in watches]
    found: dict[str, list[Times]] = {watch.name: [] for watch in watches}
    for number in range(WARM_UP + rounds):
        batch = Case("mlp").batch()
        turn = number % len(loops)
        for loop in loops[turn:] + loops[:turn]:
            times = one_step(loop, batch)
            if number >= WARM_UP:
                found[loop.watch.name].append(times)
    return found


def table(found: dict[str, list[Times]]) -> str:
    """Markdown; ratios to the first way."""
    lines = ["| way | forward, ms | ratio | step, ms | ratio |", "|---|---|---|---|---|"]
    base = next(iter(found.values()))
    for name, times in found.items():
        cells = [name]
        for part in Times._fields:
            mine, plain = ([getattr(each, part) for each in row] for row in (times, base))
            ratio = statistics.median(a / b for a, b in zip(mine, plain, strict=True))
            cells += [f"{1000 * statistics.median(mine):.2f}", f"{ratio:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def detector_in(path: Path) -> Any:
    """The class in the article's file."""
    spec = importlib.util.spec_from_file_location("nan_detector", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file; give the article's nan_detector.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.NaNDetector


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--detector", type=Path, help="the article's nan_detector.py")
    parser.add_argument("--rounds", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    watches: list[Watch] = [
        Watch(),
        Control(),
        Guard("NanGuard"),
        Guard("NanGuard, every layer", layers="every"),
        Guard("NanGuard, every layer, parameter norms", layers="every", parameter_norm_warn=100.0),
        ModuleHooks(),
    ]
    if options.detector is not None:
        kind = detector_in(options.detector)
        watches += [Detector(kind, "NaNDetector"), Detector(kind, "NaNDetector, backward too", check_backward=True)]
    watches.append(Anomaly())
    with contextlib.ExitStack() as closing:
        for watch in watches:
            closing.callback(watch.close)
        found = measured(watches, options.rounds)
    print(f"{described(machine())}; load {load()}; {options.rounds} rounds, one thread\n")
    print(table(found))


if __name__ == "__main__":
    main()
