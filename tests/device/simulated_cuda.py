"""Two CUDA devices of host memory for the CPU build of torch. ``python -m tests.device.simulated_cuda`` builds it.

What is real: tensors of device type ``cuda``, streams, events, pinned memory, autograd's device threads, captured
graphs. Kernels are those of the CPU. It is as unkind as CUDA may be: the host cannot touch device memory; an
asynchronous copy or an event is done only when its own stream is waited for; pinned memory comes with garbage in it.
What it cannot show: two kernels that race, times, NCCL's own threads, code that a compiler makes for a GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

SOURCES = Path(__file__).parent / "simulator"
NAME = "nanguard_simulated_cuda"
HOST_WAITS = frozenset(
    {"D2H wait", "H2D wait", "item", "event synchronize", "stream synchronize", "device synchronize"}
)
CUDA = 1  # c10::DeviceType
_core: Any = None


def missing() -> str | None:
    """What this machine lacks to build the device; None where it lacks nothing."""
    lacks = [name for name in ("g++", "ninja") if shutil.which(name) is None]
    return f"needs {' and '.join(lacks)} to build the simulated CUDA device" if lacks else None


def build() -> None:
    """Build the device in a process of its own, which may load it; nothing where it is there."""
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True, cwd=SOURCES.parents[2])
    if done.returncode:
        raise RuntimeError(f"the simulated CUDA device was not built:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def activate() -> None:
    """Make this process one with two CUDA devices, for good."""
    global _core
    if _core is None:
        _core = _loaded()
        _patch_cuda()


def _loaded() -> Any:
    """The device of these sources, built where nobody has, whichever checkout asks; a killed build is no obstacle."""
    from filelock import FileLock
    from torch.utils.cpp_extension import get_default_build_root, load

    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    directory = Path(get_default_build_root()) / f"{NAME}-{torch.__version__}-{digest.hexdigest()}"
    directory.mkdir(parents=True, exist_ok=True)
    built = directory / "ready"
    with FileLock(directory / "builders.lock"):
        if not built.exists():
            (directory / "lock").unlink(missing_ok=True)  # torch's own, which stays behind a killed process
            source, flags = str(SOURCES / "device.cpp"), ["-O0", "-g0"]
            load(NAME, [source], extra_cflags=flags, build_directory=str(directory), is_python_module=False)
            built.touch()
    spec = importlib.util.spec_from_file_location(NAME, directory / f"{NAME}.so")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def core() -> Any:
    """The device's own functions."""
    return _core


# -- what was asked of the device --------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """One thing that was asked of the device.

    ``stream`` is -1 for the whole device, ``what`` an operator, ``bytes`` for an operator the number of its tensors.
    """

    kind: str
    device: int
    stream: int
    bytes: int
    what: str


@dataclass
class Log:
    """What the device was asked to do, in order."""

    entries: list[Entry] = field(default_factory=list)

    def host_waits(self) -> dict[str, int]:
        """How often the host waited for the device, by kind."""
        return dict(Counter(entry.kind for entry in self.entries if entry.kind in HOST_WAITS))

    def kernels(self) -> Counter[str]:
        """Kernels by operator; copies within the device are one each."""
        launched = [e for e in self.entries if e.kind in ("kernel", "copy on device")]
        return Counter(entry.what or entry.kind for entry in launched)

    def of(self, kind: str) -> list[Entry]:
        """Entries of one kind."""
        return [entry for entry in self.entries if entry.kind == kind]


@contextlib.contextmanager
def logging() -> Iterator[Log]:
    """Log what all threads of this process ask of the device; the log is there after the block."""
    log = Log()
    _core.start_log()
    try:
        yield log
    finally:
        log.entries += map(Entry._make, _core.stop_log())


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """What this thread asks of the device in the block is not logged: it stands in for NCCL, which asks otherwise."""
    _core.silence(1)
    try:
        yield
    finally:
        _core.silence(-1)


# -- torch.cuda ------------------------------------------------------------------------------------------------------


def _index(device: Any = None) -> int:
    if device is None:
        return int(_core.current_device())
    if isinstance(device, int):
        return device if device >= 0 else int(_core.current_device())
    index = torch.device(device).index
    return int(_core.current_device()) if index is None else index


class _Device:
    """``torch.cuda.device``."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = _core.current_device()
        _core.set_device(self.index)

    def __exit__(self, *_: object) -> None:
        _core.set_device(self.before)


