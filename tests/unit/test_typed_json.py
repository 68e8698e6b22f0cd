"""JSON read as declared types, and written from them."""

from __future__ import annotations

import enum
import json
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
import torch

from ddp_nanguard.dump.typed_json import MisfitError, as_json, read_as
from ddp_nanguard.report.types import Evidence, FaultReport, FirstOperator, Phase, Rule, SecondLook, Shape, Site

Even = Annotated[int, Rule(lambda value: value % 2 == 0, "an even number")]


class Color(enum.StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    even: Even
    color: Color = Color.RED


@dataclass(frozen=True)
class Outer:
    inner: Inner | None
    many: tuple[Inner, ...]
    pair: tuple[str, int]
    numbers: dict[str, float]
    word: Literal["a", "b"] = "a"
    anything: Any = None
    names: list[str] = field(default_factory=list)


OUTER = Outer(Inner(2), (Inner(4),), ("x", 1), {"nan": math.inf, "one": 1.0}, "b", {"k": [None]}, ["n"])
DATA = {
    "inner": {"even": 2, "color": "red"},
    "many": [{"even": 4, "color": "red"}],
    "pair": ["x", 1],
    "numbers": {"nan": "inf", "one": 1.0},
    "word": "b",
    "anything": {"k": [None]},
    "names": ["n"],
}


def test_there_and_back() -> None:
    assert as_json(OUTER) == DATA and json.loads(json.dumps(DATA, allow_nan=False)) == DATA
    assert read_as(Outer, DATA) == OUTER
    assert read_as(Outer, {**DATA, "inner": None, "later": 1}).inner is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"inner": {"even": 3, "color": "red"}}, "inner.even is 3, valid is an even number"),
        ({"inner": {"even": "2", "color": "red"}}, "inner.even is '2', valid is an even number"),
        ({"inner": 1}, "inner is 1, valid is an object or null"),
        ({"many": [{"even": 2}]}, "many[0].color is missing"),
        ({"many": [{"even": 2, "color": "blue"}]}, "many[0].color is 'blue', valid is 'red'"),
        ({"many": {}}, "many is {}, valid is a list"),
        ({"pair": ["x"]}, "pair is ['x'], valid is a list of 2"),
        ({"numbers": {"one": True}}, "numbers['one'] is True, valid is a number"),
        ({"numbers": {"one": 10**400}}, f"numbers['one'] is {'1' + '0' * 27}...{'0' * 28}0, valid is a number"),
        ({"numbers": []}, "numbers is [], valid is an object"),
        ({"word": "c"}, "word is 'c', valid is 'a' or 'b'"),
        ({"names": ["\ud800"]}, r"names[0] is '\ud800', valid is a text"),
    ],
)
def test_the_first_misfit_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(MisfitError) as caught:
        read_as(Outer, {**DATA, **change})
    assert str(caught.value) == said


def test_the_whole() -> None:
    with pytest.raises(MisfitError, match=r"^the whole is \[\], valid is an object$"):
        read_as(Outer, [])


def test_other_classes_are_taken_as_they_are() -> None:
    tensor = torch.ones(1)
    assert read_as(dict[str, torch.Tensor], {"x": tensor})["x"] is tensor
    with pytest.raises(MisfitError, match=r"^x is 1, valid is a Tensor$"):
        read_as(torch.Tensor, 1, "x")


def test_half_of_a_surrogate_pair_is_written_as_what_can_be_printed() -> None:
    assert as_json({"\udc80": ("a\udc80",)}) == {"\\udc80": ["a\\udc80"]}


def test_a_report_is_read_by_its_own_form() -> None:
    site = Site(0, 1, 2, Phase.LOSS, None, None, "loss", "inf", evidence=Evidence((2, 3), "float32", 0, 1, 0, 6, None))
    second = SecondLook(
        "finite", "text", FirstOperator(0, "aten.div.Tensor", output=Evidence((), "float32", 1, 0, 0, 1, None))
    )
    report = FaultReport(1, 4, "ddp", site, (site,), (3,), 2, (0, 3), second_look=second)
    assert read_as(FaultReport, report.to_dict()) == report
    with pytest.raises(MisfitError, match=r"^second_look.outcome is 'fine', valid is 'same' or "):
        read_as(FaultReport, {**report.to_dict(), "second_look": {**second.to_dict(), "outcome": "fine"}})
    assert read_as(Shape, [0, 2**62]) == (0, 2**62)
