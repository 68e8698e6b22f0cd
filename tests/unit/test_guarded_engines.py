"""`guard_engine`, on engines that are called as accelerate calls DeepSpeed's; and outputs that hold a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.integrations.engines import WatchedBackward, guard_engine

BAD_STEP = 2


class Engine(nn.Module):
    """Owns backward and step: it accumulates, clips, and steps an optimizer over copies of the weights.

    The loop calls what accelerate calls: ``set_gradient_accumulation_boundary``, ``backward``, and ``step`` at the
    boundary.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.masters = [parameter.detach().clone() for parameter in module.parameters()]
        self.optimizer = Masters(self)
        self.is_boundary = True
        self.num_updates = 0

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.is_boundary = is_boundary

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.is_boundary

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        if not self.is_boundary:
            return
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.module.parameters(), strict=True):
                master -= 0.1 * parameter.grad
                parameter.copy_(master)
                parameter.grad = None
        self.num_updates += 1


class Masters:
    """Around an optimizer of torch that the engine, written in another language, never steps."""

    def __init__(self, engine: Engine) -> None:
        self.optimizer = torch.optim.SGD(engine.masters, lr=0.1)
        self.bit16_groups = [list(engine.module.parameters())]

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


def train(engine: Engine, guard: NanGuard, accumulate: int = 1) -> None:
    """Three steps and the bad one, called as accelerate does; the loss of that divides 0 by 0."""
    for index in range(4 * accumulate):
        weight = torch.zeros(()) if index == BAD_STEP * accumulate else torch.ones(())
        loss = (engine(guard.begin(torch.ones(2, 3))) * weight).sum() / weight
        engine.set_gradient_accumulation_boundary(is_boundary=(index + 1) % accumulate == 0)
        engine.backward(loss)
        if engine.is_boundary:
            engine.step()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_engine_that_owns_its_step_is_stopped_before_it(accumulate: int) -> None:
    torch.manual_seed(0)
    engine = Engine(nn.Linear(3, 1))
    guard = NanGuard(engine, engine.optimizer, dump_dir=None)
    watched = guard_engine(guard, engine)
    with pytest.raises(NonFiniteError) as caught:
        train(engine, guard, accumulate)
    first = str(caught.value).splitlines()[0]
    assert first == f"rank 0, step {BAD_STEP}, micro-batch 0, loss: loss is NaN; the model's output was finite"
    assert engine.num_updates == BAD_STEP
    assert all(parameter.isfinite().all() for parameter in engine.module.parameters())
    watched.undo()
    guard.close()
    assert not {"step", "backward"} & set(vars(engine))


def test_skipping_is_refused_where_gradients_cannot_be_taken_out_again() -> None:
    engine = Engine(nn.Linear(3, 1))
    with NanGuard(engine, engine.optimizer, dump_dir=None, on_fault="skip") as guard:
        with pytest.raises(ValueError, match="option on_fault='skip' with Engine, which owns its step"):
            guard_engine(guard, engine)
        assert not {"step", "backward"} & set(vars(engine))


def test_a_loss_that_is_known_is_looked_at_once_and_what_is_added_to_it_is_seen() -> None:
    class Accelerator:
        def backward(self, loss: Tensor) -> None:
            loss.backward()

    accelerator, model = Accelerator(), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with NanGuard(model, optimizer, dump_dir=None) as guard:
        watched = WatchedBackward(guard, accelerator)
        seen = []
        for change in (lambda loss: loss, lambda loss: loss / 2, lambda loss: loss + model.bias.sum()):
            loss = guard.run(lambda called, batch: called(batch).sum(), guard.begin(torch.ones(2, 3)))
            watched.knows(loss)
            accelerator.backward(change(loss))
            seen.append(list(guard._context.window.micro_batches[-1].losses))
            optimizer.step()
        assert seen == [["loss"], ["loss"], ["loss", "backpropagated"]]
        watched.undo()
        assert not vars(accelerator)


def test_what_was_wrapped_before_and_since_stays_so() -> None:
    class Accelerator: ...

    accelerator: Any = Accelerator()
    accelerator.backward = own = lambda loss: None
    model = nn.Linear(3, 1)
    with NanGuard(model, torch.optim.SGD(model.parameters(), lr=0.1), dump_dir=None) as guard:
        watched = WatchedBackward(guard, accelerator)
        watched.undo()
        assert accelerator.backward is own
        watched = WatchedBackward(guard, accelerator)
        accelerator.backward = others = lambda loss: None
        watched.undo()
        assert accelerator.backward is others


class Cache:
    """No container that anything knows: keys of attention, as language models return them."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = [keys]


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        keys = self.first(x)
        return {"logits": self.last(keys), "cache": Cache(keys)}


def stopped(loss_of: Any) -> list[str]:
    torch.manual_seed(0)
    model = Cached()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=None)
    try:
        for step in range(4):
            loss = loss_of(guard(torch.randn(3, 4)), torch.tensor(float(step != BAD_STEP)))
            guard.watch(loss=loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except NonFiniteError as error:
        return str(error).splitlines()
    return []


def test_a_cache_in_the_output_does_not_keep_the_step_from_being_run_again() -> None:
    first, *rows = stopped(lambda output, weight: output["logits"].sum() * weight / weight)
    assert first == "rank 0, step 2, micro-batch 0, loss: loss is NaN; the model's output was finite"
    assert any(row.startswith("  again:    same up to the model's output") for row in rows)


def test_a_gradient_that_came_through_the_cache_is_told_as_not_compared() -> None:
    def loss_of(output: Any, weight: Tensor) -> Tensor:
        keys = output["cache"].keys[0]
        return output["logits"].sum() + (keys - keys.detach() + weight).sqrt().sum()

    first, *rows = stopped(loss_of)
    assert first.startswith("rank 0, step 2, micro-batch 0, backward: gradient of first.")
    (again,) = [row for row in rows if row.startswith("  again:")]
    assert 'not compared: gradients of what else the model returns (["cache"])' in again
