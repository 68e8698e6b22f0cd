"""What only a real GPU can tell, each in a process of its own with a deadline: ``python benchmarks/gpu.py --check``.

    python benchmarks/gpu_checks.py NAME     # one of them, in this process; its last line is JSON

A check that fails, hangs or dies leaves its error in its place. What each found is beside ``ok``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # after the path of this repository
from torch import Tensor, nn

from ddp_nanguard import NanGuard, NonFiniteError

REPOSITORY = Path(__file__).resolve().parent.parent
SIMULATED = "simulated CUDA device"  # the name of that of tests/device
WIDTH, STEPS, BAD_STEP = 64, 6, 3
WAITED = "called a synchronizing CUDA operation"


class Net(nn.Module):
    """A layer whose -inf are legal, one that divides by what the batch says, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.drop, self.divide = nn.Dropout(0.1), Divide()

    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        scores = torch.full((WIDTH, WIDTH), -torch.inf, device=values.device).triu(1)
        return self.last(self.divide(self.drop(self.first(values)) @ scores.softmax(-1), divisor))  # type: ignore[no-any-return]


class Divide(nn.Module):
    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        return (values * divisor) / divisor


def _job(**options: Any) -> tuple[Any, torch.optim.Optimizer, NanGuard]:
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return model, optimizer, NanGuard(model, optimizer, **{"dump_dir": None, "layers": "every", **options})


def _batches(count: int = STEPS, bad: int | None = None) -> list[tuple[Tensor, Tensor]]:
    values = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).cuda()
    return [(values, torch.full((1,), 0.0 if index == bad else 1.0, device="cuda")) for index in range(count)]


