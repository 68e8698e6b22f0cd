"""Budget: what the probes may cost, measured in the job itself, and which modules go unwatched to stay within it.

[Note: coarsening]
Only what answers *where* is watched less finely: hooks on modules and on the tensors between them. What decides
*whether* a step is good (losses, gradients, state) is looked at in every step. After `WARM_UP` steps the probes are
timed for `MEASURED` steps; the share of the slowest rank travels in the verdict's bytes, so that every rank goes to the
next level in the same step, until the share fits. Timing makes the probes slower, so it ends there.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from .forward import ForwardProbe

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

WARM_UP = 50
"""Steps before the first measurement."""
MEASURED = 10
"""Steps that are timed before a decision."""
PARTS_PER_MILLION = 1_000_000
_CACHE_BYTES = 2**24  # writing so much leaves the next hook with a cold cache, as a model's operators do on a CPU


@dataclass(frozen=True)
class Level:
    """How finely modules are watched.

    Attributes:
        text: what is watched, as a log line or a report says it.
        layers: clean names of the modules that carry hooks.
        gradient_layers: those of them whose inputs and outputs carry tensor hooks for backward too.
    """

    text: str
    layers: frozenset[str]
    gradient_layers: frozenset[str]


def levels_of(modules: list[tuple[str, nn.Module]]) -> list[Level]:
    """The levels that a model has, finest first: from every module to the root alone.

    Gradients of activations go first: those of parameters, which are always looked at, tell the layer too. A level that
    watches the same as one before it is left out.

    Args:
        modules: clean name and module, root included.
    """
    every = frozenset(name for name, _ in modules)
    called = _layers_with_forward(modules)
    blocks = frozenset(name for name, module in modules if name == "" or any(True for _ in module.children()))
    outer = frozenset(name for name in blocks if name == "" or not _called_ancestors(name, called))
    root = frozenset({""})
    levels = [
        Level("every module", every, every),
        Level("every module, activation gradients of blocks alone", every, blocks),
        Level("blocks", blocks, blocks),
        Level("blocks, no activation gradients inside", blocks, root),
        Level("outermost blocks", outer, outer),
        Level("outermost blocks, no activation gradients inside", outer, root),
        Level("the root", root, root),
    ]
    found: dict[tuple[frozenset[str], frozenset[str]], Level] = {}
    for level in levels:
        found.setdefault((level.layers, level.gradient_layers), level)
    return list(found.values())


def layers_in_compiled_code(modules: list[tuple[str, nn.Module]]) -> frozenset[str]:
    """Modules that are watched inside compiled code under a budget: blocks, and modules that are in no block.

    Compiled code keeps its hooks: with fewer of them later it would have to be compiled again. In there a probe is a
    pass of its own over the data wherever the compiler cannot fuse it into a loop that it has anyway.
    """
    called = _layers_with_forward(modules)
    blocks = {name for name, module in modules if any(True for _ in module.children())}
    return frozenset(name for name, _ in modules if name in blocks or not _called_ancestors(name, called))


def _layers_with_forward(modules: list[tuple[str, nn.Module]]) -> set[str]:
    """Names of modules that define ``forward``. A ``ModuleList`` does not: it is never called, so it is no block."""
    return {name for name, module in modules if getattr(type(module), "forward", None) is not nn.Module.forward}


def _called_ancestors(name: str, called: set[str]) -> list[str]:
    """Names of the modules around ``name`` that are called themselves; the root is left out."""
    parts = name.split(".")
    around = [".".join(parts[:end]) for end in range(1, len(parts))]
    return [other for other in around if other in called]


@dataclass
class Meter:
    """Times the probes of one step.

    Attributes:
        hook_s: seconds that torch takes to call one hook, see `hook_cost_s`.
        on_device: whether probes launch CUDA kernels, which are then timed by events.
        seconds: host time so far.
        events: CUDA events before and after each probe, read once at the end of the step.
    """

    hook_s: float
    on_device: bool
    seconds: float = 0.0
    events: list[tuple[Any, Any]] = field(default_factory=list)

    def run(self, probe: Callable[..., _T], *args: Any) -> _T:
        """Call ``probe(*args)``, add its time and return its result."""
        if self.on_device:
            begin, end = _event(), _event()
            begin.record()
        start = time.perf_counter()
        try:
            return probe(*args)
        finally:
            self.seconds += time.perf_counter() - start + self.hook_s
            if self.on_device:
                end.record()
                self.events.append((begin, end))

    def count_hook(self) -> None:
        """Add the time of one hook that does next to nothing itself: what torch takes to call it."""
        self.seconds += self.hook_s

    def device_seconds(self) -> float:
        """Seconds that the probes took on the device; 0.0 on a CPU. Host sync: one, for the last event."""
        if not self.events:
            return 0.0
        self.events[-1][1].synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in self.events)) / 1000


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own


class Budget:
    """Makes a `ForwardProbe` watch fewer modules until the probes fit their share of a step, see [Note: coarsening].

    Args:
        limit: share of the unguarded step, such as 0.02; None watches everything for ever.
        forward: the probe whose hooks are taken off.
        device: of the model.

    Attributes:
        note: what was decided, for the report; None while nothing was left out.
        level_index: 0 is the finest of `levels_of`; it never goes back, or a job whose speed varies would swing.

    Host sync: on CUDA one per timed step: `MEASURED` per decision, of which there are at most seven in the life of a
    job.
    """

    def __init__(self, limit: float | None, forward: ForwardProbe, device: torch.device) -> None:
        self.limit = limit
        self._forward = forward
        self._on_device = device.type == "cuda"

        # - The level, the same on all ranks: it changes only on a share that the verdict has brought to all of them
        self._levels = levels_of(forward.modules)
        self.level_index = 0
        self.note: str | None = None
        self._is_settled = limit is None
        self._steps = 0

        # - The measurement of this rank: one meter per timed step, which lasts from verdict to verdict
        self._hook_s: float | None = None
        self._meter: Meter | None = None
        self._started_s = 0.0
        self._shares: list[float] = []
        self._first_share = 0.0

    @property
    def layers_in_compiled_code(self) -> frozenset[str]:
        """Clean names of the modules that carry hooks where they run inside compiled code."""
        if self.limit is None:
            return self._levels[0].layers
        return layers_in_compiled_code(self._forward.modules)

    @property
    def level(self) -> str:
        """What is watched now, as the report says it, such as ``blocks, in compiled code blocks``."""
        has_less = bool(self._forward.unwatched_in_compiled_code())
        return self._levels[self.level_index].text + (", in compiled code blocks" if has_less else "")

    def start_at(self, index: int, compiled: dict[str, list[str]] | None = None) -> None:
        """Watch as finely as the run did that a replay is to be compared with.

        Args:
            index: its `level_index`.
            compiled: its `ForwardProbe.compiled_layers`: modules in compiled code, whose hooks no level takes off.
        """
        self.level_index = min(index, len(self._levels) - 1)
        level = self._levels[self.level_index]
        traced, watched = (frozenset((compiled or {}).get(name, ())) for name in ("traced", "watched"))
        self._forward.watch_only(level.layers - traced | watched, level.gradient_layers - traced | watched)

    def parts_per_million(self) -> int:
        """This rank's share of a step in millionths, for the verdict; 0 where no decision is due, else at least 1.

        To be called before each verdict: a measurement goes from one verdict to the next. Host sync: one on CUDA in a
        step that was timed, else none.
        """
        self._end_step()
        if not self._is_settled and self._steps >= WARM_UP:
            self._begin_step()
        if len(self._shares) < MEASURED:
            return 0
        return max(1, min(round(statistics.median(self._shares) * PARTS_PER_MILLION), 2**30))

    def all_ranks_took(self, share_ppm: int) -> None:
        """Decide on what the verdict brought: go to the next level, or stay and stop measuring.

        Args:
            share_ppm: the largest `parts_per_million` of all ranks; 0 decides nothing.
        """
        if share_ppm and not self._is_settled:
            self._decide(share_ppm / PARTS_PER_MILLION)

    def next_step(self) -> None:
        """Count a step, after its verdict; measuring starts at `WARM_UP`."""
        self._steps += 1

    def _begin_step(self) -> None:
        if self._hook_s is None:
            self._hook_s = hook_cost_s(self._on_device)
        self._forward.slots.meter = self._meter = Meter(self._hook_s, self._on_device)
        self._started_s = time.perf_counter()

    def _end_step(self) -> None:
        meter, self._forward.slots.meter = self._meter, None
        if meter is not None:
            self._meter = None
            step = time.perf_counter() - self._started_s
            spent = max(meter.seconds, meter.device_seconds())
            self._shares.append(spent / max(step - spent, 1e-9))

    def _decide(self, share: float) -> None:
        assert self.limit is not None
        self._shares = []
        self._first_share = self._first_share or share
        if share > self.limit and self.level_index + 1 < len(self._levels):
            self.start_at(self.level_index + 1)
            return
        # timing costs time itself: once settled, no step is measured again
        self._is_settled = True
        self._forward.slots.meter = self._meter = None
        if self.level_index or share > self.limit:
            self.note = self._text(share)
            _log.warning("%s", self.note)

    def _text(self, share: float) -> str:
        what = f"budget={self.limit:g}: the probes took {self._first_share:.1%} of a step on the slowest rank"
        now = f"watched from now on: {self.level} ({share:.1%})" if self.level_index else "no level is cheaper"
        if share <= (self.limit or 0.0):
            return f"{what}; {now}; replay --trace gives the finer answer, budget=None watches everything"
        return f"{what}; {now}: the rest is the check itself; budget=None watches everything"


def hook_cost_s(on_device: bool, repeats: int = 25) -> float:
    """Seconds that torch takes around one forward hook of a module: the median of several calls, at least 0.

    Args:
        on_device: whether the model computes on another device. On a CPU its operators push the hook's code and data
            out of the processor's cache, and that is measured too.
        repeats: number of calls that are timed.
    """
    bare, hooked = nn.Identity(), nn.Identity()
    hooked.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    hooked.register_forward_hook(lambda module, args, output: None, always_call=True)
    value, other = torch.zeros(()), torch.zeros(0 if on_device else _CACHE_BYTES // 4, device="cpu")

    def seconds(module: nn.Module) -> float:
        other.add_(1)
        start = time.perf_counter()
        module(value)
        return time.perf_counter() - start

    # the hooked and the bare call alternate, so that a busy machine slows both
    with torch.no_grad():
        pairs = [(seconds(hooked), seconds(bare)) for _ in range(repeats)]
    return max(0.0, statistics.median(one - other for one, other in pairs)) / 2
