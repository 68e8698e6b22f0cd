"""A model made ready to run its step a second time, so that nothing is left of it afterwards.

[Note: shadow parameters]
Without sharding the modules get fresh parameters over the same memory, and clones of the buffers, for forward and
backward alike. So a second backward touches no live gradient, fires no hook of the job, and DDP's reducer never hears
of it. A parameter that is used through another reference than its module's would receive a gradient all the same: a
hook on the live one raises before it does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard.tensors.written import contents_kept, write_back

from .clean_names import join, paths

__frame_role__ = "passes on"  # the model runs below `forward_inside`, see `hooks.frames`

_MACHINERY = frozenset({"_parameters", "_buffers", "_modules", "_compiled_call_impl", "_is_full_backward_hook"})


class HeldOutsideError(RuntimeError):
    """A parameter was used through another reference than that of its module."""


@contextlib.contextmanager
def shadowed(
    model: nn.Module, parameters: Iterable[tuple[str, nn.Parameter]], saved: Mapping[str, Tensor]
) -> Iterator[None]:
    """Within, the modules have shadow parameters and cloned buffers, see [Note: shadow parameters].

    Args:
        model: with all its shells.
        parameters: clean name and live parameter.
        saved: buffers as they are to be at the beginning, by clean name; others are as they are now.
    """
    with contextlib.ExitStack() as stack:
        for name, parameter in parameters:
            if parameter.requires_grad:
                stack.enter_context(_refused(name, parameter))
        stack.enter_context(attributes_kept(model))
        _replace_parameters(model)
        _replace_buffers(model, saved)
        _renew_flat_weights(model)
        yield


@contextlib.contextmanager
def _refused(name: str, parameter: nn.Parameter) -> Iterator[None]:
    """Within, a gradient that reaches the live parameter raises."""

    def refuse(gradient: Tensor) -> None:
        raise HeldOutsideError(f"parameter {name} is used outside of the module that owns it")

    before = parameter._backward_hooks
    handle = parameter.register_hook(refuse)  # type: ignore[no-untyped-call]  # torch's own
    try:
        yield
    finally:
        handle.remove()
        if before is None:
            parameter._backward_hooks = None  # compiled code guards on it


def forward_inside(ddp: DistributedDataParallel, buffers: Callable[[], list[Tensor]], *args: Any, **kwargs: Any) -> Any:
    """Stands in for DDP's forward: hands the call on to its module, and the reducer hears nothing of it.

    Args:
        ddp: whose module is called.
        buffers: gives those that begin as rank 0 has them.
        args: of the call.
        kwargs: of the call.

    Collective: a broadcast of the buffers, where there are any.
    """
    present = buffers()
    if present:
        _broadcast_coalesced(ddp.process_group, present, ddp.broadcast_bucket_size, 0)
    if ddp.device_ids:
        device = torch.device(ddp.device_type, ddp.device_ids[0])
        moved, moved_kwargs = _to_kwargs(args, kwargs, device, False)
        args, kwargs = moved[0], moved_kwargs[0]
    return ddp.module(*args, **kwargs)


def _replace_parameters(model: nn.Module) -> None:
    shadows: dict[int, nn.Parameter] = {}
    for _, module in paths(model):
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in shadows:
                shadow = nn.Parameter(parameter.detach(), parameter.requires_grad)
                shadow.__dict__.update(parameter.__dict__)
                shadows[id(parameter)] = shadows[id(shadow)] = shadow  # a module may be met on two paths
            module._parameters[name] = shadows[id(parameter)]


def _replace_buffers(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    clones: dict[int, Tensor] = {}
    for prefix, module in paths(model):
        for attribute, buffer in module._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in clones:
                clone = saved.get(join(prefix, attribute), buffer).detach().clone()
                clones[id(buffer)] = clones[id(clone)] = clone
            module._buffers[attribute] = clones[id(buffer)]


def _renew_flat_weights(model: nn.Module) -> None:
    """Recurrent modules keep a list of their parameters."""
    for _, module in paths(model):
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


@contextlib.contextmanager
def attributes_kept(model: nn.Module, managed: Mapping[nn.Module, Container[str]] | None = None) -> Iterator[None]:
    """At the end each module has the attributes, parameters, buffers and children that it had: a forward may set some.

    Tensors and containers that the job's own modules keep in them hold again what they held, see `contents_kept`.

    Args:
        model: with all its shells.
        managed: where the wrapper shards them, names of parameters by module: these, and tensors in their place, are
            the wrapper's to put back; None where it does not.
    """
    modules = list(dict.fromkeys(module for _, module in paths(model)))
    plain = [module for module in modules if not isinstance(module, FullyShardedDataParallel)]
    names = managed or {}
    modes = [(module, module.training) for module in modules]
    attributes = [(module, own_attributes(module, names.get(module, ()))) for module in plain]
    tables = [(table, dict(table)) for module in modules for table in _tables(module, managed is not None)]
    registered = {
        id(tensor) for module in modules for tensor in (*module._parameters.values(), *module._buffers.values())
    }
    kept = [values for module, values in attributes if not is_of_torch(type(module))]
    try:
        with contents_kept(kept, registered):
            yield
    finally:
        for module, before in attributes:
            for name in own_attributes(module, names.get(module, ())).keys() - before.keys():
                del module.__dict__[name]
            module.__dict__.update(before)
        for table, entries in tables:
            table.clear()
            table.update(entries)
        for module, training in modes:
            module.training = training


def own_attributes(module: nn.Module, managed: Container[str] = ()) -> dict[str, Any]:
    """Attributes of a module that are neither its parameters, buffers and children nor hooks.

    Args:
        module: whose they are.
        managed: names that are the wrapper's.
    """
    own = {name: value for name, value in module.__dict__.items() if name not in _MACHINERY and "hooks" not in name}
    return {name: value for name, value in own.items() if name not in managed}


def is_of_torch(kind: type) -> bool:
    """Whether a class of modules is torch's own."""
    return kind.__module__.partition(".")[0] == "torch"


