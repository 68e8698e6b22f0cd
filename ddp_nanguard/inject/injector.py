"""Injecting faults into a model: those of the environment, those of a replay, those of `testing.inject`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterator
from typing import Any

from torch import nn

from ddp_nanguard.config import ENV_INJECT, injection_text
from ddp_nanguard.distributed.group import RankGroup
from ddp_nanguard.report.types import Phase
from ddp_nanguard.wrappers import Wrapper, wrapper_of

from .hooks import attach
from .injection import REPLAY, Injection, injections_of
from .spec import InjectionSpec, parse_spec, validate_spec
from .step_counter import HookStepCounter, StepCounter, counter_of, register_counter

_log = logging.getLogger(__name__)

LEFT_IN_DUMP = (Phase.INPUT, Phase.STATE)
"""Phases whose faults a replay finds in the dump itself, as a bad batch or bad weights."""


def install_injection(model: nn.Module, spec: InjectionSpec, source: str, here: bool) -> Injection:
    """Put the hooks of an injection on the model, if this is its rank.

    Args:
        model: what the training loop calls, wrapper included.
        spec: valid for the model, its layer filled in.
        source: what asked for it, for the log.
        here: whether this is its rank; elsewhere the injection does nothing.
    """
    injection = Injection(spec, model, source)
    if not here:
        return injection
    wrapper = wrapper_of(model)
    layer = None if spec.layer is None else dict(wrapper.named_modules())[spec.layer]
    injection.handles = attach(injection, model, layer)
    counter = counter_of(wrapper.root)
    # without a guard the fault counts for itself; a guard that is made later takes over, see `follow_counter`
    if counter is None:
        counter = own = HookStepCounter(model, {id(parameter) for _, parameter in wrapper.named_parameters()})
        injection.handles.append(own)
    injection.count_by(counter)
    injections_of(wrapper.root).append(injection)
    return injection


def spec_from_environment(wrapper: Wrapper, ranks: RankGroup) -> InjectionSpec | None:
    """The fault that ``NANGUARD_INJECT`` asks for, the same on every rank; None without the variable.

    The rank of the fault fills the layer in, since only it knows of which layers it holds parameters.

    Raises:
        ValueError: on every rank, if the text is no spec or does not fit the model on any of them.

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


def follow_counter(model: nn.Module, counter: StepCounter, spec: InjectionSpec | None, rank: int) -> Injection | None:
    """Let all faults of a model count steps with a guard, and inject what the environment asks for.

    Args:
        model: what the training loop calls.
        counter: of the guard.
        spec: from `spec_from_environment`; None for none.
        rank: this one.

    Returns:
        The injection of ``spec``; None without one.
    """
    root = wrapper_of(model).root
    register_counter(root, counter)
    for injection in injections_of(root):
        injection.count_by(counter)
    if spec is None:
        return None
    injection = install_injection(model, spec, ENV_INJECT, here=spec.rank == rank)
    injection.tell("a fault will be PLANTED in this job")
    return injection


@contextlib.contextmanager
def injected_again(root: nn.Module, counter: StepCounter) -> Iterator[None]:
    """Within, faults that have happened happen once more, as another counter counts.

    See [Note: replay of an injected fault].

    Args:
        root: the unwrapped model.
        counter: of the second look.
    """
    before, fired = counter_of(root), [injection for injection in injections_of(root) if injection.num_fired]
    counts = [(injection, injection.num_fired) for injection in fired if injection.spec.phase not in LEFT_IN_DUMP]
    register_counter(root, counter)
    for injection in fired:
        injection.count_by(counter)
        injection.active = False  # the calls of its layer are counted from the next forward on
    for injection, _ in counts:
        injection.num_fired = 0
    try:
        yield
    finally:
        for injection, count in counts:
            injection.num_fired = count
        if before is not None:
            register_counter(root, before)
            for injection in fired:
                injection.count_by(before)


def warn_of_disabled() -> None:
    """Warn that ``NANGUARD_INJECT`` is set and does nothing, since the guard is switched off."""
    if injection_text() is not None:
        _log.warning("%s: NOT planted: the guard has enabled=False", ENV_INJECT)


def environment_option() -> dict[str, str]:
    """The fault of the environment as an entry among the options, which all ranks compare; empty for none."""
    text = injection_text()
    return {} if text is None else {"inject": text}


def reinject(model: nn.Module, recorded: list[dict[str, Any]]) -> tuple[list[Injection], list[str]]:
    """Inject into a replay's model what its dump records and nothing else, see [Note: replay of an injected fault].

    Args:
        model: of the replay.
        recorded: what `fired_injections` returned in the job.

    Returns:
        The injections that have hooks now, and notes about all recorded ones for the outcome.
    """
    # the recipe may have called `inject` itself, and the fault must not come twice
    for injection in list(injections_of(wrapper_of(model).root)):
        injection.remove()
    specs = [InjectionSpec(**data) for data in recorded]
    injected = [install_injection(model, spec, REPLAY, here=True) for spec in specs if spec.phase not in LEFT_IN_DUMP]
    return injected, [f"the fault was planted, and is again: {spec}" for spec in specs]