def _train(guard: NanGuard, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    loss = guard(*batch).square().mean()
    guard.watch(loss=loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


# -- the checks --------------------------------------------------------------------------------------------------------


def device_tests() -> dict[str, Any]:
    """The tests of one process."""
    kind = "simulated" if torch.cuda.get_device_name() == SIMULATED else "real"
    line = [sys.executable, "-m", "pytest", "-n", "0", "-q", "tests/device/test_device.py", "-k", kind]
    line += ["-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if kind == "real" or name != "PYTHONPATH"}
    ended = subprocess.run(line, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    return {
        "ok": ended.returncode == 0,
        "tail": ended.stdout.strip().splitlines()[-1:],
        "failed": _failed(ended.stdout),
    }


def _failed(output: str) -> list[str]:
    return [line[:300] for line in output.splitlines() if line.startswith(("E  ", "FAILED"))][:20]


def host_waits() -> dict[str, Any]:
    """How often the host waits in a clean step, by torch's own witness: once, and never with a deferred verdict."""
    found = {}
    for verdict in ("sync", "deferred"):
        _, optimizer, guard = _job(verdict=verdict, history=2)
        for step, batch in enumerate(guard.steps(_batches())):
            if step < STEPS - 1:
                _train(guard, optimizer, batch)
                continue
            torch.cuda.set_sync_debug_mode("warn" if verdict == "sync" else "error")
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                _train(guard, optimizer, batch)
            torch.cuda.set_sync_debug_mode("default")
        guard.close()
        found[verdict] = sum(WAITED in str(each.message) for each in told)
    return {"ok": found == {"sync": 1, "deferred": 0}, "waits": found}


def nan_table() -> dict[str, Any]:
    """``_foreach_norm(inf)`` and ``_foreach_max`` against ``aminmax``: NaN and infinities at every kind of place."""
    wrong = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for size in (1, 1000, 2**16 + 3, 2**20 + 1):
            for value in (float("nan"), float("inf"), -float("inf")):
                for place in {0, size // 2, size - 1}:
                    wrong += _differences(dtype, size, value, place)
    return {"ok": not wrong, "wrong": wrong[:20]}


def _differences(dtype: torch.dtype, size: int, value: float, place: int) -> list[str]:
    bad = torch.ones(size, dtype=dtype, device="cuda")
    bad[place] = value
    clean = torch.full_like(bad, -2.0)
    low, high = torch.aminmax(bad)
    norms = torch._foreach_norm([clean, bad, clean], ord=float("inf"))
    largest = torch._foreach_max([clean, bad, clean])
    seen = [low.isfinite() & high.isfinite(), norms[1].isfinite(), largest[1].isnan() | (largest[1] == float("inf"))]
    aminmax, norm, is_bad = (bool(each) for each in seen)
    others = [bool(each.isfinite()) for each in (norms[0], norms[2], largest[0], largest[2])]
    right = not aminmax and not norm and is_bad == (value != -float("inf")) and all(others)
    return [] if right else [f"{dtype} {size} {value} at {place}: {aminmax} {norm} {is_bad} {others}"]


def alone_beside_a_stuck_stream() -> dict[str, Any]:
    """A peer has fallen, and this rank's stream waits for ever: it writes its part all the same."""
    with tempfile.TemporaryDirectory() as directory:
        _, optimizer, guard = _job(dump_dir=directory, hold_batches="host", timeout_s=20)
        batches = _batches()
        for batch in guard.steps(batches[:-1]):
            _train(guard, optimizer, batch)
        for batch in guard.steps(batches[-1:]):
            guard(*batch)
            torch.cuda._sleep(10**13)
            return _written_aside(guard, Path(directory))
    raise AssertionError("no batch")


def _written_aside(guard: Any, directory: Path) -> dict[str, Any]:
    began, done = time.monotonic(), threading.Event()

    def write() -> None:
        with guard._exit._apart(0.5):
            guard._policy.dump_with_peer(guard._monitor.record(), "rank 1 raised", lambda index, seen: {index: seen})
        done.set()

    threading.Thread(target=write, daemon=True).start()
    done.wait(60)
    files = sorted(path.name for path in directory.rglob("*") if path.is_file())
    is_stuck = not torch.cuda.current_stream().query()
    return {
        "ok": done.is_set() and is_stuck and {"manifest.json", "shard-00000-00000.safetensors"} <= set(files),
        "seconds": round(time.monotonic() - began, 1),
        "still stuck": is_stuck,
        "files": files,
    }


def captured_block() -> dict[str, Any]:
    """Forward and backward captured with hooks on, replayed in later steps: no false alarm, and the fault is found."""
    ends = []
    for bad in (None, BAD_STEP):
        model, optimizer, guard = _job()
        batches = _batches(STEPS, bad)
        _train(guard, optimizer, batches[0])
        values, divisor = (tensor.clone() for tensor in batches[0])
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(values, divisor).square().mean().backward()
        torch.cuda.current_stream().wait_stream(stream)
        optimizer.zero_grad(set_to_none=False)
        with torch.cuda.graph(graph):
            loss = model(values, divisor).square().mean()
            loss.backward()
        ends.append(_replayed(guard, optimizer, graph, batches, (values, divisor), loss))
        guard.close()
    return {"ok": ends == ["clean", f"step {BAD_STEP + 1}"], "ends": ends}


def _replayed(guard: NanGuard, optimizer: Any, graph: Any, batches: Any, static: Any, loss: Tensor) -> str:
    try:
        for batch in guard.steps(batches):
            for to, tensor in zip(static, batch, strict=True):
                to.copy_(tensor)
            optimizer.zero_grad(set_to_none=False)
            graph.replay()
            guard.watch(loss=loss)
            optimizer.step()
    except NonFiniteError as error:
        return f"step {error.report.step}"
    return "clean"


CHECKS: dict[str, tuple[Callable[[], dict[str, Any]], float]] = {
    "device tests": (device_tests, 240.0),
    "host waits": (host_waits, 60.0),
    "nan table": (nan_table, 60.0),
    "alone beside a stuck stream": (alone_beside_a_stuck_stream, 120.0),
    "captured block": (captured_block, 60.0),
}
"""Each check, and the seconds that it is given."""


def checked(seconds: float) -> dict[str, Any]:
    """All checks, each in a process of its own, as long as there is time."""
    end, found = time.monotonic() + seconds, {}
    for name, (_, limit_s) in CHECKS.items():
        left_s = end - time.monotonic()
        began = time.monotonic()
        found[name] = _in_process(name, min(limit_s, left_s)) if left_s > 0 else {"ok": None, "error": "out of time"}
        found[name]["took_s"] = round(time.monotonic() - began, 1)
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def _in_process(name: str, limit_s: float) -> dict[str, Any]:
    line = [sys.executable, str(Path(__file__).resolve()), name]
    try:
        ended = subprocess.run(line, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"ok": False, "error": f"no end within {limit_s:.0f} s"}
    lines = [text for text in ended.stdout.splitlines() if text.startswith("{")]
    if not lines:
        return {"ok": False, "error": f"exit code {ended.returncode}: {ended.stderr[-1500:]}"}
    return json.loads(lines[-1])  # type: ignore[no-any-return]  # written below


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=list(CHECKS))
    name = parser.parse_args().name
    print(json.dumps(CHECKS[name][0]()), flush=True)
    os._exit(0)  # a stream that never ends would keep the interpreter


if __name__ == "__main__":
    main()
