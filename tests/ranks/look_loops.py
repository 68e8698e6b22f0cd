"""Jobs with one fault, for what the second look says: arguments, compiled code, odd loops; and all of them by name."""

from __future__ import annotations

import gc
import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_nanguard.dump.read import open_dump
from tests.ranks import look_jobs
from tests.ranks.look_jobs import BAD_STEP, Job, Net, usual
from tests.training import digest, listening


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
    return Job(torch.compile(net, backend="aot_eager")).run(usual)


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
    return Job(Branches()).run(usual)


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


class Opaque(Tensor):
    """A kind of tensor that nobody can look into."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Opaque:
        tensor: Opaque = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        tensor.inner = inner
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.ops.aten.mul.Tensor:
            raise NotImplementedError(f"{function} of an opaque tensor")
        return Opaque(args[0].inner * args[1])


class WithOpaque(Net):
    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        with torch.no_grad():
            scaled = Opaque(values.detach()) * 2.0
        return super().forward(scaled.inner, divisor)  # type: ignore[attr-defined]


def opaque(wrap: str) -> Any:
    return Job(WithOpaque(), wrap).run(usual)


class NoTrace(Net):
    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        return Untraceable.apply(super().forward(values, divisor))  # type: ignore[no-any-return]


def no_trace() -> Any:
    return Job(NoTrace()).run(usual)


def window_open(wrap: str) -> Any:
    """A forward still waits for its backward when the optimizer steps."""
    kept = []

    def step(job: Job, number: int) -> None:
        usual(job, number)
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
    return {**job.run(usual), "texts": texts}


def _step_of(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    output = model(*batch)
    return output.square().mean() / batch[1].mean().detach()  # type: ignore[no-any-return]


def run_and_call() -> Any:
    """One micro-batch by ``guard.run``, one by ``guard(...)``; the fault is in the second."""

    def step(job: Job, number: int) -> None:
        job.guard.run(_step_of, (job.values(number), torch.ones(3, 1))).backward()
        usual(job, number)

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
        usual(job, number)

    return job.run(step)


def off() -> Any:
    return Job(Net(), look_again=False).run(usual)


def checkpointed(reentrant: bool) -> Any:
    class Checkpointed(Net):
        def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
            values = values.detach().requires_grad_()
            hidden = checkpoint(self.part, values, divisor, use_reentrant=reentrant)
            return self.head(self.drop(hidden))  # type: ignore[no-any-return]

    return Job(Checkpointed()).run(usual)


def _penalty(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    values = batch[0].clone().requires_grad_()
    output = model(values, batch[1])
    (gradient,) = torch.autograd.grad(output.sum(), values, create_graph=True)
    return output.square().mean() + gradient.square().mean()  # type: ignore[no-any-return]


def penalty(runs: bool) -> Any:
    """A gradient within the loss."""

    def step(job: Job, number: int) -> None:
        batch = job.values(number), job.divisor(number)
        (job.guard.run(_penalty, batch) if runs else _penalty(job.guard, batch)).backward()

    return Job(Net()).run(step)


def output_in_place() -> Any:
    """The loop changes what the model has given, and differentiates that."""

    def step(job: Job, number: int) -> None:
        output = job.guard(job.values(number), job.divisor(number))
        output.mul_(2.0)
        output.square().mean().backward()

    return Job(Net()).run(step)


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
        found = Job(Net(), redact=True, dump_dir=directories[0]).run(usual)
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
    return {"text": "", "look": None, "lines": [line for line in lines if " · second look: " in line]}


JOBS: dict[str, Callable[[], Any]] = {
    "hardware": look_jobs.hardware,
    "hardware, sharded": partial(look_jobs.hardware, "fsdp2"),
    "counting": look_jobs.counting,
    "counting around": look_jobs.counting_around,
    "thawed": look_jobs.thawed,
    "swapped": look_jobs.swapped,
    "overwritten": look_jobs.overwritten,
    "drawn": look_jobs.drawn,
    "memory": look_jobs.dirty_memory,
    "held outside": look_jobs.held_outside,
    "attributes, plain": partial(look_jobs.attributes, "plain"),
    "attributes, ddp": partial(look_jobs.attributes, "ddp"),
    "attributes, fsdp1": partial(look_jobs.attributes, "fsdp1"),
    "attributes, fsdp2": partial(look_jobs.attributes, "fsdp2"),
    "hooks": partial(look_jobs.own_hooks, False),
    "hooks, at fault": partial(look_jobs.own_hooks, True),
    "counted hooks, ddp": partial(look_jobs.counted_hooks, "ddp"),
    "counted hooks, fsdp1": partial(look_jobs.counted_hooks, "fsdp1"),
    "counted hooks, fsdp2": partial(look_jobs.counted_hooks, "fsdp2"),
    "sums of parts": look_jobs.sums_of_parts,
    "updated within, plain": partial(look_jobs.updated_within, "plain"),
    "updated within, fsdp2": partial(look_jobs.updated_within, "fsdp2"),
    "augmented": look_jobs.augmented,
    "two calls, ddp": partial(look_jobs.two_calls, "ddp_unused"),
    "two calls, fsdp1": partial(look_jobs.two_calls, "fsdp1"),
    "two calls, fsdp2": partial(look_jobs.two_calls, "fsdp2"),
    "buffers": partial(look_jobs.buffers, 1, ()),
    "buffers, first silent": partial(look_jobs.buffers, 2, (0,)),
    "buffers, both communicate": partial(look_jobs.buffers, 2, ()),
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
    "opaque, ddp": partial(opaque, "ddp"),
    "opaque, fsdp2": partial(opaque, "fsdp2"),
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
    "output in place": output_in_place,
    "penalty": partial(penalty, False),
    "penalty in the step": partial(penalty, True),
    "many skips": many_skips,
}
