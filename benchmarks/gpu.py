"""What the guard costs on one GPU, in one file and at most eight minutes, warm-up included.

    python benchmarks/gpu.py [--minutes 8] [--json FILE]
    python benchmarks/gpu.py --check --minutes 14      # first what only a GPU can tell, see gpu_checks.py
    python benchmarks/gpu.py --device cpu --short      # the same path without a GPU; its figures mean nothing

One process that is its own world of one rank. Guarded and unguarded steps of a transformer in alternation: eager,
compiled, CUDA-graphed where the guard allows it, each with the synchronous and the deferred verdict; bytes probed per
second against the bandwidth of a copy on the same card; and what the host waits for, counted by the profiler. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # after the path of this repository
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, supported_activities

from benchmarks.gpu_checks import checked
from ddp_nanguard import NanGuard

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
TO_HOST = "Memcpy DtoH"
UNTIL_FULL = 20
"""Warm-up steps of a guarded loop: its ring is full, and what is looked at now and then has been."""


class Size(NamedTuple):
    """Of the model, and of what is measured."""

    width: int
    num_blocks: int
    batch: int
    length: int
    pairs: int
    copied_bytes: int


FULL = Size(1024, 12, 8, 1024, 40, 1 << 30)
SHORT = Size(32, 2, 2, 16, 4, 1 << 20)


# -- the model ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.gelu, self.narrow = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.merge(self._attention(self.norm1(x)))
        return x + self.narrow(self.gelu(self.widen(self.norm2(x))))

    def _attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.heads(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(batch, length, width)


class Transformer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


# -- one training loop -------------------------------------------------------------------------------------------------


class Loop:
    """A training loop, guarded or not.

    Args:
        way: ``eager``, ``compiled`` (in place, before it is wrapped) or ``cuda graphs`` (the same in the mode
            ``reduce-overhead``).
        options: of the guard, None for no guard.
    """

    def __init__(self, size: Size, device: torch.device, way: str, options: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        self.device, self.size, self.way = device, size, way
        model = Transformer(size).to(device)
        if way != "eager":
            backend = "inductor" if device.type == "cuda" else "aot_eager"
            model.compile(**({"mode": "reduce-overhead"} if way == "cuda graphs" else {"backend": backend}))
        ids = [device.index or 0] if device.type == "cuda" else None
        self.model = DistributedDataParallel(model, device_ids=ids)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.guard = None if options is None else NanGuard(self.model, self.optimizer, dump_dir=None, **options)

    def step(self, batch: Tensor) -> None:
        if self.guard is None:
            self._train(batch)
            return
        for item in self.guard.steps([batch]):
            self._train(item)

    def _train(self, batch: Tensor) -> None:
        if self.way == "cuda graphs":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(batch).float().square().mean()
        if self.guard is not None:
            self.guard.watch(loss=loss)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        if self.guard is not None:
            self.guard.close()


# -- measuring ---------------------------------------------------------------------------------------------------------


class Bench:
    """One device, and the time that is left."""

    def __init__(self, device: torch.device, size: Size, seconds: float) -> None:
        self.device, self.size = device, size
        self.end = time.monotonic() + seconds

    def batch(self) -> Tensor:
        return torch.randn(self.size.batch, self.size.length, self.size.width, device=self.device)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object]) -> float:
        """From an idle device to an idle device."""
        self.wait()
        start = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - start

    def is_late(self) -> bool:
        return time.monotonic() >= self.end

    # -- step times ----------------------------------------------------------------------------------------------------

    def way(self, way: str) -> dict[str, Any]:
        """Every kind of verdict against the unguarded loop, compiled or captured alike."""
        torch._dynamo.reset()
        torch._dynamo.config.recompile_limit = 64  # every loop has a model of its own, of the same code
        torch._dynamo.config.skip_nnmodule_hook_guards = False  # else one without hooks lends its graph to all
        plain = Loop(self.size, self.device, way, None)
        self._warm_up(plain)
        rows = {name: self._against(plain, way, options) for name, options in verdicts().items()}
        return {"unguarded": {"waits": self.waits(plain)}, **rows}

    def _against(self, plain: Loop, way: str, options: dict[str, Any]) -> dict[str, Any]:
        if self.is_late():
            return {"not measured": "out of time"}
        try:
            loop = Loop(self.size, self.device, way, options)
        except ValueError as error:
            return {"not measured": str(error)}
        try:
            self._warm_up(loop)
            return {**self._ratio(plain, loop), "waits": self.waits(loop), "peak_bytes": self._peak(plain, loop)}
        finally:
            loop.close()

    def _warm_up(self, loop: Loop) -> None:
        for _ in range(UNTIL_FULL):
            loop.step(self.batch())

    def _ratio(self, plain: Loop, guarded: Loop) -> dict[str, Any]:
        ratios, plains, issues = [], [], []
        for index in range(self.size.pairs):
            times, batch = {}, self.batch()
            for loop in (plain, guarded) if index % 2 else (guarded, plain):
                times[loop] = self.seconds(lambda loop=loop, batch=batch: loop.step(batch))
            ratios.append(times[guarded] / times[plain])
            plains.append(times[plain])
            issues.append(self._stretch(guarded) / self._stretch(plain) if index % 10 == 0 else 0.0)
        low, middle, high = statistics.quantiles(ratios, n=4)
        return {
            "ratio": round(middle, 4),
            "quartiles": [round(low, 4), round(high, 4)],
            "ratio_of_10_steps": round(statistics.median(ratio for ratio in issues if ratio), 4),
            "unguarded_ms": round(1000 * statistics.median(plains), 3),
            "pairs": len(ratios),
        }

    def _stretch(self, loop: Loop) -> float:
        """Ten steps without a wait between them: a host that runs ahead hides what the device does not feel."""
        batch = self.batch()
        return self.seconds(lambda: [loop.step(batch) for _ in range(10)])

    def _peak(self, plain: Loop, guarded: Loop) -> dict[str, int] | None:
        """Of one step, beyond what both loops hold between steps."""
        if self.device.type != "cuda":
            return None
        found = {}
        for name, loop in (("unguarded", plain), ("guarded", guarded)):
            batch = self.batch()
            self.wait()
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            loop.step(batch)
            self.wait()
            found[name] = torch.cuda.max_memory_allocated(self.device) - before
        return found

    # -- what the host waits for ---------------------------------------------------------------------------------------

    def waits(self, loop: Loop) -> dict[str, int]:
        """Calls in one step in which the host waits for the device, and copies to the host, by name."""
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda" and ProfilerActivity.CUDA in supported_activities():
            activities.append(ProfilerActivity.CUDA)
        batch = self.batch()
        self.wait()
        with profile(activities=activities) as found:
            loop.step(batch)
        events = Counter(event.name for event in found.events())
        waits = {name: events[name] for name in WAITS if events[name]}
        copies = sum(count for name, count in events.items() if name.startswith(TO_HOST))
        # the profiler's own end waits for the device once
        waits["cudaDeviceSynchronize"] = max(0, waits.get("cudaDeviceSynchronize", 0) - 1)
        reads = events["aten::_local_scalar_dense"] + events["aten::item"] * (self.device.type != "cuda")
        return {**{name: count for name, count in waits.items() if count}, TO_HOST: copies, "scalar reads": reads}

    # -- bytes per second ----------------------------------------------------------------------------------------------

    def bandwidth(self) -> list[dict[str, Any]]:
        """A probe of one tensor against a copy of it, which reads and writes, so that a probe may reach twice that."""
        rows = []
        largest = self.size.copied_bytes
        for dtype in (torch.float32, torch.bfloat16):
            for size_bytes in (largest // 1024, largest // 32, largest):
                rows.append(self._bandwidth(size_bytes, dtype))
        return rows

    def _bandwidth(self, size_bytes: int, dtype: torch.dtype) -> dict[str, Any]:
        source = torch.randn(size_bytes // dtype.itemsize, device=self.device, dtype=dtype)
        target, slot = torch.empty_like(source), source.new_zeros(2)
        outs = (slot[0], slot[1])
        kernels: dict[str, Callable[[], object]] = {
            "probe": lambda: torch.aminmax(source, out=outs),
            "sum": lambda: torch.sum(source),
            "copy": lambda: target.copy_(source),
        }
        speeds = {name: size_bytes / self._each(run) / 1e9 for name, run in kernels.items()}
        return {
            "dtype": str(dtype).removeprefix("torch."),
            "size_bytes": size_bytes,
            "probe_gb_per_s": round(speeds["probe"], 1),
            "sum_gb_per_s": round(speeds["sum"], 1),
            "copy_gb_per_s": round(2 * speeds["copy"], 1),
        }

    def _each(self, run: Callable[[], object]) -> float:
        """Seconds of one of many launches in a row, the fastest of five."""
        repeats = 20
        run()
        return min(self.seconds(lambda: [run() for _ in range(repeats)]) for _ in range(5)) / repeats


def verdicts() -> dict[str, dict[str, Any]]:
    """The guard's options that are compared."""
    return {
        "sync": {},
        "deferred": {"verdict": "deferred"},
        "layers=blocks": {"layers": "blocks"},
        "layers=every": {"layers": "every"},
        "loss, reduce": {"watch": ("loss", "reduce")},
    }


