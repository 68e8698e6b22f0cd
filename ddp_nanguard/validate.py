"""The arguments of `NanGuard`, looked at on this rank alone: what does not fit is a ValueError with its remedy."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler

from .config import GuardConfig, is_switched_off
from .context import guarded
from .hooks.optimizers import each_given, optimizers_in
from .tensors.containers import tensors_in
from .wrappers import Wrapper, wrapper_of
from .wrappers.grad_scaler import require_fitting_scaler


@dataclass(frozen=True)
class ValidatedArgs:
    """The arguments of `NanGuard` after validation on this rank.

    Attributes:
        config: the options, environment included.
        wrapper: the adapter of the model's kind of wrapper.
        optimizers: at least one, each once.
        scaler: None without one, and where it is disabled.
        recipe_directory: where the module of ``replay=`` lies; None where that is not given or not a file.
    """

    config: GuardConfig
    wrapper: Wrapper
    optimizers: list[torch.optim.Optimizer]
    scaler: GradScaler | None
    recipe_directory: str | None


def validate_args(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    scaler: object,
    replay: str | None,
    options: dict[str, Any],
) -> ValidatedArgs:
    """Validate the arguments of `NanGuard` on this rank, without any communication.

    Args:
        model: what the training loop calls.
        optimizer: one, or several.
        scaler: a GradScaler, or None.
        replay: ``module:function`` of the recipe, or None.
        options: those given in code; the environment wins over them.

    Raises:
        ValueError: names the option, the value and the remedy.
    """
    if is_switched_off(options):
        return _switched_off(model, optimizer)
    config = GuardConfig.from_code_and_environment(options)
    wrapper = wrapper_of(model)
    _require_eager_autograd(wrapper)
    _require_materialised(model)
    # by the unwrapped model: the same one inside another wrapper is guarded all the same
    if wrapper.root in guarded:
        raise ValueError(f"model {type(model).__name__} has a guard already; close() that one, or use it")
    given = each_given(optimizer)
    optimizers = _as_list(given)
    own = {id(parameter) for _, parameter in wrapper.named_parameters()}
    for each in optimizers:
        _require_fitting_optimizer(each, own, given)
        _require_deferrable(config, each, wrapper)
    fitting = require_fitting_scaler(scaler, wrapper)
    return ValidatedArgs(config, wrapper, optimizers, fitting, _recipe_directory(replay))


def _switched_off(model: object, optimizer: object) -> ValidatedArgs:
    """``enabled=False`` takes whatever is given: steps are counted by what is an optimizer, and that is all."""
    try:
        wrapper = wrapper_of(cast(nn.Module, model))
    except Exception:
        wrapper = wrapper_of(nn.Identity())
    try:
        optimizers = _as_list(each_given(optimizer))
    except Exception:
        optimizers = []
    return ValidatedArgs(GuardConfig(enabled=False), wrapper, optimizers, None, None)


def _require_deferrable(config: GuardConfig, optimizer: torch.optim.Optimizer, wrapper: Wrapper) -> None:
    """Refuse a deferred verdict where the device cannot withhold the update: that needs ``found_inf``."""
    if config.verdict != "deferred":
        return
    name = type(optimizer).__name__
    takes_flag = getattr(optimizer, "_step_supports_amp_scaling", False)
    if not takes_flag or not all(group.get("fused") for group in optimizer.param_groups):
        raise ValueError(
            f"option verdict='deferred' needs an optimizer that takes found_inf, and this {name} does not; "
            "give Adam, AdamW, SGD or Adagrad with fused=True, or verdict='sync'"
        )
    if config.keep_previous:
        raise ValueError(
            "option keep_previous=True with verdict='deferred' would put back the wrong step, since the host is one "
            "behind; give verdict='sync', or keep_previous=False"
        )
    if not wrapper.communicates and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            "option verdict='deferred' with several ranks needs DDP or FSDP, which give all ranks the same gradients; "
            "wrap the model, or give verdict='sync'"
        )


def _require_eager_autograd(wrapper: Wrapper) -> None:
    # read only where it is loaded already: importing it is slow, and unloaded it cannot have been switched on
    settings = sys.modules.get("torch._dynamo.config")
    if wrapper.hides_compiled_gradients and settings is not None and getattr(settings, "compiled_autograd", False):
        raise ValueError(
            "torch._dynamo.config.compiled_autograd=True compiles DDP's backward, whose hooks then see no gradient; "
            "set it to False"
        )


def _require_materialised(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(f"model has a lazy parameter {name!r} without a shape; run one forward before the guard")


def require_fitting_group(group: dist.ProcessGroup | None, model: nn.Module) -> None:
    """Check that the guard steps with exactly the ranks that the model communicates with.

    Args:
        group: the option; None is the world.
        model: whose wrapper knows its own ranks; one that does not communicate fits every group.

    Raises:
        ValueError: on this rank alone, for a wrong group gives no peers to tell it to.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    args = dist.get_process_group_ranks(group or dist.group.WORLD)
    if dist.get_rank() not in args:
        raise ValueError(
            f"option group: rank {dist.get_rank()} is not among its ranks {args}; build the guard there only"
        )
    own = _ranks_of(model)
    if own is not None and sorted(own) != sorted(args):
        raise ValueError(
            f"option group: the model communicates over ranks {own}, the guard over {args}; "
            "give the model's own process group as group="
        )


