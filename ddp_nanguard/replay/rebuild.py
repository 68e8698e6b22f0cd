"""Rebuilds model, optimizers, scaler and settings of a dumped step, or lays their state into those of a script."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from ddp_nanguard.capture.backends import matmul_precision, set_backend_settings
from ddp_nanguard.dump.names import STATE_JSON
from ddp_nanguard.dump.read import Dump
from ddp_nanguard.errors import DumpError
from ddp_nanguard.tensors.shards import TensorShard
from ddp_nanguard.wrappers import Wrapper, wrap_like, wrapper_class, wrapper_of

from .recipe import Recipe


@dataclass
class Rebuilt:
    """Everything that one rank needs to run the step again.

    Attributes:
        dump: the dump.
        rank: the rank whose step is run.
        recipe: the user's.
        wrapper: of the wrapped model, with the dumped weights and buffers.
        optimizers: with the dumped groups and state; stand-ins where the recipe has no optimizer.
        scaler: with the dumped state; None where training had none.
        device: where the model is.
        group: process group that the guard uses; None for the default group.
    """

    dump: Dump
    rank: int
    recipe: Recipe
    wrapper: Wrapper
    optimizers: list[torch.optim.Optimizer]
    scaler: GradScaler | None
    device: torch.device
    group: dist.ProcessGroup | None = None


def apply_settings(dump: Dump) -> None:
    """Set what decides bits in this process as recorded: threads, deterministic flags, precision and backends."""
    settings = dump.manifest.settings
    torch.set_num_threads(settings.num_threads)
    # once both kinds of precision were set, only the one per backend has an answer: then it is all there is
    if settings.float32_matmul_precision not in (None, matmul_precision()):
        torch.set_float32_matmul_precision(settings.float32_matmul_precision)
    set_backend_settings(settings.backends)
    torch.use_deterministic_algorithms(settings.deterministic_algorithms, warn_only=settings.deterministic_warn_only)
    torch.backends.cudnn.deterministic = settings.cudnn_deterministic
    torch.backends.cudnn.benchmark = settings.cudnn_benchmark


def rebuild(dump: Dump, rank: int, recipe: Recipe, device: torch.device, alone: bool) -> Rebuilt:
    """Model and optimizers with the dumped weights and state, as the rank had them.

    Args:
        dump: the dump.
        rank: the rank whose step is run.
        recipe: the user's.
        device: where the model goes.
        alone: one process stands for ``rank`` and is the whole world; DDP is left out, FSDP wraps over one member.

    Raises:
        DumpError: the recipe's parameters are not those of the dump, or weights are missing.

    Collective: those of the wrapper's constructor, unless ``alone``.
    """
    # Before wrapping, which may flatten or shard the parameters.
    require_matching_parameters(dump, recipe.model)
    model = _wrapped(dump, recipe, device, alone)
    wrapper = wrapper_of(model)
    lay_in_model(dump, rank, wrapper)
    optimizers = _optimizers(dump, rank, recipe, wrapper)
    return Rebuilt(dump, rank, recipe, wrapper, optimizers, _scaler(dump, wrapper, device), device)


def lay_in_model(dump: Dump, rank: int, wrapper: Wrapper) -> None:
    """Give a wrapped model the weights, buffers and modes that the rank had.

    Raises:
        DumpError: weights are missing.
    """
    _fill_weights(dump, rank, wrapper)
    lay_in_buffers(dump, rank, wrapper)


def lay_in_buffers(dump: Dump, rank: int, wrapper: Wrapper) -> None:
    """Give a wrapped model the buffers and modes that the rank had before the step."""
    _fill_buffers(dump, rank, wrapper)
    _set_modes(dump, rank, wrapper)


def require_matching_parameters(dump: Dump, model: nn.Module, source: str = "recipe", remedy: str = "recipe") -> None:
    """Check that the model is that of the run: same parameter names and shapes.

    Args:
        dump: the dump.
        model: plain or wrapped.
        source: what has built it, for the error.
        remedy: what is to be given, for the error.

    Raises:
        DumpError: names the first parameter that does not match.
    """
    again = f"give the {remedy} of that run"
    recorded = {
        name.removeprefix("model."): tuple(entry.shape)
        for name, entry in dump.manifest.shapes.items()
        if name.startswith("model.")
    }
    built = {name: shape for name, (shape, _) in wrapper_of(model).all_shapes().items()}
    for name, shape in recorded.items():
        if name not in built:
            raise DumpError(f"the {source}'s model has no parameter {name!r}, the dump has; {again}")
        if built[name] != shape:
            raise DumpError(f"the {source}'s parameter {name!r} has shape {built[name]}, the dump's {shape}; {again}")
    extra = sorted(built.keys() - recorded.keys())
    if extra and recorded:
        raise DumpError(f"the {source}'s model has a parameter {extra[0]!r}, the dump has not; {again}")


def _wrapped(dump: Dump, recipe: Recipe, device: torch.device, alone: bool) -> nn.Module:
    description = dump.manifest.wrapper_description
    model = recipe.model.to(device)
    if alone and not wrapper_class(description.kind).is_sharded:
        return model
    if recipe.wrap is not None and not alone:
        return recipe.wrap(model)
    try:
        return wrap_like(model, description.details)
    except (KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DumpError(
            f"{dump.path}: the recipe's model cannot be wrapped as wrapper_description says ({what}); "
            "give the recipe of that run, or Recipe(wrap=...)"
        ) from error


def _fill_weights(dump: Dump, rank: int, wrapper: Wrapper) -> None:
    if not dump.manifest.options.dump_weights:
        raise DumpError(f"{dump.path} was written with dump_weights=False: it holds no weights to replay with")
    for name, parameter in wrapper.named_parameters():
        _fill(dump, rank, wrapper.shards("model.", name, parameter, parameter))


def _fill(dump: Dump, rank: int, shards: list[TensorShard]) -> None:
    special: dict[str, Tensor] | None = None
    for shard in shards:
        try:
            whole = dump.load_state([shard.name], rank)[shard.name]
        except DumpError:
            # Tensors that cannot be cut into shards are stored with the rank's window.
            special = dump.special(rank) if special is None else special
            if shard.name not in special:
                raise
            whole = special[shard.name]
        region = tuple(slice(o, o + size) for o, size in zip(shard.offsets, shard.tensor.shape, strict=True))
        with torch.no_grad():
            shard.tensor.copy_(whole.reshape(shard.stored_shape)[region])


def _fill_buffers(dump: Dump, rank: int, wrapper: Wrapper) -> None:
    saved = dump.buffers(rank)
    for name, buffer in wrapper.named_buffers():
        if name in saved and saved[name].shape == buffer.shape:
            with torch.no_grad():
                buffer.copy_(saved[name])


def _set_modes(dump: Dump, rank: int, wrapper: Wrapper) -> None:
    evidence = dump.evidence(rank)
    in_eval, frozen = set(evidence.eval_modules), set(evidence.frozen_parameters)
    for name, module in wrapper.named_modules():
        module.training = name not in in_eval
    for name, parameter in wrapper.named_parameters():
        parameter.requires_grad_(name not in frozen)


# -- optimizers ------------------------------------------------------------------------------------------------------


def _optimizers(dump: Dump, rank: int, recipe: Recipe, wrapper: Wrapper) -> list[torch.optim.Optimizer]:
    recorded = dump.plain_state()["optimizers"]
    return [_optimizer(dump, rank, recipe, wrapper, index, plain) for index, plain in enumerate(recorded)]


def _optimizer(
    dump: Dump, rank: int, recipe: Recipe, wrapper: Wrapper, index: int, plain: dict[str, Any]
) -> torch.optim.Optimizer:
    parameters = dict(wrapper.named_parameters())
    names = [[name for name in group["params"] if name in parameters] for group in plain["groups"]]
    held = list(dict.fromkeys(parameters[name] for group in names for name in group))
    # A recipe builds one optimizer; of further ones only groups and state are inspected.
    make = recipe.optimizer if recipe.optimizer is not None and index == 0 else _stand_in
    # torch refuses an optimizer without parameters.
    optimizer = make(held or list(parameters.values()))
    _lay_in_optimizer(dump, rank, wrapper, index, optimizer, plain)
    return optimizer


def lay_in_optimizers(dump: Dump, rank: int, wrapper: Wrapper, optimizers: list[torch.optim.Optimizer]) -> None:
    """Give optimizers that exist the groups, numbers and state that those of the rank had.

    Raises:
        DumpError: their number differs, or what was recorded does not fit.
    """
    recorded = dump.plain_state()["optimizers"]
    if len(recorded) != len(optimizers):
        raise DumpError(
            f"the script's guard has {len(optimizers)} optimizers, the dump {len(recorded)}; "
            "give the command of that run"
        )
    for index, (optimizer, plain) in enumerate(zip(optimizers, recorded, strict=True)):
        _lay_in_optimizer(dump, rank, wrapper, index, optimizer, plain)


def own_numbers(dump: Dump, optimizers: list[torch.optim.Optimizer]) -> list[str]:
    """Where a script's optimizers were made with other numbers than the dump's: those of the dump are used.

    ``lr`` is left out: schedules change it in each step.
    """
    found = []
    for optimizer, plain in zip(optimizers, dump.plain_state()["optimizers"], strict=False):
        for index, (own, then) in enumerate(zip(optimizer.param_groups, plain["groups"], strict=False)):
            name = f"{type(optimizer).__name__}, group {index}"
            numbers = {key: value for key, value in then.items() if isinstance(value, float) and key in own}
            found += [
                f"{name}: {key}={own[key]!r} in the script, {value!r} in the dump and in this replay"
                for key, value in numbers.items()
                if key not in ("lr", "initial_lr") and own[key] != value
            ]
    return found


def lay_in_numbers(dump: Dump, rank: int, optimizers: list[torch.optim.Optimizer]) -> None:
    """Set the hyper-parameters that the rank had, which a script may compute from its own count of steps."""
    for index, optimizer in enumerate(optimizers):
        _set_own_numbers(dump, rank, index, optimizer)


def _lay_in_optimizer(
    dump: Dump, rank: int, wrapper: Wrapper, index: int, optimizer: torch.optim.Optimizer, plain: dict[str, Any]
) -> None:
    parameters = dict(wrapper.named_parameters())
    names = [[name for name in group["params"] if name in parameters] for group in plain["groups"]]
    with _as_recorded(dump, f"optimizers[{index}]"):
        _regroup(optimizer, plain, names, parameters)
        _set_own_numbers(dump, rank, index, optimizer)
        if dump.manifest.options.dump_optimizer:
            _fill_state(dump, rank, wrapper, index, optimizer, plain)


@contextlib.contextmanager
def _as_recorded(dump: Dump, what: str) -> Iterator[None]:
    """Turn errors of optimizers and scalers, which alone know whether recorded numbers fit, into a `DumpError`."""
    try:
        yield
    except DumpError:
        raise
    except Exception as error:
        line = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise DumpError(
            f"{dump.path / STATE_JSON}: {what} cannot be put together again ({line}); give the recipe of that run"
        ) from error


def _stand_in(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer that holds groups and state for the guard's state probes; it never steps."""
    return torch.optim.SGD(parameters, lr=0.0)


