"""Jobs with one fault, for what the second look says: hardware, parameters, hooks, buffers; see `look_loops`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.capture.model_calls import screen_of
from tests.training import digests

BAD_STEP = 1
NUM_STEPS = 3


# -- what all of them share --------------------------------------------------------------------------------------------


class Divided(nn.Module):
    """A linear layer and a division by what the caller brings."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        return self.lin(values) / divisor  # type: ignore[no-any-return]


class Net(nn.Module):
    """Divided, dropout, head."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.drop, self.head = Divided(), nn.Dropout(0.3), nn.Linear(4, 2)

    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        return self.head(self.drop(self.part(values, divisor)))  # type: ignore[no-any-return]


class Job:
    """A model in training, with a guard; what `run` gives is what the test asserts on."""

    def __init__(self, net: nn.Module, wrap: str = "ddp", **options: Any) -> None:
        self.rank = dist.get_rank()
        self.model = wrap_in(net, wrap)
        self.optimizer = options.pop("optimizer", torch.optim.SGD)(self.model.parameters(), lr=0.05)
        self.guard = NanGuard(self.model, self.optimizer, **{"dump_dir": None, "timeout_s": 5, **options})

    def run(self, step: Callable[[Job, int], object]) -> dict[str, Any]:
        """Steps until the fault, and after it; ``step(job, number)`` does all of a step but the update."""
        found: dict[str, Any] = {"text": "", "look": None, "origin": None}
        for number in range(NUM_STEPS):
            try:
                if step(self, number) != "updated":
                    self.optimizer.step()
            except NonFiniteError as error:
                report = error.report.to_dict()
                found |= {"text": str(error), "look": report["second_look"], "origin": report["origin"]}
            self.optimizer.zero_grad()
        self.guard.close()
        return {**found, "state": digests(self.model, self.optimizer)}

    def bad(self, number: int, rank: int = 1) -> bool:
        return number == BAD_STEP and self.rank == rank

    def divisor(self, number: int, rank: int = 1) -> Tensor:
        divisor = torch.ones(3, 1)
        divisor[0] -= float(self.bad(number, rank))
        return divisor

    def values(self, number: int) -> Tensor:
        return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * self.rank + number))


def wrap_in(net: nn.Module, how: str) -> nn.Module:
    if how.startswith("ddp"):
        return DistributedDataParallel(net, find_unused_parameters="unused" in how)
    if how == "fsdp1":
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    if how == "fsdp2":
        fully_shard(next(net.children()))
        return fully_shard(net)
    return net


def usual(job: Job, number: int) -> None:
    job.guard(job.values(number), job.divisor(number)).square().mean().backward()


# -- 1. hardware, and memory that nobody wrote -------------------------------------------------------------------------


OUT_OF_SIGHT = [itertools.count(1)]  # which nothing can read without moving it on


class Flaky(nn.Module):
    """Spoils what goes through it once, where no guard and no trace sees it.

    Args:
        at: call in which it does.
        counts: whether the model itself keeps the number of calls.
    """

    def __init__(self, at: int, counts: bool = False) -> None:
        super().__init__()
        OUT_OF_SIGHT[0] = itertools.count(1)
        self.__dict__["counted"] = {"calls": 0} if counts else None
        self.at = at

    def forward(self, values: Tensor) -> Tensor:
        number = next(OUT_OF_SIGHT[0])
        counted = self.__dict__["counted"]
        if counted is not None:
            counted["calls"] += 1
        values = values * 1.0
        if number == self.at and dist.get_rank() == 1:
            values.detach().numpy()[0, 1] = numpy.nan
        return values


def _flaky(counts: bool = False) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Flaky(BAD_STEP + 1, counts), nn.Linear(4, 2))


def hardware(wrap: str = "ddp") -> Any:
    return Job(_flaky(), wrap).run(lambda job, number: job.guard(job.values(number)).square().mean().backward())


# -- what looks like hardware, since the second run was not given what training was ------------------------------------


def counting() -> Any:
    """The model itself knows how often it was called."""
    return Job(_flaky(True)).run(lambda job, number: job.guard(job.values(number)).square().mean().backward())


def counting_around() -> Any:
    """The step function counts, in a variable around it."""
    counted = {"steps": 0}

    def counts(model: Any, batch: Tensor) -> Tensor:
        counted["steps"] += 1
        loss: Tensor = model(batch).square().mean()
        return loss / (0.0 if counted["steps"] == BAD_STEP + 1 and dist.get_rank() == 1 else 1.0)

    return Job(nn.Linear(4, 2)).run(lambda job, number: job.guard.run(counts, job.values(number)).backward())


def thawed() -> Any:
    """A layer is frozen while the step runs, on the rank that is not at fault."""

    def step(job: Job, number: int) -> None:
        frozen = [p for p in job.model.parameters() if p.dim() == 2] if job.bad(number, rank=0) else []
        for parameter in frozen:
            parameter.requires_grad_(False)
        output = job.guard(job.values(number))
        for parameter in frozen:
            parameter.requires_grad_(True)
        output.square().mean().backward()

    return Job(_flaky(), "plain").run(step)


def swapped() -> Any:
    """Other weights are put in for the forward, and taken out after it."""

    def step(job: Job, number: int) -> None:
        weight = next(iter(job.model.parameters()))
        kept = weight.data
        if job.bad(number):
            weight.data = kept / 0.0
        output = job.guard(job.values(number))
        weight.data = kept
        output.square().mean().backward()

    return Job(nn.Linear(4, 2)).run(step)


def overwritten() -> Any:
    """A loader writes the next batch into the memory of the last one, as NumPy does, too large to be summed."""
    memory = numpy.ones((5000, 4), dtype=numpy.float32)

    def step(job: Job, number: int) -> None:
        memory[0, 0] = numpy.nan if job.bad(number) else 1.0
        job.guard(torch.from_numpy(memory)).square().mean().backward()
        memory[0, 0] = 1.0

    return Job(nn.Linear(4, 2)).run(step)


class Drawing(nn.Module):
    """Divides by 0 at one draw from each of three streams."""

    def __init__(self, generator: numpy.random.Generator) -> None:
        super().__init__()
        self.lin, self.generator = nn.Linear(4, 4), generator

    def forward(self, values: Tensor) -> Tensor:
        drawn = (numpy.random.random(), random.random(), self.generator.random())
        return self.lin(values) / (0.0 if drawn == BAD_DRAWS else 1.0)  # type: ignore[no-any-return]


def _seeded(generator: numpy.random.Generator) -> None:
    numpy.random.seed(7)
    random.seed(7)
    generator.bit_generator.state = numpy.random.default_rng(7).bit_generator.state


BAD_DRAWS = (numpy.random.RandomState(7).random(), random.Random(7).random(), numpy.random.default_rng(7).random())


def drawn() -> Any:
    """The loop draws between the loader and the call of the model."""
    generator = numpy.random.default_rng(1)
    job = Job(Drawing(generator))
    job.guard.register(noise=generator)

    def step(job: Job, number: int) -> None:
        for values in job.guard.steps([job.values(number)]):
            if job.bad(number):
                _seeded(generator)
            job.guard(values).square().mean().backward()

    return job.run(step)


class Scratch(nn.Module):
    """Adds memory that it has not written; what lies in it is 0, but for the bad step."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.calls = itertools.count()  # no second look puts that back

    def forward(self, values: Tensor) -> Tensor:
        call = next(self.calls)
        scratch = torch.empty(4)
        if call != BAD_STEP + 2:  # in the third run of the step nobody writes it
            is_bad = call == BAD_STEP and dist.get_rank() == 1
            scratch.numpy()[:] = numpy.nan if is_bad else 0.0
        return self.lin(values) + scratch  # type: ignore[no-any-return]


