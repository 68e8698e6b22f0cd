"""Memory in clean steps, with and without the guard: tensors at their peak, Python objects, and the whole process.

Tensors are counted by the allocator's own events, from before the model is made until the ring of past steps is full:
what is alive at the end, and the peak of what was alive at once. Python objects are what `tracemalloc` finds after the
last step, the process is its resident memory then; each comes from a launch of its own, since watching one disturbs
the others.

What a guard is to hold, in bytes:

    tensors = (1 + history) * 2 * itemsize * slots + 48 * slots + floating buffers

with `slots` the probes of a step, rounded up to a power of two of at least 64; 48 bytes are what a slot is held against
in the verdict. While the verdict is made, `IN_VERDICT` bytes more per slot are alive, but no activation is.
"""

from __future__ import annotations

import gc
import re
import tracemalloc
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import profile

from benchmarks.limit import Stopwatch
from benchmarks.watches import EVERY, EVERYTHING, Guard, Watch
from tests.rank_processes import run_ranks

HISTORY = 16
STEPS = HISTORY + 4
TIMEOUT_S = 120.0
FIRST_SLOTS = 64
HELD_AGAINST = 48
IN_VERDICT = 44


@dataclass(frozen=True)
class Job:
    """What is trained: pairs of a linear layer and a batch norm, which has buffers."""

    pairs: int
    width: int
    batch: int = 16

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        layers = [module for _ in range(self.pairs) for module in (self._linear(), nn.BatchNorm1d(self.width))]
        return nn.Sequential(*layers)

    def _linear(self) -> nn.Module:
        return nn.Linear(self.width, self.width)


JOBS = (Job(5, 64), Job(50, 64), Job(500, 64), Job(50, 512))


def run(rank: int, world_size: int, job: Job, guarded: bool, how: str) -> dict[str, int]:
    """Body of a process without a group, whose buffers are freed on threads that nobody watches: what steps take."""
    if how == "tensors":
        with profile(profile_memory=True, use_cpu=True) as found:
            kept = _train(job, guarded)
        return _peak_and_end(found, kept)
    if how == "objects":
        tracemalloc.start()
        kept = _train(job, guarded)
        gc.collect()
        return {"objects": tracemalloc.get_traced_memory()[0] + 0 * len(kept)}
    if how == "process":
        kept = _train(job, guarded)
        gc.collect()
        return {"process": _resident() + 0 * len(kept)}
    with Stopwatch() as watch:
        _train(job, guarded, on_step=watch.begin)
    num_probes = watch.num_probes - watch.num_screens
    return {"num_probes": num_probes, "num_screens": watch.num_screens, "buffer_bytes": _buffer_bytes(job)}


def _train(job: Job, guarded: bool, on_step: Any = None) -> list[Any]:
    model = job.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    watch = Guard(EVERY, **EVERYTHING) if guarded else Watch()
    watch.start(model, optimizer)
    for _ in range(STEPS):
        if on_step is not None:
            on_step(False)
        for batch in watch.batches([torch.randn(job.batch, job.width)]):
            loss = model(batch).square().mean()
            watch.after_forward(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model, optimizer, watch]  # alive until they have been counted


def _peak_and_end(found: Any, kept: list[Any]) -> dict[str, int]:
    """Sums of what was allocated and freed, in the order of time, while what was trained is kept."""
    events = [event for event in found.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return {"peak": peak, "tensors": alive}


def _resident() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def _buffer_bytes(job: Job) -> int:
    return sum(b.numel() * b.element_size() for b in job.model().buffers() if b.is_floating_point())


def predicted(num_probes: int, num_screens: int, buffer_bytes: int, itemsize: int = 4) -> int:
    """Bytes of the guard's tensors."""
    slots, screens = (max(FIRST_SLOTS, 1 << (count - 1).bit_length()) for count in (num_probes, num_screens))
    numbers = 2 * slots + screens
    return (1 + HISTORY) * itemsize * numbers + HELD_AGAINST * (slots + screens) + buffer_bytes


def measured() -> list[dict[str, Any]]:
    """A row per job."""
    return [_row(job) for job in JOBS]


def _row(job: Job) -> dict[str, Any]:
    shape = _launch(job, True, "shape")
    row: dict[str, Any] = {**asdict(job), **shape, "predicted": predicted(**shape)}
    for how in ("tensors", "objects", "process"):
        off, on = _launch(job, False, how), _launch(job, True, how)
        row.update({name: {"unguarded": off[name], "guarded": on[name], "added": on[name] - off[name]} for name in off})
    return row


def _launch(job: Job, guarded: bool, how: str) -> dict[str, int]:
    found: dict[str, int] = run_ranks(run, 1, TIMEOUT_S, process_group=False, job=job, guarded=guarded, how=how)[0]
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """For people, in KiB."""
    head = ("layers", "width", "probes", "unguarded", "held", "formula", "peak", "objects", "process")
    lines = ["added, in KiB; `unguarded` is the peak of tensors without a guard", "".join(f"{h:>11}" for h in head)]
    for row in rows:
        added = [row[name]["added"] for name in ("tensors", "peak", "objects", "process")]
        sizes = [row["peak"]["unguarded"], added[0], row["predicted"], *added[1:]]
        cells = [f"{2 * row['pairs']}", f"{row['width']}", f"{row['num_probes']}", *(f"{s / 1024:.0f}" for s in sizes)]
        lines.append("".join(f"{cell:>11}" for cell in cells))
    return "\n".join(lines)
