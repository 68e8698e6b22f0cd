"""Group D: the model or its loss makes the value."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import diagnosing
from tests.cases.harness import Case, Launch, batch_of, each, flagged
from tests.cases.parts import INF, NAN, WIDTH, N, ValidatedArgs, given, of_batch

THIS = sys.modules[__name__]
FORWARD = {"rank": 1, "step": 1, "phase": "forward", "kind": "nan"}
BACKWARD = {"rank": 1, "step": 1, "phase": "backward", "kind": "nan"}
BETWEEN = {"layer": "", "after": "b", "before": "a"}
LOSS = {"rank": 1, "step": 1, "phase": "loss", "layer": None, "slot": "loss", "kind": "nan"}

# -- functions between layer a and layer b; the batch's "g" is 0 on rank 1 in step 1, else 1 ---------------------------


def where_trap(h: Tensor, batch: dict[str, Any]) -> Tensor:
    h = h * batch["g"]
    return torch.where(h != 0, (h * h).log(), 0.0)  # <D01>


def root_of_squares(h: Tensor, batch: dict[str, Any]) -> Tensor:
    return h + (h * batch["g"]).pow(2).sum().sqrt()  # <D02>


def norm(h: Tensor, batch: dict[str, Any]) -> Tensor:
    return h + (h * batch["g"]).norm()


def saturated_masks(h: Tensor, batch: dict[str, Any]) -> Tensor:
    least = torch.finfo(torch.bfloat16).min
    causal = torch.full((N, WIDTH), least, dtype=torch.bfloat16)
    padding = torch.zeros_like(causal).masked_fill(batch["g"] == 0, least)
    both = causal + padding  # <D05>
    return (h.bfloat16() + both).softmax(-1).float() + h


def root_mean_square(h: Tensor, batch: dict[str, Any]) -> Tensor:
    """In half precision: the squares overflow, the inverse root of that is 0, and all is finite again."""
    h = h.half() * 0 + 300 * (1 - batch["g"]).half()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-3)).float()


def phase(h: Tensor, batch: dict[str, Any]) -> Tensor:
    z = torch.complex(h, h) * batch["g"]
    return h + (z / z.abs()).real  # <D19>


def imaginary(h: Tensor, batch: dict[str, Any]) -> Tensor:
    z = torch.complex(h, h / batch["g"])  # <D19 imaginary>
    return h + z.imag


class Kernel(torch.autograd.Function):
    """Its backward leaves the tail rows unwritten where the batch says so."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, g: Tensor) -> Tensor:
        ctx.g = g
        return values * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        result = gradients[0] * 2
        if ctx.g == 0:
            result[-2:] = math.nan  # <D17>
        return result, None


def kernel(h: Tensor, batch: dict[str, Any]) -> Tensor:
    return Kernel.apply(h, batch["g"])  # type: ignore[no-any-return, no-untyped-call]  # torch's own


# -- models and losses -------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """One sample is padding only, where the batch's "g" is 0."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.need_weights = need_weights

    def forward(self, batch: dict[str, Any]) -> Tensor:
        x = batch["x"].reshape(2, 3, WIDTH)
        padding = torch.zeros(2, 3, dtype=torch.bool)
        padding[1] = batch["g"] == 0
        found = self.attention(x, x, x, key_padding_mask=padding, need_weights=self.need_weights)  # <D03>
        return found[0]  # type: ignore[no-any-return]


