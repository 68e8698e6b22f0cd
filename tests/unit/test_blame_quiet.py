"""What is non-finite in clean steps too is not blamed; nothing is said of what was not looked at."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_nanguard.report.messages import log_line
from tests.unit.blaming import WIDTH, Bad, Model, batches, linear, place_of, report_of, switch


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