WAYS = ("eager", "compiled", "cuda graphs")


def measured(bench: Bench, ways: list[str]) -> dict[str, Any]:
    """Everything, each part on its own: one that fails leaves its error in its place."""
    parts: dict[str, Callable[[], Any]] = {"bandwidth": bench.bandwidth}
    for way in ways:
        if way == "cuda graphs" and bench.device.type != "cuda":
            continue
        parts[way] = lambda way=way: bench.way(way)
    found: dict[str, Any] = {}
    for name, part in parts.items():
        start = time.monotonic()
        found[name] = _attempt(part) if not bench.is_late() else {"not measured": "out of time"}
        gc.collect()
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return found


def _attempt(part: Callable[[], Any]) -> Any:
    try:
        return part()
    except Exception as error:  # the figures that were taken must not be lost with it
        traceback.print_exc()
        return {"not measured": f"{type(error).__name__}: {error}"[:500]}


def _machine(device: torch.device) -> dict[str, Any]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["memory_bytes"] = torch.cuda.get_device_properties(device).total_memory
    return {**found, "load": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--short", action="store_true", help="a tiny model and few steps, to see that it runs")
    parser.add_argument("--check", action="store_true", help="first the checks of gpu_checks.py, within the same time")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no further part begins")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", type=Path, help="the last line, to a file, too")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; --device cpu --short shows that the script runs, and measures nothing")
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    # the last way under way may take this long, compilation included
    reserve_s = 0.0 if options.short else 90.0
    began = time.monotonic()
    checks = {"checks": checked(60 * options.minutes / 2)} if options.check else {}
    seconds = 60 * options.minutes - reserve_s - (time.monotonic() - began)
    bench = Bench(device, SHORT if options.short else FULL, seconds)
    with tempfile.TemporaryDirectory() as directory:
        store = dist.FileStore(f"{directory}/store", 1)
        backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(backend, rank=0, world_size=1, store=store)
        found = {
            "machine": _machine(device),
            "backend": backend,
            "size": bench.size._asdict(),
            **checks,
            **measured(bench, options.ways),
        }
        gc.collect()
        dist.destroy_process_group()
    line = json.dumps(found)
    if options.json:
        options.json.write_text(line + "\n")
    print(line, flush=True)


if __name__ == "__main__":
    main()
