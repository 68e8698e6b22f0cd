"""What a zero divisor was computed from, and what is said of infinities that the code holds or masks with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ddp_nanguard.diagnosis.rules import reason_for
from tests.tracing import facts_of

ONES, ZEROS = torch.ones(4, 3), torch.zeros(4, 3)
CLASSES = torch.tensor([0, 1, 1, 0])


def said(function: Callable[..., Any], *values: Tensor) -> tuple[str, str]:
    found = reason_for(facts_of(function, *values))
    return found.kind, found.sentence


# -- divisors ----------------------------------------------------------------------------------------------------------


def decayed(x: Tensor, count: Tensor) -> Tensor:
    count = count.detach().half() * 0.05
    count.add_((x.detach() * 0).sum(0).half())
    return x / count.float()


def overwritten(x: Tensor) -> Tensor:
    total = x.detach().sum(0)
    total.zero_()
    return x / total


def filled_in_part(x: Tensor) -> Tensor:
    total = x.detach().sum(0)
    total[1] = 0.0
    return x / total


def replaced(x: Tensor) -> Tensor:
    total = x.detach().sum(0)
    total.copy_((x.detach() * 0).amax(0))
    return x / total


def written_in_part(x: Tensor) -> Tensor:
    both = torch.zeros(2, 3)
    both[0].copy_(x.detach().sum(0))
    return x / both[1]


def masked_out(x: Tensor) -> Tensor:
    return x / (x.detach().sum(0) * torch.tensor([1.0, 0.0, 1.0]))


def two_sums(x: Tensor) -> Tensor:
    return x / (x.detach().sum(0) - x.detach().amax(0) * 4)


def of_a_power(x: Tensor) -> Tensor:
    return x / x.detach().sum(0).mul(1e-3) ** 20


def cast_away(x: Tensor) -> Tensor:
    return x / (x.detach().mean(0) * 1e-8).half().float()


def small_but_not_gone(x: Tensor) -> Tensor:
    return x / (x.detach().mean(0) * 1e-8 - 1e-8)


DIVISORS: list[tuple[Callable[..., Any], tuple[Tensor, ...], str]] = [
    (decayed, (ONES, torch.tensor([1e-7, 1.0, 1.0])),
     "the divisor, computed from p1 and a sum over dim 0, is 0 at index 0: "
     "it underflowed in float16 in `count.detach().half() * 0.05`"),
    (overwritten, (ONES,), "the divisor is 0 everywhere"),
    (filled_in_part, (ONES,), "the divisor is 0 at index 1"),
    (replaced, (ONES,), "the divisor, a maximum over dim 0, is 0 everywhere"),
    (written_in_part, (ONES,), "the divisor is 0 everywhere"),
    (masked_out, (ONES,), "the divisor is 0 at index 1"),
    (two_sums, (ONES,), "the divisor, computed from a sum over dim 0 and a maximum over dim 0, is 0 everywhere"),
    (of_a_power, (ONES,),
     "the divisor, a sum over dim 0, is 0 everywhere: "
     "it underflowed in float32 in `x.detach().sum(0).mul(1e-3) ** 20`"),
    (cast_away, (ONES,),
     "the divisor, a mean over dim 0, is 0 everywhere: "
     "it underflowed in float16 in `(x.detach().mean(0) * 1e-8).half()`"),
    (small_but_not_gone, (ONES,), "the divisor, a mean over dim 0, is 0 everywhere"),
    (lambda x, scale: x / scale.detach(), (ONES, torch.tensor([1.0, 0.0, 1.0])), "the divisor, p1, is 0 at index 1"),
    (lambda x, scale: x / scale.detach()[1:2], (ONES, torch.tensor([1.0, 0.0, 1.0])), "the divisor, p1, is 0"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "values", "text"), DIVISORS, ids=[each[0].__name__ for each in DIVISORS])
def test_what_a_divisor_was_computed_from(function: Any, values: tuple[Tensor, ...], text: str) -> None:
    kind, sentence = said(function, *values)
    assert kind == "division by zero"
    assert sentence.partition("): ")[2].partition(" (test_sources.py:")[0] == text


# -- operators with several outputs ------------------------------------------------------------------------------------


def test_of_several_outputs_the_bad_one_counts() -> None:
    nearly = torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    assert said(lambda a: torch.linalg.slogdet(a)[1], nearly)[1].startswith("log of the determinant of a singular")
    assert said(lambda a: torch.frexp(a * 1e38 * 1e38)[0], ONES)[0] == "overflow"


def test_a_logarithm_of_a_negative_determinant() -> None:
    turned = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    kind, sentence = said(lambda a: a.logdet(), turned)
    assert (kind, sentence.partition(" (")[0]) == (
        "edge of domain", "logdet of a matrix with a negative determinant in `a.logdet()`"
    )  # fmt: skip
    assert said(lambda a: torch.where(a > -1, math.nan, torch.linalg.slogdet(a)[1]), turned.abs() + 1)[0] == "constant"


def test_what_a_selection_left_behind_is_not_the_origin() -> None:
    kind, sentence = said(lambda x: torch.where(x > 5, math.nan, (x * 0).log()), ONES)
    assert (kind, sentence.partition(" (")[0]) == ("edge of domain", "log of 0 in `(x * 0).log()`")


def test_two_causes_at_once_are_neither() -> None:
    both = torch.tensor([0.0, 1e300], dtype=torch.float64)
    assert said(lambda x: x.detach() ** torch.tensor([-1.0, 2.0]) + x, both)[0] == "unknown"
    assert said(lambda x: x.detach() ** torch.tensor([1.0, 2.0]) + x, both)[0] == "overflow"


# -- masks and constants -----------------------------------------------------------------------------------------------

UNSEEN = torch.tensor([False, False, True])


def smoothed(x: Tensor) -> Tensor:
    return F.cross_entropy(x.masked_fill(UNSEEN, -math.inf), CLASSES, label_smoothing=0.1)


def smoothed_with_weights(x: Tensor) -> Tensor:
    return F.cross_entropy(
        x.masked_fill(UNSEEN, -math.inf), CLASSES, torch.tensor([1.0, 2.0, 1.0]), label_smoothing=0.1
    )


def smoothed_by_hand(x: Tensor) -> Tensor:
    return -x.masked_fill(UNSEEN, -math.inf).log_softmax(-1).sum(-1).mean()


@pytest.mark.parametrize("function", [smoothed, smoothed_with_weights, smoothed_by_hand])
def test_label_smoothing_over_masked_classes(function: Any) -> None:
    kind, sentence = said(function, ONES)
    assert kind == "constant"
    assert " sums the log-probabilities of all classes, as label smoothing does, and those of masked" in sentence
    assert sentence.endswith("; mask with a finite number, or do not smooth over masked classes")


def test_a_label_that_is_masked() -> None:
    labels = torch.tensor([0, 2, 1, 2])
    kind, sentence = said(lambda x: F.cross_entropy(x.masked_fill(UNSEEN, -math.inf), labels), ONES)
    assert kind == "constant"
    assert sentence.startswith("the labelled class of samples 1, 3 is masked (sample 1: class 2) in `F.cross_entropy(")


def test_a_mask_without_smoothing_is_no_fault() -> None:
    facts = facts_of(lambda x: F.cross_entropy(x.masked_fill(UNSEEN, -math.inf), CLASSES), ONES)
    assert facts.traced is not None and not facts.traced.target


def squared(x: Tensor) -> Tensor:
    return x.masked_fill(UNSEEN, -math.inf) ** 2


def test_a_mask_that_becomes_something_worse() -> None:
    kind, sentence = said(squared, ONES)
    assert kind == "constant"
    assert " makes +Inf of -Inf, which the code writes in " in sentence


def test_a_mask_that_the_model_holds() -> None:
    mask = torch.tensor([0.0, 0.0, -math.inf])
    said_of = lambda x, m: F.cross_entropy(x + m.detach(), CLASSES, label_smoothing=0.1)  # noqa: E731
    kind, sentence = said(said_of, ONES, mask)
    assert (kind, sentence.partition(", which ")[2].partition(";")[0]) == ("constant", "p1 holds")


WEIGHT = torch.tensor([1.0, math.inf, 1.0])


def test_an_infinity_that_a_loss_holds() -> None:
    kind, sentence = said(lambda x: F.cross_entropy(x, CLASSES, WEIGHT), ONES)
    assert kind == "constant"
    assert sentence.startswith("`F.cross_entropy(x, CLASSES, WEIGHT)` (test_sources.py:")
    assert sentence.partition("takes in ")[2] == (
        "+Inf by its argument `weight`, at index 1: a tensor that no operator of the step made and that is no "
        "parameter, buffer or batch item"
    )
    assert " takes in +Inf by its argument `other`, at index 1" in said(lambda x: (x * WEIGHT).sum(), ONES)[1]
