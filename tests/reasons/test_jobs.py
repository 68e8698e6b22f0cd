"""Reasons that lie outside of one operator: the batch, state, optimizers, scalers, growth, recomputation, chance."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_nanguard.diagnosis.diagnose import Diagnosis, diagnose, facts_of
from ddp_nanguard.diagnosis.rules import RULES
from tests.diagnosing import (
    WIDTH,
    Body,
    N,
    Training,
    batch,
    body,
    diagnosed,
    inline_code,
    marked,
    of_loss,
    session_of,
    square,
)

THIS = sys.modules[__name__]


def root_of_squares(h: Tensor) -> Tensor:
    return h + (h * 0).pow(2).sum().sqrt()


# -- values from outside -----------------------------------------------------------------------------------------------


def test_a_bad_sample_is_named_with_its_ids(tmp_path: Path) -> None:
    items = batch(path=["a.png", "b.png", "c.png", "d.png", "e.png", "f.png"], index=torch.arange(100, 106))
    items["x"][3, 1] = math.nan
    found = diagnosed(Training(body(torch.tanh), square, [batch(), items], accumulation=2), tmp_path)
    assert found.traced is not None and found.traced.first_nonfinite_op is not None
    assert found.traced.micro_batch == 1
    assert (found.traced.first_nonfinite_op.layer, found.traced.first_nonfinite_op.call) == ("a", 1)
    assert (found.reason.kind, found.reason.sentence) == ("bad input", 'batch["x"] holds NaN, sample 3')
    assert found.reason.evidence[0] == '1 of 24 elements, first batch["x"][3, 1]'
    assert found.reason.evidence[2:] == (
        'batch["path"] of these samples: d.png',
        'batch["index"] of these samples: 103',
    )


class Spoilt(Body):
    def __init__(self) -> None:
        super().__init__(torch.tanh)
        self.b.weight.data[1, 2] = math.nan


def test_a_weight_that_was_bad_before_training(tmp_path: Path) -> None:
    found = diagnosed(Training(Spoilt, square, [batch()]), tmp_path)
    assert (found.reason.kind, found.reason.sentence) == ("state", "b.weight held NaN before any training")
    assert found.traced is not None and found.traced.first_nonfinite_op is not None
    assert found.traced.first_nonfinite_op.layer == "b"


class Unwritten(Body):
    def forward(self, values: Tensor) -> Tensor:
        room = torch.empty(N, WIDTH)
        room.untyped_storage().nbytes()
        room.data.view(torch.int32).fill_(-1)  # what dirty memory holds: the bits of a NaN, not written as a number
        return self.b(self.a(values) + room)  # type: ignore[no-any-return]  # <empty>


def test_memory_that_nobody_wrote(tmp_path: Path) -> None:
    found = diagnosed(Training(lambda: Unwritten(torch.tanh), square, [batch()]), tmp_path)
    assert found.reason.kind == "uninitialised memory"
    assert (
        found.traced is not None
        and found.traced.first_nonfinite_op is not None
        and found.traced.first_nonfinite_op.line is not None
    )
    assert found.traced.first_nonfinite_op.line.number == marked(THIS, "empty")


class Normed(Body):
    """Its outputs are finite, what BatchNorm keeps for evaluation is not."""

    def __init__(self) -> None:
        super().__init__(torch.tanh)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return self.b(self.norm(self.a(values) * 1e25))  # type: ignore[no-any-return]


def test_running_statistics_that_overflow(tmp_path: Path) -> None:
    found = diagnosed(Training(lambda: Normed(), square, [batch()]), tmp_path)
    assert found.traced is not None and found.traced.first_nonfinite_op is not None
    assert found.traced.target == "the buffer norm.running_var is +Inf"
    assert (found.traced.first_nonfinite_op.operator, found.traced.first_nonfinite_op.layer) == (
        "aten.native_batch_norm.default",
        "norm",
    )
    assert found.reason.kind == "overflow"


def hooked(h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient / 0)  # <hook>
    return h


def test_code_of_the_users_that_runs_in_backward(tmp_path: Path) -> None:
    found = diagnosed(inline_code(hooked), tmp_path)
    assert (
        found.traced is not None
        and found.traced.first_nonfinite_op is not None
        and found.traced.first_nonfinite_op.line is not None
    )
    assert (found.traced.first_nonfinite_op.phase, found.traced.first_nonfinite_op.line.number) == (
        "backward",
        marked(THIS, "hook"),
    )
    assert (found.reason.kind, found.traced.first_nonfinite_op.numbers) == ("division by zero", ("other=0",))


def test_an_infinity_of_the_batch_that_becomes_nan_at_once(tmp_path: Path) -> None:
    loss = lambda h, items: F.binary_cross_entropy_with_logits(h, items["t"])  # noqa: E731
    found = diagnosed(of_loss(loss, t=torch.full((N, 3), math.inf)), tmp_path)
    assert found.reason.sentence.startswith('batch["t"] holds Inf, samples 0, 1, 2')


@pytest.mark.parametrize("held", [math.nan, [1.0, math.nan]], ids=["a number", "a list"])
def test_a_number_of_the_batch(held: Any, tmp_path: Path) -> None:
    found = diagnosed(of_loss(lambda h, items: (h.mean() * torch.tensor(items["w"])).sum(), w=held), tmp_path)
    assert found.reason.kind == "bad input"
    assert found.reason.sentence == f'batch["w"]{"[1]" if isinstance(held, list) else ""} holds NaN'


# -- optimizers, scalers, growth ---------------------------------------------------------------------------------------


class Half(Body):
    def __init__(self) -> None:
        super().__init__(torch.tanh)
        self.half()


def half_step(model: Any, items: Any) -> Tensor:
    return (model(items["x"].half()).float() * 1e-4).sum()  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("keep", [False, True])
def test_an_eps_that_is_zero_in_half_precision(keep: bool, tmp_path: Path) -> None:
    adam = lambda parameters: torch.optim.Adam(parameters, lr=1e-3)  # noqa: E731  # shorter than a function
    job = Training(Half, half_step, [batch(), batch()], optimizer=adam, options={"keep_previous": keep})
    found = diagnosed(job, tmp_path)
    assert found.reason.kind == "update overflow"
    assert "eps=1e-08 is 0 in float16: the update of" in found.reason.sentence
    assert bool(found.obstacle) is not keep


class ByHand(torch.optim.Optimizer):
    """An optimizer of the user's, whose update goes wrong while every gradient is finite."""

    def __init__(self, parameters: Any, formula: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.formula = formula

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's own has two
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["power"] = torch.ones(())
            parameter.sub_(self.formula(parameter.grad, state))


def debiased(gradient: Tensor, state: Any) -> Tensor:
    state["power"] *= 1e-25
    return gradient / state["power"] if state["power"] < 1e-30 else gradient


UNDERFLOWED = ': the divisor, a.weight.power, is 0: it underflowed in float32 in `state["power"] *= 1e-25`'
UPDATES: dict[str, tuple[Any, str, str]] = {
    "a power that underflows": (debiased, "division by zero", UNDERFLOWED),
    "a logarithm": (lambda g, _: (g * 0).log(), "edge of domain", "log of 0 in `(g * 0).log()`"),
    "a root": (lambda g, _: (-g.abs() - 1).sqrt(), "edge of domain", "sqrt of a negative number in"),
    "a norm": (
        lambda g, _: (g * 0) / (g * 0).norm(),
        "division by zero",
        ": the divisor, a norm over all 16 elements,",
    ),
    "half precision": (lambda g, _: (g * 0 + 300).half() ** 2, "overflow", "float16 overflow in"),
}


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_by_hand_says_what_went_wrong_in_it(name: str, tmp_path: Path) -> None:
    formula, kind, said = UPDATES[name]
    job = inline_code(torch.tanh, optimizer=lambda parameters: ByHand(parameters, formula))
    job.batches, job.options = [batch(), batch()], {"keep_previous": True}
    found, rules = answering(job, tmp_path)
    assert found.reason.kind == kind
    assert said in found.reason.sentence
    assert len(rules) == 2 and rules[-1] == "update_overflow"


def answering(job: Training, directory: Path) -> tuple[Diagnosis, list[str]]:
    """The diagnosis, and the names of all rules that have an answer, in their order."""
    session = session_of(job, directory)
    found = diagnose(session, session.plain())
    facts = facts_of(session.dump, found.traced, found.outcome)
    return found, [rule.__name__ for rule in RULES if rule(facts) is not None]


@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_without_eps(foreach: bool, tmp_path: Path) -> None:
    adagrad = lambda parameters: torch.optim.Adagrad(parameters, eps=0.0, foreach=foreach)  # noqa: E731
    job = inline_code(lambda h: h * 0, optimizer=adagrad, options={"keep_previous": True})
    job.batches = [batch(), batch()]
    found, rules = answering(job, tmp_path)
    assert rules == ["vanishing_eps", "edge_of_domain", "update_overflow"]
    operator = "aten._foreach_addcdiv_.Scalar" if foreach else "aten.addcdiv_.default"
    assert found.reason.text.endswith(f"overflow: the update of a.weight divides by zero: {operator}, eps is too small")


def test_a_learning_rate_that_is_no_number(tmp_path: Path) -> None:
    def spoil(model: Any, optimizer: Any, index: int) -> None:
        optimizer.param_groups[0]["lr"] = math.nan

    found = diagnosed(inline_code(torch.tanh, before_update=spoil), tmp_path)
    assert (found.reason.kind, found.reason.sentence) == ("hyper-parameter", "g0.lr is NaN")


def test_growth_by_a_learning_rate(tmp_path: Path) -> None:
    job = Training(lambda: Body(lambda h: h), square, [batch()] * 80)
    job.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=3.0)
    found = diagnosed(job, tmp_path)
    assert found.reason.kind == "growth"
    assert "per step since step" in found.reason.sentence


