"""FSDP2: `torch.distributed.fsdp.fully_shard`, HSDP included.

[Note: FSDP2 gradients] The optimizer holds sharded DTensors, whose ``.grad`` appears only after the reduce. Autograd
accumulates into the unsharded parameter, one object per parameter for the whole run, made by the first all-gather. It
is hooked in a forward pre-hook of the module that `fully_shard` was called on, after FSDP's own: the parameter's own
module may never be called (a `torch.nn.ParameterList`, the output projection of attention, a tied weight).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, Shard
from torch.utils.hooks import RemovableHandle

from ddp_nanguard.hooks.weak import WeakHook
from ddp_nanguard.tensors.dtypes import dtype_name, dtype_named

from .aside import attributes_kept, buffers_put_back, gradients_aside
from .base import GradientWatch, OnGradient, ShardedWrapper
from .clean_names import class_name, join, paths
from .plain import PlainWrapper

PENDING_BYTES = 2**22
"""Unsharded gradients that are kept at most until they are reduced to slots together: 4 MiB."""


class FSDP2Wrapper(ShardedWrapper):
    """A module whose parameters are sharded in place by `fully_shard`, at the root or only below it."""

    kind: ClassVar[str] = "fsdp2"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.states: list[FSDPState] = list(dict.fromkeys(_states(model)))
        self._by_module: dict[nn.Module, dict[str, FSDPParam]] = {}
        for param in (param for group in self.groups() for param in group.fsdp_params):
            for module, attribute in _places(param):
                self._by_module.setdefault(module, {})[attribute] = param
        self.names = self._kept_names()

    def groups(self) -> Iterator[FSDPParamGroup]:
        """The groups of parameters that are gathered and reduced together."""
        return (group for state in self.states for group in state._fsdp_param_groups)

    def watch_local_gradients(self, on_gradient: OnGradient) -> GradientWatch:
        """As `Wrapper.watch_local_gradients`; unsharded parameters are hooked, see [Note: FSDP2 gradients]."""
        watch = FSDP2Watch(self, on_gradient)
        watch.install_hooks()
        return watch

    def find_gathered(self) -> Callable[[torch.Tensor], str | None]:
        """As `Wrapper.find_gathered`: FSDP2 gathers a parameter into new memory for each use, and frees it again."""
        modules = self.named_modules()

        def name_of(tensor: torch.Tensor) -> str | None:
            for layer, module in modules:
                for name, parameter in module._parameters.items():
                    if parameter is not None and _is_at(parameter, tensor):
                        return f"{layer}.{name}" if layer else name
            return None

        return name_of

    def will_reduce(self) -> bool:
        """Whether any group over more than one rank reduces, see `FSDPModule.set_requires_gradient_sync`."""
        return any(group.reduce_grads and group.mesh_info.mesh.size() > 1 for group in self.groups())

    def leaves_reduce_running(self) -> bool:
        """Where more backwards are to follow (``set_is_last_backward(False)``) FSDP2 does not wait for its stream."""
        return not all(state._state_ctx.is_last_backward for state in self.states)

    def compute_device(self) -> torch.device:
        """FSDP2's own: parameters that are offloaded lie on the CPU between two uses."""
        return next((group.device for group in self.groups()), super().compute_device())

    def unreduced(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As `Wrapper.unreduced`: without gradient sync the gradients stay in the unsharded parameters."""
        return ((name, gradient) for param, name in self.names.items() for gradient in _unreduced(param))

    def pending_gradient_bytes(self) -> int | None:
        """`PENDING_BYTES`: FSDP2 reduces a copy and frees the gradients, so those that are kept take memory."""
        return PENDING_BYTES

    def leaves(self) -> list[tuple[str, torch.Tensor]]:
        """The unsharded parameters that exist so far, and the parameters that FSDP ignores."""
        unsharded = {name: getattr(param, "_unsharded_param", None) for param, name in self.names.items()}
        found = [(name, unsharded.get(name, parameter)) for name, parameter in self.named_parameters()]
        return [(name, tensor) for name, tensor in found if tensor is not None]

    def why_not_again(self) -> str | None:
        """A unit that is not at rest cannot take another step."""
        if any(group._training_state is not TrainingState.IDLE for group in self.groups()):
            return "a forward or backward of fully_shard has not ended"
        return None

    @contextlib.contextmanager
    def aside(self, saved: Mapping[str, torch.Tensor], keep_gradients: bool) -> Iterator[None]:
        """As `Wrapper.aside`, on the live parameters, whose gradients are put aside; units are left sharded."""
        flags = [(group, group.reduce_grads, group.all_reduce_grads) for group in self.groups()]
        parameters = [parameter for _, parameter in self.named_parameters()]
        with (
            attributes_kept(self.model, self._by_module),
            gradients_aside(parameters, keep_gradients),
            _unreduced_aside(list(self.names), keep_gradients),
            buffers_put_back(self.named_buffers, saved),
        ):
            try:
                yield
            finally:
                self._come_to_rest()
                for group, reduces, all_reduces in flags:
                    group.reduce_grads, group.all_reduce_grads = reduces, all_reduces

    def _come_to_rest(self) -> None:
        """No unit keeps gathered weights, which the next update would make stale, nor unsharded gradients."""
        for group in self.groups():
            for param in group.fsdp_params:
                _drop_unreduced(param)
            group.reshard()

    @contextlib.contextmanager
    def syncing(self, reduces: bool) -> Iterator[None]:
        """As `Wrapper.syncing`; see `FSDPModule.set_requires_gradient_sync`."""
        for group in self.groups():
            group.reduce_grads = group.all_reduce_grads = reduces
        yield

    def own_parameters(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters as the optimizer holds them, also while the module holds gathered ones."""
        for name, parameter in super().own_parameters(module):
            managed = self._by_module.get(module, {}).get(name)
            if managed is not None and managed.sharded_state != ShardedState.SHARDED:
                parameter = managed.sharded_param
            yield name, parameter

    def describe(self) -> dict[str, Any]:
        """As `Wrapper.describe`, with the mesh and, per call of `fully_shard`, modules and options, parents first."""
        managed = set(self.names.values())
        return {
            **super().describe(),
            "root_class": class_name(_original_class(self.root)),
            "model_class": class_name(_original_class(self.model)),
            "mesh": _describe_mesh([group.mesh_info.mesh for group in self.groups()]),
            "units": [_describe_unit(state, _first_names(self.model), self.names) for state in self.states],
            "ignored": [name for name, _ in self.named_parameters() if name not in managed],
        }

    def _kept_names(self) -> dict[FSDPParam, str]:
        names: dict[FSDPParam, str] = {}
        for prefix, module in paths(self.model):
            for attribute, param in self._by_module.get(module, {}).items():
                names.setdefault(param, join(prefix, attribute))
        return names

    def _position(self) -> tuple[int, int, int]:
        infos = [group.mesh_info for group in self.groups()]
        found = {tuple(getattr(info, name, default) for name, default in _POSITION) for info in infos}
        if len(found) != 1 or any(param.is_dtensor for param in self.names):
            # several meshes or tensor parallel: no two ranks hold the same bytes
            return self._rank, self._world_size, 0
        return found.pop()  # type: ignore[return-value]  # three integers


_POSITION = (("shard_mesh_rank", 0), ("shard_mesh_size", 1), ("replicate_mesh_rank", 0))


class GatheredHook(WeakHook):
    """Forward pre-hook of a module that `fully_shard` was called on."""

    __slots__ = ()

    @_disable_dynamo  # traced, each parameter's name would compile it again; this one imports dynamo late
    def __call__(self, module: nn.Module, args: Any) -> None:
        """Hook the parameters that the module has gathered; without grad mode there are no gradients to report."""
        watch = self.target()
        if watch is not None and torch.is_grad_enabled():
            watch.hook_gathered(module)


class FSDP2Watch(GradientWatch):
    """Hooks each unsharded parameter in the first forward after it was made, see [Note: FSDP2 gradients]."""

    def __init__(self, wrapper: FSDP2Wrapper, on_gradient: OnGradient) -> None:
        super().__init__(wrapper, on_gradient)
        self._params = {
            module: [(wrapper.names[p], p) for group in state._fsdp_param_groups for p in group.fsdp_params]
            for state in wrapper.states
            for module in state._modules
        }
        self._pre_hooks: list[RemovableHandle] = []

    def install_hooks(self) -> None:
        """As `GradientWatch.install_hooks`; also hooks the forwards that gather parameters."""
        super().install_hooks()
        if self._armed and not self._pre_hooks:
            self._pre_hooks = [module.register_forward_pre_hook(GatheredHook(self)) for module in self._params]

    def remove_hooks(self) -> None:
        """As `GradientWatch.remove_hooks`, with the hooks of forwards."""
        super().remove_hooks()
        while self._pre_hooks:
            self._pre_hooks.pop().remove()

    def hook_gathered(self, module: nn.Module) -> None:
        """Hook the parameters that ``module`` has just gathered; called by the pre-hook."""
        for name, param in self._params[module]:
            if (unsharded := getattr(param, "_unsharded_param", None)) is not None:
                self.hook_leaf(name, unsharded)


def _unreduced(param: FSDPParam) -> list[torch.Tensor]:
    unsharded = getattr(param, "_unsharded_param", None)
    found = (param.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad)
    return [gradient for gradient in found if gradient is not None]


def _drop_unreduced(param: FSDPParam) -> None:
    param.unsharded_accumulated_grad = None
    if hasattr(param, "_unsharded_param"):
        param._unsharded_param.grad = None


@contextlib.contextmanager
def _unreduced_aside(params: list[FSDPParam], keep: bool) -> Iterator[None]:
    """Within, no gradient waits to be reduced; afterwards those do again that did before, if they are kept."""
    waiting = [param for param in params if _unreduced(param)]
    gradients = [(param.unsharded_accumulated_grad, param._unsharded_param.grad) for param in waiting]
    for param in waiting:
        _drop_unreduced(param)
    try:
        yield
    finally:
        for param, (accumulated, unsharded) in zip(waiting, gradients, strict=True):
            if keep:
                param.unsharded_accumulated_grad, param._unsharded_param.grad = accumulated, unsharded


def _is_at(parameter: torch.Tensor, tensor: torch.Tensor) -> bool:
    if isinstance(parameter, DTensor) or isinstance(tensor, DTensor) or parameter.numel() == 0:
        return False
    return parameter.device == tensor.device and parameter.data_ptr() == tensor.data_ptr()


def wrap(
    module: nn.Module, description: dict[str, Any], group: ProcessGroup | None, mesh: DeviceMesh | None
) -> nn.Module:
    """``module`` sharded in place as described, children first.

    Args:
        module: a plain module.
        description: what `FSDP2Wrapper.describe` gave.
        group: process group to shard over, used where ``mesh`` is None.
        mesh: device mesh to shard over; None for the recorded one over the present world.

    Collective: creating the mesh's groups where HSDP needs some; `fully_shard` itself does not communicate.
    """
    mesh = mesh or _mesh_like(description["mesh"], _device_type(module), group)
    modules = dict(PlainWrapper(module).named_modules())
    parameters = dict(PlainWrapper(module).named_parameters())
    ignored = {parameters[name] for name in description["ignored"]}
    # Children first, as `fully_shard` demands: it takes all parameters that no inner call has taken.
    for unit in reversed(description["units"]):
        _shard([modules[name] for name in unit["modules"]], unit, mesh, ignored, parameters)
    return module


def _shard(
    modules: list[nn.Module],
    unit: dict[str, Any],
    mesh: DeviceMesh,
    ignored: set[nn.Parameter],
    parameters: dict[str, nn.Parameter],
) -> None:
    # Parameters that are not listed are sharded over dim 0, the default.
    dims = {id(parameters[name]): dim for name, dim in unit["shard_dims"].items()}
    fully_shard(
        modules if len(modules) > 1 else modules[0],
        mesh=mesh,
        reshard_after_forward=_reshard(unit["reshard_after_forward"], mesh),
        shard_placement_fn=(lambda parameter: Shard(dims.get(id(parameter), 0))) if dims else None,
        mp_policy=_policy(unit["mixed_precision"]),
        offload_policy=CPUOffloadPolicy(**unit["cpu_offload"]) if unit["cpu_offload"] else OffloadPolicy(),
        ignored_params=ignored,
    )


def _states(model: nn.Module) -> Iterator[FSDPState]:
    return (module._get_fsdp_state() for _, module in paths(model) if isinstance(module, FSDPModule))


def _places(param: FSDPParam) -> Iterator[tuple[nn.Module, str]]:
    info = param._module_info
    yield info.module, info.param_name
    yield from zip(info.shared_modules, info.shared_param_names, strict=True)


def _first_names(model: nn.Module) -> dict[nn.Module, str]:
    names: dict[nn.Module, str] = {}
    for name, module in paths(model):
        names.setdefault(module, name)
    return names


def _original_class(module: nn.Module) -> type:
    """The class of a module before `fully_shard` replaced it with a derived one."""
    if isinstance(module, FSDPModule):
        return type(module).__mro__[module._orig_cls_mro_index]
    return type(module)


def _describe_unit(state: FSDPState, modules: dict[nn.Module, str], names: dict[FSDPParam, str]) -> dict[str, Any]:
    params = [param for group in state._fsdp_param_groups for param in group.fsdp_params]
    policy = state._mp_policy
    offload = next(
        (g.offload_policy for g in state._fsdp_param_groups if isinstance(g.offload_policy, CPUOffloadPolicy)), None
    )
    return {
        "modules": [modules[module] for module in state._modules],
        "reshard_after_forward": _describe_reshard(state),
        "mixed_precision": {
            **{name: dtype_name(getattr(policy, name)) for name in ("param_dtype", "reduce_dtype", "output_dtype")},
            "cast_forward_inputs": policy.cast_forward_inputs,
        },
        "cpu_offload": {"pin_memory": offload.pin_memory} if offload else None,
        "shard_dims": {names[p]: p.fsdp_placement.dim for p in params if p.fsdp_placement.dim},
    }


def _describe_reshard(state: FSDPState) -> bool | int | None:
    """The argument of `fully_shard`; the root's None turns into False when it first runs."""
    if state._auto_reshard_after_forward or not state._fsdp_param_groups:
        return None
    group = state._fsdp_param_groups[0]
    after = group.post_forward_mesh_info
    if after is None or after is group.mesh_info:
        return after is not None
    return after.shard_mesh_size


def _reshard(recorded: bool | int | None, mesh: DeviceMesh) -> bool | int | None:
    """The recorded argument, or True where the present mesh cannot be divided by the recorded number."""
    if recorded is None or isinstance(recorded, bool):
        return recorded
    return recorded if mesh.size(-1) % recorded == 0 and recorded < mesh.size(-1) else True


def _policy(recorded: dict[str, Any]) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=dtype_named(recorded["param_dtype"]),
        reduce_dtype=dtype_named(recorded["reduce_dtype"]),
        output_dtype=dtype_named(recorded["output_dtype"]),
        cast_forward_inputs=recorded["cast_forward_inputs"],
    )


def _describe_mesh(meshes: list[DeviceMesh]) -> dict[str, Any] | None:
    if not meshes:
        return None
    names = meshes[0].mesh_dim_names
    return {"shape": list(meshes[0].shape), "dim_names": list(names) if names else None}


def _mesh_like(recorded: dict[str, Any] | None, device_type: str, group: ProcessGroup | None) -> DeviceMesh:
    """The recorded mesh over the present world; a world of another size keeps the shard size where that divides it."""
    if group is not None:
        return DeviceMesh.from_group(group, device_type)
    world_size, shape = dist.get_world_size(), tuple(recorded["shape"]) if recorded else (1,)
    if len(shape) == 2:
        num_shards = shape[1] if world_size % shape[1] == 0 else world_size
        shape = (world_size // num_shards, num_shards)
    else:
        shape = (world_size,)
    names = tuple(recorded["dim_names"]) if recorded and recorded["dim_names"] else None
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def _device_type(module: nn.Module) -> str:
    parameter = next(module.parameters(), None)
    return "cpu" if parameter is None else parameter.device.type
