"""What the second look says, job by job: each is a few lines that a user could have written, with one fault."""

from __future__ import annotations

import gc
import socket
import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.capture.model_calls import screen_of
from ddp_nanguard.dump.read import open_dump
from tests.ranks import run_ranks
from tests.training import digest, digests, listening

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
        self.model = _wrap(net, wrap)
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


def _wrap(net: nn.Module, how: str) -> nn.Module:
    if how.startswith("ddp"):
        return DistributedDataParallel(net, find_unused_parameters="unused" in how)
    if how == "fsdp1":
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    if how == "fsdp2":
        fully_shard(next(net.children()))
        return fully_shard(net)
    return net


def _usual(job: Job, number: int) -> None:
    job.guard(job.values(number), job.divisor(number)).square().mean().backward()


# -- 1. hardware, and memory that nobody wrote -------------------------------------------------------------------------


class Flaky(nn.Module):
    """Spoils what goes through it once, where no guard and no trace sees it."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.counted = {"calls": 0}
        self.at = at

    def forward(self, values: Tensor) -> Tensor:
        self.counted["calls"] += 1
        values = values * 1.0
        if self.counted["calls"] == self.at and dist.get_rank() == 1:
            values.detach().numpy()[0, 1] = numpy.nan
        return values


def hardware(wrap: str = "ddp") -> Any:
    net = nn.Sequential(nn.Linear(4, 4), Flaky(BAD_STEP + 1), nn.Linear(4, 2))
    return Job(net, wrap).run(lambda job, number: job.guard(job.values(number)).square().mean().backward())


class Scratch(nn.Module):
    """Adds memory that it has not written; what lies in it is 0, but for the bad step."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.counted = {"calls": 0}

    def forward(self, values: Tensor) -> Tensor:
        self.counted["calls"] += 1
        scratch = torch.empty(4)
        if self.counted["calls"] != BAD_STEP + 3:  # in the third run of the step nobody writes it
            is_bad = self.counted["calls"] == BAD_STEP + 1 and dist.get_rank() == 1
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
    return Job(HeldOutside(), "ddp_unused").run(_usual)


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
        _usual(job, number)
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
    return {**job.run(_usual), "calls": len(calls)}


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
        _usual(job, number)

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