def test_a_scale_that_collapses(tmp_path: Path) -> None:
    job = inline_code(root_of_squares, scaler=lambda: torch.amp.GradScaler("cpu", init_scale=4.0))
    job.options = {"scale_floor": 2.0}
    job.batches = [batch()] * 9
    found = diagnosed(job, tmp_path)
    assert found.reason.kind == "edge of domain"  # no scale heals that


def test_a_scale_that_is_too_large_for_too_long(tmp_path: Path) -> None:
    job = inline_code(torch.tanh, scaler=lambda: torch.amp.GradScaler("cpu", init_scale=2.0**127))
    job.options = {"max_consecutive_overflows": 2}
    job.step = lambda model, items: square(model, items) * 1e3
    job.batches = [batch()] * 4
    found = diagnosed(job, tmp_path)
    assert (found.reason.kind, found.reason.sentence) == ("scale collapse", "scale collapse: 2 overflows in a row")


# -- calls, recomputation, compiled code -------------------------------------------------------------------------------


class Twice(Body):
    """One encoder for two inputs that are equal."""

    def forward(self, values: Tensor) -> Tensor:
        one, other = self.a(values), self.a(values.clone())
        distance = ((one - other) ** 2).sum(-1).sqrt()  # <D14>
        return self.b(one) + distance[:, None]  # type: ignore[no-any-return]


