"""Fault injection: a non-finite value at a named rank, step, layer and phase of your own training.

    from ddp_nanguard.testing import inject

    inject(model, rank=1, step=3, layer="blocks.0", phase="forward")

or, without touching the script, ``NANGUARD_INJECT="rank=1,step=3,layer=blocks.0,phase=forward,kind=nan"``.

[Note: replay of a planted fault]
Each rank's planted faults are recorded in its evidence. What they have left in the dump (a bad batch, bad weights) is
there again in a replay; what a hook did (``forward``, ``backward``, ``loss``, ``reduce``, ``optimizer``) is planted
again by the replay itself, so a recipe need not call `inject`. As for real faults, ``reduce`` takes all ranks and
``optimizer`` takes ``keep_previous``.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from .clock import Clock, GuardClock, OwnClock, Stopped
from .config import ENV_INJECT, injection_text
from .plan import PHASES, Plan, checked, parsed
from .planting import attach, spoilt, with_first_spoilt, write
from .scan import is_plain, tensors_in
from .wrappers import Wrapper, wrapper_of

if TYPE_CHECKING:
    from .guard import NanGuard
    from .parts import Parts
    from .verdict import Peers

_log = logging.getLogger(__name__)

LEFT_IN_DUMP = ("input", "state")
REPLAY = "replay"
OVERDUE_STEPS = 3
"""So many steps after the planted one, a job that still runs is told so."""


class Injection:
    """A planted fault; `remove` takes its hooks off. What it has spoilt stays spoilt.

    Attributes:
        plan: what is planted.
        num_planted: how often it was done; 0 on every rank but the planned one.
        active: whether the forward that ran last is the planned one.
    """

    def __init__(self, plan: Plan, model: nn.Module, source: str) -> None:
        self.plan = plan
        self.num_planted = 0
        self.active = False
        self.clock: Clock = Stopped()
        self.on_model: Callable[[], None] = _nothing
        self.model: Callable[[], nn.Module | None] = weakref.ref(model)
        self.source = source
        self._handles: list[Any] = []
        self._calls = [0, 0]
        self._told: set[str] = set()

    def remove(self) -> None:
        """Every hook off; may be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        model = self.model()
        if model is not None and self in (present := _injections.get(wrapper_of(model).root, [])):
            present.remove(self)

    # -- what the hooks ask and tell -----------------------------------------------------------------------------------

    def enter(self) -> None:
        """The model is about to be called in grad mode."""
        now = self.clock.entering()
        was, self.active = self.active, now == (self.plan.step, self._micro_batch(now))
        if self.active and not was:
            self._calls = [0, 0]
        if self.active and not self.num_planted:
            self.on_model()
        if now is not None and now[0] >= self.plan.step + OVERDUE_STEPS:
            self.tell(f"{OVERDUE_STEPS} steps later the job still runs; {self._outcome()}")

    def _outcome(self) -> str:
        if self.num_planted:
            return "it was planted, and nobody minded: masked, or skipped by a scaler"
        if self.plan.phase in ("forward", "backward"):
            return "nothing was planted: the layer was not called in that micro-batch, or is compiled"
        return "nothing was planted: there is no such micro-batch, or no watched loss"

    def _micro_batch(self, now: tuple[int, int] | None) -> int:
        """A reduce comes with whichever micro-batch communicates."""
        return now[1] if now is not None and self.plan.phase == "reduce" else self.plan.micro_batch

    def is_first_call(self, recomputed: bool) -> bool:
        """Whether this is the layer's first call in the planned micro-batch, or the recomputation of it."""
        self._calls[recomputed] += self.active
        return self.active and self._calls[recomputed] == 1

    def planted(self) -> None:
        """It was done."""
        self.num_planted += 1
        self.tell("planted")

    def note(self, done: bool, problem: str) -> None:
        """It was done, or why it was not."""
        if done:
            self.planted()
        else:
            self.tell(f"NOT planted: {problem}")

    def tell(self, text: str) -> None:
        """A warning, each text once."""
        if text not in self._told:
            self._told.add(text)
            level = logging.INFO if self.source == REPLAY else logging.WARNING
            _log.log(level, "%s: %s (%s)", self.source, text, self.plan)


_injections: weakref.WeakKeyDictionary[nn.Module, list[Injection]] = weakref.WeakKeyDictionary()


def inject(
    model: nn.Module,
    *,
    rank: int,
    step: int,
    phase: str,
    layer: str | None = None,
    kind: str = "nan",
    micro_batch: int = 0,
    guard: NanGuard | None = None,
) -> Injection:
    """Plant one fault. Call it on every rank, once the model is wrapped; before or after the guard is built.

    Args:
        model: what the training loop calls: plain, DDP, FSDP1 or after ``fully_shard``.
        rank: on which it happens; nothing at all is done on the others.
        step: number of the optimizer step, from 0; with a guard as that one counts.
        phase: ``state``: a weight of ``layer`` before the step. ``input``: the first floating tensor of the batch.
            ``forward``: what ``layer`` gives in its first call. ``loss``: the first loss given to ``guard.watch``.
            ``backward``: the gradient within ``layer``. ``reduce``: a gradient of ``layer`` after it was communicated.
            ``optimizer``: a weight of ``layer`` after the update.
        layer: name in the unwrapped model, "" for the root; none for input and loss. By default one in the middle.
        kind: ``nan``, ``inf`` or ``-inf``.
        micro_batch: index in the step.
        guard: whose steps count. Without one they are counted here: a step is a call of ``step`` of an optimizer that
            holds a parameter of the model, so one that a GradScaler leaves out is not seen. A guard built later on
            the same model takes over.

    Raises:
        ValueError: names the option, the value and the valid ones.

    Collective: none. Host sync: none but in the planned step.
    """
    wrapper = wrapper_of(model)
    plan = checked(Plan(rank, step, phase, layer, kind, micro_batch), wrapper, _ranks(), _own_rank())
    return plant(model, plan, guard, "inject()", here=plan.rank == _own_rank())