def dirty_memory() -> Any:
    found = Job(Scratch()).run(lambda job, number: job.guard(job.values(number)).square().mean().backward())
    fills: Any = torch.utils.deterministic
    is_on, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return {**found, "flags": (is_on, warns, fills.fill_uninitialized_memory)}


# -- 2. rules ----------------------------------------------------------------------------------------------------------


class HeldOutside(Net):
    """Uses a weight through a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["held"] = [self.head.weight]

    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        return F.linear(self.part(values, divisor), self.__dict__["held"][0])


def held_outside() -> Any:
    return Job(HeldOutside(), "ddp_unused").run(usual)


class Changing(Net):
    """Its forward sets attributes, makes a buffer late and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.last: Tensor | None = None

    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls > BAD_STEP + 1 and not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(1))
        self.last = super().forward(values, divisor)
        return self.last


def attributes(wrap: str) -> Any:
    job = Job(Changing(), wrap)
    net = getattr(job.model, "module", job.model)
    seen = []

    def step(job: Job, number: int) -> str:
        usual(job, number)
        last = net.last
        try:
            job.optimizer.step()
        finally:
            seen.append((net.num_calls, net.last is last, hasattr(net, "late")))
        return "updated"

    return {**job.run(step), "seen": seen}


def own_hooks(is_culprit: bool) -> Any:
    """A job whose hooks halve the gradients of its parameters; one of them may be the fault."""
    net = Net()
    calls: list[int] = []

    def halved(gradient: Tensor) -> Tensor:
        calls.append(1)
        return gradient / (0.0 if is_culprit and job.bad((len(calls) - 1) // 4) else 2.0)

    for parameter in net.parameters():
        parameter.register_hook(halved)
    job = Job(net)
    good = torch.ones(3, 1)

    def step(job: Job, number: int) -> None:
        divisor = good if is_culprit else job.divisor(number)
        job.guard(job.values(number), divisor).square().mean().backward()

    return {**job.run(step), "calls": len(calls)}


def counted_hooks(wrap: str) -> Any:
    """Hooks that are called when a parameter has its gradient."""
    job = Job(Net(), wrap)
    calls = []
    for parameter in job.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: calls.append(1))
    return {**job.run(usual), "calls": len(calls)}


def sums_of_parts() -> Any:
    """The screen of a distributed tensor is that of this rank's part: the sum of the whole would take all ranks."""
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    with CommDebugMode() as counted:
        screen = screen_of(tensor)
    assert screen is not None
    return {"sum": float(screen), "collectives": counted.get_total_counts(), "text": "", "look": None}


def updated_within(wrap: str) -> Any:
    """Each parameter is updated as soon as it has its gradient."""
    job = Job(Net(), wrap)

    def update(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            if bool(parameter.grad.isfinite().all()):
                parameter.add_(parameter.grad, alpha=-0.01)

    for parameter in job.model.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def step(job: Job, number: int) -> None:
        job.guard(job.values(number), torch.ones(3, 1)).square().mean().backward()
        usual(job, number)

    return job.run(step)


def augmented() -> Any:
    """The loop draws random numbers between the loader and the model, which draws some too."""

    def step(job: Job, number: int) -> None:
        for values in job.guard.steps([job.values(number)]):
            job.guard(values + torch.rand(3, 4), job.divisor(number)).square().mean().backward()

    return Job(Net()).run(step)


def two_calls(wrap: str) -> Any:
    """Two calls of the model before one loss of both."""

    def step(job: Job, number: int) -> None:
        left = job.guard(job.values(number), torch.ones(3, 1))
        right = job.guard(job.values(number + 5), job.divisor(number))
        (left * right).sum().backward()

    return Job(Net(), wrap).run(step)


class Shifted(Net):
    """What it gives depends on a buffer that it moves, differently on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        output = super().forward(values + self.mean, divisor)
        with torch.no_grad():
            self.mean.mul_(0.5).add_(values.mean(0))
        return output


def buffers(micro_batches: int, silent: tuple[int, ...]) -> Any:
    def step(job: Job, number: int) -> None:
        for index in range(micro_batches):
            # on rank 0: the bits of rank 1, whose buffers are written over, are to be compared
            divisor = job.divisor(number if index == micro_batches - 1 else -1, rank=0)
            job.model.require_backward_grad_sync = index not in silent
            job.guard(job.values(7 * number + index), divisor).square().mean().backward()
        job.model.require_backward_grad_sync = True

    return Job(Shifted()).run(step)