def _regroup(
    optimizer: torch.optim.Optimizer,
    plain: dict[str, Any],
    names: list[list[str]],
    parameters: dict[str, nn.Parameter],
) -> None:
    defaults = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    held = list(optimizer.param_groups)
    groups = []
    for index, (group, group_names) in enumerate(zip(plain["groups"], names, strict=True)):
        values = {key: value for key, value in group.items() if key != "params"}
        # the dict stays the same one where there is one: a schedule of the script may hold it
        own = held[index] if index < len(held) else {}
        own |= {**defaults, **own, **values, "params": [parameters[name] for name in group_names]}
        groups.append(own)
    optimizer.param_groups[:] = groups


def _set_own_numbers(dump: Dump, rank: int, index: int, optimizer: torch.optim.Optimizer) -> None:
    """Apply this rank's own hyper-parameters: ``state.json`` holds those of one rank."""
    prefix = "" if index == 0 else f"optimizer{index}."
    own = dump.evidence(rank).hyper_parameters
    for group_index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            name = f"{prefix}g{group_index}.{key}"
            if isinstance(value, float) and name in own:
                group[key] = own[name]
            elif isinstance(value, Tensor) and name in own:
                group[key] = torch.full_like(value, own[name])


def _fill_state(
    dump: Dump, rank: int, wrapper: Wrapper, index: int, optimizer: torch.optim.Optimizer, plain: dict[str, Any]
) -> None:
    """Fill the optimizer's state tensors, each shaped like its parameter's local part, or of shape ()."""
    keys = _state_keys(dump, rank, index)
    special = dump.special(rank)
    for name, parameter in wrapper.named_parameters():
        state: dict[str, Any] = dict(plain["state"].get(name, {}))
        for key in keys.get(name, []) or _keys_of_flat(wrapper, name, parameter, keys):
            state[key] = _state_tensor(dump, rank, wrapper, index, name, parameter, key, special)
        if state:
            optimizer.state[parameter] = state


