"""What a report says about planted faults: one process, plain modules, the exact origin or nothing."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.report.messages import log_line
from ddp_nanguard.report.types import FaultReport

WIDTH = 6
Step = Callable[[Any, Any], "Tensor | dict[str, Tensor]"]


class _SpoilGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, spoils: bool) -> Tensor:
        ctx.spoils = spoils
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad * math.nan if ctx.spoils else grad), None


def spoil_gradient(values: Tensor, spoils: bool = True) -> Tensor:
    return _SpoilGradient.apply(values, spoils)  # type: ignore[no-any-return]  # torch does not type apply


def spoil(values: Tensor, spoils: bool = True) -> Tensor:
    return values + torch.zeros(()) / torch.tensor(0.0 if spoils else 1.0)


class Bad(nn.Module):
    """Identity that spoils its output or its input's gradient while ``on``."""

    def __init__(self, backward: bool = False) -> None:
        super().__init__()
        self.backward_only = backward
        self.on = False

    def forward(self, values: Tensor) -> Tensor:
        return (spoil_gradient if self.backward_only else spoil)(values, self.on)


class BadWeight(nn.Linear):
    on = False

    def forward(self, values: Tensor) -> Tensor:
        return F.linear(values, spoil_gradient(self.weight, self.on), self.bias)


class Model(nn.Module):
    """Linear ``a``, then ``body`` (a function of itself and the values), then linear ``b``."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.a = linear()
        for name, module in parts.items():
            self.add_module(name, module)
        self.b = linear()
        self.body = body

    def forward(self, values: Tensor) -> Tensor:
        return self.b(self.body(self, self.a(values)))  # type: ignore[no-any-return]  # modules return Any


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def batches(count: int = 3) -> list[Tensor]:
    return [torch.randn(4, WIDTH) for _ in range(count)]


def square(guard: Any, batch: Tensor) -> Tensor:
    return guard(batch).square().mean()  # type: ignore[no-any-return]  # the guard returns Any


def report_of(
    model: nn.Module,
    items: Iterable[Any],
    step: Step = square,
    *,
    plant: Callable[[bool], object] = bool,
    fault_at: int = 1,
    accumulation: int = 1,
    before_update: Callable[[int], object] = bool,
    **options: Any,
) -> FaultReport | None:
    """Trains with ``plant(True)`` in item ``fault_at`` only; the report of the fault, if any."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=None, **options)
    with contextlib.closing(guard), contextlib.suppress(NonFiniteError):
        try:
            for index, item in enumerate(guard.steps(items)):  # type: ignore[arg-type]  # a list is given
                plant(index == fault_at)
                losses = step(guard, item)
                guard.watch(loss=losses)
                sum(losses.values() if isinstance(losses, dict) else [losses]).backward()  # type: ignore[union-attr]
                if (index + 1) % accumulation == 0:
                    before_update(index)
                    optimizer.step()
                    optimizer.zero_grad()
        except NonFiniteError as error:
            return error.report
    return None


def place_of(report: FaultReport | None) -> tuple[Any, ...] | None:
    if report is None or report.origin is None:
        return None
    site = report.origin
    return str(site.phase), site.layer, site.call, site.slot


def switch(*modules: Any) -> Callable[[bool], None]:
    def plant(on: bool) -> None:
        for module in modules:
            module.on = on

    return plant


# -- habits: what is non-finite in clean steps too


class MaskedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores, self.soft, self.out = linear(), nn.Softmax(-1), linear()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        scores = self.scores(batch["x"]).masked_fill(batch["mask"], -math.inf)
        return self.out(self.soft(scores))  # type: ignore[no-any-return]  # modules return Any


def _masked(fully: bool) -> dict[str, Tensor]:
    mask = torch.zeros(4, WIDTH, dtype=torch.bool)
    mask[:, 0] = True
    mask[1] |= fully
    return {"x": torch.randn(4, WIDTH), "mask": mask}


@pytest.mark.parametrize("num_clean_steps", [0, 2])
def test_a_softmax_that_always_takes_masks_is_blamed_for_its_first_nan(num_clean_steps: int) -> None:
    items = [_masked(False)] * num_clean_steps + [_masked(True)]
    assert place_of(report_of(MaskedAttention(), items)) == ("forward", "soft", 1, "output")


def test_a_layer_that_merely_took_the_value_of_a_habitual_one_is_not_blamed() -> None:
    class Block(nn.Module):
        on = False

        def __init__(self) -> None:
            super().__init__()
            self.bad = Bad()
            self.bad.on = True

        def forward(self, values: Tensor) -> Tensor:
            values = self.bad(values)
            return values if self.on else values.nan_to_num(0.0)

    block = Block()
    report = report_of(Model(lambda m, x: m.block(x), block=block), batches(), plant=switch(block))
    assert report is not None and report.origin is not None
    assert report.origin.layer in {"block.bad", "block"}


def test_legal_nan_labels_are_not_blamed_for_a_layer() -> None:
    bad = Bad()
    labels = torch.randn(4, WIDTH)
    labels[0, 0] = math.nan

    def masked_step(guard: Any, batch: dict[str, Tensor]) -> Tensor:
        known = ~batch["y"].isnan()
        return (guard(batch["x"])[known] - batch["y"][known]).square().mean()  # type: ignore[no-any-return]

    items = [{"x": x, "y": labels} for x in batches()]
    report = report_of(Model(lambda m, x: m.bad(x), bad=bad), items, masked_step, plant=switch(bad))
    assert place_of(report) == ("forward", "bad", 1, "output")