class Statistics(nn.Module):
    """BatchNorm by hand, without the check of the batch's size: only what it keeps for evaluation goes bad."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_var", torch.ones(WIDTH))

    def forward(self, values: Tensor, rows: int) -> Tensor:
        used = values.detach()[:rows]
        self.running_var = 0.9 * self.running_var + 0.1 * used.var(0)  # <D10>
        return (values - used.mean(0)) / (used.var(0, unbiased=False) + 1e-5).sqrt()


class OwnNorm(ValidatedArgs):
    def __init__(self) -> None:
        super().__init__(lambda h, batch: h)
        self.norm = Statistics()

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.b(self.norm(self.a(batch["x"]), 1 if batch["g"] == 0 else N))  # type: ignore[no-any-return]


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))


def features(model: Any, batch: dict[str, Any]) -> Tensor:
    return model(batch["x"]).square().mean()  # type: ignore[no-any-return]


class Hidden(ValidatedArgs):
    """Statistics for evaluation only: training never sees what goes into them."""

    def __init__(self) -> None:
        super().__init__(lambda h, batch: h)
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        h = self.a(batch["x"])
        self.norm(h.detach() / batch["g"])  # <D12>
        return self.b(h)  # type: ignore[no-any-return]


class Twice(ValidatedArgs):
    def __init__(self) -> None:
        super().__init__(lambda h, batch: h)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        anchor, positive = self.a(batch["x"]), self.a(batch["x"] + batch["g"])
        distance = ((anchor - positive) ** 2).sum(-1).sqrt()  # <D14>
        return self.b(anchor) + distance[:, None]  # type: ignore[no-any-return]


def balanced(model: Any, batch: dict[str, Any]) -> Tensor:
    logits, targets = model(batch), F.one_hot(batch["y"], 3).float()
    errors = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return ((errors * targets).sum(0) / targets.sum(0)).mean()  # <D06>


def over_nothing(model: Any, batch: dict[str, Any]) -> Tensor:
    chosen = model(batch)[batch["y"] > batch["g"]]
    return chosen.mean()  # <D07>


def labels(rank: int, index: int) -> Tensor:
    return torch.tensor([0, 2, 2, 0, 0, 2] if (rank, index) == (1, 1) else [0, 1, 2, 0, 1, 2])


def at(index: int, **more: Any) -> Any:
    """Bad on rank 1 in that micro-batch."""
    return batch_of(g=flagged(1, at=index), **more)


WHERE, D11 = "https://github.com/pytorch/pytorch/issues/52248", "https://github.com/pytorch/pytorch/issues/90342"
D03, D19 = "https://github.com/pytorch/pytorch/issues/103749", "https://github.com/pytorch/pytorch/issues/46144"
SKIP = {"on_fault": "skip"}
CASES = {
    "D01 where trap": Case(
        WHERE, at(1), {**BACKWARD, "inline_code": BETWEEN}, ("aten.div.Tensor", "D01", "where trap"), given(where_trap),
        of_batch,
    ),
    "D02 root of squares at zero": Case(
        "https://github.com/pytorch/pytorch/issues/2421", at(1), {**BACKWARD, "inline_code": BETWEEN},
        ("aten.div.Tensor", "D02", "edge of domain"), given(root_of_squares), of_batch,
    ),
    "D02 the norm of zeros": Case(
        "https://github.com/open-mmlab/mmrotate/issues/205", at(1), None, None, given(norm), of_batch
    ),
    "D03 attention that returns its weights": Case(
        D03, at(1), {**FORWARD, "layer": "attention", "call": 1}, ("aten._softmax.default", "D03", "masked row"),
        lambda: Attention(True), of_batch,
    ),
    "D03 attention without": Case(D03, at(1), None, None, lambda: Attention(False), of_batch),
    "D05 two saturated masks": Case(
        "https://github.com/NVIDIA-NeMo/Automodel/pull/2658", at(1), FORWARD,
        ("aten.add.Tensor", "D05", "masked row"), given(saturated_masks), of_batch,
    ),
    "D06 an absent class": Case(
        "https://github.com/HuiZhang0812/DiffusionAD/issues/33", at(1, y=labels), LOSS,
        ("aten.div.Tensor", "D06", "division by zero"), given(lambda h, batch: h), balanced, runs_step=True),
    "D07 mean over nothing": Case(
        "https://github.com/pytorch/pytorch/issues/50224",
        batch_of(y=labels, g=flagged(1, good=1.0, bad=5.0)), LOSS,
        ("aten.mean.default", "D07", "empty reduction"), given(lambda h, batch: h), over_nothing, runs_step=True),
    "D07 as a warning": Case(
        "https://github.com/pytorch/pytorch/issues/141057",
        batch_of(y=labels, g=flagged(1, good=1.0, bad=5.0)), None, None, given(lambda h, batch: h), over_nothing,
        options={"on_loss": "warn"},
    ),
    "D09 an overflow that comes back as zero": Case(
        "https://github.com/openvinotoolkit/openvino/pull/37041", at(1), None, None, given(root_mean_square), of_batch
    ),
    "D10 variance of one value": Case(
        "https://github.com/facebookresearch/SparseConvNet/issues/190",
        batch_of(g=flagged(0)), {"rank": 0, "step": 1, "phase": "state", "layer": "norm", "slot": "norm.running_var"},
        ("aten.var.correction", "D10", "empty reduction"), OwnNorm, of_batch,
    ),
    "D11 statistics of a skipped step": Case(
        D11, batch_of(0), None, None, normed, features, options=SKIP
    ),
    "D11 statistics of a skipped step, rank 1": Case(
        D11, batch_of(1), None, None, normed, features, options=SKIP
    ),
    "D12 statistics that training does not use": Case(
        "https://github.com/pytorch/pytorch/issues/1206",
        batch_of(g=flagged(0)), {"rank": 0, "step": 1, "phase": "state", "layer": "norm", "slot": "norm.running_mean"},
        ("aten.div.Tensor", "D12", "division by zero"), Hidden,
        of_batch,
    ),
    "D14 equal embeddings": Case(
        "https://github.com/huggingface/sentence-transformers/pull/4033", at(1), BACKWARD,
        ("aten.div.Tensor", "D14", "edge of domain"), Twice, of_batch,
    ),
    "D17 rows that a kernel leaves unwritten": Case(
        "https://github.com/huggingface/transformers/pull/48205", at(1), {**BACKWARD, "inline_code": BETWEEN},
        ("aten.lift_fresh.default", "D17", "constant"), given(kernel), of_batch,
    ),
    "D19 the phase of silence": Case(
        D19, at(1), FORWARD, ("aten.div.Tensor", "D19", "division by zero"), given(phase), of_batch
    ),
    "D19 the imaginary part alone": Case(
        D19, at(1), {**FORWARD, "kind": "inf"}, ("aten.div.Tensor", "D19 imaginary", "division by zero"),
        given(imaginary), of_batch,
    ),
    "D21 finite parameters": Case(
        "https://github.com/Dao-AILab/flash-attention/issues/41", at(2), {**BACKWARD, "step": 2, "state": []},
        ("aten.lift_fresh.default", "D17", "constant"), given(kernel), of_batch,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:var")
@each(CASES)
def test_case(name: str, ended: Launch) -> None:
    ended.check(name)


def test_D07_the_loss_alone_is_a_warning_with_on_loss(ended: Launch) -> None:
    """https://github.com/pytorch/pytorch/issues/50224."""
    assert any("loss" in line for rank in ended["D07 as a warning"] for line in rank.log)


