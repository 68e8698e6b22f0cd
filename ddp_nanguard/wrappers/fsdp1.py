"""FSDP1: `torch.distributed.fsdp.FullyShardedDataParallel`.

[Note: FSDP1 gradients] Each forward cuts new views out of the gathered flat parameter, and autograd sends each view its
gradient; hooks of original and flat parameters see only what the reduce has left. So each forward hooks its views, in a
forward pre-hook of the module that FSDP calls. A unit that is called twice has two sets of views, each of which gets
its own part of the gradient.

[Note: flat ranges] A rank holds one range of the flat parameter, hence of each original parameter a flat range that may
be empty. With ``use_orig_params`` the optimizer holds these ranges, without it the range of the flat parameter.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import GradScaler
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.fsdp._flat_param import FlatParameter, FlatParamHandle
from torch.utils.hooks import RemovableHandle

from ddp_nanguard.hooks.weak import WeakHook
from ddp_nanguard.tensors.dtypes import dtype_name, dtype_named
from ddp_nanguard.tensors.shards import TensorShard

from .aside import attributes_kept, buffers_put_back, gradients_aside
from .base import GradientWatch, OnGradient, ShardedWrapper
from .clean_names import join, paths
from .plain import PlainWrapper

_DTYPES = ("param_dtype", "reduce_dtype", "buffer_dtype")
_FLAGS = ("keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs")


@dataclass(frozen=True)
class Original:
    """An original parameter within a flat parameter.

    Attributes:
        handle: of the flat parameter.
        index: position in the flat parameter.
        module: the module that has it.
        attribute: its name in that module.
    """

    handle: FlatParamHandle
    index: int
    module: nn.Module
    attribute: str

    @property
    def flat(self) -> FlatParameter:
        """The flat parameter that holds it."""
        return self.handle.flat_param

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the parameter had before it was flattened."""
        return tuple(self.flat._shapes[self.index])