def test_labels_are_blamed_where_they_reach_the_loss() -> None:
    labels = torch.full((4, WIDTH), math.nan)
    items = [{"x": x, "y": labels} for x in batches()]
    report = report_of(linear(), items, lambda guard, batch: F.mse_loss(guard(batch["x"]), batch["y"]))
    assert place_of(report) == ("input", None, None, '["y"]')


def test_masked_logits_do_not_undo_containment() -> None:
    nanny, bad = Bad(), Bad(backward=True)

    class Net(Model):
        def forward(self, values: Tensor) -> Tensor:
            logits = super().forward(values)
            return logits.masked_fill(torch.eye(4, WIDTH, dtype=torch.bool), -math.inf)

    def finite_part(guard: Any, batch: Tensor) -> Tensor:
        logits = guard(batch)
        return logits[logits.isfinite()].square().mean()  # type: ignore[no-any-return]

    model = Net(
        lambda m, x: m.bad(torch.cat([x[:1], m.nanny(x)[1:] * 0 + x[1:]]).nan_to_num(0.0)), nanny=nanny, bad=bad
    )
    report = report_of(model, batches(), finite_part, plant=switch(nanny, bad))
    assert place_of(report) == ("backward", "bad", 1, "grad")


# -- who did it


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


# -- claims about what was not looked at


def test_a_weight_that_this_step_spoilt_was_not_bad_before_it() -> None:
    def body(model: Any, values: Tensor) -> Tensor:
        if model.on:
            with torch.no_grad():
                model.b.weight.div_(0.0)
        return values

    model = Model(body)
    model.on = False  # type: ignore[assignment]
    report = report_of(model, batches(), plant=switch(model))
    assert report is not None
    assert "before the step" not in log_line(report) + report.cause
    assert report.nonfinite_state == ("b.weight",)


def test_gradients_that_the_loop_spoilt_are_not_said_to_be_finite() -> None:
    model = linear()

    def clip(index: int) -> None:
        if index == 1:
            assert model.weight.grad is not None
            model.weight.grad.mul_(math.nan)

    report = report_of(model, batches(), before_update=clip)
    assert report is not None
    assert "gradients were finite" not in report.cause or "when backward ended" in report.cause


def test_a_buffer_that_the_forward_wrote_was_not_bad_before() -> None:
    class Counting(nn.Module):
        on = False

        def __init__(self) -> None:
            super().__init__()
            self.lin = linear()
            self.register_buffer("spread", torch.ones(WIDTH))

        def forward(self, values: Tensor) -> Tensor:
            with torch.no_grad():
                self.spread.div_(0.0 if self.on else 1.0)
            return self.lin(values)  # type: ignore[no-any-return]

    model = Counting()
    report = report_of(model, batches(), plant=switch(model))
    assert place_of(report) == ("state", "", None, "spread")
    assert report is not None and "before the step" not in log_line(report) + report.cause


def test_a_skipped_type_is_unchecked() -> None:
    bad = Bad()
    model = Model(lambda m, x: m.bad(x), bad=bad)
    report = report_of(model, batches(), plant=switch(bad), skip_types=("Bad",))
    assert report is not None and any("bad" in text or "Bad" in text for text in report.unchecked)


def test_finite_in_is_said_of_what_was_looked_at_only() -> None:
    class Nothing(nn.Module):
        def forward(self) -> Tensor:
            return torch.full((4, WIDTH), math.nan)

    report = report_of(Model(lambda m, x: x + m.nothing(), nothing=Nothing()), batches())
    assert place_of(report) == ("forward", "nothing", 1, "output")
    assert report is not None and "finite in" not in log_line(report)


# -- cases that must stay quiet, or must be exact


def _where_trap(model: Any, values: Tensor) -> Tensor:
    values = values * 0
    return torch.where(values > 0, values.log(), torch.zeros_like(values))


def test_a_where_trap_is_between_its_neighbours() -> None:
    report = report_of(Model(_where_trap), batches())
    assert report is not None and report.to_dict()["inline_code"] == {"layer": "", "after": "b", "before": "a"}


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda y, t: (y[~t.isnan()] - t[~t.isnan()]).square().mean(), None),
        (lambda y, t: F.mse_loss(y, t, reduction="none")[~t.isnan()].mean(), ("backward", "", 1, "grad")),
        (lambda y, t: F.l1_loss(y, t, reduction="none")[~t.isnan()].mean(), None),
        (lambda y, t: (y * 0).norm(), None),
        (lambda y, t: (y * 0).square().sum().sqrt(), ("backward", "", 1, "grad")),
        (lambda y, t: y[y > 1e9].mean(), ("loss", None, None, "loss")),
        (lambda y, t: {"cls": y.sum() / 0, "box": y.mean()}, ("loss", None, None, "loss.cls")),
    ],
    ids=["masked", "mse", "l1", "norm", "sqrt", "empty", "dict"],
)
def test_losses(loss: Any, expected: tuple[Any, ...] | None) -> None:
    labels = torch.zeros(4, WIDTH)
    labels[0] = math.nan
    report = report_of(linear(), batches(), lambda guard, batch: loss(guard(batch), labels))
    assert place_of(report) == expected


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_fully_padded_row(need_weights: bool) -> None:
    def body(model: Any, values: Tensor) -> Tensor:
        padded = torch.ones(1, 4, dtype=torch.bool)
        x = values[None]
        return model.attn(x, x, x, key_padding_mask=padded, need_weights=need_weights)[0]  # type: ignore[no-any-return]

    report = report_of(Model(body, attn=nn.MultiheadAttention(WIDTH, 2, batch_first=True)), batches())
    assert place_of(report) == (("forward", "attn", 1, "output") if need_weights else None)