_runs: list[int] = []


def dirty_once(h: Tensor) -> Tensor:
    _runs.append(1)
    return h + (NAN if len(_runs) == 1 else 0.0)


def test_D17_dirty_memory_does_not_come_again(tmp_path: Path) -> None:
    """https://github.com/Dao-AILab/flash-attention/pull/2324."""
    _runs.clear()
    found = diagnosing.diagnosed(diagnosing.inline_code(dirty_once), tmp_path)
    assert found.outcome is not None and str(found.outcome.outcome) == "not_reproduced"
    assert found.reason.kind == "not reproduced"


class Unwritten(diagnosing.Body):
    def forward(self, values: Tensor) -> Tensor:
        room = torch.empty(N, WIDTH)
        room.data.view(torch.int32).fill_(-1)  # what dirty memory holds: the bits of a NaN
        return self.b(self.a(values) + room)  # type: ignore[no-any-return]  # <D17 empty>


def test_D17_memory_that_nobody_wrote(tmp_path: Path) -> None:
    """https://github.com/Dao-AILab/flash-attention/issues/1947."""
    job = diagnosing.Training(lambda: Unwritten(torch.tanh), diagnosing.square, [diagnosing.batch()])
    found = diagnosing.diagnosed(job, tmp_path)
    assert found.reason.kind == "uninitialised memory"
    assert (
        found.traced is not None
        and found.traced.first_nonfinite_op is not None
        and found.traced.first_nonfinite_op.line is not None
    )
    assert found.traced.first_nonfinite_op.line.number == diagnosing.marked(THIS, "D17 empty")


def test_D03_a_mask_of_minus_infinity_alone_is_no_fault(tmp_path: Path) -> None:
    """https://github.com/pytorch/pytorch/issues/24816."""
    mask = torch.tensor([0.0, 0.0, 0.0, -INF])
    with pytest.raises(AssertionError, match="no fault"):
        diagnosing.trained(diagnosing.inline_code(lambda h: (h + mask).softmax(-1)), tmp_path)