def _state_keys(dump: Dump, rank: int, index: int) -> dict[str, list[str]]:
    prefix = f"optim.{index}."
    found: dict[str, list[str]] = {}
    for full in (*dump.names(), *dump.special(rank)):
        if full.startswith(prefix):
            name, _, key = full.removeprefix(prefix).rpartition(".")
            found.setdefault(name, []).append(key)
    return found


def _keys_of_flat(wrapper: Wrapper, name: str, parameter: Tensor, keys: dict[str, list[str]]) -> list[str]:
    """The state keys of a flat parameter, which are those of the original parameters in it."""
    originals = [shard.name for shard in wrapper.shards("", name, parameter, parameter)]
    return list(dict.fromkeys(key for original in originals for key in keys.get(original, [])))


def _state_tensor(
    dump: Dump,
    rank: int,
    wrapper: Wrapper,
    index: int,
    name: str,
    parameter: nn.Parameter,
    key: str,
    special: dict[str, Tensor],
) -> Tensor:
    """One state tensor as the optimizer holds it: of shape (), or cut like the parameter."""
    prefix, suffix = f"optim.{index}.", f".{key}"
    if f"{prefix}{name}{suffix}" in special:
        return special[f"{prefix}{name}{suffix}"]
    own = [f"{prefix}{name}{suffix}"]
    cut = [shard.name for shard in wrapper.shards(prefix, name, parameter, parameter, suffix)]
    known = dump.described(rank)
    stored = next(each for each in (*own, *cut) if each in known)
    shape, dtype = known[stored]
    if shape == () and stored == own[0]:
        return dump.load_state([stored], rank)[stored]
    tensor = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    _fill(dump, rank, wrapper.shards(prefix, name, parameter, tensor, suffix))
    return tensor.detach()


