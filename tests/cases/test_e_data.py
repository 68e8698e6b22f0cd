"""Group E: the data bring the value in."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases.harness import Case, Launch, batch_of, each, flagged
from tests.cases.parts import NAN, N, mlp

THIS = sys.modules[__name__]
BAD_X = {"rank": 1, "step": 1, "phase": "input", "layer": None, "call": None, "slot": '["x"]', "kind": "nan"}
LOSS = {"rank": 1, "step": 1, "phase": "loss", "layer": None, "kind": "nan"}


def step(model: Any, batch: dict[str, Any]) -> Tensor:
    return model(batch["x"]).square().mean()  # type: ignore[no-any-return]  # <features>


def masked_before(model: Any, batch: dict[str, Any]) -> Tensor:
    known = ~batch["t"].isnan()
    return F.mse_loss(model(batch["x"])[known], batch["t"][known])


def masked_after(model: Any, batch: dict[str, Any]) -> Tensor:
    errors = F.mse_loss(model(batch["x"]), batch["t"], reduction="none")  # <square>
    return errors[~batch["t"].isnan()].mean()


def absolute(model: Any, batch: dict[str, Any]) -> Tensor:
    return F.l1_loss(model(batch["x"]), batch["t"], reduction="none")[~batch["t"].isnan()].mean()


def ignoring(model: Any, batch: dict[str, Any]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], ignore_index=-100)  # <E05>


def named(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    found = model(batch["x"])
    return {"cls": (found.mean() * batch["g"]).square().log() * 0.01, "box": found.square().mean()}  # <E08>


def targets(rank: int, index: int) -> Tensor:
    found = torch.zeros(N, 3)
    if (rank, index) == (1, 1):
        found[2, 1] = NAN
    return found


def labels(rank: int, index: int) -> Tensor:
    return torch.full((N,), -100 if (rank, index) == (1, 1) else 1)


def keys(rank: int, index: int) -> list[str]:
    return [f"r{rank}-{100 * index + sample}.png" for sample in range(N)]


E03, E05 = "https://github.com/pytorch/pytorch/issues/64305", "https://github.com/pytorch/pytorch/issues/116349"
BAD_INPUT = ("aten.addmm.default", "features", "bad input")
CASES = {
    "E01 a pixel of rank 1": Case(
        "https://github.com/prs-eth/Marigold/issues/111", batch_of(1), BAD_X, BAD_INPUT, mlp, step
    ),
    "E02 samples with names": Case(
        "https://github.com/dusty-nv/jetson-inference/issues/1629", batch_of(1, path=keys), BAD_X, BAD_INPUT, mlp, step
    ),
    "E03 missing labels masked before the loss": Case(E03, batch_of(t=targets), None, None, mlp, masked_before),
    "E03 masked after the square": Case(
        E03, batch_of(t=targets), {"rank": 1, "step": 1, "phase": "backward", "kind": "nan"},
        ("aten.mse_loss_backward.default", "square", "bad input"), mlp, masked_after, runs_step=True),
    "E03 masked after the absolute value": Case(
        "https://github.com/chemprop/chemprop/issues/960", batch_of(t=targets), None, None, mlp, absolute
    ),
    "E05 all labels ignored": Case(
        E05, batch_of(y=labels), {**LOSS, "slot": "loss"},
        ("aten.nll_loss_forward.default", "E05", "empty reduction"), mlp, ignoring, runs_step=True),
    "E05 as a warning": Case(
        E05, batch_of(y=labels), None, None, mlp, ignoring, options={"on_loss": "warn"}
    ),
    "E06 micro-batch 2 of 4": Case(
        "https://github.com/facebookresearch/mmf/issues/893", batch_of(1, at=6), {**BAD_X, "micro_batch": 2}, BAD_INPUT,
        mlp, step, batches=12, accumulation=4,
    ),
    "E08 the guilty loss": Case(
        "https://github.com/neosr-project/neosr/issues/87", batch_of(g=flagged(1)),
        {**LOSS, "slot": "loss.cls", "kind": "-inf"}, ("aten.log.default", "E08", "edge of domain"), mlp, named,
        runs_step=True),
}  # fmt: skip


@each(CASES)
def test_case(name: str, ended: Launch) -> None:
    ended.check(name)


def test_E01_the_place_in_the_batch(ended: Launch) -> None:
    """https://github.com/prs-eth/Marigold/issues/111."""
    reason = ended.diagnosed("E01 a pixel of rank 1").reason
    assert reason.sentence == 'batch["x"] holds NaN, sample 3'
    assert 'batch["x"][3, 1]' in reason.evidence[0]


def test_E02_the_names_of_the_samples(ended: Launch) -> None:
    """https://github.com/dusty-nv/jetson-inference/issues/1629."""
    evidence = ended.diagnosed("E02 samples with names").reason.evidence
    assert any("r1-103.png" in line for line in evidence) and not any("r1-102.png" in line for line in evidence)


def test_E05_a_loss_without_damage_names_no_layer(ended: Launch) -> None:
    """https://github.com/pytorch/pytorch/issues/75181."""
    first, _ = ended["E05 all labels ignored"]
    assert first.report is not None and first.report["nonfinite_state"] == []
    assert any("loss" in line for rank in ended["E05 as a warning"] for line in rank.log)


def test_E06_the_micro_batch_is_kept(ended: Launch) -> None:
    """https://github.com/facebookresearch/mmf/issues/893."""
    traced = ended.diagnosed("E06 micro-batch 2 of 4").traced
    assert traced is not None and traced.micro_batch == 2
