"""What a guard and a replay ask of fault injection."""

from __future__ import annotations

import dataclasses
import json
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ddp_nanguard.config import ENV_INJECT, injection_text
from ddp_nanguard.tensors.containers import tensors_in
from ddp_nanguard.tensors.minmax import is_plain
from ddp_nanguard.wrappers import Wrapper, wrapper_of

from .hooks import attach, corrupt_first, corrupted, with_first_corrupted
from .injection import LEFT_IN_DUMP, REPLAY, Injection, _injections
from .spec import InjectionSpec, parse_spec, validate_spec
from .step_counter import GuardClock, HookStepCounter

if TYPE_CHECKING:
    from ddp_nanguard.context import GuardContext
    from ddp_nanguard.distributed.group import RankGroup
    from ddp_nanguard.guard import NanGuard


_log = logging.getLogger(__name__)


def install_injection(
    model: nn.Module, spec: InjectionSpec, guard: NanGuard | None, source: str, here: bool
) -> Injection:
    """Put the hooks of a checked plan on, where this is its rank."""
    injection = Injection(spec, model, source)
    if not here:
        return injection
    wrapper = wrapper_of(model)
    layer = None if spec.layer is None else dict(wrapper.named_modules())[spec.layer]
    injection._handles = attach(injection, model, layer)
    if guard is not None:
        injection.step_counter = GuardClock(guard)
    else:
        injection.step_counter = step_counter = HookStepCounter(
            model, {id(parameter) for _, parameter in wrapper.named_parameters()}
        )
        injection._handles.append(step_counter)
    _injections.setdefault(wrapper.root, []).append(injection)
    return injection


def spec_from_environment(wrapper: Wrapper, ranks: RankGroup) -> InjectionSpec | None:
    """What ``NANGUARD_INJECT`` plants, the same on every rank; the planned rank fills the layer in.

    Raises:
        ValueError: on every rank.

    Collective: none without the variable; else one MIN and one SUM all-reduce of at most 8 KiB on the fault group.
    """
    text, problem, spec = injection_text(), None, None
    if text is None:
        return None
    try:
        spec = validate_spec(parse_spec(text), wrapper, ranks.members, ranks.rank)
    except ValueError as error:
        problem = str(error)
        problem = problem if ENV_INJECT in problem else f"environment variable {ENV_INJECT}={text!r}: {problem}"
    ranks.require_no_problem(problem)
    assert spec is not None
    here = spec.rank == ranks.rank
    return InjectionSpec(**json.loads(ranks.text_of(here, json.dumps(dataclasses.asdict(spec)))))


def attach_to_guard(guard: NanGuard, context: GuardContext) -> list[Injection]:
    """Plant what the environment asks for; faults that were planted before now go by this guard's steps."""
    for injection in _injections.get(context.wrapper.root, []):
        injection.step_counter = GuardClock(guard)
    spec = context.injection
    if spec is None:
        return []
    injection = install_injection(context.wrapper.model, spec, guard, ENV_INJECT, here=spec.rank == context.ranks.rank)
    injection.tell("a fault will be PLANTED in this job")
    return [injection]


def warn_of_disabled() -> None:
    """A guard that does nothing plants nothing."""
    if injection_text() is not None:
        _log.warning("%s: NOT planted: the guard has enabled=False", ENV_INJECT)


def environment_option() -> dict[str, str]:
    """For the comparison of options over ranks: what the environment plants must be the same everywhere."""
    text = injection_text()
    return {} if text is None else {"inject": text}


def notes(context: GuardContext) -> list[str]:
    """For the report of any fault while the environment plants one."""
    return [] if context.injection is None else [f"{ENV_INJECT} plants a fault in this job: {context.injection}"]


def injected_specs(context: GuardContext) -> list[dict[str, Any]]:
    """This rank's faults that were planted, for the evidence."""
    present = _injections.get(context.wrapper.root, [])
    return [dataclasses.asdict(injection.spec) for injection in present if injection.num_fired]


def reinject(guard: NanGuard, context: GuardContext, mark_fired: list[dict[str, Any]]) -> list[str]:
    """For a replay: what the dump records and nothing else, see [Note: replay of a planted fault].

    Returns:
        Remarks about it.
    """
    for injection in list(_injections.get(context.wrapper.root, [])):
        injection.remove()
    context.injection = None
    plans = [InjectionSpec(**data) for data in mark_fired]
    for spec in plans:
        if spec.phase not in LEFT_IN_DUMP:
            guard._handles.append(install_injection(context.wrapper.model, spec, guard, REPLAY, here=True))
    return [f"the fault was planted, and is again: {spec}" for spec in plans]


def corrupt_batch(guard: NanGuard, context: GuardContext, batch: Any) -> Any:
    """What the loader has produced, spoilt where that is planned."""
    for injection in _injections.get(context.wrapper.root, ()):
        spec, now = injection.spec, (guard.step, len(context.window.micro_batches))
        if spec.phase == "input" and not injection.num_fired and now == (spec.step, spec.micro_batch):
            batch, done = with_first_corrupted(batch, partial(corrupted, kind=spec.kind))
            injection.note(done, "the batch holds no floating tensor in a plain container")
    return batch


def corrupt_loss(context: GuardContext, micro_batch: int, value: Tensor) -> None:
    """A watched loss, spoilt in place where that is planned, unseen by autograd."""
    for injection in _injections.get(context.wrapper.root, ()):
        spec = injection.spec
        if spec.phase == "loss" and injection.active and not injection.num_fired and spec.micro_batch == micro_batch:
            found = [tensor for tensor in tensors_in(value) if is_plain(tensor)]
            if found:
                corrupt_first(found[0].data, spec.kind)
            injection.note(bool(found), "the watched loss is no floating tensor")
