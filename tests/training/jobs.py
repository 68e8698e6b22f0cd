"""Jobs for real ranks: any wrapper, accumulation, scaler, clipping, policy and planted fault, as data.

A job gives a record per rank: digests of parameters, buffers, optimizer state and random states before every step and
at the end, and what the guard said.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard
from tests import models
from tests.counting import Counts, counting
from tests.faults import KIND_CODES, FadingSGD, Fault, addend
from tests.training.digests import copies, digest, digests, local_of, named, random_digest, seed
from tests.training.loop import Loop

WRAPPERS = ("plain", "ddp", "fsdp1", "fsdp2")
STATE_PARAMETER = "blocks.0.conv.weight"
STATE_BUFFER = "blocks.1.norm.running_mean"
UPDATED_PARAMETER = "stem.weight"
UPDATED_INDEX = 1  # of stem.weight among the parameters: gain comes first


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        wrapper: one of `WRAPPERS`, or ``hsdp``: FSDP2 on a 2 x 2 mesh.
        num_steps: optimizer steps.
        num_micro_batches: per step.
        fault: what is planted, if anything.
        scaler: train with a GradScaler.
        clip: clip gradients by norm.
        guarded: build a guard at all.
        options: of the guard.
        dump_dir: of the guard; None writes no dump.
        use_orig_params: of FSDP1.
        num_layers: train a `tests.models.Tower` of so many layers instead of `tests.models.OddNet`.
        count_step: the step in which communication and host reads are counted.
        device_type: ``cpu``, or ``cuda``: each rank has its own.
    """

    wrapper: str
    num_steps: int = 2
    num_micro_batches: int = 1
    fault: Fault | None = None
    scaler: bool = False
    clip: bool = False
    guarded: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    dump_dir: str | None = None
    use_orig_params: bool = True
    num_layers: int | None = None
    count_step: int | None = None
    device_type: str = "cpu"

    def device(self, rank: int) -> torch.device:
        """Where a rank trains."""
        return torch.device("cpu") if self.device_type == "cpu" else torch.device(self.device_type, rank)

    @property
    def half_reduce(self) -> bool:
        return self.fault is not None and self.fault.place == "reduce"

    @property
    def fading(self) -> bool:
        return self.fault is not None and self.fault.place == "update"

    @property
    def recipe(self) -> str:
        if self.fading:
            return "tests.models:fading_recipe"
        if self.half_reduce and self.wrapper == "ddp":
            return "tests.models:half_hook_recipe"
        return "tests.models:recipe"


@dataclass
class Record:
    """What one rank saw. Digests are hexadecimal, by clean name.

    Attributes:
        before: per step, the digests when its window opened.
        window_state: copies of the local parameters and optimizer state when the window of the fault opened, by the
            names they have in a dump.
        random_states: per step and micro-batch, after the loader produced it and before the forward.
        after: digests at the end.
        losses: per micro-batch, by name, the bytes.
        error: the text of the `NonFiniteError`, if one was raised.
        report: its report as a dict.
        counts: what was counted: ``step`` and, without its last micro-batch, ``no_sync``.
        error_step: the step in which it was raised.
        bad_gradients, bad_parameters, bad_buffers: names of the non-finite ones at the end.
    """

    before: list[dict[str, str]] = field(default_factory=list)
    window_state: dict[str, Tensor] = field(default_factory=dict)
    random_states: list[list[str]] = field(default_factory=list)
    after: dict[str, str] = field(default_factory=dict)
    random_after: str = ""
    losses: list[dict[str, str]] = field(default_factory=list)
    error: str | None = None
    report: dict[str, Any] | None = None
    error_step: int | None = None
    bad_gradients: list[str] = field(default_factory=list)
    bad_parameters: list[str] = field(default_factory=list)
    bad_buffers: list[str] = field(default_factory=list)
    scaler_state: dict[str, Any] | None = None
    counts: dict[str, Counts] = field(default_factory=dict)


# -- building ----------------------------------------------------------------------------------------------------------


def wrap(module: nn.Module, job: Job, rank: int = 0) -> nn.Module:
    module = module.to(job.device(rank))
    if job.wrapper == "plain":
        return module
    if job.wrapper == "ddp":
        return wrap_ddp_with_half_hook(module) if job.half_reduce else DistributedDataParallel(module)
    if job.wrapper == "fsdp1":
        return _wrap_fsdp1(module, job, job.device(rank))
    return _wrap_fsdp2(module, job)


def _wrap_fsdp1(module: nn.Module, job: Job, device: torch.device) -> nn.Module:
    precision = MixedPrecision(reduce_dtype=torch.float16) if job.half_reduce else None
    return FullyShardedDataParallel(
        module,
        auto_wrap_policy=ModuleWrapPolicy({models.Residual}),
        device_id=device,
        use_orig_params=job.use_orig_params,
        mixed_precision=precision,
    )