class _StreamContext:
    """``torch.cuda.stream``."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> Any:
        if self.stream is not None:
            self.before = torch.accelerator.current_stream(_index())
            self.on_device = torch.accelerator.current_stream(self.stream.device.index)
            torch.accelerator.set_stream(self.stream)
        return self.stream

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            torch.accelerator.set_stream(self.on_device)
            torch.accelerator.set_stream(self.before)


class _Event(torch.Event):
    """``torch.cuda.Event``: recorded on the current stream of the *current* device, wherever the model is."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, *_: Any, **__: Any) -> Any:
        return torch.Event("cuda", enable_timing=enable_timing, blocking=blocking)


class _Stream(torch.Stream):
    """``torch.cuda.Stream``."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
        return torch.Stream(device=torch.device("cuda", _index(device)), priority=priority, **kwargs)


class _Graph:
    """``torch.cuda.CUDAGraph``: replays what was launched between the two calls, on the same memory."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._graph: Any = None

    def capture_begin(self, *_: Any, **__: Any) -> None:
        _core.begin_capture()

    def capture_end(self) -> None:
        self._graph = _core.end_capture()

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self._graph = None

    def pool(self) -> tuple[int, int]:
        return (0, 1)


def _properties(device: Any = None) -> Any:
    return types.SimpleNamespace(
        name="simulated CUDA device", uuid=f"simulated-{_index(device)}", total_memory=2**34, major=9, minor=0
    )


def _patch_cuda() -> None:
    cuda: Any = torch.cuda
    generators = tuple(_core.default_generator(index) for index in range(_core.device_count()))
    replaced = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": _core.device_count,
        "current_device": _core.current_device,
        "set_device": lambda device: _core.set_device(_index(device)),
        "synchronize": lambda device=None: _core.synchronize(_index(device)),
        "current_stream": lambda device=None: torch.accelerator.current_stream(_index(device)),
        "default_stream": lambda device=None: torch.Stream(stream_id=0, device_index=_index(device), device_type=CUDA),
        "set_stream": lambda stream: torch.accelerator.set_stream(stream) if stream is not None else None,
        "stream": _StreamContext,
        "device": _Device,
        "Event": _Event,
        "Stream": _Stream,
        "CUDAGraph": _Graph,
        "is_current_stream_capturing": _core.is_capturing,
        "get_device_name": lambda device=None: "simulated CUDA device",
        "get_device_properties": _properties,
        "get_device_capability": lambda device=None: (9, 0),
        "default_generators": generators,
        "get_rng_state": lambda device="cuda": generators[_index(device)].get_state(),
        "set_rng_state": lambda state, device="cuda": generators[_index(device)].set_state(state),
        "manual_seed": lambda seed: generators[_core.current_device()].manual_seed(seed),
        "manual_seed_all": lambda seed: [generator.manual_seed(seed) for generator in generators] and None,
        "empty_cache": lambda: None,
        "set_sync_debug_mode": lambda mode: _core.on_sync(("default", "warn", "error").index(mode)),
        "_sleep": lambda cycles: _core.stick(_index(), cuda.current_stream().stream_id),
        "memory_allocated": lambda device=None: _core.live_bytes(),
        "max_memory_allocated": lambda device=None: _core.peak_bytes(),
        "reset_peak_memory_stats": lambda device=None: _core.reset_peak(),
    }
    for name, value in replaced.items():
        setattr(cuda, name, value)
    cuda.graphs.CUDAGraph = _Graph
    cuda.graphs.is_current_stream_capturing = _core.is_capturing
    cuda.graphs._cuda_isCurrentStreamCapturing = _core.is_capturing
    cuda.graphs.graph_pool_handle = cuda.graph_pool_handle = lambda: (0, 1)
    torch._C._cuda_isCurrentStreamCapturing = _core.is_capturing
    torch._C._host_emptyCache = cuda.empty_cache
    torch.accelerator.empty_cache = cuda.empty_cache
    _patch_storage()


def _patch_storage() -> None:
    resize = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        _core.resize_storage(self, size)
        return self

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]


if __name__ == "__main__":
    activate()
