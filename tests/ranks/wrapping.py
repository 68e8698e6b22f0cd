"""An odd model, the wrappings that it gets in the tests of the wrappers, and how it is trained there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard.wrappers import wrapper_of

BF16 = torch.bfloat16


class Block(nn.Module):
    """Linear with few rows, BatchNorm, dropout; ``spare`` is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5, momentum=0.3)
        self.drop = nn.Dropout(0.2)
        self.spare = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.relu(self.norm(self.lin(x))))


class Odd(nn.Module):
    """Parameters at the root, one row, in a list and tied; a block twice; a layer used without being called."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.scales = nn.ParameterList([nn.Parameter(torch.full((3, 5), 1.5)), nn.Parameter(torch.ones(2))])
        self.mix = nn.Linear(5, 5, bias=False)
        self.remix = nn.Linear(5, 5, bias=False)
        self.remix.weight = self.mix.weight
        self.blocks = nn.ModuleList([Block(), Block()])
        self.twice = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.uncalled = nn.Linear(5, 7)
        self.register_buffer("shift", torch.tensor([0.5]), persistent=False)
        self.register_buffer("also_shift", self.shift)

    def forward(self, x: Tensor) -> Tensor:
        x = self.remix(torch.tanh(self.mix(x))) * self.gain + self.shift
        for block in self.blocks:
            x = self.twice(block(x))
        x = x * self.scales[0].sum(0) * self.scales[1].sum()
        return F.linear(x, self.uncalled.weight, self.uncalled.bias)


def odd(checkpointing: str | None = None) -> Odd:
    torch.manual_seed(3)
    net = Odd()
    if checkpointing is not None:
        net.blocks[1] = checkpoint_wrapper(net.blocks[1], checkpoint_impl=CheckpointImpl[checkpointing])
    return net


def units(net: Odd) -> list[nn.Module]:
    return [*net.blocks, net.twice]


def shard(net: Odd, *, only_root: bool = False, grouped: bool = False, **options: Any) -> nn.Module:
    if "mp_policy" in options:
        for block in net.blocks:
            fully_shard(block.norm)  # its float buffers do not go with bf16 parameters
    inner = [] if only_root else [list(net.blocks)] if grouped else units(net)
    for unit in inner:
        fully_shard(unit, **options)
    return fully_shard(net, **{**options, "reshard_after_forward": options.get("reshard_after_forward")})


def flatten(net: Odd, **options: Any) -> nn.Module:
    options = {"use_orig_params": True, "device_id": torch.device("cpu"), **options}
    if "mixed_precision" in options:
        for block in net.blocks:
            inner = getattr(block, "_checkpoint_wrapped_module", block)
            inner.norm = FullyShardedDataParallel(inner.norm, **{**options, "mixed_precision": None})
    net.blocks = nn.ModuleList([FullyShardedDataParallel(block, **options) for block in net.blocks])
    net.twice = FullyShardedDataParallel(net.twice, **options)  # type: ignore[assignment]  # a shell around it
    return FullyShardedDataParallel(net, **options)


def mesh_2d() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


WRAP: dict[str, Callable[[Odd], nn.Module]] = {
    "plain": lambda net: net,
    "ddp": lambda net: DistributedDataParallel(net, find_unused_parameters=True),
    "ddp_bucket_view": lambda net: DistributedDataParallel(
        net, find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=1, forward_sync_buffers=False
    ),
    "fsdp2": shard,
    "fsdp2_bf16": lambda net: shard(net, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)),
    "fsdp2_keep": lambda net: shard(net, reshard_after_forward=False),
    "fsdp2_root": lambda net: shard(net, only_root=True),
    "fsdp2_grouped": lambda net: shard(net, grouped=True),
    "fsdp2_offload": lambda net: shard(net, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "hsdp2": lambda net: shard(net, mesh=mesh_2d()),
    "fsdp2_reshard_2": lambda net: shard(net, reshard_after_forward=2),
    "fsdp1": flatten,
    "fsdp1_flat": lambda net: flatten(net, use_orig_params=False),
    "fsdp1_bf16": lambda net: flatten(net, mixed_precision=MixedPrecision(param_dtype=BF16, cast_forward_inputs=True)),
    "fsdp1_grad_op": lambda net: flatten(net, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "fsdp1_grad_op_flat": lambda net: flatten(
        net, use_orig_params=False, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP
    ),
    "fsdp1_no_shard": lambda net: flatten(net, sharding_strategy=ShardingStrategy.NO_SHARD),
    "hsdp1": lambda net: flatten(net, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh_2d()),
}
KINDS = {kind: 4 if kind in ("hsdp2", "hsdp1", "fsdp2_reshard_2") else 2 for kind in WRAP}
VARIANTS = ("fsdp2_keep", "fsdp2_root", "fsdp2_reshard_2", "fsdp1_grad_op", "fsdp1_grad_op_flat", "fsdp1_no_shard")
"""They differ in when parameters are gathered and freed."""
each_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.exhaustive] if kind in VARIANTS else []) for kind in WRAP]
)
each_wrapper = pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp2", "fsdp1", "fsdp1_flat"])
NO_SHARD_WARNS = "ignore:The `NO_SHARD` sharding strategy:FutureWarning"


def wrapped(kind: str, checkpointing: str | None = None) -> nn.Module:
    if kind.startswith("ddp") and checkpointing == "REENTRANT":  # DDP takes it with a static graph only
        return DistributedDataParallel(odd(checkpointing), static_graph=True, gradient_as_bucket_view="view" in kind)
    return WRAP[kind](odd(checkpointing))


def batch(rank: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + index)
    return torch.randn(6, 5, generator=generator)


def loss_of(model: nn.Module, rank: int, index: int) -> Tensor:
    torch.manual_seed(1000 + 10 * rank + index)  # dropout
    return model(batch(rank, index)).float().square().mean()


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    elif hasattr(model, "no_sync"):
        with model.no_sync():
            yield
    else:
        yield


def kind_of(kind: str) -> str:
    return kind.partition("_")[0].replace("hsdp", "fsdp")


def train(model: nn.Module, rank: int, steps: int, optimizer: str = "AdamW") -> torch.optim.Optimizer:
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    optim: torch.optim.Optimizer = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01, **options)
    for step in range(steps):
        with no_sync(model):
            loss_of(model, rank, 2 * step).backward()
        loss_of(model, rank, 2 * step + 1).backward()
        optim.step()
        optim.zero_grad()
    return optim


def one_backward(model: nn.Module, rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    reported: dict[str, list[Tensor]] = {}
    watch = wrapper_of(model).watch_local_gradients(lambda name, g: reported.setdefault(name, []).append(g.clone()))
    loss = loss_of(model, rank, 0)
    loss.backward()
    watch.remove()
    return loss.detach(), {name: torch.stack(parts).sum(0) for name, parts in reported.items()}


def reassembled(shards: list[list[Any]]) -> dict[str, Tensor]:
    """The full tensors, each element of which exactly one rank gives."""
    whole: dict[str, Tensor] = {}
    times: dict[str, Tensor] = {}
    shapes = {}
    for name, tensor, stored_shape, offsets, true_shape in (shard for shard in shards for shard in shard):
        assert tensor.numel() and not tensor.requires_grad
        place = tuple(slice(at, at + size) for at, size in zip(offsets, tensor.shape, strict=True))
        whole.setdefault(name, torch.zeros(stored_shape))[place] = tensor
        times.setdefault(name, torch.zeros(stored_shape))[place] += 1
        shapes[name] = true_shape
    assert all((count == 1).all() for count in times.values())
    return {name: tensor.reshape(shapes[name]) for name, tensor in whole.items()}