def _wrap_fsdp2(module: nn.Module, job: Job) -> nn.Module:
    if job.wrapper == "hsdp":
        mesh = init_device_mesh(job.device_type, (2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(job.device_type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16) if job.half_reduce else MixedPrecisionPolicy()
    for block in [block for block in module.modules() if isinstance(block, models.Residual)]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(module, mesh=mesh, mp_policy=policy)


def wrap_ddp_with_half_hook(module: nn.Module) -> nn.Module:
    """DDP that sums gradients in half precision before it divides."""
    model = DistributedDataParallel(module)
    model.register_comm_hook(None, sum_in_half)
    return model


def sum_in_half(state, bucket):  # type: ignore[no-untyped-def]  # torch compares the annotations as objects
    compressed = bucket.buffer().to(torch.float16)
    future = dist.all_reduce(compressed, async_op=True).get_future()
    return future.then(lambda done: done.value()[0].to(torch.float32) / dist.get_world_size())


def build_scaler(job: Job) -> torch.amp.GradScaler | None:
    if not job.scaler:
        return None
    if job.wrapper == "fsdp1":
        return ShardedGradScaler(device=job.device_type, init_scale=2.0**10)
    return torch.amp.GradScaler(job.device_type, init_scale=2.0**10)


def build_optimizer(model: nn.Module, job: Job, rank: int) -> torch.optim.Optimizer:
    if not job.fading:
        return models.build_optimizer(model.parameters())
    assert job.fault is not None
    optimizer = FadingSGD(model.parameters(), target=UPDATED_INDEX)
    if job.fault.rank == rank:
        optimizer.param_groups[0]["fuel"] = job.fault.step + 1.0
    return optimizer


def build_guard(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, job: Job) -> Any:
    options: dict[str, Any] = {"dump_dir": job.dump_dir, "timeout_s": 10.0, **job.options}
    if scaler is not None:
        options["scaler"] = scaler
    return NanGuard(model, optimizer, replay=job.recipe, **options)


# -- data --------------------------------------------------------------------------------------------------------------


class Loader:
    """Micro-batches that depend on the rank and their position only; never on the global random state."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job = job
        self.rank = rank

    def __len__(self) -> int:
        return self.job.num_steps * self.job.num_micro_batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for position in range(len(self)):
            yield self.micro_batch(*divmod(position, self.job.num_micro_batches))

    def micro_batch(self, step: int, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(10_000 * self.rank + 100 * step + index)
        batch = {
            "image": torch.randn(models.BATCH_SIZE, *models.IMAGE_SHAPE, generator=generator),
            "label": torch.randint(models.NUM_CLASSES, (models.BATCH_SIZE,), generator=generator),
            "fault": torch.zeros(len(models.PLACES), dtype=torch.int64),
            "weight": 1.0 / self.job.num_micro_batches,
            "id": f"rank {self.rank} step {step} micro-batch {index}",
        }
        fault = self.job.fault
        if fault is not None and fault.hits(self.rank, step, index):
            _plant_in_batch(batch, fault)
        device = self.job.device(self.rank)
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def _plant_in_batch(batch: dict[str, Any], fault: Fault) -> None:
    code = KIND_CODES[fault.kind]
    if fault.place in models.PLACES:
        batch["fault"][models.PLACES.index(fault.place)] = code
    elif fault.place == "reduce":
        batch["fault"][models.PLACES.index("weight.backward")] = KIND_CODES["huge"]
    elif fault.place == "input":
        batch["image"][1, 0, 2, 3] += addend(torch.tensor(code))


# -- faults of the state -----------------------------------------------------------------------------------------------


def _plant_in_state(model: nn.Module, optimizer: torch.optim.Optimizer, fault: Fault) -> None:
    if fault.place == "parameter":
        _spoil(dict(named(model.named_parameters()))[STATE_PARAMETER], fault)
    elif fault.place == "buffer":
        _spoil(dict(named(model.named_buffers()))[STATE_BUFFER], fault)
    elif fault.place == "optimizer_state":
        _spoil(optimizer.state[dict(named(model.named_parameters()))[STATE_PARAMETER]]["momentum_buffer"], fault)
    elif fault.place == "lr":
        warmup_steps = 0.0  # a warm-up of no steps: 0/0
        optimizer.param_groups[0]["lr"] = float(numpy.float64(0.0) * numpy.divide(0.0, warmup_steps))


def _spoil(tensor: Tensor, fault: Fault) -> None:
    local = local_of(tensor)
    assert local.numel(), "the rank holds nothing of what is to be spoiled"
    local.view(-1)[0] += addend(torch.tensor(KIND_CODES[fault.kind]))


def _restore_momentum(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer as loaded from a checkpoint: every parameter has its momentum."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


# -- the loop ----------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """The objects of one run, for tests that look at them."""

    job: Job
    rank: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any
    guard: Any
    record: Record = field(default_factory=Record)

    def close(self) -> None:
        if self.guard is not None:
            self.guard.close()


def build(job: Job, rank: int) -> Run:
    if job.device_type != "cpu" and job.wrapper == "fsdp2":  # which goes by the current device; others need none
        torch.accelerator.set_device_index(rank)
    seed(rank)
    model = wrap(models.build_model(job.num_layers), job, rank)
    optimizer = build_optimizer(model, job, rank)
    if job.fault is not None and job.fault.place == "optimizer_state":
        _restore_momentum(optimizer)
    scaler = build_scaler(job)
    guard = build_guard(model, optimizer, scaler, job) if job.guarded else None
    return Run(job, rank, model, optimizer, scaler, guard)


def train(job: Job, rank: int) -> Record:
    """Builds, trains, closes."""
    run = build(job, rank)
    train_steps(run)
    end_record(run)
    try:
        run.close()
    finally:
        with contextlib.suppress(AttributeError):
            del run.guard
    return run.record


def train_steps(run: Run) -> None:
    """The steps of the job; a `NonFiniteError` ends them and is recorded."""
    error = _loop(run).until_fault(Loader(run.job, run.rank))
    if error is not None:
        run.record.error = str(error)
        run.record.report = error.report.to_dict()
        run.record.error_step = len(run.record.before) - 1


def _loop(run: Run) -> Loop:
    accumulation = run.job.num_micro_batches
    return Loop(
        run.model,
        run.optimizer,
        models.train_step,
        guard=run.guard,
        scaler=run.scaler,
        accumulation=accumulation,
        clip=_clip if run.job.clip else None,
        around_step=lambda step: _counted(run, step, "step"),
        around_silent=lambda step: _counted(run, step, "no_sync"),
        around_batch=lambda index: _reduction(run.model, enabled=(index + 1) % accumulation == 0),
        before_batch=lambda index, batch: _look_before(run, *divmod(index, accumulation)),
        on_losses=lambda losses: _keep_losses(run, losses),
    )


@contextlib.contextmanager
def _counted(run: Run, step: int, name: str) -> Iterator[None]:
    if step != run.job.count_step:
        yield
        return
    with counting() as counts:
        yield
    run.record.counts[name] = counts


def _look_before(run: Run, step: int, index: int) -> None:
    if index == 0:
        _open_window(run, step)
    run.record.random_states[-1].append(random_digest())


def _open_window(run: Run, step: int) -> None:
    fault = run.job.fault
    if fault is not None and fault.begins(run.rank, step):
        _plant_in_state(run.model, run.optimizer, fault)
    run.record.before.append(digests(run.model, run.optimizer))
    if fault is not None and fault.step == step:
        run.record.window_state = copies(run.model, run.optimizer)
    run.record.random_states.append([])


def _keep_losses(run: Run, losses: dict[str, Tensor]) -> None:
    run.record.losses.append({name: digest(loss) for name, loss in losses.items()})


def _clip(model: nn.Module) -> None:
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(1.0)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@contextlib.contextmanager
def _reduction(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Gradient communication on, or off for all but the last micro-batch of a step."""
    if isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)) and not enabled:
        with model.no_sync():
            yield
        return
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(enabled)
    yield


def end_record(run: Run) -> None:
    """What is there once the steps have ended."""
    run.record.after = digests(run.model, run.optimizer)
    run.record.random_after = random_digest()
    parameters = list(named(run.model.named_parameters()))
    run.record.bad_parameters = [name for name, parameter in parameters if _is_bad(parameter)]
    run.record.bad_gradients = [name for name, parameter in parameters if _is_bad(parameter.grad)]
    run.record.bad_buffers = [name for name, buffer in named(run.model.named_buffers()) if _is_bad(buffer)]
    if run.scaler is not None:
        run.record.scaler_state = run.scaler.state_dict()
    if run.record.error is None:
        run.record.window_state = {}


def _is_bad(tensor: Tensor | None) -> bool:
    return tensor is not None and not bool(local_of(tensor).isfinite().all())


def run_jobs(rank: int, world_size: int, jobs: list[Job]) -> list[Record]:
    """Body for `run_ranks`: jobs one after the other in the same processes, each with a fresh model and guard."""
    return [train(job, rank) for job in jobs]
