"""The operator, the line and the reason of known kinds of faults, each trained into and replayed from its dump."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_nanguard.replay.reasons import KINDS, RULES, Facts, reason_for
from ddp_nanguard.site import FaultReport, Phase, Site
from tests.diagnosing import Job, diagnosed, marked

THIS = sys.modules[__name__]
N, WIDTH = 6, 4


class Body(nn.Module):
    """Two layers with a function of the test's between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.between = between

    def forward(self, values: Tensor) -> Tensor:
        return self.b(self.between(self.a(values)))  # type: ignore[no-any-return]  # modules return Any


def body(between: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Body(between)


def square(model: Any, batch: Any) -> Tensor:
    return model(batch["x"]).square().mean()  # type: ignore[no-any-return]


def batch(**more: Any) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return {"x": torch.randn(N, WIDTH), **more}


def between(function: Callable[[Tensor], Tensor], **more: Any) -> Job:
    return Job(body(function), square, [batch()], **more)


def of_loss(loss: Callable[[Tensor, dict[str, Any]], Any], **more: Any) -> Job:
    def step(model: Any, items: dict[str, Any]) -> Any:
        return loss(model(items["x"]), items)

    return Job(body(torch.tanh), step, [batch(**more)])


# -- functions between two layers
# -----------------------------------------------------------------------------------------------


def where_trap(h: Tensor) -> Tensor:
    h = h * 0
    return torch.where(h > 0, h.log(), 0.0)  # <D01>


def where_trap_of_a_division(h: Tensor) -> Tensor:
    h = h * 0
    inverse = 1 / h  # <D01 division>
    return torch.where(h > 0, inverse, 0.0)


def where_trap_of_exp(h: Tensor) -> Tensor:
    h = h * 0 + 1000.0
    grown = h.exp()  # <D01 exp>
    return torch.where(h < 100, grown, 0.0)


def root_of_squares(h: Tensor) -> Tensor:
    return h + (h * 0).pow(2).sum().sqrt()  # <D02>


def fractional_power(h: Tensor) -> Tensor:
    return (h * 0).abs().pow(0.5)  # <pow derivative>


def acos_at_one(h: Tensor) -> Tensor:
    return (h * 0 + 1).acos()  # <acos derivative>


def acos_outside(h: Tensor) -> Tensor:
    return (h * 0 + 1.0001).acos()  # <acos>


def log_of_zero(h: Tensor) -> Tensor:
    return h.relu().clamp(max=0.0).log()  # <log>


def root_of_negative(h: Tensor) -> Tensor:
    shifted = -h.abs() - 1
    return shifted.sqrt()  # <sqrt>


def power_of_negative(h: Tensor) -> Tensor:
    return (-h.abs() - 1) ** 1.5  # <pow>


def negative_power_of_zero(h: Tensor) -> Tensor:
    return (h * 0) ** -2.0  # <pow zero>


def inverse_of_zero(h: Tensor) -> Tensor:
    return (h * 0).reciprocal()  # <reciprocal>


def in_place_division(h: Tensor) -> Tensor:
    h = h * 1.0
    h /= h.detach() * 0  # <in place>
    return h


def division_of_a_view(h: Tensor) -> Tensor:
    h = h.clone()
    h[:, 1].div_(0.0)  # <view>
    return h


def exponential(h: Tensor) -> Tensor:
    return (h * 0 + 1000.0).exp()  # <exp>


def half_precision(h: Tensor) -> Tensor:
    h = h.half() * 0 + 300
    return (h * h).float()  # <D09>


def half_sum(h: Tensor) -> Tensor:
    large = h.half() * 0 + 30000
    return h + large.sum(1, keepdim=True)  # <B12>


def cast(h: Tensor) -> Tensor:
    large = h * 0 + 1e5
    return large.half().float()  # <cast>


def zero_times_infinity(h: Tensor) -> Tensor:
    return h * 0 * math.inf  # <0*inf>


def mask_with_nan(h: Tensor) -> Tensor:
    return h.masked_fill(h > -100, math.nan)  # <constant>


def assigned(h: Tensor) -> Tensor:
    h = h.clone()
    h[0, 0] = math.nan  # <assigned>
    return h


def complex_phase(h: Tensor) -> Tensor:
    z = torch.complex(h, h) * 0
    return h + (z / z.abs()).real  # <D19>


def masked_softmax(h: Tensor) -> Tensor:
    mask = torch.zeros(N, WIDTH, dtype=torch.bool)
    mask[2] = True
    return h.masked_fill(mask, -math.inf).softmax(-1)  # <masked row>


def saturated_masks(h: Tensor) -> Tensor:
    scores = h.bfloat16()
    mask = torch.full((N, WIDTH), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16)
    both = mask + mask  # <D05>
    return (scores + both).softmax(-1).float()


def variance_of_one(h: Tensor) -> Tensor:
    return h / (h[:1].var(0) + 1e-5).sqrt()  # <D10>


def unknown(h: Tensor) -> Tensor:
    return (h * 0 - 1).lgamma()  # <unknown>


class NanGradient(torch.autograd.Function):
    """Like a kernel that leaves its padding unwritten."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        result = gradients[0] * 2
        result[-1] = math.nan  # <D17>
        return result


def bad_kernel(h: Tensor) -> Tensor:
    return NanGradient.apply(h)  # type: ignore[no-any-return, no-untyped-call]  # torch's own


BETWEEN: list[tuple[str, Callable[[Tensor], Tensor], str, str]] = [
    ("D01", where_trap, "aten.div.Tensor", "where trap"),
    ("D01 division", where_trap_of_a_division, "aten.reciprocal.default", "where trap"),
    ("D01 exp", where_trap_of_exp, "aten.exp.default", "where trap"),
    ("D02", root_of_squares, "aten.div.Tensor", "edge of domain"),
    ("pow derivative", fractional_power, "aten.pow.Tensor_Scalar", "edge of domain"),
    ("acos derivative", acos_at_one, "aten.rsqrt.default", "edge of domain"),
    ("acos", acos_outside, "aten.acos.default", "edge of domain"),
    ("log", log_of_zero, "aten.log.default", "edge of domain"),
    ("sqrt", root_of_negative, "aten.sqrt.default", "edge of domain"),
    ("pow", power_of_negative, "aten.pow.Tensor_Scalar", "edge of domain"),
    ("pow zero", negative_power_of_zero, "aten.pow.Tensor_Scalar", "edge of domain"),
    ("reciprocal", inverse_of_zero, "aten.reciprocal.default", "division by zero"),
    ("in place", in_place_division, "aten.div_.Tensor", "division by zero"),
    ("view", division_of_a_view, "aten.div_.Tensor", "division by zero"),
    ("exp", exponential, "aten.exp.default", "overflow"),
    ("D09", half_precision, "aten.mul.Tensor", "overflow"),
    ("B12", half_sum, "aten.sum.dim_IntList", "overflow"),
    ("cast", cast, "aten._to_copy.default", "overflow"),
    ("0*inf", zero_times_infinity, "aten.mul.Tensor", "0*inf"),
    ("constant", mask_with_nan, "aten.masked_fill.Scalar", "constant"),
    ("assigned", assigned, "aten.lift_fresh.default", "constant"),
    ("D19", complex_phase, "aten.div.Tensor", "division by zero"),
    ("masked row", masked_softmax, "aten._softmax.default", "masked row"),
    ("D05", saturated_masks, "aten.add.Tensor", "masked row"),
    ("D10", variance_of_one, "aten.var.correction", "empty reduction"),
    ("D17", bad_kernel, "aten.lift_fresh.default", "constant"),
    ("unknown", unknown, "aten.lgamma.default", "unknown"),
]


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize(("name", "function", "operator", "kind"), BETWEEN, ids=[case[0] for case in BETWEEN])
def test_between_two_layers(name: str, function: Any, operator: str, kind: str, tmp_path: Path) -> None:
    found = diagnosed(between(function), tmp_path)
    birth = found.traced.birth if found.traced is not None else None
    assert birth is not None and birth.line is not None, found
    assert (birth.operator, birth.line.number, found.reason.kind) == (operator, marked(THIS, name), kind)
    assert birth.line.file == __file__
    assert birth.layer == ""


# -- losses
# ---------------------------------------------------------------------------------------------------------------------


def balanced(logits: Tensor, items: dict[str, Any]) -> Tensor:
    targets = F.one_hot(items["y"], 3).float()
    errors = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    counts = targets.sum(0)
    return ((errors * targets).sum(0) / counts).mean()  # <D06>


def weighted(logits: Tensor, items: dict[str, Any]) -> Tensor:
    weights = items["w"]
    return (logits.mean(1) * weights).sum() / weights.sum()  # <weights>


def over_nothing(logits: Tensor, items: dict[str, Any]) -> Tensor:
    chosen = logits[items["y"] > 5]
    return chosen.mean()  # <D07>


def ignored(logits: Tensor, items: dict[str, Any]) -> Tensor:
    return F.cross_entropy(logits, items["y"] * 0 - 100)  # <E05>


def named(logits: Tensor, items: dict[str, Any]) -> dict[str, Tensor]:
    return {"box": logits.square().mean(), "cls": (logits.mean() * 0).log()}  # <E08>


def masked_late(logits: Tensor, items: dict[str, Any]) -> Tensor:
    errors = F.mse_loss(logits, items["t"], reduction="none")  # <E03>
    return errors[~items["t"].isnan()].mean()


LABELS = torch.tensor([0, 2, 2, 0, 0, 2])
LOSSES: list[tuple[str, Callable[..., Any], dict[str, Any], str, str, str]] = [
    ("D06", balanced, {"y": LABELS}, "aten.div.Tensor", "division by zero",
     "0/0 in `(errors * targets).sum(0) / counts` (test_reasons.py:LINE): the divisor, a sum over the batch, "
     "is 0 at index 1: class 1 is absent in this batch"),
    ("weights", weighted, {"w": torch.zeros(N)}, "aten.div.Tensor", "division by zero",
     "0/0 in `(logits.mean(1) * weights).sum() / weights.sum()` (test_reasons.py:LINE): the divisor, "
     "a sum over all 6 elements, is 0"),
    ("D07", over_nothing, {"y": LABELS}, "aten.mean.default", "empty reduction",
     "mean over nothing in `chosen.mean()` (test_reasons.py:LINE)"),
    ("E05", ignored, {"y": LABELS}, "aten.nll_loss_forward.default", "empty reduction",
     "all labels are ignored in `F.cross_entropy(logits, items[\"y\"] * 0 - 100)` (test_reasons.py:LINE): "
     "the mean is over nothing"),
    ("E08", named, {}, "aten.log.default", "edge of domain",
     "log of 0 in `(logits.mean() * 0).log()` (test_reasons.py:LINE)"),
    ("E03", masked_late, {"t": torch.tensor([[math.nan, 0, 0]] + [[0.0, 0, 0]] * 5)},
     "aten.mse_loss_backward.default", "bad input", 'batch["t"] holds NaN, sample 0'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "loss", "more", "operator", "kind", "text"), LOSSES, ids=[c[0] for c in LOSSES])
def test_losses(name: str, loss: Any, more: Any, operator: str, kind: str, text: str, tmp_path: Path) -> None:
    found = diagnosed(of_loss(loss, **more), tmp_path)
    birth = found.traced.birth if found.traced is not None else None
    assert birth is not None and birth.line is not None, found
    line = marked(THIS, name)
    assert (birth.operator, birth.line.number, found.reason.kind) == (operator, line, kind)
    assert found.reason.sentence == text.replace("LINE", str(line))
    assert birth.layer == ("" if birth.phase == "forward" else None)


# -- values from outside
# --------------------------------------------------------------------------------------------------------


def test_a_bad_sample_is_named_with_its_ids(tmp_path: Path) -> None:
    items = batch(path=["a.png", "b.png", "c.png", "d.png", "e.png", "f.png"], index=torch.arange(100, 106))
    items["x"][3, 1] = math.nan
    found = diagnosed(Job(body(torch.tanh), square, [batch(), items], accumulation=2), tmp_path)
    assert found.traced is not None and found.traced.birth is not None
    assert found.traced.micro_batch == 1
    assert (found.traced.birth.layer, found.traced.birth.call) == ("a", 1)
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
    found = diagnosed(Job(Spoilt, square, [batch()]), tmp_path)
    assert (found.reason.kind, found.reason.sentence) == ("state", "b.weight held NaN before any training")
    assert found.traced is not None and found.traced.birth is not None
    assert found.traced.birth.layer == "b"


class Unwritten(Body):
    def forward(self, values: Tensor) -> Tensor:
        room = torch.empty(N, WIDTH)
        room.untyped_storage().nbytes()
        room.data.view(torch.int32).fill_(-1)  # what dirty memory holds: the bits of a NaN, not written as a number
        return self.b(self.a(values) + room)  # type: ignore[no-any-return]  # <empty>


def test_memory_that_nobody_wrote(tmp_path: Path) -> None:
    found = diagnosed(Job(lambda: Unwritten(torch.tanh), square, [batch()]), tmp_path)
    assert found.reason.kind == "uninitialised memory"
    assert found.traced is not None and found.traced.birth is not None and found.traced.birth.line is not None
    assert found.traced.birth.line.number == marked(THIS, "empty")


class Normed(Body):
    """Its outputs are finite, what BatchNorm keeps for evaluation is not."""

    def __init__(self) -> None:
        super().__init__(torch.tanh)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return self.b(self.norm(self.a(values) * 1e25))  # type: ignore[no-any-return]


def test_running_statistics_that_overflow(tmp_path: Path) -> None:
    found = diagnosed(Job(lambda: Normed(), square, [batch()]), tmp_path)
    assert found.traced is not None and found.traced.birth is not None
    assert found.traced.target == "the buffer norm.running_var is +Inf"
    assert (found.traced.birth.operator, found.traced.birth.layer) == ("aten.native_batch_norm.default", "norm")
    assert found.reason.kind == "overflow"


def hooked(h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient / 0)  # <hook>
    return h


def test_code_of_the_users_that_runs_in_backward(tmp_path: Path) -> None:
    found = diagnosed(between(hooked), tmp_path)
    assert found.traced is not None and found.traced.birth is not None and found.traced.birth.line is not None
    assert (found.traced.birth.phase, found.traced.birth.line.number) == ("backward", marked(THIS, "hook"))
    assert (found.reason.kind, found.traced.birth.numbers) == ("division by zero", ("other=0",))


def test_an_infinity_of_the_batch_that_becomes_nan_at_once(tmp_path: Path) -> None:
    loss = lambda h, items: F.binary_cross_entropy_with_logits(h, items["t"])  # noqa: E731
    found = diagnosed(of_loss(loss, t=torch.full((N, 3), math.inf)), tmp_path)
    assert found.reason.sentence.startswith('batch["t"] holds Inf, samples 0, 1, 2')


@pytest.mark.parametrize("held", [math.nan, [1.0, math.nan]], ids=["a number", "a list"])
def test_a_number_of_the_batch(held: Any, tmp_path: Path) -> None:
    found = diagnosed(of_loss(lambda h, items: (h.mean() * torch.tensor(items["w"])).sum(), w=held), tmp_path)
    assert found.reason.kind == "bad input"
    assert found.reason.sentence == f'batch["w"]{"[1]" if isinstance(held, list) else ""} holds NaN'


# -- optimizers, scalers, growth
# ------------------------------------------------------------------------------------------------


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
    job = Job(Half, half_step, [batch(), batch()], optimizer=adam, options={"keep_previous": keep})
    found = diagnosed(job, tmp_path)
    assert found.reason.kind == "update overflow"
    assert "eps=1e-08 is 0 in float16: the update of" in found.reason.sentence
    assert bool(found.obstacle) is not keep


def test_a_learning_rate_that_is_no_number(tmp_path: Path) -> None:
    def spoil(model: Any, optimizer: Any, index: int) -> None:
        optimizer.param_groups[0]["lr"] = math.nan

    found = diagnosed(between(torch.tanh, before_update=spoil), tmp_path)
    assert (found.reason.kind, found.reason.sentence) == ("hyper-parameter", "g0.lr is NaN")


def test_growth_by_a_learning_rate(tmp_path: Path) -> None:
    job = Job(lambda: Body(lambda h: h), square, [batch()] * 80)
    job.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=3.0)
    found = diagnosed(job, tmp_path)
    assert found.reason.kind == "growth"
    assert "per step since step" in found.reason.sentence


def test_a_scale_that_collapses(tmp_path: Path) -> None:
    job = between(root_of_squares, scaler=lambda: torch.amp.GradScaler("cpu", init_scale=4.0))
    job.options = {"scale_floor": 2.0}
    job.batches = [batch()] * 9
    found = diagnosed(job, tmp_path)
    assert found.reason.kind == "edge of domain"  # no scale heals that


def test_a_scale_that_is_too_large_for_too_long(tmp_path: Path) -> None:
    job = between(torch.tanh, scaler=lambda: torch.amp.GradScaler("cpu", init_scale=2.0**127))
    job.options = {"max_consecutive_overflows": 2}
    job.step = lambda model, items: square(model, items) * 1e3
    job.batches = [batch()] * 4
    found = diagnosed(job, tmp_path)
    assert (found.reason.kind, found.reason.sentence) == ("scale collapse", "scale collapse: 2 overflows in a row")


# -- calls, recomputation, compiled code
# ----------------------------------------------------------------------------------------


class Twice(Body):
    """One encoder for two inputs that are equal."""

    def forward(self, values: Tensor) -> Tensor:
        one, other = self.a(values), self.a(values.clone())
        distance = ((one - other) ** 2).sum(-1).sqrt()  # <D14>
        return self.b(one) + distance[:, None]  # type: ignore[no-any-return]


def test_a_shared_encoder(tmp_path: Path) -> None:
    found = diagnosed(Job(lambda: Twice(torch.tanh), square, [batch()]), tmp_path)
    assert found.traced is not None and found.traced.birth is not None and found.traced.birth.line is not None
    birth = found.traced.birth
    assert (birth.line.number, birth.layer, birth.phase) == (marked(THIS, "D14"), "", "backward")
    assert birth.node == "SqrtBackward0" and birth.forward_operator == "aten.sqrt.default"
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
    found = diagnosed(Job(Second, square, [batch()]), tmp_path)
    assert found.traced is not None and found.traced.birth is not None and found.traced.birth.line is not None
    birth = found.traced.birth
    assert (birth.layer, birth.call, birth.line.number) == ("divide", 2, marked(THIS, "H08"))
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
    found = diagnosed(Job(lambda: Checkpointed(reentrant), square, [batch()]), tmp_path)
    assert found.traced is not None and found.traced.birth is not None and found.traced.birth.line is not None
    birth = found.traced.birth
    assert (birth.layer, birth.call, birth.line.number) == ("root", 1, marked(THIS, "H03"))
    assert (birth.phase, birth.node, found.reason.kind) == ("backward", "SqrtBackward0", "edge of domain")


def test_autocast(tmp_path: Path) -> None:
    def step(model: Any, items: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return model(items["x"] * 1e4).square().float().mean()  # type: ignore[no-any-return]  # <autocast>

    found = diagnosed(Job(lambda: Body(lambda h: h), step, [batch()]), tmp_path)
    assert found.traced is not None and found.traced.birth is not None and found.traced.birth.line is not None
    assert found.traced.birth.line.number == marked(THIS, "autocast")
    assert found.reason.kind == "overflow"
    assert found.reason.sentence.endswith("it stays finite in float32")


def test_compiled_models_are_replayed_eagerly_and_that_is_said(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = Body(log_of_zero)
        model.compile(backend="eager")
        return model

    found = diagnosed(Job(build, square, [batch()]), tmp_path)
    assert found.traced is not None and found.traced.birth is not None and found.traced.birth.line is not None
    assert found.traced.birth.line.number == marked(THIS, "log")
    assert "the model is compiled in training; the trace ran it eagerly" in found.traced.notes


_runs: list[int] = []


def sometimes(h: Tensor) -> Tensor:
    _runs.append(1)
    return h / (h.detach() * 0) if len(_runs) == 1 else h


def test_what_does_not_come_again(tmp_path: Path) -> None:
    _runs.clear()
    found = diagnosed(between(sometimes), tmp_path)
    assert found.reason.kind == "not reproduced"
    assert found.traced is not None and found.traced.birth is None


# -- the report and the history alone
# ------------------------------------------------------------------------------------------------


def site(phase: str, **more: Any) -> Site:
    given = {"rank": 0, "layer": "b", "slot": "b.weight", "kind": "inf", **more}
    return Site(step=9, micro_batch=None, phase=Phase(phase), call=None, **given)


def report(origin: Site, **more: Any) -> FaultReport:
    return FaultReport(9, 2, "ddp", origin, (origin,), **more)


def history(loss: list[float], gradient: float = 1.0) -> dict[str, Any]:
    steps = range(9 - len(loss), 9)
    slots = {f"step.{step}.{key}": np.array([]) for step in steps for key in ("labels", "values")}
    fault = {"fault.labels": np.array(["backward|0|b.weight|gradient|1"]), "fault.values": np.array([[0.0, gradient]])}
    flat = np.ones(len(loss))
    return {**slots, **fault, "steps": np.array(steps), "loss": np.array(loss), "gradient_max": flat}


def test_overflow_in_the_reduce() -> None:
    histories = {0: history([1.0], 40000.0), 1: history([1.0], 30000.0)}
    found = reason_for(Facts(report(site("reduce", rank=None)), histories=histories))
    assert found.kind == "overflow in the reduce"
    assert found.sentence == (
        "b.weight overflowed in the reduce: every rank's gradient was finite, "
        "their sum of up to 7e+04 is more than float16 holds (6.55e+04)"
    )
    assert found.evidence == ("rank 0: largest 4e+04", "rank 1: largest 3e+04")


@pytest.mark.parametrize(
    ("origin", "histories"),
    [
        (site("reduce", rank=None), {0: history([1.0], 4.0), 1: history([1.0], 3.0)}),
        (site("reduce", rank=None), {0: history([1.0], 40000.0)}),
        (site("reduce", rank=None, taken_in="unchecked"), {0: history([1.0], 4e4), 1: history([1.0], 4e4)}),
        (site("state", taken_in="unchecked"), {}),
        (site("optimizer"), {}),
        (site("forward"), {0: history([1.0, 2.0, 3.0, 4.0, 5.0])}),
        (site("forward"), {0: history([1.0, 20.0, 400.0, 8000.0, 16.0])}),
        (site("forward"), {0: history([1.0, 3.0, 9.0, 27.0])}),
        (site("forward"), {0: history([1.0] * 5), 1: history([1.0, 10.0, 100.0, 1e3, 1e4])}),
    ],
    ids=[
        "small sum", "a rank is missing", "not looked at", "written in the step", "an update with nothing known",
        "growth too small", "growth that ended", "growth too short of proof", "growth elsewhere",
    ],
)  # fmt: skip
def test_what_proves_nothing_is_unknown(origin: Site, histories: Any) -> None:
    assert reason_for(Facts(report(origin), histories=histories)).kind == "unknown"


def test_growth_from_the_history_alone() -> None:
    histories = {rank: history([7.0, 1.0, 10.0, 100.0, 1e3, 1e4]) for rank in (0, 1)}
    found = reason_for(Facts(report(site("forward")), histories=histories))
    assert found.sentence == "growth: the loss grew by a factor of 10.00 per step since step 4, on every rank"
    one = reason_for(Facts(report(site("forward")), histories={0: histories[0], 1: history([1.0] * 6)}))
    assert one.sentence.endswith("since step 4, on rank 0")


def test_state_from_the_report_alone() -> None:
    found = reason_for(Facts(report(site("state", kind="nan"), state=("b.weight", "b.bias"))))
    assert (found.kind, found.sentence) == ("state", "b.weight held NaN before the step")
    assert found.evidence == ("damaged: b.weight, b.bias",)


def test_without_any_facts_the_reason_is_unknown() -> None:
    assert reason_for(Facts()).kind == "unknown"
    assert all(rule(Facts()) is None for rule in RULES)


def test_the_list_of_kinds_is_closed() -> None:
    assert len(set(KINDS)) == len(KINDS) and KINDS[-1] == "unknown"