def _tables(module: nn.Module, is_sharded: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [module._buffers, module._modules]
    return found if is_sharded else [*found, module._parameters]


# -- sharded: the live parameters themselves ---------------------------------------------------------------------------


@contextlib.contextmanager
def gradients_aside(parameters: list[nn.Parameter], keep: bool) -> Iterator[None]:
    """Within, no parameter has a gradient or a hook of the job; afterwards each has its own again.

    Args:
        parameters: as the optimizer holds them.
        keep: whether the gradients are kept; if not, they are given up, and there are none afterwards.
    """
    gradients = [parameter.grad if keep else None for parameter in parameters]
    _drop_gradients(parameters)
    hooks = [(table, dict(table)) for parameter in parameters for table in _hook_tables(parameter)]
    for table, _ in hooks:
        table.clear()
    try:
        yield
    finally:
        _drop_gradients(parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            _put_back(parameter, gradient)
        for table, before in hooks:
            table.update(before)


def _drop_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _put_back(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    """Also one that FSDP1 has not reduced: it is larger than what this rank has of the parameter."""
    if gradient is None or gradient.shape == parameter.shape:
        parameter.grad = gradient
        return
    shard = parameter.data
    parameter.data = gradient.detach()  # torch compares the shapes
    parameter.grad = gradient
    parameter.data = shard


def has_hooks_of_the_job(parameter: nn.Parameter) -> bool:
    """Whether code that is neither ours nor torch's may change its gradient while a backward runs."""
    return any(_is_of_the_job(hook) for hook in (parameter._backward_hooks or {}).values())


def _is_of_the_job(hook: Any) -> bool:
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return module.partition(".")[0] not in ("ddp_nanguard", "torch")


def _hook_tables(parameter: nn.Parameter) -> list[dict[int, Any]]:
    if hasattr(parameter, "_is_flat_param"):
        return []  # FSDP's own
    found = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    return [table for table in found if table]


@contextlib.contextmanager
def buffers_put_back(named: Callable[[], Iterable[tuple[str, Tensor]]], saved: Mapping[str, Tensor]) -> Iterator[None]:
    """Within, buffers begin as they were saved; afterwards they are what they were before.

    Args:
        named: gives clean name and buffer.
        saved: by clean name.
    """
    now = [(buffer, buffer.detach().clone()) for _, buffer in named()]
    with torch.no_grad():
        for name, buffer in named():
            if name in saved:
                write_back(buffer, saved[name])
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in now:
                write_back(buffer, value)
