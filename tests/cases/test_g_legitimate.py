"""Group G: non-finite values that are meant, and must not stop training."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases.harness import Case, Launch, batch_of, each, flagged
from tests.cases.parts import INF, NAN, WIDTH, N, ValidatedArgs, given, mlp, of_batch

THIS = sys.modules[__name__]


class Clamped(ValidatedArgs):
    """A half-precision child that overflows by design, clamped right after."""

    def __init__(self) -> None:
        super().__init__(lambda h, batch: h)
        self.project = nn.Linear(WIDTH, WIDTH, bias=False).half()
        nn.init.constant_(self.project.weight, 200.0)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        h = self.a(batch["x"])
        large = self.project((h * 0 + 200).half())
        assert large.isinf().all()
        limit = torch.finfo(torch.float16).max - 1000
        return self.b(h + large.clamp(-limit, limit).float() / limit)  # type: ignore[no-any-return]


class Sliced(ValidatedArgs):
    """Fully masked rows, dropped before the loss; and an output that nobody uses."""

    def __init__(self) -> None:
        super().__init__(lambda h, batch: h)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        h = self.a(batch["x"])
        mask = torch.zeros(N, 1)
        mask[-1] = -INF
        rows = self.softmax(h.detach() + mask)
        assert rows[-1].isnan().all()
        return self.b(h[:-1] * rows[:-1]), rows


def sliced(model: Any, batch: dict[str, Any]) -> Tensor:
    used, _ = model(batch)
    return used.square().mean()  # type: ignore[no-any-return]


class Mask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("causal", torch.full((N, N), -INF).triu(1))

    def forward(self) -> Tensor:
        return self.causal


class Masked(ValidatedArgs):
    """A causal mask as buffer and as output of a module, and masked logits."""

    def __init__(self) -> None:
        super().__init__(lambda h, batch: h)
        self.mask = Mask()

    def forward(self, batch: dict[str, Any]) -> Tensor:
        h = self.a(batch["x"])
        attention = (h @ h.T + self.mask()).softmax(-1)
        return self.b(attention @ h).masked_fill(torch.arange(3) == 2, -INF)  # type: ignore[no-any-return]


def masked(model: Any, batch: dict[str, Any]) -> Tensor:
    return F.cross_entropy(model(batch), torch.zeros(N, dtype=torch.int64))


def ctc(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    """A target longer than the input: its loss is infinite, and zeroed before it is used."""
    scores = model(batch["x"]).log_softmax(-1)[None]  # <ctc scores>
    lengths = torch.ones(N, dtype=torch.int64)
    given = (scores, torch.ones(N, 3, dtype=torch.int64), lengths, lengths * batch["g"].long())
    return {
        "raw": F.ctc_loss(*given, reduction="none").detach(),  # <G05>
        "used": F.ctc_loss(*given, reduction="sum", zero_infinity=True),
    }


def used(losses: dict[str, Tensor]) -> Tensor:
    return losses["used"]


def evaluating(model: Any, batch: dict[str, Any]) -> Tensor:
    """Evaluation on bad data before each training step, longer on rank 1."""
    module = getattr(model, "module", model)
    module.eval()
    with torch.no_grad():
        for _ in range(1 + (2 * dist.get_rank() if dist.is_initialized() else 0)):
            assert model(torch.full_like(batch["x"], NAN)).isnan().any()
    module.train()
    return model(batch["x"]).square().mean()  # type: ignore[no-any-return]


def receiving(model: Any, batch: dict[str, Any]) -> Tensor:
    received = batch["x"].clone() if dist.get_rank() == 0 else torch.full_like(batch["x"], NAN)
    dist.broadcast(received, 0)
    return model(received).square().mean()  # type: ignore[no-any-return]


class Sentinel(ValidatedArgs):
    """A scale that is NaN until it has been loaded."""

    def __init__(self) -> None:
        super().__init__(lambda h, batch: h)
        self.register_buffer("scale", torch.tensor([NAN]))

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.b(self.a(batch["x"])) * self.scale.nan_to_num(1.0)  # type: ignore[no-any-return, operator]


def loaded(model: nn.Module, optimizer: Any, rank: int, index: int) -> None:
    model.module.scale.fill_(2.0)  # type: ignore[operator, union-attr]  # DDP's module is a Sentinel


def overflowing_unused(h: Tensor, batch: dict[str, Any]) -> Tensor:
    assert (h / 0).isnan().any() or (h / 0).isinf().any()
    return h


LONG = flagged(1, good=1.0, bad=3.0)
G05, G09 = "https://github.com/huggingface/transformers/pull/13619", "https://github.com/vllm-project/vllm/pull/52501"
CASES = {
    "G02 a child overflows, its parent clamps": Case(
        "https://github.com/huggingface/transformers/pull/9487", batch_of(), None, None, Clamped, of_batch
    ),
    "G03 bad rows are sliced away": Case(
        "https://github.com/pytorch/pytorch/pull/131060", batch_of(), None, None, Sliced, sliced
    ),
    "G03 an operator whose result nobody uses": Case(
        "https://github.com/pytorch/pytorch/pull/80245", batch_of(), None, None, given(overflowing_unused), of_batch
    ),
    "G04 masks of minus infinity": Case(
        "https://github.com/pytorch/pytorch/issues/103749", batch_of(), None, None, Masked, masked, finite=False
    ),
    "G05 an infinite loss, as a warning": Case(
        G05, batch_of(g=LONG), None, None, mlp, ctc, total=used, options={"on_loss": "warn"}
    ),
    "G05 an infinite loss, by default": Case(
        G05, batch_of(g=LONG), {"rank": 1, "step": 1, "phase": "loss", "slot": "loss.raw", "kind": "inf"},
        None, mlp, ctc, total=used,
    ),
    "G07 evaluation on bad data": Case(
        "https://github.com/facebookresearch/ClassyVision/pull/743", batch_of(), None, None, mlp, evaluating
    ),
    "G08 a buffer that receives": Case(
        "https://github.com/pytorch/pytorch/issues/134062", batch_of(), None, None, mlp, receiving
    ),
    "G09 a sentinel that is filled": Case(G09, batch_of(), None, None, Sentinel, of_batch, before=loaded),
    "G09 a sentinel that is ignored by name": Case(
        G09, batch_of(), None, None, Sentinel, of_batch, options={"ignore": ("scale",)}, finite=False
    ),
    "G09 a sentinel that is never filled, as a warning": Case(
        G09, batch_of(), None, None, Sentinel, of_batch, finite=False
    ),
}  # fmt: skip


@each(CASES)
def test_case(name: str, ended: Launch) -> None:
    ended.check(name)


@pytest.mark.parametrize("name", [pytest.param(name, id=name) for name, case in CASES.items() if case.origin is None])
def test_no_word_about_what_is_meant(name: str, ended: Launch) -> None:
    told = [line for rank in ended[name] for line in rank.log]
    assert bool(told) is ("warn" in name), told
