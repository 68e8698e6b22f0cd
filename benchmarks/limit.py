"""Distance to the limit: the time spent in probes against one `sum` over the same bytes.

Whoever looks at every element has to read every byte once, and `sum` is the fastest kernel that does. In steps that
alternate, either the probes are timed or, at the same places and so in the same state of the caches, a `sum` of what
they are given.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmarks.watches import EVERY, EVERYTHING, Guard
from benchmarks.workloads import Case, Loop
from ddp_nanguard.probes import screens
from ddp_nanguard.probes.slots import SlotBuffer
from ddp_nanguard.tensors.minmax import dense_parts


class Stopwatch:
    """Stands in for `SlotBuffer.reduce`, and for what screens reduce together, while it is entered.

    Attributes:
        probes, sums: seconds of the step under way.
        size_bytes, num_probes: what was looked at in it; ``num_screens`` of these by screens.
    """

    def __enter__(self) -> Stopwatch:
        self._reduce = reduce = SlotBuffer.reduce
        self.begin(False)

        def timed(slots: SlotBuffer, role: Any, tensor: Tensor, note: Any, order: int | None = None) -> int | None:
            parts = dense_parts(tensor) or []
            self.num_probes += len(parts)
            self.size_bytes += sum(part.numel() * part.element_size() for part in parts)
            if self.is_summing:
                self._sum(parts)
                return reduce(slots, role, tensor, note, order)
            start = time.perf_counter()
            found = reduce(slots, role, tensor, note, order)
            self.probes += time.perf_counter() - start
            return found

        self._look = look = screens._Group.look

        def looked(group: Any, slots: SlotBuffer, tensors: Any, orders: Any) -> None:
            parts = [tensors[index].detach() for index in group.indices]
            self.num_probes += len(parts)
            self.num_screens += len(parts)
            self.size_bytes += sum(part.numel() * part.element_size() for part in parts)
            if self.is_summing:
                self._sum(parts)
                return look(group, slots, tensors, orders)
            start = time.perf_counter()
            look(group, slots, tensors, orders)
            self.probes += time.perf_counter() - start
            return None

        SlotBuffer.reduce = timed  # type: ignore[method-assign]
        screens._Group.look = looked  # type: ignore[method-assign]
        return self

    def begin(self, is_summing: bool) -> None:
        """A step."""
        self.is_summing = is_summing
        self.probes = self.sums = 0.0
        self.size_bytes = self.num_probes = self.num_screens = 0

    def _sum(self, parts: list[Tensor]) -> None:
        start = time.perf_counter()
        for part in parts:
            part.sum()
        self.sums += time.perf_counter() - start

    def __exit__(self, *_: object) -> None:
        SlotBuffer.reduce = self._reduce  # type: ignore[method-assign]
        screens._Group.look = self._look  # type: ignore[method-assign]


def distance(case: Case, num_pairs: int = 15, warm_up: int = 3) -> dict[str, Any]:
    """Measured in a guarded loop of its own. Collective: as the training steps."""
    probes, sums = [], []
    with Stopwatch() as watch:
        loop = Loop(case, Guard(EVERY, **EVERYTHING))
        for index in range(2 * (num_pairs + warm_up)):
            batch = case.batch()
            dist.barrier()
            watch.begin(is_summing=bool(index % 2))
            loop.step(batch)
            if index >= 2 * warm_up:
                (sums if watch.is_summing else probes).append(watch.sums if watch.is_summing else watch.probes)
        loop.close()
    probes_s, sums_s = statistics.median(probes), statistics.median(sums)
    return {
        "num_probes": watch.num_probes,
        "size_bytes": watch.size_bytes,
        "probes_ms": round(1000 * probes_s, 3),
        "sums_ms": round(1000 * sums_s, 3),
        "distance": round(probes_s / sums_s, 2),
        "gb_per_s": round(watch.size_bytes / probes_s / 1e9, 2),
    }


def described(found: dict[str, Any]) -> str:
    """One line."""
    size = f"{found['num_probes']} probes of {found['size_bytes'] / 1e6:.1f} MB"
    times = f"{found['probes_ms']:.2f} ms in probes, {found['sums_ms']:.2f} ms in sums of the same"
    return f"{size}: {times}, {found['distance']:.2f} times the limit, {found['gb_per_s']:.1f} GB/s"
