"""What a guarded step costs beyond an unguarded one, counted: the part of `overhead.py` that no machine can blur."""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.watches import EVERY, EVERYTHING, Guard, Watch
from benchmarks.workloads import Case, Loop
from ddp_nanguard.probes.slots import SlotBuffer
from tests.counting import Counts, counting

CASES = (
    Case("mlp", "ddp"),
    Case("mlp", "fsdp2"),
    Case("resnet", "ddp"),
    Case("mlp", "ddp", "whole", "aot_eager"),
    Case("resnet", "ddp", "blocks", "aot_eager"),
)
WARM_UP = 3
STEPS = 10
"""In which compiled code must not be compiled again."""


@dataclass
class Found:
    """What the guard added to one step of a case; of a compiled case, what became of its graphs.

    Attributes:
        collective_bytes: of each collective that only the guarded step issued.
        waits: host reads behind the step's collective and so for its result; the others find theirs long there.
        kernels: of each probe.
        graphs: compiled with and without the guard.
    """

    case: Case
    verdict: str
    collective_bytes: list[int] = field(default_factory=list)
    host_reads: int = 0
    waits: int = 0
    kernels: list[int] = field(default_factory=list)
    graphs: tuple[int, int] = (0, 0)
    graph_breaks: int = 0
    recompilations: int = 0


def counted(case: Case, verdict: str = "sync") -> Found:
    """Counts one case. Collective: as the training steps."""
    found = Found(case, verdict)
    options = dict(EVERYTHING) if verdict == "sync" else {**EVERYTHING, "verdict": verdict}
    return _of_graphs(found, options) if case.compiled else _of_step(found, options)


def _of_step(found: Found, options: dict[str, Any]) -> Found:
    off, on = Loop(found.case, Watch()), Loop(found.case, Guard(EVERY, **options))
    for _ in range(WARM_UP):
        off.step(found.case.batch())
        on.step(found.case.batch())
    with counting() as plain:
        off.step(found.case.batch())
    with counting() as guarded, _reads_behind_collectives(guarded) as waits, _kernels() as found.kernels:
        on.step(found.case.batch())
    on.close()
    found.collective_bytes = sorted((Counter(guarded.operator_bytes) - Counter(plain.operator_bytes)).elements())
    found.host_reads = guarded.host_reads.total() - plain.host_reads.total()
    found.waits = waits()
    return found


def _of_graphs(found: Found, options: dict[str, Any]) -> Found:
    graphs = []
    for watch in (Watch(), Guard(EVERY, **options)):
        torch._dynamo.reset()
        counters.clear()
        loop = Loop(found.case, watch)
        for _ in range(WARM_UP):
            loop.step(found.case.batch())
        graphs.append(_graphs())
        for _ in range(STEPS):
            loop.step(found.case.batch())
        found.recompilations = _graphs() - graphs[-1]
        found.graph_breaks = sum(counters["graph_break"].values())
        loop.close()
    found.graphs = (graphs[1], graphs[0])
    return found


def _graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@contextlib.contextmanager
def _reads_behind_collectives(counts: Counts) -> Iterator[Any]:
    """Gives what tells the number of host reads since the last ``all_reduce`` from Python."""
    original, before = dist.all_reduce, 0

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        nonlocal before
        work = original(*args, **kwargs)
        before = counts.host_reads.total()
        return work

    dist.all_reduce = all_reduce
    try:
        yield lambda: counts.host_reads.total() - before
    finally:
        dist.all_reduce = original


class _Operators(TorchDispatchMode):
    """Counts what is no view and so a kernel."""

    num_kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_kernels += not func.is_view
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _kernels() -> Iterator[list[int]]:
    """Of each probe that looked at anything."""
    found: list[int] = []
    original = SlotBuffer.reduce

    def reduce(slots: SlotBuffer, *args: Any, **kwargs: Any) -> Any:
        with _Operators() as operators:
            order = original(slots, *args, **kwargs)
        found.append(operators.num_kernels)
        return order

    SlotBuffer.reduce = reduce  # type: ignore[method-assign]
    try:
        yield found
    finally:
        SlotBuffer.reduce = original  # type: ignore[method-assign]


def require_cheap(found: Found) -> None:
    """Raises AssertionError where a step of the guard costs more than it may."""
    where = f"{found.case}, {found.verdict}"
    if found.case.compiled:
        assert found.graphs[0] == found.graphs[1], f"{where}: {found.graphs[0]} graphs, {found.graphs[1]} without guard"
        assert found.graph_breaks == 0, f"{where}: {found.graph_breaks} graph breaks"
        assert found.recompilations == 0, f"{where}: {found.recompilations} recompilations in {STEPS} steps"
        return
    assert found.collective_bytes == [16], f"{where}: collectives of {found.collective_bytes} bytes"
    assert found.host_reads == 1, f"{where}: {found.host_reads} host reads"
    allowed = 1 if found.verdict == "sync" else 0
    assert found.waits == allowed, f"{where}: {found.waits} host reads behind the collective"
    assert found.kernels, f"{where}: no probe"
    assert max(found.kernels) <= 1, f"{where}: up to {max(found.kernels)} kernels in a probe"


def described(found: Found) -> str:
    """One line."""
    if found.case.compiled:
        graphs = f"{found.graphs[0]} graphs ({found.graphs[1]} without guard), {found.graph_breaks} graph breaks"
        return f"{found.case}: {graphs}, {found.recompilations} recompilations in {STEPS} steps"
    collectives = f"{len(found.collective_bytes)} collective of {found.collective_bytes} bytes more"
    reads = f"{found.host_reads} host read more, {found.waits} of them behind it"
    kernels = f"{len(found.kernels)} probes of at most {max(found.kernels)} kernel"
    return f"{found.case}, {found.verdict}: {collectives}, {reads}, {kernels}"


def generous_ratio(case: Case, num_pairs: int = 5) -> float:
    """Processor time of a guarded step in unguarded ones, the median."""
    off, on = Loop(case, Watch()), Loop(case, Guard(EVERY, **EVERYTHING))
    ratios = []
    for index in range(num_pairs + 2):
        batch = case.batch()
        plain, guarded = off.step(batch).cpu, on.step(batch).cpu
        if index >= 2:
            ratios.append(guarded / plain)
    on.close()
    return statistics.median(ratios)
