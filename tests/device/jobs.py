"""A small transformer in every wrapper, and training steps of it, on the device of a rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

WRAPPERS = ("plain", "ddp", "fsdp1", "fsdp2", "fsdp2 offloaded")
SIZE = 8


class Block(nn.Module):
    """12 parameters: attention with a causal mask, whose -inf are legal, dropout, and a layer of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner_norm = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.attention = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(2))
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)
        self.drop = nn.Dropout(0.1)

    def forward(self, values: Tensor) -> Tensor:
        normed = self.norm(values)
        scores = self.attention[0](normed) @ normed.transpose(1, 2)
        mask = torch.full(scores.shape[-2:], -torch.inf, device=values.device).triu(1)
        values = values + self.attention[1](torch.softmax(scores + mask, -1) @ normed)
        return values + self.drop(self.down(torch.relu(self.up(self.inner_norm(values)))))


class Model(nn.Module):
    """Blocks and a head; ``divide`` is where a batch that holds a zero divisor goes bad."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.divide = Divide()
        self.head = nn.Linear(SIZE, 1)

    def forward(self, values: Tensor, divisor: Tensor, num_runs: int = 1) -> Tensor:
        for _ in range(num_runs):
            for block in self.blocks:
                values = block(values)
        return self.head(self.divide(values, divisor))  # type: ignore[no-any-return]


class Divide(nn.Module):
    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        return (values * divisor) / divisor


def device_of(rank: int, sets_device: bool = True) -> torch.device:
    """The rank's own device; without ``set_device`` the current one stays ``cuda:0``, as in many a DDP script."""
    index = rank % torch.cuda.device_count()
    if sets_device:
        torch.cuda.set_device(index)
    return torch.device("cuda", index)


def wrapped(wrapper: str, device: torch.device, num_blocks: int = 2) -> nn.Module:
    """The same weights in each wrapper."""
    torch.manual_seed(0)
    model: nn.Module = Model(num_blocks)
    if wrapper == "fsdp2 offloaded":
        return _sharded(model, offload_policy=CPUOffloadPolicy())
    model = model.to(device)
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    if wrapper == "fsdp1":
        return FullyShardedDataParallel(model, device_id=device, use_orig_params=True)
    return _sharded(model) if wrapper == "fsdp2" else model


def _sharded(model: nn.Module, **options: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cuda", (torch.distributed.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]  # of `Model`
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batches(device: torch.device, count: int, bad: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Values and divisor; the divisor of batch ``bad`` is 0, so that ``divide`` makes a NaN of finite values."""
    generator = torch.Generator().manual_seed(1)
    for index in range(count):
        values = torch.randn(4, 5, SIZE, generator=generator)
        yield values.to(device), torch.tensor([0.0 if index == bad else 1.0]).to(device)


def train(
    guard: Any,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    number: float | None = None,
    **given: Any,
) -> None:
    """One step; a loss that is a number is held by the host."""
    loss = guard(*batch, **given).square().mean()
    guard.watch(loss=loss, number=number)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