def _scaler(dump: Dump, wrapper: Wrapper, device: torch.device) -> GradScaler | None:
    state = dump.plain_state()["scaler"]
    if not state:
        return None
    with _as_recorded(dump, "scaler"):
        return _scaler_like(state, wrapper, device)


def _scaler_like(state: dict[str, Any], wrapper: Wrapper, device: torch.device) -> GradScaler:
    scaler = wrapper.scaler_class()(device=device.type, init_scale=state["scale"])
    scaler.load_state_dict(copy.deepcopy(state))
    return scaler


def lay_in_scaler(dump: Dump, scaler: GradScaler | None) -> None:
    """Give a scaler the scale and counters that the job's had.

    Raises:
        DumpError: one of both has a scaler and the other has none.
    """
    state = dump.plain_state()["scaler"]
    if bool(state) != (scaler is not None):
        here, then = ("no scaler", "has one") if state else ("a scaler", "has none")
        raise DumpError(f"the script's guard has {here}, the dump {then}; give the command of that run")
    if scaler is not None:
        with _as_recorded(dump, "scaler"):
            scaler.load_state_dict(copy.deepcopy(state))


def recorded_gradients(rebuilt: Rebuilt) -> Iterator[tuple[nn.Parameter, list[TensorShard], Tensor]]:
    """For the replay of an update: each parameter, the shards of its gradient, and the gradient, zeroed.

    Copy the recorded values in with `fill_shards`, which writes through the shards. Parameters without a recorded
    gradient are left out.
    """
    names = set(rebuilt.dump.names())
    for name, parameter in rebuilt.wrapper.named_parameters():
        gradient = torch.zeros_like(parameter, requires_grad=False)
        shards = rebuilt.wrapper.shards("grad.", name, parameter, gradient)
        if any(shard.name in names for shard in shards):
            yield parameter, shards, gradient


def fill_shards(rebuilt: Rebuilt, shards: list[TensorShard]) -> None:
    """Copy the stored values into the tensors of the shards, in place."""
    _fill(rebuilt.dump, rebuilt.rank, shards)