def test_a_shared_encoder(tmp_path: Path) -> None:
    found = diagnosed(Training(lambda: Twice(torch.tanh), square, [batch()]), tmp_path)
    assert (
        found.traced is not None
        and found.traced.first_nonfinite_op is not None
        and found.traced.first_nonfinite_op.line is not None
    )
    first_nonfinite_op = found.traced.first_nonfinite_op
    assert (first_nonfinite_op.line.number, first_nonfinite_op.layer, first_nonfinite_op.phase) == (
        marked(THIS, "D14"),
        "",
        "backward",
    )
    assert first_nonfinite_op.node == "SqrtBackward0" and first_nonfinite_op.forward_operator == "aten.sqrt.default"
    assert found.reason.sentence.startswith("the derivative of sqrt at 0 is infinite")


class Divide(nn.Module):
    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        return values / divisor  # <H08>


class Second(Body):
    """A module that is called twice, and fails the second time."""

    def __init__(self) -> None:
        super().__init__(torch.tanh)
        self.divide = Divide()

    def forward(self, values: Tensor) -> Tensor:
        once = self.divide(self.a(values), torch.ones(()))
        return self.b(self.divide(once, torch.zeros(())))  # type: ignore[no-any-return]


def test_the_call_of_a_shared_module(tmp_path: Path) -> None:
    found = diagnosed(Training(Second, square, [batch()]), tmp_path)
    assert (
        found.traced is not None
        and found.traced.first_nonfinite_op is not None
        and found.traced.first_nonfinite_op.line is not None
    )
    first_nonfinite_op = found.traced.first_nonfinite_op
    assert (first_nonfinite_op.layer, first_nonfinite_op.call, first_nonfinite_op.line.number) == (
        "divide",
        2,
        marked(THIS, "H08"),
    )
    assert found.reason.kind == "division by zero"