class FSDP1Wrapper(ShardedWrapper):
    """A module whose parameters are flattened and sharded by FSDP1, at the root or only below it."""

    kind: ClassVar[str] = "fsdp1"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.units: list[FullyShardedDataParallel] = list(
            dict.fromkeys(module for _, module in paths(model) if isinstance(module, FullyShardedDataParallel))
        )
        self._by_module: dict[nn.Module, dict[str, Original]] = {}
        for unit in self.units:
            for module, attribute, original in _places(unit._handle):
                self._by_module.setdefault(module, {})[attribute] = original
        self._originals, self._original_aliases = self._name_originals()

    def aliases(self) -> dict[str, str]:
        """As `Wrapper.aliases`, with tied parameters that FSDP manages."""
        return {**super().aliases(), **self._original_aliases}

    def watch_local_gradients(self, on_gradient: OnGradient) -> GradientWatch:
        """As `Wrapper.watch_local_gradients`; the views of each forward are hooked, see [Note: FSDP1 gradients]."""
        watch = FSDP1Watch(self, on_gradient)
        watch.install_hooks()
        return watch

    def scaler_class(self) -> type[GradScaler]:
        """`ShardedGradScaler`: a plain one checks this rank's shard alone, so that ranks would skip different steps."""
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # seldom needed

        return ShardedGradScaler

    def will_reduce(self) -> bool:
        """Whether any unit over more than one rank reduces; none does under ``no_sync``."""
        return any(unit._sync_gradients and _num_ranks(unit) > 1 for unit in self.units)

    def compute_device(self) -> torch.device:
        """FSDP1's own: parameters that are offloaded lie on the CPU between two uses."""
        return next((unit.compute_device for unit in self.units if unit.compute_device), super().compute_device())

    def leaves(self) -> list[tuple[str, torch.Tensor]]:
        """The parameters that FSDP ignores, which it neither flattens nor reduces."""
        return [(name, parameter) for name, parameter in self.named_parameters() if self._is_ignored(name, parameter)]

    def originals_of(self, unit: FullyShardedDataParallel) -> list[tuple[str, Original]]:
        """The original parameters that ``unit`` gathers, by clean name."""
        return [(name, original) for name, original in self._originals.items() if original.handle is unit._handle]

    def own_parameters(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters as the optimizer holds them, also while the module holds views of the gathered ones."""
        managed = self._by_module.get(module, {})
        for attribute, original in managed.items():
            # None without use_orig_params, where the optimizer holds the flat parameter itself.
            if original.flat._params is not None:
                yield attribute, original.flat._params[original.index]
        yield from ((name, p) for name, p in super().own_parameters(module) if name not in managed)

    def shards(
        self, prefix: str, name: str, parameter: torch.Tensor, tensor: torch.Tensor, suffix: str = ""
    ) -> list[TensorShard]:
        """As `Wrapper.shards`, one flat range per original parameter, see [Note: flat ranges]."""
        if name in self._originals:
            return _range_of_one(f"{prefix}{name}{suffix}", self._originals[name], tensor)
        if not hasattr(parameter, "_is_flat_param"):
            return super().shards(prefix, name, parameter, tensor, suffix)
        originals = [(n, o) for n, o in self._originals.items() if o.flat is parameter]
        local = getattr(tensor, "_local_shard", tensor)  # while gathered, a flat parameter's own data is the whole
        return [shard for n, o in originals for shard in _range_of_flat(f"{prefix}{n}{suffix}", o, local)]

    def all_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """As `Wrapper.all_shapes`: the shapes from before flattening."""
        originals = {name: (o.shape, o.handle._orig_param_dtype) for name, o in self._originals.items()}
        return {**originals, **{name: (tuple(p.shape), p.dtype) for name, p in self.leaves()}}

    def describe(self) -> dict[str, Any]:
        """As `Wrapper.describe`, with module and options of each FSDP1 unit, parents first, and ignored parameters."""
        names: dict[nn.Module, str] = {}
        for name, module in paths(self.model):
            names.setdefault(module, name)
        units = [{"module": names[unit], **_describe_unit(unit)} for unit in self.units]
        return {**super().describe(), "units": units, "ignored": [name for name, _ in self.leaves()]}

    def why_not_again(self) -> str | None:
        """A unit that is not at rest cannot take another step."""
        if any(unit.training_state is not TrainingState.IDLE for unit in self.units):
            return "a forward or backward of FSDP has not ended"
        return None

    @contextlib.contextmanager
    def aside(self, saved: Mapping[str, torch.Tensor], keep_gradients: bool) -> Iterator[None]:
        """As `Wrapper.aside`, on the live parameters, whose gradients are put aside."""
        parameters = dict.fromkeys([parameter for _, parameter in self.named_parameters()] + self._flat_parameters())
        with (
            attributes_kept(self.model, self._by_module),
            gradients_aside(list(parameters), keep_gradients),
            buffers_put_back(self.named_buffers, saved),
        ):
            yield

    @contextlib.contextmanager
    def syncing(self, reduces: bool) -> Iterator[None]:
        """As `Wrapper.syncing`; see FSDP1's ``no_sync``."""
        before = [(unit, unit._sync_gradients) for unit in self.units]
        for unit in self.units:
            unit._sync_gradients = reduces  # type: ignore[assignment]  # a plain attribute
        try:
            yield
        finally:
            for unit, value in before:
                unit._sync_gradients = value

    def _name_originals(self) -> tuple[dict[str, Original], dict[str, str]]:
        kept: dict[Original, str] = {}
        aliases = {}
        for prefix, module in paths(self.model):
            for attribute, original in self._by_module.get(module, {}).items():
                name = join(prefix, attribute)
                if kept.setdefault(original, name) != name:
                    aliases[name] = kept[original]
        return {name: original for original, name in kept.items()}, aliases

    def _flat_parameters(self) -> list[nn.Parameter]:
        """Each holds what has not been reduced, of which the gradients of the optimizer's parameters are views."""
        return [unit._handle.flat_param for unit in self.units if unit._handle is not None]

    def _is_ignored(self, name: str, parameter: torch.Tensor) -> bool:
        return name not in self._originals and not hasattr(parameter, "_is_flat_param")

    def _position(self) -> tuple[int, int, int]:
        found = {_position_of(unit, unit._handle) for unit in self.units if unit._handle is not None}
        # Units over different groups: no two ranks hold the same bytes.
        return found.pop() if len(found) == 1 else (self._rank, self._world_size, 0)


class ViewHook(WeakHook):
    """Gradient hook of one view of a flat parameter; reports to the watch."""

    __slots__ = ("name",)

    def __init__(self, watch: FSDP1Watch, name: str) -> None:
        super().__init__(watch)
        self.name = name

    def __call__(self, gradient: torch.Tensor) -> None:
        """Report the gradient that autograd sends to the view."""
        if (watch := self.target()) is not None:
            watch.report(self.name, gradient)


class ViewsHook(WeakHook):
    """Forward pre-hook of the module inside an FSDP1 unit."""

    __slots__ = ("position",)

    def __init__(self, watch: FSDP1Watch, position: int) -> None:
        super().__init__(watch)
        self.position = position

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Hook the unit's views; without grad mode there are no gradients to report."""
        watch = self.target()
        if watch is not None and torch.is_grad_enabled():
            watch.hook_views(self.position)


class FSDP1Watch(GradientWatch):
    """Hooks the views that each forward cuts out of the flat parameters, see [Note: FSDP1 gradients]."""

    def __init__(self, wrapper: FSDP1Wrapper, on_gradient: OnGradient) -> None:
        super().__init__(wrapper, on_gradient)
        self._inner = [unit._fsdp_wrapped_module for unit in wrapper.units]
        self._originals = [wrapper.originals_of(unit) for unit in wrapper.units]
        self._pre_hooks: list[RemovableHandle] = []
        self._views: dict[str, RemovableHandle] = {}

    def install_hooks(self) -> None:
        """As `GradientWatch.install_hooks`; also hooks the forwards in which FSDP makes its views."""
        super().install_hooks()
        if self._armed and not self._pre_hooks:
            hooks = [(module, ViewsHook(self, position)) for position, module in enumerate(self._inner)]
            self._pre_hooks = [module.register_forward_pre_hook(hook) for module, hook in hooks]

    def remove_hooks(self) -> None:
        """As `GradientWatch.remove_hooks`, with the hooks of forwards and views."""
        super().remove_hooks()
        while self._pre_hooks:
            self._pre_hooks.pop().remove()
        while self._views:
            self._views.popitem()[1].remove()

    @_disable_dynamo  # traced, each parameter's name would compile it again; this one imports dynamo late
    def hook_views(self, position: int) -> None:
        """Hook the views that a unit has just made; called by the pre-hook."""
        for name, original in self._originals[position]:
            view = getattr(original.module, original.attribute)
            if view.requires_grad and not self._is_hooked(view):
                self._views[name] = view.register_hook(ViewHook(self, name))

    def _is_hooked(self, view: torch.Tensor) -> bool:
        """Whether a view has this watch's hook already: a recomputation meets the views of the forward."""
        hooks = (view._backward_hooks or {}).values()
        return any(isinstance(hook, ViewHook) and hook.target() is self for hook in hooks)


def wrap(
    module: nn.Module, description: dict[str, Any], group: ProcessGroup | None, mesh: DeviceMesh | None
) -> nn.Module:
    """``module`` in FSDP1 units as described, children first.

    Args:
        module: a plain module.
        description: what `FSDP1Wrapper.describe` gave.
        group: process group to shard over; None for the whole world.
        mesh: device mesh to shard over; takes precedence over ``group``.

    Collective: creating groups where the strategy is hybrid; FSDP1 itself does not communicate without
    ``sync_module_states``.
    """
    plain = PlainWrapper(module)
    modules, parameters = dict(plain.named_modules()), dict(plain.named_parameters())
    shared = {"ignored_states": [parameters[name] for name in description["ignored"]]} if description["ignored"] else {}
    place = _place(description["units"], group, mesh, next(module.parameters()).device)
    # Children first, as FSDP1 demands: a unit flattens all parameters that no inner unit has taken.
    for unit in reversed(description["units"]):
        inner = modules[unit["module"]]
        outer = _wrap_unit(inner, unit, **place, **shared)
        if inner is plain.root:
            return outer
        _replace(module, inner, outer)
    return module


def _wrap_unit(inner: nn.Module, unit: dict[str, Any], **place: Any) -> FullyShardedDataParallel:
    prefetch = unit["backward_prefetch"]
    with warnings.catch_warnings():
        # Chosen on purpose for one rank, see `_strategy`.
        warnings.filterwarnings("ignore", "The `NO_SHARD` sharding strategy is deprecated", FutureWarning)
        return FullyShardedDataParallel(
            inner,
            sharding_strategy=_strategy(unit["sharding_strategy"], **place),
            mixed_precision=_precision(unit["mixed_precision"]),
            cpu_offload=CPUOffload(offload_params=unit["cpu_offload"]),
            backward_prefetch=None if prefetch is None else BackwardPrefetch[prefetch],
            forward_prefetch=unit["forward_prefetch"],
            limit_all_gathers=unit["limit_all_gathers"],
            use_orig_params=unit["use_orig_params"],
            **place,
        )


def _strategy(
    recorded: str, process_group: Any = None, device_mesh: DeviceMesh | None = None, **_: Any
) -> ShardingStrategy:
    """The recorded strategy; NO_SHARD on one rank, where FSDP would switch to it with a warning."""
    if device_mesh is not None:
        num_ranks = device_mesh.size()
    else:
        num_ranks = dist.get_world_size(process_group)
    return ShardingStrategy.NO_SHARD if num_ranks == 1 else ShardingStrategy[recorded]


def _place(
    units: list[dict[str, Any]], group: ProcessGroup | None, mesh: DeviceMesh | None, device: torch.device
) -> dict[str, Any]:
    """Arguments that say where to shard: the mesh or group given, else the world, as a 2-D mesh if hybrid."""
    place: dict[str, Any] = {"device_id": device}
    world_size = dist.get_world_size()
    if mesh is not None:
        place["device_mesh"] = mesh
    elif group is not None:
        place["process_group"] = group
    elif world_size > 1 and any("HYBRID" in unit["sharding_strategy"] for unit in units):
        recorded = units[0]["num_shards"]
        num_shards = recorded if world_size % recorded == 0 else world_size
        shape, names = (world_size // num_shards, num_shards), ("replicate", "shard")
        place["device_mesh"] = init_device_mesh(device.type, shape, mesh_dim_names=names)
    return place


def _replace(root: nn.Module, inner: nn.Module, outer: nn.Module) -> None:
    # Listed first, since the loop changes the tree. ``outer`` keeps ``inner``, which it wraps.
    for _, parent in list(paths(root)):
        for attribute, child in parent._modules.items():
            if child is inner and parent is not outer:
                parent._modules[attribute] = outer


def _places(handle: FlatParamHandle | None) -> Iterator[tuple[nn.Module, str, Original]]:
    """(module, attribute, original) for each original parameter of a flat parameter, tied ones included."""
    if handle is None:
        return
    found = {}
    for index, (attribute, module, _) in enumerate(handle.flat_param._param_infos):
        found[module, attribute] = Original(handle, index, module, attribute)
        yield module, attribute, found[module, attribute]
    for attribute, module, _, first_attribute, first_module, _ in handle.flat_param._shared_param_infos:
        yield module, attribute, found[first_module, first_attribute]


def _range_of_one(name: str, original: Original, tensor: torch.Tensor) -> list[TensorShard]:
    """The shard that is this rank's range of one parameter; under NO_SHARD the whole parameter in its shape."""
    if tuple(tensor.shape) == original.shape and not original.handle.uses_sharded_strategy:
        return [TensorShard.whole(name, tensor)] if tensor.numel() else []
    return _shard_of(name, original, tensor)


def _range_of_flat(name: str, original: Original, shard: torch.Tensor) -> list[TensorShard]:
    """The shard of one parameter within a tensor that is this rank's range of the flat parameter."""
    info = original.flat._shard_param_infos[original.index]
    if shard.shape != original.flat._sharded_size:
        raise ValueError(_unlike(name, shard, tuple(original.flat._sharded_size)))
    start = info.offset_in_shard or 0
    return _shard_of(name, original, shard.detach()[start : start + (info.numel_in_shard or 0)])


def _shard_of(name: str, original: Original, tensor: torch.Tensor) -> list[TensorShard]:
    info = original.flat._shard_param_infos[original.index]  # its fields are None outside the shard
    numel, offset = info.numel_in_shard or 0, info.intra_param_start_idx or 0
    if tuple(tensor.shape) != (numel,):
        raise ValueError(_unlike(name, tensor, (numel,)))
    if numel and not original.flat._contiguities[original.index]:
        raise ValueError(f"{name} was not contiguous when FSDP flattened it, so its elements lie in another order")
    whole = TensorShard(name, tensor.detach(), (torch.Size(original.shape).numel(),), (offset,), original.shape)
    return [whole] if numel else []


def _unlike(name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> str:
    return (
        f"{name} has shape {tuple(tensor.shape)} where this rank's part of its parameter has {expected}: "
        "which part of the whole it is cannot be told; keep it as a tensor of this rank"
    )


def _position_of(unit: FullyShardedDataParallel, handle: FlatParamHandle) -> tuple[int, int, int]:
    if not handle.uses_sharded_strategy:
        return 0, 1, unit.rank
    replicas = _group_between(unit)
    return unit.rank, unit.world_size, 0 if replicas is None else replicas.rank()


def _num_ranks(unit: FullyShardedDataParallel) -> int:
    replicas = _group_between(unit)
    return unit.world_size * (1 if replicas is None else replicas.size())


def _group_between(unit: FullyShardedDataParallel) -> ProcessGroup | None:
    """The group of ranks that hold the same shard, under a hybrid strategy."""
    return getattr(unit, "_inter_node_pg", None)


def _describe_unit(unit: FullyShardedDataParallel) -> dict[str, Any]:
    precision, prefetch = unit.mixed_precision, unit.backward_prefetch
    return {
        "sharding_strategy": unit.sharding_strategy.name,
        "num_shards": unit.world_size,
        "mixed_precision": {
            **{name: dtype_name(getattr(precision, name)) for name in _DTYPES},
            **{name: getattr(precision, name) for name in _FLAGS},
        },
        "cpu_offload": bool(unit.cpu_offload.offload_params),
        "backward_prefetch": None if prefetch is None else prefetch.name,
        "forward_prefetch": bool(unit.forward_prefetch),
        "limit_all_gathers": bool(unit.limit_all_gathers),
        "use_orig_params": bool(unit._use_orig_params),
    }


def _precision(recorded: dict[str, Any]) -> MixedPrecision:
    dtypes: dict[str, Any] = {name: dtype_named(recorded[name]) for name in _DTYPES}
    return MixedPrecision(**dtypes, **{name: recorded[name] for name in _FLAGS})
