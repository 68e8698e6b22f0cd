"""What the second look says, job by job: each is a few lines that a user could have written, with one fault."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_nanguard import NanGuard, NonFiniteError
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
        self.model = _wrap(net, wrap)
        self.optimizer = options.pop("optimizer", torch.optim.SGD)(self.model.parameters(), lr=0.05)
        self.guard = NanGuard(self.model, self.optimizer, **{"dump_dir": None, "timeout_s": 5, **options})
        self.states: list[Any] = []

    def run(self, step: Callable[[Job, int], object]) -> dict[str, Any]:
        """Steps until the fault, and after it; ``step(job, number)`` does all of a step but the update."""
        found: dict[str, Any] = {"text": "", "look": None, "origin": None, "job": vars(self)}
        for number in range(NUM_STEPS):
            try:
                if step(self, number) != "updated":
                    self.optimizer.step()
            except NonFiniteError as error:
                report = error.report.to_dict()
                found |= {"text": str(error), "look": report["second_look"], "origin": report["origin"]}
            self.optimizer.zero_grad()
        self.guard.close()
        return {**found, "job": {}, "state": digests(self.model, self.optimizer)}

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
        if self.counted["calls"] < BAD_STEP + 3:  # as memory that another tensor has left behind
            is_bad = self.counted["calls"] == BAD_STEP + 1 and dist.get_rank() == 1
            scratch.numpy()[:] = numpy.nan if is_bad else 0.0
        return self.lin(values) + scratch  # type: ignore[no-any-return]


def dirty_memory() -> Any:
    found = Job(Scratch()).run(lambda job, number: job.guard(job.values(number)).square().mean().backward())
    flags = (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
    return {**found, "flags": flags}


# -- 2. rules ----------------------------------------------------------------------------------------------------------


class HeldOutside(Net):
    """Uses a weight through a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["held"] = [self.head.weight]

    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        return F.linear(self.part(values, divisor), self.__dict__["held"][0])


def parameter_held_outside() -> Any:
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


def updated_in_backward(wrap: str) -> Any:
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


def upstream() -> Any:
    """The argument comes from another module, whose gradients are the job's."""
    encoder = nn.Linear(4, 4)
    gradients = []

    def step(job: Job, number: int) -> str:
        job.guard(encoder(job.values(number)), job.divisor(number)).square().mean().backward()
        try:
            job.optimizer.step()
        finally:
            assert encoder.weight.grad is not None
            gradients.append(encoder.weight.grad.clone())
            encoder.zero_grad()
        return "updated"

    found = Job(Net()).run(step)
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


def argument_that_requires_grad() -> Any:
    """An argument that is a leaf and gets a gradient of its own."""
    gradients = []

    def step(job: Job, number: int) -> str:
        values = job.values(number).requires_grad_()
        job.guard(values, job.divisor(number)).square().mean().backward()
        try:
            job.optimizer.step()
        finally:
            gradients.append(values.grad)
        return "updated"

    return {**Job(LeafInPlace()).run(step), "gradients": gradients}


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


def forward_only(wrap: str, look_again: bool) -> Any:
    """A forward in grad mode whose output is dropped: the last thing that the step does with the model."""

    def step(job: Job, number: int) -> None:
        _usual(job, number)
        job.guard(job.values(9), torch.ones(3, 1))

    return Job(Net(), wrap, look_again=look_again).run(step)


# -- 3. other loops ----------------------------------------------------------------------------------------------------


def no_loss() -> Any:
    job = Job(Net())
    texts = []
    for step in (lambda model, batch: None, lambda model, batch: {"a": 1.0}, lambda model, batch: {}):
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


def loss_outside() -> Any:
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


def loss_not_seen() -> Any:
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


def raising_backward() -> Any:
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


def leak() -> Any:
    """What the loop drops is gone at once: nothing of ours keeps an output, or the graph behind it."""
    import gc

    job = Job(Net(), "plain")
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
    return gone


JOBS: dict[str, Callable[[], Any]] = {
    "hardware": hardware,
    "dirty memory": dirty_memory,
    "held outside": parameter_held_outside,
    **{f"attributes {wrap}": lambda wrap=wrap: attributes(wrap) for wrap in ("plain", "ddp", "fsdp2")},  # type: ignore[misc]
    "own hooks": lambda: own_hooks(False),
    "own hook that is the fault": lambda: own_hooks(True),
    "hardware fsdp2": lambda: hardware("fsdp2"),
    "loss outside, not seen": loss_not_seen,
    **{
        f"updated in backward {wrap}": lambda wrap=wrap: updated_in_backward(wrap)  # type: ignore[misc]
        for wrap in ("plain", "ddp", "fsdp2")
    },
    **{f"two calls {wrap}": lambda wrap=wrap: two_calls(wrap) for wrap in ("plain", "fsdp1", "fsdp2")},  # type: ignore[misc]
    "buffers": lambda: buffers(1, ()),
    "buffers, one silent": lambda: buffers(2, (0,)),
    "buffers, both sync": lambda: buffers(2, ()),
    "logits and loss": lambda: logits_and_loss(False),
    "logits and loss, both": lambda: logits_and_loss(True),
    "upstream": upstream,
    "popped": popped,
    "argument that requires grad": argument_that_requires_grad,
    **{f"changed {how}": lambda how=how: changed_argument(how) for how in ("tensor", "data", "numpy")},  # type: ignore[misc]
    "compiled": compiled,
    "compiled badly": compiled_badly,
    "higher order": higher_order,
    "no trace": no_trace,
    **{f"window open {wrap}": lambda wrap=wrap: window_open(wrap) for wrap in ("ddp", "fsdp1", "fsdp2")},  # type: ignore[misc]
    **{
        f"forward only {wrap} {again}": lambda wrap=wrap, again=again: forward_only(wrap, again)  # type: ignore[misc]
        for wrap in ("ddp", "fsdp1", "fsdp2")
        for again in (True, False)
    },
    "no loss": no_loss,
    "run and call": run_and_call,
    "loss outside": loss_outside,
    "closure": closure,
    "raising backward": raising_backward,
    "off": off,
    "checkpointed": lambda: checkpointed(False),
    "checkpointed, reentrant": lambda: checkpointed(True),
    "leak": leak,
}


def run_jobs(rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        torch.manual_seed(0)
        try:
            found[name] = JOBS[name]()
        except Exception:
            import traceback

            found[name] = traceback.format_exc()
        dist.barrier()
    return found