class Root(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values + (values * 0).abs().sqrt()  # <H03>


class Checkpointed(Body):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(torch.tanh)
        self.root, self.reentrant = Root(), reentrant

    def forward(self, values: Tensor) -> Tensor:
        values = checkpoint(self.root, self.a(values), use_reentrant=self.reentrant)
        return self.b(values)  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, tmp_path: Path) -> None:
    found = diagnosed(Training(lambda: Checkpointed(reentrant), square, [batch()]), tmp_path)
    assert (
        found.traced is not None
        and found.traced.first_nonfinite_op is not None
        and found.traced.first_nonfinite_op.line is not None
    )
    first_nonfinite_op = found.traced.first_nonfinite_op
    assert (first_nonfinite_op.layer, first_nonfinite_op.call, first_nonfinite_op.line.number) == (
        "root",
        1,
        marked(THIS, "H03"),
    )
    assert (first_nonfinite_op.phase, first_nonfinite_op.node, found.reason.kind) == (
        "backward",
        "SqrtBackward0",
        "edge of domain",
    )


def test_autocast(tmp_path: Path) -> None:
    def step(model: Any, items: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return model(items["x"] * 1e4).square().float().mean()  # type: ignore[no-any-return]  # <autocast>

    found = diagnosed(Training(lambda: Body(lambda h: h), step, [batch()]), tmp_path)
    assert (
        found.traced is not None
        and found.traced.first_nonfinite_op is not None
        and found.traced.first_nonfinite_op.line is not None
    )
    assert found.traced.first_nonfinite_op.line.number == marked(THIS, "autocast")
    assert found.reason.kind == "overflow"
    assert found.reason.sentence.endswith("it stays finite in float32")


def log_of_zero(h: Tensor) -> Tensor:
    return h.relu().clamp(max=0.0).log()  # <log>


def test_compiled_models_are_replayed_eagerly_and_that_is_said(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = Body(log_of_zero)
        model.compile(backend="eager")
        return model

    found = diagnosed(Training(build, square, [batch()]), tmp_path)
    assert (
        found.traced is not None
        and found.traced.first_nonfinite_op is not None
        and found.traced.first_nonfinite_op.line is not None
    )
    assert found.traced.first_nonfinite_op.line.number == marked(THIS, "log")
    assert "the model is compiled in training; the trace ran it eagerly" in found.traced.notes


_runs: list[int] = []


def sometimes(h: Tensor) -> Tensor:
    _runs.append(1)
    return h / (h.detach() * 0) if len(_runs) == 1 else h


def test_what_does_not_come_again(tmp_path: Path) -> None:
    _runs.clear()
    found = diagnosed(inline_code(sometimes), tmp_path)
    assert found.reason.kind == "not reproduced"
    assert found.traced is not None and found.traced.first_nonfinite_op is None
