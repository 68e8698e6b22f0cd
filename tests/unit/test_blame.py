"""What a report says about planted faults: one process, plain modules, the exact origin or nothing."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.report.messages import log_line
from tests.unit.blaming import (
    WIDTH,
    Bad,
    BadWeight,
    Model,
    batches,
    linear,
    place_of,
    report_of,
    spoil,
    spoil_gradient,
    square,
    switch,
)


def test_a_module_that_spoils_its_input_in_place_is_named() -> None:
    class InPlace(nn.Module):
        on = False

        def forward(self, values: Tensor) -> None:
            with torch.no_grad():
                values.div_(0.0 if self.on else 1.0)

    bad = InPlace()

    def body(model: Any, values: Tensor) -> Tensor:
        model.bad(values)
        return values

    report = report_of(Model(body, bad=bad), batches(), plant=switch(bad))
    assert report is not None and report.origin is not None
    assert report.origin.layer == "bad"


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("backward", [True, False])
def test_a_fault_inside_a_checkpoint_is_put_down_to_its_module(use_reentrant: bool, backward: bool) -> None:
    bad = Bad(backward=backward)
    block = nn.Sequential(linear(), bad, linear())
    model = Model(lambda m, x: checkpoint(m.block, x, use_reentrant=use_reentrant), block=block)
    report = report_of(model, batches(), plant=switch(bad))
    phase, slot = ("backward", "grad") if backward else ("forward", "output")
    assert place_of(report) == (phase, "block.1", 1, slot)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_code_after_a_checkpoint_is_not_put_down_to_the_checkpoint(use_reentrant: bool) -> None:
    model = Model(
        lambda m, x: spoil_gradient(checkpoint(m.block, x, use_reentrant=use_reentrant), m.on),
        block=nn.Sequential(linear(), nn.Tanh()),
    )
    model.on = False  # type: ignore[assignment]  # a plain attribute
    report = report_of(model, batches(), plant=switch(model))
    assert report is not None and report.origin is not None
    assert (report.origin.phase, report.origin.layer) == ("backward", "")
    assert report.origin.inline_code is not None and report.origin.inline_code.layer == ""


def test_a_tensor_that_an_unused_module_saw_first_still_belongs_to_the_code_after() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log = linear()

        def forward(self, values: Tensor) -> Tensor:
            values = values * 1.0
            with torch.no_grad():
                self.log(values)
            return values

    model = Model(lambda m, x: spoil_gradient(m.block(x), m.on), block=Block())
    model.on = False  # type: ignore[assignment]
    report = report_of(model, batches(), plant=switch(model))
    assert report is not None and report.origin is not None and report.origin.inline_code is not None
    assert report.origin.inline_code.layer == ""


def test_a_module_that_also_returns_its_input_is_not_blamed_for_what_follows() -> None:
    class Pair(nn.Module):
        def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
            return values, values * 2

    def body(model: Any, values: Tensor) -> Tensor:
        same, double = model.pair(values)
        return spoil_gradient(same, model.on) + double  # type: ignore[no-any-return]

    model = Model(body, pair=Pair())
    model.on = False  # type: ignore[assignment]
    report = report_of(model, batches(), plant=switch(model))
    assert report is not None and report.origin is not None
    assert report.origin.layer != "pair"


def test_a_child_that_raises_leaves_the_stack() -> None:
    class Raising(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            raise ValueError

    def body(model: Any, values: Tensor) -> Tensor:
        with contextlib.suppress(ValueError):
            model.raising(values)
        return spoil(values, model.on)

    model = Model(body, raising=Raising())
    model.on = False  # type: ignore[assignment]
    report = report_of(model, batches(), plant=switch(model))
    assert report is not None and report.origin is not None and report.origin.inline_code is not None
    assert report.origin.inline_code.layer == ""


@pytest.mark.parametrize("guilty", ["q", "k"])
def test_of_two_modules_on_one_tensor_none_is_cleared(guilty: str) -> None:
    """Which of them it was cannot be seen; that no layer made it is untrue."""
    parts = {name: Bad(backward=True) for name in ("q", "k")}
    model = Model(lambda m, x: m.q(x).tanh() + m.k(x).sigmoid(), **parts)
    report = report_of(model, batches(), plant=switch(parts[guilty]))
    assert report is not None and report.origin is not None
    text = log_line(report)
    assert "no layer made" not in text
    assert "q" in text and "k" in text


def test_two_modules_on_the_input_of_a_container_are_suspects_within_it() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = Bad(backward=True), Bad(backward=True)

        def forward(self, values: Tensor) -> Tensor:
            return self.q(values).tanh() + self.k(values).sigmoid()  # type: ignore[no-any-return]

    pair = Pair()
    report = report_of(Model(lambda m, x: m.pair(x), pair=pair), batches(), plant=switch(pair.q))
    assert report is not None and report.origin is not None
    assert (report.origin.layer, report.origin.suspects) == ("pair", ("pair.q", "pair.k"))


def test_a_checkpoint_within_a_reentrant_one_is_named_once() -> None:
    class BadSquare(Bad):
        def forward(self, values: Tensor) -> Tensor:
            return super().forward(values).square()  # which keeps its input, so that it runs a third time

    bad = BadSquare(backward=True)
    model = Model(lambda m, x: checkpoint(m.outer, x, use_reentrant=True))
    model.outer = Model(lambda m, x: checkpoint(m.bad, x, use_reentrant=False), bad=bad)
    report = report_of(model, batches(), plant=switch(bad))
    assert place_of(report) == ("backward", "outer.bad", 1, "grad")


class OnIn(Bad):
    """Spoils the gradient in one of its calls of a micro-batch; a recomputation counts on."""

    def __init__(self, *calls: int) -> None:
        super().__init__(backward=True)
        self.calls, self.called = calls, 0

    def forward(self, values: Tensor) -> Tensor:
        self.called += 1
        return spoil_gradient(values, self.on and self.called in self.calls)


@pytest.mark.parametrize(("bad", "number"), [(OnIn(1, 3), 1), (OnIn(2, 4), 2)], ids=["first", "second"])
def test_several_calls_in_a_reentrant_checkpoint_are_told_apart(bad: OnIn, number: int) -> None:
    def plant(on: bool) -> None:
        bad.on, bad.called = on, 0

    twice = Model(lambda m, x: m.bad(m.bad(x).tanh()), bad=bad)
    report = report_of(
        Model(lambda m, x: checkpoint(m.twice, x, use_reentrant=True), twice=twice), batches(), plant=plant
    )
    assert place_of(report) == ("backward", "twice.bad", number, "grad")


class BadBegin(nn.Module):
    """Its own code spoils the gradient of its input while ``on``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.on = linear(), False

    def forward(self, values: Tensor) -> Tensor:
        return self.layer(spoil_gradient(values, self.on))  # type: ignore[no-any-return]  # modules return Any


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # the first run has no graph
def test_code_at_the_start_of_a_reentrant_checkpoint_within_another_one() -> None:
    inner = BadBegin()
    outer = Model(lambda m, x: checkpoint(m.inner, x, use_reentrant=True), inner=inner)
    model = Model(lambda m, x: checkpoint(m.outer, x, use_reentrant=True), outer=outer)
    report = report_of(model, batches(), plant=switch(inner))
    assert place_of(report) == ("backward", "outer.inner", 1, "grad")
    assert report is not None and report.origin is not None and report.origin.inline_code is not None
    assert report.origin.inline_code.layer == "outer.inner"


