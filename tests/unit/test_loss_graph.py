"""What a loss is made of beside the output of the model, read off its graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ddp_nanguard.script.loss_graph import nodes_of, takes_more

LABELS = torch.tensor([0, 2, 1])
LOSSES = {
    "the output itself": (lambda out: out, False),
    "a part of it": (lambda out: out.mean() / 4 * 0.5, False),
    "only the output": (lambda out: (out.softmax(1).log() * out).sum(), False),
    "cross entropy with labels": (lambda out: F.cross_entropy(out, LABELS), True),
    "squared error": (lambda out: F.mse_loss(out, torch.ones(3, 4)), True),
    "picked by labels": (lambda out: out.gather(1, LABELS[:, None]).mean(), True),
    "divided by one number of a batch": (lambda out: out.sum() / torch.ones(3).sum(), True),
    "divided by what a rank counted": (lambda out: (out / torch.tensor([[1.0], [2.0], [0.0]])).mean(), True),
}


@pytest.mark.parametrize("name", LOSSES)
def test_constants_between_the_model_and_the_loss_are_seen(name: str) -> None:
    make, expected = LOSSES[name]
    weight = torch.ones(4, 4, requires_grad=True)
    out: Tensor = F.cross_entropy(torch.ones(3, 4) @ weight, LABELS, reduction="none")[:, None] * weight[:3]
    assert takes_more(make(out), nodes_of([out])) == expected
