"""Jobs for tests of the second look: one small net in any wrapping, a divisor that is 0 once, and what was left."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard, NonFiniteError
from tests.training import digest, listening, seed
from tests.training.digests import clean, random_digest

WIDTH = 6
NUM_STEPS = 5
BAD_STEP = 2
SOURCE = "return values / divisor"


class Divided(nn.Module):
    """Where the fault is: its divisor comes with the batch."""

    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        return values / divisor


class Block(nn.Module):
    """Two linear layers, dropout and BatchNorm."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()

    def forward(self, values: Tensor) -> Tensor:
        return self.norm(values + self.drop(self.down(torch.relu(self.up(values)))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Block, division, block, linear; its input is scaled by numbers of python and numpy."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.first, self.divided, self.second = Block(norm), Divided(), Block(norm)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        values = values * (1 + 0.1 * random.random() + 0.1 * numpy.random.random())
        return self.head(self.second(self.divided(self.first(values), divisor)))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Look:
    """One training run with one fault: on the last rank, in step `BAD_STEP`, in its last micro-batch.

    Attributes:
        kind: of `WRAP`.
        options: of the guard.
        accumulation: micro-batches per step.
        runs: whether the loop uses ``guard.run``.
        checkpointing: of both blocks; None for none.
        scales: whether there is a GradScaler.
        autocasts: whether forwards run in bf16 autocast.
        norms: whether blocks have BatchNorm.
        halves: whether two optimizers hold half of the parameters each.
        follows: whether an average of the model and two generators are registered.
        fused: whether the optimizer is a fused AdamW.
    """

    kind: str = "ddp"
    options: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    runs: bool = False
    checkpointing: str | None = None
    scales: bool = False
    autocasts: bool = False
    norms: bool = True
    halves: bool = False
    follows: bool = False
    fused: bool = False

    @property
    def name(self) -> str:
        extra = [
            name
            for name in ("runs", "checkpointing", "scales", "autocasts", "halves", "follows", "fused")
            if getattr(self, name)
        ]
        return " ".join([self.kind, str(self.accumulation), *extra, *map(str, self.options.values())])


@dataclass
class Ended:
    """What one rank saw.

    Attributes:
        states: per step, digests of all that training goes on from, taken after its update.
        gradients: digests of the gradients when the verdict had been given in the bad step.
        report: of the error; None where none was raised.
        text: of the error.
        lines: that the guard logged.
    """

    states: list[dict[str, str]] = field(default_factory=list)
    gradients: dict[str, str] = field(default_factory=dict)
    report: dict[str, Any] | None = None
    text: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def looked(self) -> dict[str, Any]:
        assert self.report is not None
        look: dict[str, Any] = self.report["second_look"]
        return look


# -- wrapping ----------------------------------------------------------------------------------------------------------


def _sharded(net: Net, **options: Any) -> nn.Module:
    for block in (net.first, net.second):
        fully_shard(block, **options)
    return fully_shard(net, **{**options, "reshard_after_forward": options.get("reshard_after_forward")})


def _prefetching(net: Net) -> nn.Module:
    model = _sharded(net)
    model.set_modules_to_forward_prefetch([net.first])  # type: ignore[operator]
    net.first.set_modules_to_forward_prefetch([net.second])  # type: ignore[operator]
    net.second.set_modules_to_backward_prefetch([net.first])  # type: ignore[operator]
    return model


def _flat(net: Net, **options: Any) -> nn.Module:
    options = {"use_orig_params": True, "device_id": torch.device("cpu"), **options}
    net.first = FullyShardedDataParallel(net.first, **options)  # type: ignore[assignment]
    net.second = FullyShardedDataParallel(net.second, **options)  # type: ignore[assignment]
    return FullyShardedDataParallel(net, **options)


def _hooked(net: Net, power: bool) -> nn.Module:
    model = DistributedDataParallel(net)
    if power:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        model.register_comm_hook(None, fp16_compress_hook)
    return model


def _tensor_parallel(net: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for block in (net.first, net.second):
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return _sharded(net, mesh=mesh["dp"])


WRAP: dict[str, Callable[[Any], nn.Module]] = {
    "plain": lambda net: net,
    "ddp": DistributedDataParallel,
    "ddp_unused": lambda net: DistributedDataParallel(net, find_unused_parameters=True),
    "ddp_static": lambda net: DistributedDataParallel(net, static_graph=True),
    "ddp_view": lambda net: DistributedDataParallel(net, gradient_as_bucket_view=True),
    "ddp_fp16_hook": lambda net: _hooked(net, power=False),
    "ddp_power_sgd": lambda net: _hooked(net, power=True),
    "fsdp1": _flat,
    "fsdp1_flat": lambda net: _flat(net, use_orig_params=False),
    "fsdp1_no_shard": lambda net: _flat(net, sharding_strategy=ShardingStrategy.NO_SHARD),
    "fsdp1_grad_op": lambda net: _flat(net, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "fsdp2": _sharded,
    "fsdp2_keep": lambda net: _sharded(net, reshard_after_forward=False),
    "fsdp2_bf16": lambda net: _sharded(net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "fsdp2_offload": lambda net: _sharded(net, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "fsdp2_prefetch": _prefetching,
    "hsdp": lambda net: _sharded(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))),
    "tp": _tensor_parallel,
}


def is_sharded(kind: str) -> bool:
    return kind.startswith(("fsdp", "hsdp", "tp"))


def built(look: Look) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        net: Any = Net(look.norms)
        if look.checkpointing is not None:
            kind = CheckpointImpl[look.checkpointing]
            net.first = checkpoint_wrapper(net.first, checkpoint_impl=kind)
            net.second = checkpoint_wrapper(net.second, checkpoint_impl=kind)
        return WRAP[look.kind](net)


# -- training ----------------------------------------------------------------------------------------------------------


def batch_of(rank: int, world_size: int, step: int, index: int, look: Look) -> dict[str, Tensor]:
    # ranks of one tensor-parallel group get the same batch
    row = rank // 2 if look.kind == "tp" else rank
    last = world_size // 2 - 1 if look.kind == "tp" else world_size - 1
    generator = torch.Generator().manual_seed(1000 * row + 10 * step + index)
    divisor = torch.ones(4, 1)
    if row == last and step == BAD_STEP and index == look.accumulation - 1:
        divisor[1] = 0.0
    return {"values": torch.randn(4, WIDTH, generator=generator), "divisor": divisor}


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    numpy.random.random()  # a step that draws from it
    return model(batch["values"], batch["divisor"]).float().square().mean()  # type: ignore[no-any-return]


@contextlib.contextmanager
def silent(model: nn.Module, look: Look, index: int) -> Iterator[None]:
    """All micro-batches but the last do not communicate."""
    is_last = index == look.accumulation - 1
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
    elif hasattr(model, "no_sync") and not is_last:
        with model.no_sync():
            yield
        return
    yield


class _Job:
    """One run of one rank."""

    def __init__(self, look: Look, rank: int, world_size: int) -> None:
        seed(rank // 2 if look.kind == "tp" else rank)
        self.look, self.rank, self.world_size = look, rank, world_size
        self.model = built(look)
        self.optimizers = _optimizers(self.model, look)
        self.scaler = _scaler(look)
        options = {"dump_dir": None, "timeout_s": 10, **look.options}
        self.guard = NanGuard(self.model, self.optimizers, scaler=self.scaler, **options)
        self.generators = [torch.Generator().manual_seed(1), numpy.random.default_rng(2)]
        self.average = Net(look.norms)
        if look.follows:
            self.guard.register(average=self.average, noise=self.generators[0], draws=self.generators[1])
        self.ended = Ended()

    def run(self) -> Ended:
        with listening() as lines:
            for step in range(NUM_STEPS):
                self._step(step)
                self.ended.states.append(self._state())
            with contextlib.suppress(NonFiniteError):  # under warn the weights are bad by now
                self.guard.close()
        self.ended.lines = list(lines)
        return self.ended

    def _step(self, step: int) -> None:
        for index in range(self.look.accumulation):
            batch = batch_of(self.rank, self.world_size, step, index, self.look)
            with silent(self.model, self.look, index), _autocast(self.look):
                loss = self._loss(batch)
            with silent(self.model, self.look, index):
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        try:
            self._update()
        except NonFiniteError as error:
            if self.ended.report is None:
                self.ended.report, self.ended.text = error.report.to_dict(), str(error)
        if step == BAD_STEP:
            self.ended.gradients = _gradients(self.model)
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        if self.look.follows:
            batch = {**batch, "values": batch["values"] + torch.rand((), generator=self.generators[0])}
            self.generators[1].random()
        if self.look.runs:
            loss: Tensor = self.guard.run(loss_of, batch)
            return loss
        loss = loss_of(self.guard, batch)
        self.guard.watch(loss=loss)
        return loss

    def _update(self) -> None:
        for optimizer in self.optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()

    def _state(self) -> dict[str, str]:
        found = {f"parameter {clean(name)}": digest(tensor) for name, tensor in self.model.named_parameters()}
        found |= {f"buffer {clean(name)}": digest(tensor) for name, tensor in self.model.named_buffers()}
        for number, optimizer in enumerate(self.optimizers):
            for place, values in enumerate(optimizer.state.values()):
                tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
                found |= {f"state {number} {place} {key}": digest(value) for key, value in tensors.items()}
        found["random"] = random_digest()
        found["generators"] = f"{digest(self.generators[0].get_state())} {self.generators[1].bit_generator.state}"
        found["average"] = " ".join(digest(tensor) for tensor in self.average.state_dict().values())
        found["training"] = str([module.training for module in self.model.modules()])
        if self.scaler is not None:
            found["scaler"] = str(self.scaler.state_dict())
        return found


def _optimizers(model: nn.Module, look: Look) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    halves = [parameters[::2], parameters[1::2]] if look.halves else [parameters]
    if look.fused:
        return [torch.optim.AdamW(half, lr=0.01, fused=True) for half in halves]
    return [torch.optim.SGD(half, lr=0.01, momentum=0.9) for half in halves]


def _scaler(look: Look) -> Any:
    if not look.scales:
        return None
    kind = ShardedGradScaler if look.kind.startswith("fsdp1") else torch.amp.GradScaler
    return kind(device="cpu", init_scale=2.0**10)


def _autocast(look: Look) -> contextlib.AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16) if look.autocasts else contextlib.nullcontext()


def _gradients(model: nn.Module) -> dict[str, str]:
    named = [(name, parameter.grad) for name, parameter in model.named_parameters()]
    return {clean(name): digest(gradient) for name, gradient in named if gradient is not None}


def run_looks(rank: int, world_size: int, looks: list[Look]) -> list[Ended]:
    """A body for `run_ranks`: each job after the other."""
    return [_run_one(look, rank, world_size) for look in looks]


def run_pairs(rank: int, world_size: int, looks: list[Look]) -> list[tuple[Ended, Ended]]:
    """A body for `run_ranks`: each job with the second look, and without it."""
    without = [replace(look, options={**look.options, "look_again": False}) for look in looks]
    return [
        (_run_one(one, rank, world_size), _run_one(other, rank, world_size))
        for one, other in zip(looks, without, strict=True)
    ]


def _run_one(look: Look, rank: int, world_size: int) -> Ended:
    job = _Job(look, rank, world_size)
    try:
        return job.run()
    except Exception as error:
        error.add_note(look.name)
        raise
    finally:
        if dist.get_world_size() > 1:
            dist.barrier()
