"""Budget: what the probes may cost, measured in the job itself, and what is watched less finely to stay within it.

[Note: coarsening]
Only what answers *where* is thinned out: hooks on modules and on the tensors between them. What decides *whether* a
step is good (losses, gradients, state) is looked at in every step. After `WARM_UP` steps the probes are timed for
`MEASURED` steps; the share of the slowest rank travels in the verdict's bytes, so that every rank goes to the next
level in the same step, until the share fits. Timing makes the probes slower, so it ends there.
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
_CACHE_BYTES = 2**24


@dataclass(frozen=True)
class Level:
    """How finely modules are watched.

    Attributes:
        text: what is watched, in words.
        layers: modules that carry hooks.
        gradient_layers: those whose tensors carry hooks too.
    """

    text: str
    layers: frozenset[str]
    gradient_layers: frozenset[str]


def levels_of(modules: list[tuple[str, nn.Module]]) -> list[Level]:
    """From every module to the root alone; a level that watches the same as one before is left out.

    Gradients of activations go first: those of parameters, which are always looked at, tell the layer too.
    """
    every = frozenset(name for name, _ in modules)
    called = _called(modules)
    blocks = frozenset(name for name, module in modules if name == "" or any(True for _ in module.children()))
    outer = frozenset(name for name in blocks if name == "" or not _callers(name, called))
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
    """What is watched inside compiled code under a budget: blocks, and modules that are in no block.

    Compiled code keeps its hooks: thinned out later it would have to be compiled again. In there a probe is a pass of
    its own over the data wherever the compiler cannot put it into a loop that it has anyway.
    """
    called = _called(modules)
    blocks = {name for name, module in modules if any(True for _ in module.children())}
    return frozenset(name for name, _ in modules if name in blocks or not _callers(name, called))


def _called(modules: list[tuple[str, nn.Module]]) -> set[str]:
    """Modules that have a forward; lists of modules have none."""
    return {name for name, module in modules if getattr(type(module), "forward", None) is not nn.Module.forward}


def _callers(name: str, called: set[str]) -> list[str]:
    """Modules around one that are called, the root left out: a list of modules is not."""
    parts = name.split(".")
    around = [".".join(parts[:end]) for end in range(1, len(parts))]
    return [other for other in around if other in called]


@dataclass
class Meter:
    """Times probes.

    Attributes:
        hook_s: what torch takes to call one hook.
        seconds: host time so far.
    """

    hook_s: float
    on_device: bool
    seconds: float = 0.0
    events: list[tuple[Any, Any]] = field(default_factory=list)

    def run(self, probe: Callable[..., _T], *args: Any) -> _T:
        """Run a probe and add its time."""
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
        """Add the time of a hook that does next to nothing."""
        self.seconds += self.hook_s

    def device_seconds(self) -> float:
        """Time on the device. Host sync: one."""
        if not self.events:
            return 0.0
        self.events[-1][1].synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in self.events)) / 1000


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own


class Budget:
    """Coarsens what a `ForwardProbe` watches until the probes fit.

    Args:
        limit: share of the unguarded step; None watches everything for ever.
        forward: whose hooks are thinned out.
        device: of the model.

    Host sync: one per decision on CUDA, of which there are at most seven in the life of a job.
    """

    def __init__(self, limit: float | None, forward: ForwardProbe, device: torch.device) -> None:
        self.limit = limit
        self.note: str | None = None
        self._forward = forward
        self._on_device = device.type == "cuda"
        self._levels = levels_of(forward.modules)
        self.level_index = 0
        self._hook_s: float | None = None
        self._is_settled = limit is None
        self._steps = 0
        self._began = 0.0
        self._meter: Meter | None = None
        self._shares: list[float] = []
        self._first_share = 0.0

    @property
    def layers_in_compiled_code(self) -> frozenset[str]:
        """Modules that are watched where they run inside compiled code."""
        if self.limit is None:
            return self._levels[0].layers
        return layers_in_compiled_code(self._forward.modules)

    @property
    def level(self) -> str:
        """What is watched, in words."""
        has_less = bool(self._forward.unwatched_in_compiled_code())
        return self._levels[self.level_index].text + (", in compiled code blocks" if has_less else "")

    def start_at(self, index: int, compiled: dict[str, list[str]] | None = None) -> None:
        """Watch as finely as a run did that is to be compared.

        Args:
            index: of its level.
            compiled: its `ForwardProbe.compiled_layers`, which its level did not reach.
        """
        self.level_index = min(index, len(self._levels) - 1)
        level = self._levels[self.level_index]
        traced, watched = (frozenset((compiled or {}).get(name, ())) for name in ("traced", "watched"))
        self._forward.watch_only(level.layers - traced | watched, level.gradient_layers - traced | watched)

    def parts_per_million(self) -> int:
        """The share to compare with the other ranks', at least 1 in a step in which a decision is due, else 0.

        To be called before each verdict: what is measured goes from there to the next.
        """
        self._end_step()
        if not self._is_settled and self._steps >= WARM_UP:
            self._begin_step()
        if len(self._shares) < MEASURED:
            return 0
        return max(1, min(round(statistics.median(self._shares) * PARTS_PER_MILLION), 2**30))

    def all_ranks_took(self, share_ppm: int) -> None:
        """What all ranks say.

        Args:
            share_ppm: the largest `parts_per_million` of all ranks.
        """
        if share_ppm and not self._is_settled:
            self._decide(share_ppm / PARTS_PER_MILLION)

    def next_step(self) -> None:
        """A verdict has fallen."""
        self._steps += 1

    def _begin_step(self) -> None:
        if self._hook_s is None:
            self._hook_s = hook_cost_s(self._on_device)
        self._forward.slots.meter = self._meter = Meter(self._hook_s, self._on_device)
        self._began = time.perf_counter()

    def _end_step(self) -> None:
        meter, self._forward.slots.meter = self._meter, None
        if meter is not None:
            self._meter = None
            step = time.perf_counter() - self._began
            spent = max(meter.seconds, meter.device_seconds())
            self._shares.append(spent / max(step - spent, 1e-9))

    def _decide(self, share: float) -> None:
        assert self.limit is not None
        self._shares = []
        self._first_share = self._first_share or share
        if share > self.limit and self.level_index + 1 < len(self._levels):
            self.start_at(self.level_index + 1)
            return
        self._is_settled = True
        self._forward.slots.meter = self._meter = None
        if self.level_index or share > self.limit:
            self.note = self._text(share)
            _log.warning("%s", self.note)

    def _text(self, share: float) -> str:
        what = f"budget={self.limit:g}: the probes took {self._first_share:.1%} of a step on the slowest rank"
        now = f"watched from now on: {self.level} ({share:.1%})" if self.level_index else "nothing is left to thin out"
        if share <= (self.limit or 0.0):
            return f"{what}; {now}; replay --trace gives the finer answer, budget=None watches everything"
        return f"{what}; {now}: the rest is the check itself; budget=None watches everything"


def hook_cost_s(on_device: bool, repeats: int = 25) -> float:
    """Seconds that torch takes around one forward hook of a module.

    Args:
        on_device: whether the model computes elsewhere; else its operators push the hook's code and data out of the
            processor's cache, and that is measured too.
        repeats: the median of so many calls is taken.
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

    with torch.no_grad():
        pairs = [(seconds(hooked), seconds(bare)) for _ in range(repeats)]
    return max(0.0, statistics.median(one - other for one, other in pairs)) / 2
