"""Every row of the operator table, run under the product's own trace: what is said, and where it is not."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from ddp_nanguard.diagnosis.rules import OUTRANKS, RULES, TraceFacts, reason_for
from ddp_nanguard.diagnosis.rules.table import ROWS, Direction
from tests.reasons.examples import EXAMPLES, FINITE, Example
from tests.reasons.page import PAGE, page
from tests.tracing import facts_of

pytestmark = pytest.mark.filterwarnings("ignore")
NUMBERS = range(len(EXAMPLES))
NAMES = [f"{number} {each.operator}: {each.said}" for number, each in enumerate(EXAMPLES)]
NEED_A_DEVICE = {"_cudnn_ctc_loss", "cudnn_batch_norm"}
OTHER_NAMES = {
    "_native_batch_norm_legit_no_training", "_safe_softmax", "softmax", "log_softmax", "special_erfcx",
    "special_modified_bessel_i0", "special_modified_bessel_i1", "mean",
}  # fmt: skip
"""Of rows of which another operator is run."""


@functools.cache
def seen(number: int) -> TraceFacts:
    return facts_of(EXAMPLES[number].function, *EXAMPLES[number].bad)


@pytest.mark.parametrize("number", NUMBERS, ids=NAMES)
def test_a_row_is_said_where_it_holds(number: int) -> None:
    example = EXAMPLES[number]
    sentence = reason_for(seen(number)).sentence
    assert sentence.startswith((f"{example.said} in `", f"{example.said}: `", f"{example.said} ("))
    place, _, end = sentence.partition(")" + example.rest) if example.rest else (sentence, "", "")
    remedies = {row.remedy for row in ROWS if row.said == example.said and row.remedy}
    assert example.rest in sentence and place.count("(examples.py:") + place.count("(tracing.py:") == 1, sentence
    assert not end or end in {f"; {remedy}" for remedy in remedies}, sentence


@pytest.mark.parametrize("number", [n for n in NUMBERS if EXAMPLES[n].good], ids=lambda n: NAMES[n])
def test_a_row_is_not_said_of_numbers_beside_it(number: int) -> None:
    example = EXAMPLES[number]
    assert example.said not in reason_for(facts_of(example.function, *example.good)).sentence


def is_by_element(example: Example) -> bool:
    takes_nan = example.operator != "BinaryCrossEntropy"
    return takes_nan and example.rest.startswith((", at index", ": the divisor, p"))


@pytest.mark.parametrize("number", [n for n in NUMBERS if is_by_element(EXAMPLES[n])], ids=lambda n: NAMES[n])
def test_a_row_is_not_said_of_nan_that_comes_in(number: int) -> None:
    example = EXAMPLES[number]
    coming = [torch.where(bad != good, math.nan, bad) for bad, good in zip(example.bad, example.good, strict=True)]
    found = reason_for(facts_of(example.function, *coming))
    assert example.said not in found.sentence
    assert found.kind in ("state", "unknown")


@pytest.mark.parametrize("number", range(len(FINITE)), ids=[name for name, *_ in FINITE])
def test_what_is_left_out_because_torch_takes_care_of_it(number: int) -> None:
    _, function, *values = FINITE[number]
    traced = facts_of(function, *values).traced
    assert traced is not None
    assert not traced.target or traced.target.endswith("; loss, gradients and weights are finite")


def test_every_row_has_its_example() -> None:
    shown = {(each.operator, each.said) for each in EXAMPLES}
    missing = [
        (name, row.said)
        for row in ROWS
        for name in row.operators
        if row.test is not None and name not in NEED_A_DEVICE | OTHER_NAMES and not _is_shown(name, row.said, shown)
    ]
    assert not missing
    asked = {name for row in ROWS if row.test is None for name in row.operators}
    assert asked - {each.operator for each in EXAMPLES} <= OTHER_NAMES


def _is_shown(name: str, said: str, shown: set[tuple[str, str]]) -> bool:
    names = {name, name.lower(), name.removeprefix("special_"), name.removesuffix("_forward")}
    return any((name, said.format(name=each)) in shown for each in names)


def test_no_row_is_there_twice() -> None:
    keys = [(name, row.direction, row.said) for row in ROWS for name in row.operators if row.test is not None]
    doubled = {key for key in keys if keys.count(key) > 1}
    assert {said for _, _, said in doubled} <= {"{name} of a negative number"}  # by either argument


def test_of_two_rules_that_answer_one_is_said_to_come_first() -> None:
    pairs = set()
    for number in NUMBERS:
        first, *others = [rule for rule in RULES if rule(seen(number)) is not None]
        pairs |= {(first, other) for other in others}
    assert pairs == {(first, other) for first, others in OUTRANKS.items() for other in others}


def test_rules_that_outrank_others_are_asked_before_them() -> None:
    assert all(RULES.index(first) < RULES.index(other) for first, others in OUTRANKS.items() for other in others)


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text() == page(), "python -m tests.reasons.page"
    assert {row.direction for row in ROWS} == set(Direction)