def test_a_module_that_is_registered_twice_does_not_share_its_weight_with_others() -> None:
    bad = BadWeight(WIDTH, WIDTH)
    model = Model(lambda m, x: m.again.inner(m.inner(x)), inner=bad, again=nn.ModuleDict({"inner": bad}))
    report = report_of(model, batches(), plant=switch(bad))
    assert place_of(report) == ("backward", "inner", None, "inner.weight")
    assert report is not None and report.origin is not None and report.origin.suspects == ()


def test_a_residual_module_is_blamed_for_its_own_gradient() -> None:
    bad = Bad(backward=True)
    report = report_of(Model(lambda m, x: x + m.bad(x), bad=bad), batches(), plant=switch(bad))
    assert place_of(report) == ("backward", "bad", 1, "grad")


def test_a_weight_handed_to_another_module_is_not_put_down_to_its_owner() -> None:
    class Head(nn.Module):
        on = False

        def forward(self, values: Tensor, weight: Tensor) -> Tensor:
            return F.linear(values, spoil_gradient(weight, self.on))

    head = Head()
    model = Model(lambda m, x: m.head(m.owner(x), m.owner.weight), owner=linear(), head=head)
    report = report_of(model, batches(), plant=switch(head))
    assert report is not None and report.origin is not None
    assert report.origin.slot == "owner.weight"
    assert report.origin.layer == "head" or "the gradient of its layer's output was finite" not in log_line(report)


def test_a_gradient_taken_before_the_loss_is_the_origin_of_the_loss() -> None:
    """Gradient penalties and forces: `torch.autograd.grad` inside the loss."""
    bad = Bad(backward=True)

    def penalty(guard: Any, batch: Tensor) -> Tensor:
        values = batch.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(guard(values).sum(), values, create_graph=True)
        return (gradient.norm(dim=1) - 1).square().mean()

    report = report_of(Model(lambda m, x: m.bad(x.tanh()), bad=bad), batches(), penalty, plant=switch(bad))
    assert report is not None and report.origin is not None
    assert (report.origin.phase, report.origin.layer) == ("backward", "bad")


def test_one_backward_for_several_micro_batches_names_no_wrong_one() -> None:
    bad = BadWeight(WIDTH, WIDTH)
    model = nn.Sequential(linear(), bad)
    guard = NanGuard(model, torch.optim.SGD(model.parameters(), lr=0.1), dump_dir=None)
    with contextlib.closing(guard):
        total = torch.zeros(())
        for index, item in enumerate(guard.steps(batches())):
            bad.on = index == 0
            total = total + square(guard, item)
        total.backward()  # type: ignore[no-untyped-call]  # torch's own
        with pytest.raises(NonFiniteError) as caught:
            guard.check()
    origin = caught.value.report.origin
    assert origin is not None and origin.slot == "1.weight"
    assert origin.micro_batch in {0, None}
