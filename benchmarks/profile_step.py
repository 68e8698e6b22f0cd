"""Where the guard's time in a step goes: one process, one thread, the time of each kind of hook and what it contains.

    OMP_NUM_THREADS=1 python benchmarks/profile_step.py [--models transformer resnet mlp] [--json FILE]

The functions below are timed by wrapping them (`time.thread_time`), so the figures are a little larger than without;
lines that are indented are part of the lines above them. "added" is the difference to an unguarded loop beside it.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  # after the path of this repository
import torch.distributed as dist  # noqa: E402

from benchmarks.watches import EVERY, EVERYTHING, Guard, Watch  # noqa: E402
from benchmarks.workloads import MODELS, Case, Loop  # noqa: E402
from ddp_nanguard.context import GuardContext  # noqa: E402
from ddp_nanguard.distributed.group import RankGroup  # noqa: E402
from ddp_nanguard.guard import NanGuard  # noqa: E402
from ddp_nanguard.hooks import loop  # noqa: E402
from ddp_nanguard.probes import backward, module_hooks  # noqa: E402
from ddp_nanguard.probes.gradient import GradientProbe  # noqa: E402
from ddp_nanguard.probes.severity import SeverityReducer  # noqa: E402
from ddp_nanguard.probes.slots import SlotBuffer  # noqa: E402
from ddp_nanguard.step.monitor import StepMonitor  # noqa: E402
from ddp_nanguard.wrappers import base  # noqa: E402

STEPS, WARM_UP = 30, 8
TIMED: list[tuple[str, Any, str]] = [
    ("a micro-batch begins (random states)", StepMonitor, "begin_micro_batch"),
    ("before modules", module_hooks.BeforeHook, "__call__"),
    ("after modules", module_hooks.AfterHook, "__call__"),
    ("  of both: hooks put on tensors", backward.BackwardProbe, "watch"),
    ("loss", NanGuard, "watch"),
    ("gradients of activations", backward.GradientHook, "__call__"),
    ("gradients of parameters: hooks", base.LeafHook, "__call__"),
    ("gradients of parameters, local", GradientProbe, "flush_pending"),
    ("end of backward, reduced gradients", backward.BackwardProbe, "_second_callback"),
    ("verdict, all of it", loop.BeforeStepHook, "__call__"),
    ("  severity on the device", SeverityReducer, "severity"),
    ("  the collective", RankGroup, "all_reduce_verdict"),
    ("  slots to the ring", GuardContext, "keep_clean_step"),
    ("updated weights", loop.AfterStepHook, "__call__"),
    ("  of all: reductions", SlotBuffer, "reduce"),
]


@contextmanager
def timed() -> Iterator[dict[str, list[float]]]:
    """Seconds of each call, by label."""
    found: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as patches:
        for label, owner, name in TIMED:
            patches.enter_context(mock.patch.object(owner, name, _timed(getattr(owner, name), found[label])))
        yield found


def _timed(function: Any, seconds: list[float]) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.thread_time() - start)

    return call


def profile(model: str) -> dict[str, Any]:
    case = Case(model)
    with timed() as found:
        plain, guarded = Loop(case, Watch()), Loop(case, Guard(EVERY, **EVERYTHING))
        pairs = []
        for index in range(WARM_UP + STEPS):
            if index == WARM_UP:
                pairs.clear()
                for seconds in found.values():
                    seconds.clear()
            batch = case.batch()
            pairs.append((plain.step(batch).cpu, guarded.step(batch).cpu))
        rows = {
            label: {"calls": round(len(found[label]) / STEPS, 1), "ms": round(1000 * sum(found[label]) / STEPS, 3)}
            for label, _, _ in TIMED
        }
        guarded.close()
    added = statistics.median(mine - other for other, mine in pairs)
    step = statistics.median(other for other, _ in pairs)
    return {"model": model, "step_ms": round(1000 * step, 2), "added_ms": round(1000 * added, 2), "rows": rows}


def table(found: list[dict[str, Any]]) -> str:
    lines = ["| | " + " | ".join(f"{each['model']}: calls | ms" for each in found) + " |"]
    lines.append("|---" + "|---|---" * len(found) + "|")
    for label, _, _ in TIMED:
        cells = " | ".join(f"{each['rows'][label]['calls']:g} | {each['rows'][label]['ms']:.2f}" for each in found)
        lines.append(f"| {label.replace('  ', '&nbsp;&nbsp;')} | {cells} |")
    lines.append("| **added to a step** | " + " | ".join(f"| {each['added_ms']:.2f}" for each in found) + " |")
    lines.append("| unguarded step | " + " | ".join(f"| {each['step_ms']:.2f}" for each in found) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["transformer", "resnet", "mlp"])
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    found = [profile(model) for model in options.models]
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
