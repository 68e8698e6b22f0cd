"""The operator, the line and the reason of known kinds of faults, each trained into and replayed from its dump."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.diagnosing import WIDTH, N, diagnosed, inline_code, marked, of_loss

THIS = sys.modules[__name__]


# -- functions between two layers --------------------------------------------------------------------------------------


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
    return h + torch.special.hermite_polynomial_h(h.detach() * 0 + 1e30, 20)  # <unknown>


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
    ("unknown", unknown, "aten.special_hermite_polynomial_h.n_scalar", "unknown"),
]


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize(("name", "function", "operator", "kind"), BETWEEN, ids=[case[0] for case in BETWEEN])
def test_between_two_layers(name: str, function: Any, operator: str, kind: str, tmp_path: Path) -> None:
    found = diagnosed(inline_code(function), tmp_path)
    first_nonfinite_op = found.traced.first_nonfinite_op if found.traced is not None else None
    assert first_nonfinite_op is not None and first_nonfinite_op.line is not None, found
    assert (first_nonfinite_op.operator, first_nonfinite_op.line.number, found.reason.kind) == (
        operator,
        marked(THIS, name),
        kind,
    )
    assert first_nonfinite_op.line.file == __file__
    assert first_nonfinite_op.layer == ""


# -- losses ------------------------------------------------------------------------------------------------------------


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
     "0/0 in `(errors * targets).sum(0) / counts` (test_operators.py:LINE): the divisor, a sum over the batch, "
     "is 0 at index 1: class 1 is absent in this batch"),
    ("weights", weighted, {"w": torch.zeros(N)}, "aten.div.Tensor", "division by zero",
     "0/0 in `(logits.mean(1) * weights).sum() / weights.sum()` (test_operators.py:LINE): the divisor, "
     "a sum over all 6 elements, is 0"),
    ("D07", over_nothing, {"y": LABELS}, "aten.mean.default", "empty reduction",
     "mean over nothing in `chosen.mean()` (test_operators.py:LINE), of a tensor of shape (0, 3)"),
    ("E05", ignored, {"y": LABELS}, "aten.nll_loss_forward.default", "empty reduction",
     "all labels are ignored in `F.cross_entropy(logits, items[\"y\"] * 0 - 100)` (test_operators.py:LINE): "
     "the mean is over nothing"),
    ("E08", named, {}, "aten.log.default", "edge of domain",
     "log of 0 in `(logits.mean() * 0).log()` (test_operators.py:LINE)"),
    ("E03", masked_late, {"t": torch.tensor([[math.nan, 0, 0]] + [[0.0, 0, 0]] * 5)},
     "aten.mse_loss_backward.default", "bad input", 'batch["t"] holds NaN, sample 0'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "loss", "more", "operator", "kind", "text"), LOSSES, ids=[c[0] for c in LOSSES])
def test_losses(name: str, loss: Any, more: Any, operator: str, kind: str, text: str, tmp_path: Path) -> None:
    found = diagnosed(of_loss(loss, **more), tmp_path)
    first_nonfinite_op = found.traced.first_nonfinite_op if found.traced is not None else None
    assert first_nonfinite_op is not None and first_nonfinite_op.line is not None, found
    line = marked(THIS, name)
    assert (first_nonfinite_op.operator, first_nonfinite_op.line.number, found.reason.kind) == (operator, line, kind)
    assert found.reason.sentence == text.replace("LINE", str(line))
    assert first_nonfinite_op.layer == ("" if first_nonfinite_op.phase == "forward" else None)