class WithLoss(Net):
    """Gives ``(logits, loss)``, as language models do, and something without a gradient."""

    def forward(self, values: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(values, divisor)
        return logits, logits.square().mean(), logits.argmax(1)


def logits_and_loss(both: bool) -> Any:
    def step(job: Job, number: int) -> None:
        logits, loss, _ = job.guard(job.values(number), job.divisor(number))
        (loss + 0.1 * logits.abs().mean() if both else loss).backward()

    return Job(WithLoss()).run(step)


def upstream(look_again: bool) -> Any:
    """The argument comes from another module, whose gradients are the job's."""
    encoder = nn.Linear(4, 4)
    gradients = []

    def step(job: Job, number: int) -> str:
        job.guard(encoder(job.values(number)), job.divisor(number)).square().mean().backward()
        try:
            job.optimizer.step()
        finally:
            assert encoder.weight.grad is not None
            gradients.append(digest(encoder.weight.grad))
            encoder.zero_grad()
        return "updated"

    found = Job(Net(), look_again=look_again).run(step)
    return {**found, "gradients": gradients}


class InPlace(Net):
    """Takes its argument for its own: changes it, and pops from the dict that it comes in."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        values = batch.pop("values")
        return super().forward(values, batch.pop("divisor"))


def popped() -> Any:
    return Job(InPlace()).run(
        lambda job, n: job.guard({"values": job.values(n), "divisor": job.divisor(n)}).square().mean().backward()
    )


class LeafInPlace(Net):
    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        values = values * 1.0
        values[0] *= 2
        return super().forward(values, divisor)


def leaf_argument(look_again: bool) -> Any:
    """An argument that is a leaf and gets a gradient of its own."""
    gradients = []

    def step(job: Job, number: int) -> str:
        values = job.values(number).requires_grad_()
        job.guard(values, job.divisor(number)).square().mean().backward()
        try:
            job.optimizer.step()
        finally:
            assert values.grad is not None
            gradients.append(digest(values.grad))
        return "updated"

    return {**Job(LeafInPlace(), look_again=look_again).run(step), "gradients": gradients}


def changed_argument(how: str) -> Any:
    """The loop reuses the memory of an argument before the update."""

    def step(job: Job, number: int) -> None:
        values = job.values(number)
        job.guard(values, divisor=job.divisor(number)).square().mean().backward()
        if how == "tensor":
            values.zero_()
        elif how == "data":
            values.data.zero_()
        else:
            values.numpy()[0] = 3.0

    return Job(Net()).run(step)


def compiled() -> Any:
    net = Net()
    return Job(torch.compile(net, backend="aot_eager")).run(_usual)


def compiled_badly() -> Any:
    """A kernel that is wrong where it is compiled, and right where it runs eagerly."""
    job: Job

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            outputs = graph(*args)
            return tuple(output * float("nan") if is_bad["now"] else output for output in outputs)

        return run

    is_bad = {"now": False}
    job = Job(torch.compile(nn.Linear(4, 2), backend=backend))

    def step(job: Job, number: int) -> None:
        is_bad["now"] = job.bad(number)
        job.guard(job.values(number)).square().mean().backward()

    return job.run(step)


class Branches(Net):
    """A branch that torch takes by a tensor."""

    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        values = torch.cond(values.sum() > 0, lambda x: x * 2, lambda x: x * 3, (values,))
        return super().forward(values, divisor)


def higher_order() -> Any:
    return Job(Branches()).run(_usual)


class Untraceable(torch.autograd.Function):
    """Cannot be run under a dispatch mode."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise NotImplementedError("no rule for this mode")
        return values * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class NoTrace(Net):
    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        return Untraceable.apply(super().forward(values, divisor))  # type: ignore[no-any-return]


def no_trace() -> Any:
    return Job(NoTrace()).run(_usual)


def window_open(wrap: str) -> Any:
    """A forward still waits for its backward when the optimizer steps."""
    kept = []

    def step(job: Job, number: int) -> None:
        _usual(job, number)
        if number == BAD_STEP:
            kept.append(job.guard(job.values(9), torch.ones(3, 1)))

    return Job(Net(), wrap).run(step)


# -- 3. other loops ----------------------------------------------------------------------------------------------------


def no_loss() -> Any:
    job = Job(Net())
    texts = []
    for index, value in enumerate((None, {"a": 1.0}, {})):

        def step(model: Any, batch: Any, value: Any = value) -> Any:
            return value

        step.__name__ = f"no_loss_{index}"
        with pytest.raises(ValueError, match=r"guard\.run\(") as caught:
            job.guard.run(step, None)
        texts.append(str(caught.value))
    return {**job.run(_usual), "texts": texts}


def _step_of(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    output = model(*batch)
    return output.square().mean() / batch[1].mean().detach()  # type: ignore[no-any-return]


def run_and_call() -> Any:
    """One micro-batch by ``guard.run``, one by ``guard(...)``; the fault is in the second."""

    def step(job: Job, number: int) -> None:
        job.guard.run(_step_of, (job.values(number), torch.ones(3, 1))).backward()
        _usual(job, number)

    return Job(Net()).run(step)


def loss_in_the_step() -> Any:
    """The loss divides; it lies in the step function."""

    def loss_of(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(batch[0], torch.ones(3, 1))
        return (logits.square().sum(1) / batch[1][:, 0]).mean()  # type: ignore[no-any-return]

    return Job(Net()).run(lambda job, n: job.guard.run(loss_of, (job.values(n), job.divisor(n))).backward())


def closure() -> Any:
    """An optimizer that calls a closure; the verdict is given in it."""

    def step(job: Job, number: int) -> str:
        def closure() -> Tensor:
            job.optimizer.zero_grad()
            loss: Tensor = job.guard(job.values(number), job.divisor(number)).square().mean()
            loss.backward()
            return loss

        job.optimizer.step(closure)
        return "updated"

    return Job(Net()).run(step)


def loss_outside() -> Any:
    """The loss divides, and is code of the loop: nothing of it is run again."""

    def step(job: Job, number: int) -> None:
        logits = job.guard(job.values(number), torch.ones(3, 1))
        loss = (logits.square().sum(1) / job.divisor(number)[:, 0]).mean()
        job.guard.watch(loss=loss)
        loss.backward()

    return Job(Net()).run(step)


class RaisesInSecondBackward(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        RaisesInSecondBackward.calls += 1
        if RaisesInSecondBackward.calls > BAD_STEP + 1:
            raise RuntimeError("this backward runs once")
        return gradient


class Once(Net):
    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        return RaisesInSecondBackward.apply(super().forward(values, divisor))  # type: ignore[no-any-return]


def backward_once() -> Any:
    RaisesInSecondBackward.calls = 0
    job = Job(Once())

    def step(job: Job, number: int) -> None:
        if number > BAD_STEP:
            RaisesInSecondBackward.calls = 0
        _usual(job, number)

    return job.run(step)


def off() -> Any:
    return Job(Net(), look_again=False).run(_usual)


def checkpointed(reentrant: bool) -> Any:
    class Checkpointed(Net):
        def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
            values = values.detach().requires_grad_()
            hidden = checkpoint(self.part, values, divisor, use_reentrant=reentrant)
            return self.head(self.drop(hidden))  # type: ignore[no-any-return]

    return Job(Checkpointed()).run(_usual)


def dropped_outputs() -> Any:
    job = Job(Net(), "plain")
    gc.collect()
    gc.disable()
    gone = []
    for number in range(3):
        output = job.guard(job.values(number), torch.ones(3, 1))
        alive = weakref.ref(output)
        if number == 1:
            output.sum().backward()
            job.optimizer.step()
        del output
        gone.append(alive() is None)
    gc.enable()
    job.guard.close()
    return {"gone": gone, "text": "", "look": None}


def redacted() -> Any:
    with tempfile.TemporaryDirectory() as directory:
        directories = [directory]
        dist.broadcast_object_list(directories)
        found = Job(Net(), redact=True, dump_dir=directories[0]).run(_usual)
        dist.barrier()
        (dump,) = Path(directories[0]).glob("step-*")
        look = open_dump(dump).report.second_look
        dist.barrier()
    return {**found, "kept": look.to_dict() if look is not None else None}


def many_skips() -> Any:
    """A fault in every step, which is skipped."""
    job = Job(Net(), on_fault="skip")
    with listening() as lines:
        for number in range(5):
            job.guard(job.values(number), job.divisor(BAD_STEP)).square().mean().backward()
            job.optimizer.step()
    job.guard.close()
    return {"text": "", "look": None, "lines": [line for line in lines if "again in place" in line]}


JOBS: dict[str, Callable[[], Any]] = {
    "hardware": hardware,
    "hardware, sharded": partial(hardware, "fsdp2"),
    "memory": dirty_memory,
    "held outside": held_outside,
    "attributes, plain": partial(attributes, "plain"),
    "attributes, ddp": partial(attributes, "ddp"),
    "attributes, fsdp1": partial(attributes, "fsdp1"),
    "attributes, fsdp2": partial(attributes, "fsdp2"),
    "hooks": partial(own_hooks, False),
    "hooks, at fault": partial(own_hooks, True),
    "counted hooks, ddp": partial(counted_hooks, "ddp"),
    "counted hooks, fsdp1": partial(counted_hooks, "fsdp1"),
    "counted hooks, fsdp2": partial(counted_hooks, "fsdp2"),
    "sums of parts": sums_of_parts,
    "updated within, plain": partial(updated_within, "plain"),
    "updated within, fsdp2": partial(updated_within, "fsdp2"),
    "augmented": augmented,
    "two calls, ddp": partial(two_calls, "ddp_unused"),
    "two calls, fsdp1": partial(two_calls, "fsdp1"),
    "two calls, fsdp2": partial(two_calls, "fsdp2"),
    "buffers": partial(buffers, 1, ()),
    "buffers, first silent": partial(buffers, 2, (0,)),
    "buffers, both communicate": partial(buffers, 2, ()),
    "logits and loss": partial(logits_and_loss, False),
    "logits and loss, both used": partial(logits_and_loss, True),
    "upstream": partial(upstream, True),
    "upstream, not looked": partial(upstream, False),
    "popped": popped,
    "leaf": partial(leaf_argument, True),
    "leaf, not looked": partial(leaf_argument, False),
    "changed, tensor": partial(changed_argument, "tensor"),
    "changed, data": partial(changed_argument, "data"),
    "changed, numpy": partial(changed_argument, "numpy"),
    "compiled": compiled,
    "compiled badly": compiled_badly,
    "higher order": higher_order,
    "no trace": no_trace,
    "open, ddp": partial(window_open, "ddp"),
    "open, fsdp1": partial(window_open, "fsdp1"),
    "open, fsdp2": partial(window_open, "fsdp2"),
    "no loss": no_loss,
    "run and call": run_and_call,
    "loss in the step": loss_in_the_step,
    "loss outside": loss_outside,
    "closure": closure,
    "backward once": backward_once,
    "off": off,
    "checkpoint": partial(checkpointed, False),
    "checkpoint, reentrant": partial(checkpointed, True),
    "dropped outputs": dropped_outputs,
    "redacted": redacted,
    "many skips": many_skips,
}
Pair = tuple[dict[str, Any], dict[str, Any]]


def _run_jobs(rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        torch.manual_seed(0)
        try:
            found[name] = JOBS[name]()
        except Exception as error:
            error.add_note(name)
            raise
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Pair]:
    """All jobs, one after the other in the same two processes."""
    first, second = run_ranks(_run_jobs, names=list(JOBS), timeout_s=55)
    return {name: (first[name], second[name]) for name in JOBS}


def _looks(pair: Pair) -> dict[str, Any]:
    """The second look, which is the same on both ranks."""
    first, second = pair
    assert first["text"] == second["text"]
    assert first["look"] == second["look"]
    look: dict[str, Any] = first["look"]
    return look


def _named(pair: Pair, code: str, rank: int = 1) -> dict[str, Any]:
    look = _looks(pair)
    assert look["operator"] is not None, pair[0]["text"]
    assert (look["operator"]["rank"], look["operator"]["code"]) == (rank, code)
    assert f": {code}" in pair[0]["text"]
    return look


DIVISION = "return self.lin(values) / divisor"
DIVISIONS = [
    "augmented",
    "attributes, plain", "attributes, ddp", "attributes, fsdp1", "attributes, fsdp2", "hooks", "two calls, ddp",
    "two calls, fsdp1", "two calls, fsdp2", "logits and loss", "logits and loss, both used", "upstream", "popped",
    "leaf", "higher order", "open, ddp", "no loss", "run and call", "closure", "checkpoint", "checkpoint, reentrant",
    "redacted",
]  # fmt: skip


@pytest.mark.parametrize("name", DIVISIONS)
def test_the_same_bits_come_again_and_the_division_is_named(found: dict[str, Pair], name: str) -> None:
    """Whatever the loop and the model do with calls, arguments, buffers, outputs and hooks.

    Two calls before one loss are run in one backward; an alias of ``(logits, loss)`` gets what the loop gave and no
    more; arguments come without the graph behind them, in containers of their own; branches of `torch.cond` are
    traced.
    """
    look = _named(found[name], DIVISION)
    assert look["outcome"] == "same", look["text"]
    assert look["operator"]["name"] == "aten.div.Tensor"
    assert found[name][0]["origin"]["layer"] == "part"
    assert found[name][0]["origin"]["phase"] == "forward"


def test_a_fault_that_does_not_come_again_names_rank_host_and_device(found: dict[str, Pair]) -> None:
    for name in ("hardware", "hardware, sharded"):
        look = _looks(found[name])
        assert look["outcome"] == "finite"
        assert look["text"].startswith("rank 1 finite on the second run")
        assert f"suspect that device ({socket.gethostname()}, cpu)" in look["text"]
        assert look["operator"] is None, "nothing was seen to make it"
        assert look["text"] in found[name][0]["text"]


def test_memory_that_nobody_wrote_is_named_with_the_line_that_reads_it(found: dict[str, Pair]) -> None:
    """By one more run, in which fresh memory is filled with NaN; the setting for that is put back."""
    look = _named(found["memory"], "return self.lin(values) + scratch")
    assert look["outcome"] == "finite"
    assert look["text"].endswith("something reads memory that nobody wrote")
    assert all(job["flags"] == (False, False, True) for job in found["memory"])


def test_a_parameter_used_outside_of_its_module_is_met(found: dict[str, Pair]) -> None:
    look = _looks(found["held outside"])
    assert look["outcome"] == "not_done"
    assert "parameter head.weight is used outside of the module that owns it" in look["text"]


@pytest.mark.parametrize("wrap", ["plain", "ddp", "fsdp1", "fsdp2"])
def test_attributes_and_late_buffers_are_those_of_training(found: dict[str, Pair], wrap: str) -> None:
    for job in found[f"attributes, {wrap}"]:
        assert job["seen"] == [(1, True, False), (2, True, False), (3, True, True)]


def test_hooks_of_the_job_on_parameters_do_not_run_again(found: dict[str, Pair]) -> None:
    for name in ("hooks", "hooks, at fault"):
        assert [job["calls"] for job in found[name]] == [3 * 4, 3 * 4]

    for wrap in ("ddp", "fsdp1", "fsdp2"):
        for job in found[f"counted hooks, {wrap}"]:
            assert job["calls"] == (0 if wrap == "fsdp1" else 3 * 4), wrap


def test_a_distributed_output_is_screened_without_communication(found: dict[str, Pair]) -> None:
    assert [(job["sum"], job["collectives"]) for job in found["sums of parts"]] == [(8.0, 0), (8.0, 0)]


def test_a_hook_of_the_job_that_spoils_a_gradient_is_not_taken_for_hardware(found: dict[str, Pair]) -> None:
    look = _looks(found["hooks, at fault"])
    assert look["outcome"] == "same"
    assert "a hook of the job on the parameter changed them" in look["text"]
    assert look["operator"] is None


@pytest.mark.parametrize("wrap", ["plain", "fsdp2"])
def test_an_update_within_the_backward_is_met(found: dict[str, Pair], wrap: str) -> None:
    look = _looks(found[f"updated within, {wrap}"])
    assert (look["outcome"], look["text"]) == (
        "not_done",
        "not done: rank 0: the weights were updated already, within the step",
    )


@pytest.mark.parametrize("name", ["buffers", "buffers, first silent", "buffers, both communicate"])
def test_ddp_writes_rank_0s_buffers_over_those_of_others_where_it_did_in_training(
    found: dict[str, Pair], name: str
) -> None:
    """Else the output of rank 1 has other bits: it depends on a buffer."""
    look = _named(found[name], DIVISION, rank=0)
    assert look["outcome"] == "same", look["text"]


def test_gradients_outside_of_the_model_are_left_alone(found: dict[str, Pair]) -> None:
    """Those of a module before the model, and of an argument that is a leaf."""
    for name in ("upstream", "leaf"):
        for looked, not_looked in zip(found[name], found[f"{name}, not looked"], strict=True):
            assert looked["gradients"] == not_looked["gradients"] and len(looked["gradients"]) == 3
            assert looked["state"] == not_looked["state"]


@pytest.mark.parametrize("how", ["tensor", "data", "numpy"])
def test_an_argument_that_the_loop_has_changed_is_met(found: dict[str, Pair], how: str) -> None:
    """Also where it is changed by way of NumPy or ``.data``, which its version does not tell."""
    look = _looks(found[f"changed, {how}"])
    assert look["outcome"] == "not_done"
    assert "argument [0] was changed after the call" in look["text"]


def test_a_compiled_step_is_confirmed_compiled_and_placed_by_an_eager_run(found: dict[str, Pair]) -> None:
    look = _named(found["compiled"], DIVISION)
    assert look["outcome"] == "same"
    assert look["text"].endswith("compiled; the place is that of an eager run, which is not the compiled step")


def test_a_kernel_that_is_bad_only_compiled_is_blamed_for_it(found: dict[str, Pair]) -> None:
    look = _looks(found["compiled badly"])
    assert look["outcome"] == "same" and look["operator"] is None
    assert look["text"].endswith("finite when it runs eagerly: suspect the kernel that torch.compile made")


def test_what_cannot_be_traced_is_still_watched_layer_by_layer(found: dict[str, Pair]) -> None:
    look = _looks(found["no trace"])
    assert look["outcome"] == "same" and look["operator"] is None
    assert found["no trace"][0]["origin"]["layer"] == "part"
    assert "the operator was not looked for: rank 1: NotImplementedError" in found["no trace"][0]["text"]


@pytest.mark.parametrize("wrap", ["fsdp1", "fsdp2"])
def test_a_sharded_step_that_has_not_ended_is_not_run_again(found: dict[str, Pair], wrap: str) -> None:
    look = _looks(found[f"open, {wrap}"])
    assert look["outcome"] == "not_done"
    assert "a forward still waits for its backward: the window is open" in look["text"]


def test_a_step_function_must_return_its_losses(found: dict[str, Pair]) -> None:
    rest = "return the loss that is backpropagated, a tensor, or a dict of named losses"
    for job in found["no loss"]:
        assert job["texts"] == [
            f"guard.run(no_loss_{index}, batch): the step function returned a {what}; {rest}"
            for index, what in enumerate(["NoneType", "dict of float", "dict of nothing"])
        ]


def test_both_ways_to_call_the_model_in_one_window(found: dict[str, Pair]) -> None:
    assert found["run and call"][0]["origin"]["micro_batch"] == 1


def test_a_loss_is_named_with_its_line_where_it_is_part_of_the_step(found: dict[str, Pair]) -> None:
    look = _named(found["loss in the step"], "return (logits.square().sum(1) / batch[1][:, 0]).mean()")
    assert look["outcome"] == "same"
    assert found["loss in the step"][0]["origin"]["phase"] == "loss"


def test_a_loss_that_is_not_run_again_is_not_put_down_to_an_operator_of_the_model(found: dict[str, Pair]) -> None:
    look = _looks(found["loss outside"])
    assert look["operator"] is None
    assert look["text"].endswith("the loss was not run again: guard.run(step, batch) would name its line")
    assert found["loss outside"][0]["origin"]["phase"] == "loss"


def test_a_backward_that_runs_only_once_costs_the_second_look_and_no_more(found: dict[str, Pair]) -> None:
    look = _looks(found["backward once"])
    assert look["text"] == "not done: rank 0: RuntimeError: this backward runs once"
    assert found["backward once"][0]["origin"]["phase"] == "backward"


def test_without_the_option_there_is_no_second_look(found: dict[str, Pair]) -> None:
    assert _looks(found["off"]) is None
    assert "again:" not in found["off"][0]["text"]


def test_nothing_keeps_an_output_that_the_loop_has_dropped(found: dict[str, Pair]) -> None:
    """Without the collector, with a backward and without one."""
    assert [job["gone"] for job in found["dropped outputs"]] == [[True] * 3] * 2


def test_a_redacted_dump_gets_the_second_look_too(found: dict[str, Pair]) -> None:
    for job in found["redacted"]:
        assert job["kept"] == _looks(found["redacted"])


def test_of_faults_of_one_kind_that_are_skipped_only_the_first_three_are_looked_at(found: dict[str, Pair]) -> None:
    for job in found["many skips"]:
        assert [line.partition(":")[0] for line in job["lines"]] == [f"step {step} again in place" for step in range(3)]
