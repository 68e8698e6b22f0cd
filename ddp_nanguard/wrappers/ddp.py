"""The wrapper of `DistributedDataParallel`, and how to wrap a module in it again."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from ddp_nanguard.tensors.dtypes import dtype_name, dtype_named

from .aside import forward_inside
from .base import Wrapper
from .clean_names import inner_of

_HOOKS = {hook.__name__: hook for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook)}
_HOOKS["bf16_compress_hook"] = default_hooks.bf16_compress_hook
_MIXED_HOOK = "_reducer_allreduce_and_upcast_hook"  # comes with mixed_precision
_FLAGS = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "skip_all_reduce_unused_params")
# Options differ between releases of torch; those that the installed one does not know are left out.
_SIGNATURE = inspect.signature(DistributedDataParallel.__init__).parameters
_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _SIGNATURE else "broadcast_buffers"


class DDPWrapper(Wrapper):
    """A module in DDP, compiled or not, before or after DDP."""

    kind: ClassVar[str] = "ddp"
    hides_compiled_gradients: ClassVar[bool] = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        while not isinstance(model, DistributedDataParallel):
            model = cast(nn.Module, inner_of(model))
        self._ddp = model
        self._rank_in_group = dist.get_rank(model.process_group)  # read once, as those of the base
        self._group_ranks = dist.get_process_group_ranks(model.process_group)
        self._reduces = self._was_synced = False

    @property
    def replica_index(self) -> int:
        """Rank in the group that DDP reduces over."""
        return self._rank_in_group

    def will_reduce(self) -> bool:
        """Whether the last forward prepared DDP to reduce in backward; False where the group is of one rank.

        ``no_sync`` counts where the forward runs, not the backward.
        """
        return bool(self._ddp.require_forward_param_sync) and self._ddp.process_group.size() > 1

    def pending_gradient_bytes(self) -> int | None:
        """None: DDP reduces copies of the gradients and puts the means back when backward ends.

        0 where gradients are views of its buckets, or under its mixed precision: these change during backward.
        """
        ddp = self._ddp
        is_view = ddp.gradient_as_bucket_view or bool(getattr(ddp, "_delay_all_reduce_params", ()))
        return 0 if is_view or ddp.mixed_precision is not None else None

    def group_ranks(self) -> list[int]:
        """Global ranks of DDP's process group."""
        return self._group_ranks

    def refuse_join(self) -> None:
        """Refuse a forward inside ``with model.join():`` or ``with Join([model]):``, and after it: DDP stays joined.

        Raises:
            ValueError: DDP's ``join`` is active.
        """
        if self._ddp._join_config.enable:
            raise ValueError(
                "model.join() shadows DDP's communication only: a rank that ran out of data would miss the verdict "
                "of the others; let all ranks leave the loop after the same number of batches, or set enabled=False"
            )

    def overwrites_buffers(self) -> bool:
        """Whether the coming forward broadcasts rank 0's buffers to this rank."""
        return self.replica_index != 0 and bool(self._ddp.will_sync_module_buffers())  # type: ignore[no-untyped-call]

    def why_not_again(self) -> str | None:
        """DDP's own mixed precision casts parameters behind the modules' backs."""
        return "DDP's mixed_precision casts the parameters" if self._ddp.mixed_precision is not None else None

    @contextlib.contextmanager
    def aside(self, saved: Mapping[str, Tensor], keep_gradients: bool) -> Iterator[None]:
        """As `Wrapper.aside`; DDP only hands its calls on, and its reducer has no part in them."""
        self._ddp.__dict__["forward"] = partial(forward_inside, self._ddp, self._buffers_to_broadcast)
        self._was_synced = False  # the buffers of the first forward were kept after its broadcast
        try:
            with super().aside(saved, keep_gradients):
                yield
        finally:
            del self._ddp.__dict__["forward"]

    def _buffers_to_broadcast(self) -> list[Tensor]:
        is_due, self._was_synced = self._was_synced and getattr(self._ddp, _BUFFERS), self._reduces
        if not is_due:
            return []
        return [buffer for name, buffer in self.named_buffers() if name not in self._ddp.parameters_to_ignore]

    @contextlib.contextmanager
    def syncing(self, reduces: bool) -> Iterator[None]:
        """As `Wrapper.syncing`: the forward after one that reduces begins with rank 0's buffers."""
        self._reduces = reduces
        yield

    def describe(self) -> dict[str, Any]:
        """As `Wrapper.describe`, with DDP's options, comm hooks and mixed precision."""
        ddp = self._ddp
        options: dict[str, Any] = {name: bool(getattr(ddp, name)) for name in _FLAGS if hasattr(ddp, name)}
        options["forward_sync_buffers"] = bool(getattr(ddp, _BUFFERS))
        options["bucket_cap_mb"] = ddp.bucket_bytes_cap / 2**20
        hooks = [getattr(hook, "__name__", type(hook).__name__) for hook, _ in ddp._comm_hooks]
        precision = None if ddp.mixed_precision is None else _dtypes(ddp.mixed_precision)
        return {**super().describe(), "options": options, "comm_hooks": hooks, "mixed_precision": precision}


def wrap(
    module: nn.Module, description: dict[str, Any], group: ProcessGroup | None, mesh: DeviceMesh | None
) -> nn.Module:
    """``module`` in DDP with the recorded options, and with its comm hooks if they are stateless ones of torch.

    Args:
        module: a plain module.
        description: what `DDPWrapper.describe` gave.
        group: process group; None for the default group, or that of ``mesh``.
        mesh: device mesh, used where ``group`` is None.

    Collective: those of DDP's constructor (parameter shapes, then weights and buffers from rank 0).
    """
    options = dict(description["options"])
    # Recorded under one name, whichever torch recorded it.
    options[_BUFFERS] = options.pop("forward_sync_buffers")
    if description["mixed_precision"] is not None:
        options["mixed_precision"] = _MixedPrecision(
            **{name: dtype_named(dtype) for name, dtype in description["mixed_precision"].items()}
        )
    known = {name: value for name, value in options.items() if name in _SIGNATURE}
    ddp = DistributedDataParallel(module, process_group=_group(group, mesh), **known)
    for name in description["comm_hooks"]:
        _register_hook(ddp, name)
    return ddp


def _group(group: ProcessGroup | None, mesh: DeviceMesh | None) -> ProcessGroup | None:
    return mesh.get_group() if group is None and mesh is not None else group


def hooks_left_out(description: dict[str, Any]) -> list[str]:
    """Comm hooks of the job's own, or with a state, which `wrap` cannot register again.

    Args:
        description: what `DDPWrapper.describe`, or that of another wrapper, gave.
    """
    return [name for name in description.get("comm_hooks", []) if name not in _HOOKS and name != _MIXED_HOOK]


def _register_hook(ddp: DistributedDataParallel, name: str) -> None:
    if name in _HOOKS:
        ddp.register_comm_hook(None, _HOOKS[name])
    elif name != _MIXED_HOOK:
        warnings.warn(
            f"comm hook {name} is not one of {', '.join(_HOOKS)}: the reduce is done without it", stacklevel=3
        )


def _dtypes(policy: _MixedPrecision) -> dict[str, str | None]:
    return {name: dtype_name(getattr(policy, name)) for name in ("param_dtype", "reduce_dtype", "buffer_dtype")}