def _ranks_of(model: nn.Module) -> list[int] | None:
    try:
        return wrapper_of(model).group_ranks()
    except ValueError:
        return None  # `validate_args` raises it again, and then all ranks are told


def _as_list(given: list[object]) -> list[torch.optim.Optimizer]:
    if not given or len({id(each) for each in given}) < len(given):
        found = "empty" if not given else "one optimizer twice"
        raise ValueError(f"optimizer is {found}; give each optimizer that steps the model once")
    optimizers = [found for each in given for found in _followed(each)]
    return list({id(each): each for each in optimizers}.values())


def _followed(optimizer: object) -> list[torch.optim.Optimizer]:
    found = optimizers_in(optimizer)
    if not found:
        name, what = type(optimizer).__name__, "give a torch.optim.Optimizer, or several of them"
        wraps = " that wraps none" if isinstance(optimizer, torch.optim.Optimizer) else ""
        raise ValueError(f"optimizer is a {name}{wraps}; {what}")
    return found


def _require_fitting_optimizer(optimizer: torch.optim.Optimizer, own: set[int], given: list[object]) -> None:
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer {name} needs a closure, which it calls several times in one step, so that no single verdict "
            "can fall before its update; use an optimizer whose step() takes none"
        )
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # an object around an optimizer of master weights keeps the model's own, into which it copies them
    held += [tensor for each in given for tensor in tensors_in(getattr(each, "__dict__", {}))]
    if not any(id(parameter) in own for parameter in held):
        raise ValueError(
            f"optimizer {name} holds no parameter of the model; "
            "build it from model.parameters() after the model is wrapped"
        )


def _recipe_directory(replay: str | None) -> str | None:
    """The directory of the recipe's module, None where it has no file. The module itself is not imported.

    Raises:
        ValueError: the text names no function, or a file or module that is not there.
    """
    if replay is None:
        return None
    if not isinstance(replay, str):
        raise ValueError(f'option replay={replay!r} is a {type(replay).__name__}; give "module:function"')
    module, colon, function = replay.rpartition(":")
    if not colon or not module or not function.isidentifier():
        raise ValueError(
            f'option replay={replay!r} names no recipe; give "module:function" or "path/to/file.py:function"'
        )
    if module.endswith(".py"):
        if not os.path.isfile(module):
            raise ValueError(
                f"option replay={replay!r}: there is no file {module}; give a path that exists on every rank"
            )
        return os.path.dirname(os.path.abspath(module))
    top = module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ValueError(
            f"option replay={replay!r}: there is no module {top!r}; give one that can be imported from here"
        )
    return os.path.dirname(os.path.abspath(spec.origin)) if spec.origin and os.path.isfile(spec.origin) else None