def plant(model: nn.Module, plan: Plan, guard: NanGuard | None, source: str, here: bool) -> Injection:
    """Put the hooks of a checked plan on, where this is its rank."""
    injection = Injection(plan, model, source)
    if not here:
        return injection
    wrapper = wrapper_of(model)
    layer = None if plan.layer is None else dict(wrapper.named_modules())[plan.layer]
    injection._handles = attach(injection, model, layer)
    if guard is not None:
        injection.clock = GuardClock(guard)
    else:
        injection.clock = clock = OwnClock(model, {id(parameter) for _, parameter in wrapper.named_parameters()})
        injection._handles.append(clock)
    _injections.setdefault(wrapper.root, []).append(injection)
    return injection


# -- for the guard ---------------------------------------------------------------------------------------------------


def planned(wrapper: Wrapper, peers: Peers) -> Plan | None:
    """What ``NANGUARD_INJECT`` plants, the same on every rank; the planned rank fills the layer in.

    Raises:
        ValueError: on every rank.

    Collective: none without the variable; else one MIN and one SUM all-reduce of at most 8 KiB on the fault group.
    """
    text, problem, plan = injection_text(), None, None
    if text is None:
        return None
    try:
        plan = checked(parsed(text), wrapper, peers.ranks, peers.rank)
    except ValueError as error:
        problem = str(error)
        problem = problem if ENV_INJECT in problem else f"environment variable {ENV_INJECT}={text!r}: {problem}"
    peers.require_no_problem(problem)
    assert plan is not None
    here = plan.rank == peers.rank
    return Plan(**json.loads(peers.text_of(here, json.dumps(dataclasses.asdict(plan)))))


def begin(guard: NanGuard, parts: Parts) -> list[Injection]:
    """Plant what the environment asks for; faults that were planted before now go by this guard's steps."""
    for injection in _injections.get(parts.wrapper.root, []):
        injection.clock = GuardClock(guard)
    plan = parts.injection
    if plan is None:
        return []
    injection = plant(parts.wrapper.model, plan, guard, ENV_INJECT, here=plan.rank == parts.peers.rank)
    injection.tell("a fault will be PLANTED in this job")
    return [injection]


def warn_of_disabled() -> None:
    """A guard that does nothing plants nothing."""
    if injection_text() is not None:
        _log.warning("%s: NOT planted: the guard has enabled=False", ENV_INJECT)


def compared() -> dict[str, str]:
    """For the comparison of options over ranks: what the environment plants must be the same everywhere."""
    text = injection_text()
    return {} if text is None else {"inject": text}


def notes(parts: Parts) -> list[str]:
    """For the report of any fault while the environment plants one."""
    return [] if parts.injection is None else [f"{ENV_INJECT} plants a fault in this job: {parts.injection}"]


def recorded(parts: Parts) -> list[dict[str, Any]]:
    """This rank's faults that were planted, for the evidence."""
    present = _injections.get(parts.wrapper.root, [])
    return [dataclasses.asdict(injection.plan) for injection in present if injection.num_planted]


def replant(guard: NanGuard, parts: Parts, planted: list[dict[str, Any]]) -> list[str]:
    """For a replay: what the dump records and nothing else, see [Note: replay of a planted fault].

    Returns:
        Remarks about it.
    """
    for injection in list(_injections.get(parts.wrapper.root, [])):
        injection.remove()
    parts.injection = None
    plans = [Plan(**data) for data in planted]
    for plan in plans:
        if plan.phase not in LEFT_IN_DUMP:
            guard._handles.append(plant(parts.wrapper.model, plan, guard, REPLAY, here=True))
    return [f"the fault was planted, and is again: {plan}" for plan in plans]


def spoilt_batch(guard: NanGuard, parts: Parts, batch: Any) -> Any:
    """What the loader has produced, spoilt where that is planned."""
    for injection in _injections.get(parts.wrapper.root, ()):
        plan, now = injection.plan, (guard.step, len(parts.window.micro_batches))
        if plan.phase == "input" and not injection.num_planted and now == (plan.step, plan.micro_batch):
            batch, done = with_first_spoilt(batch, partial(spoilt, kind=plan.kind))
            injection.note(done, "the batch holds no floating tensor in a plain container")
    return batch


def spoil_loss(parts: Parts, micro_batch: int, value: Tensor) -> None:
    """A watched loss, spoilt in place where that is planned, unseen by autograd."""
    for injection in _injections.get(parts.wrapper.root, ()):
        plan = injection.plan
        if plan.phase == "loss" and injection.active and not injection.num_planted and plan.micro_batch == micro_batch:
            found = [tensor for tensor in tensors_in(value) if is_plain(tensor)]
            if found:
                write(found[0].data, plan.kind)
            injection.note(bool(found), "the watched loss is no floating tensor")


def _ranks() -> list[int]:
    return list(range(dist.get_world_size())) if dist.is_available() and dist.is_initialized() else [0]


def _own_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _nothing() -> None:
    return None


__all__ = ["PHASES", "Injection", "Plan", "inject"]
