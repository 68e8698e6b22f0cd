"""What a report says against itself: a report by hand for each rule, and what is left of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from ddp_nanguard.replay.outcome import Outcome, Result, contradiction
from ddp_nanguard.report import audit
from ddp_nanguard.report.audit import Claim, contradictions, settled
from ddp_nanguard.report.text import error_text
from ddp_nanguard.report.types import Evidence, FaultReport, FirstOperator, Phase, SecondLook, Site

BAD, CLEAN = Evidence((4,), "float32", 1, 0, 0, 4, 2.0), Evidence((4,), "float32", 0, 0, 0, 4, 2.0)


def _site(phase: Phase, rank: int | None = 1, **more: Any) -> Site:
    fields: dict[str, Any] = {"micro_batch": 0, "layer": "a", "call": 1, "slot": "output", "kind": "nan", **more}
    return Site(rank, 3, phase=phase, **fields)


def _report(origin: Site | None, *others: Site, **more: Any) -> FaultReport:
    sites = () if origin is None else (origin, *others)
    ranks = (1,) if origin is None or origin.rank is None else (origin.rank,)
    fields: dict[str, Any] = {"ranks_affected": ranks, "num_ranks_affected": 1, "cause": "unknown", **more}
    return FaultReport(3, 2, "ddp", origin, sites, **fields)


def _operator(output: Evidence | None = BAD, **more: Any) -> FirstOperator:
    return FirstOperator(**{"rank": 1, "name": "aten.div.Tensor", "line": "a.py:1 in f", "output": output, **more})


def _looked(outcome: str, text: str, operator: FirstOperator | None = None) -> FaultReport:
    return _report(FORWARD, second_look=SecondLook(outcome, text, operator))


FORWARD = _site(Phase.FORWARD)
LOSS = _site(Phase.LOSS, layer=None, call=None, slot="loss")
ROOT = _site(Phase.FORWARD, layer="")
REDUCED = _site(Phase.REDUCE, None, micro_batch=None, call=None, slot="a.weight")
CHANGED = _site(Phase.LOOP, micro_batch=None, call=None, slot="a.weight")
FINITE = "rank 1 finite on the second run, different from the start; "
DEVICE = "last of all that device (host, cpu)"

IN_ORDER = {
    "forward": _report(replace(FORWARD, evidence=BAD), _site(Phase.BACKWARD, 0)),
    "loss": _report(LOSS, replace(ROOT, rank=0)),
    "reduce": _report(REDUCED, holders=(0, 1)),
    "loop": _report(CHANGED),
    "unknown": _report(None),
    "operator": _looked("same", "same on all 2 ranks: deterministic", _operator()),
    "memory": _looked("finite", f"{FINITE}bad again with fresh memory filled with NaN", _operator()),
    "device": _looked("finite", f"{FINITE}weights were the same: {DEVICE}"),
    "uncompared": _looked("finite", f"{FINITE}not compared: the bits of weights"),
    "not done": _looked("not_done", "not done: the update is at fault"),
}

AGAINST_ITSELF: dict[str, tuple[Claim, FaultReport, str]] = {
    "no NaN": (Claim.ORIGIN, _report(replace(FORWARD, evidence=CLEAN)), "holds none when counted"),
    "another kind": (Claim.ORIGIN, _report(replace(FORWARD, evidence=BAD, kind="inf")), "output is +Inf, and holds"),
    "reduce on a rank": (Claim.ORIGIN, _report(replace(REDUCED, rank=1)), "on rank 1, in phase reduce"),
    "forward on none": (Claim.ORIGIN, _report(replace(FORWARD, rank=None)), "on no rank, in phase forward"),
    "holders": (Claim.ORIGIN, _report(FORWARD, holders=(0,)), "did not begin in the reduce"),
    "unaffected": (Claim.ORIGIN, _report(FORWARD, ranks_affected=(0,)), "only ranks [0] saw it"),
    "bad before the reduce": (Claim.ORIGIN, _report(REDUCED, LOSS, holders=(0,)), "phase reduce, and loss was bad"),
    "bad before the loop": (Claim.ORIGIN, _report(CHANGED, REDUCED), "phase loop, and a.weight was bad before"),
    "not asked": (Claim.ORIGIN, _report(CHANGED, single_rank_view=True), "no other rank was asked"),
    "bad output": (Claim.ORIGIN, _report(LOSS, ROOT), "output was finite, and it was bad"),
    "another step": (Claim.ORIGIN, replace(_report(FORWARD), step=4), "is of step 4, and begins in step 3"),
    "not the first": (Claim.ORIGIN, replace(_report(FORWARD), sites=(LOSS, FORWARD)), "another site than the first"),
    "operator without NaN": (Claim.OPERATOR, _looked("same", "same", _operator(CLEAN)), "holds nothing non-finite"),
    "operator, no run": (Claim.OPERATOR, _looked("not_done", "not done", _operator()), "no second look was made"),
    "operator, not known": (
        Claim.OPERATOR,
        _looked("same", "same; where it began is not known", _operator()),
        "where it began is not known",
    ),
    "code without a line": (Claim.OPERATOR, _looked("same", "same", _operator(line=None, code="a / b")), "no line"),
    "same and finite": (Claim.LOOK, _looked("same", FINITE), "was same, and finite"),
    "finite unsaid": (Claim.LOOK, _looked("finite", "same on all 2 ranks"), "its text does not say so"),
    "device, not compared": (
        Claim.LOOK,
        _looked("finite", f"{FINITE}not compared: weights; {DEVICE}"),
        "inputs were not compared",
    ),
    "device, other inputs": (
        Claim.LOOK,
        _looked("finite", f"{FINITE}it was not given the same: weights; {DEVICE}"),
        "inputs were not given the same",
    ),
    "device, same": (Claim.LOOK, _looked("same", f"same; {DEVICE}"), "the second run was same"),
    "hardware": (Claim.CAUSE, _report(FORWARD, cause="the device's hardware"), "inputs were not compared"),
}


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    audit.FOUND.clear()  # they were made here on purpose


@pytest.mark.parametrize("name", IN_ORDER)
def test_a_report_that_is_in_order_is_left_alone(name: str) -> None:
    report = IN_ORDER[name]
    assert contradictions(report) == []
    assert settled(report, []) is report and audit.FOUND == []


@pytest.mark.parametrize("name", AGAINST_ITSELF)
def test_what_contradicts_itself_is_not_known(name: str) -> None:
    claim, report, text = AGAINST_ITSELF[name]
    (found,) = contradictions(report)
    assert found.claim is claim and text in found.text

    left = settled(report, [found])
    assert contradictions(left) == []
    assert left.notes == (f"not known: what was seen contradicts itself: {found.text}",)
    assert "not known: what was seen contradicts itself" in error_text(left)
    assert (left.origin is None) is (claim is Claim.ORIGIN)
    assert len(audit.FOUND) == 1


@pytest.mark.parametrize(
    ("origin", "own", "is_earlier"),
    [
        (LOSS, FORWARD, True),
        (REDUCED, LOSS, True),
        (replace(LOSS, micro_batch=1), LOSS, True),
        (FORWARD, LOSS, False),
        (FORWARD, replace(FORWARD, rank=0), False),
        (LOSS, replace(FORWARD, micro_batch=1), False),
        (_site(Phase.STATE, micro_batch=None), FORWARD, False),
        (LOSS, _site(Phase.INPUT), False),
    ],
)
def test_no_rank_has_recorded_anything_before_the_origin(origin: Site, own: Site, is_earlier: bool) -> None:
    holders = (0,) if origin.phase is Phase.REDUCE else ()
    found = contradictions(_report(origin, holders=holders), [own])
    assert [each.claim for each in found] == ([Claim.ORIGIN] if is_earlier else [])


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (Result(0, Outcome.SAME, FORWARD, FORWARD), None),
        (Result(0, Outcome.SAME), None),
        (Result(0, Outcome.NOT_REPRODUCED, FORWARD, reason="the runs part at loss"), None),
        (Result(0, Outcome.ELSEWHERE, FORWARD, LOSS, losses={"loss": False}), None),
        (Result(0, Outcome.SAME, FORWARD), "bad in only one of both runs"),
        (Result(0, Outcome.SAME, None, FORWARD), "bad in only one of both runs"),
        (Result(0, Outcome.SAME, FORWARD, FORWARD, losses={"loss": False}), "other bits at loss"),
        (Result(0, Outcome.SAME, FORWARD, FORWARD, first_difference="a slot"), "other bits at a slot"),
        (Result(0, Outcome.NOT_REPRODUCED, FORWARD, LOSS), "and one is not"),
        (Result(0, Outcome.NOT_REPRODUCED, FORWARD, reason="suspect hardware"), "no input was compared"),
    ],
)
def test_a_replay_does_not_contradict_itself(result: Result, text: str | None) -> None:
    found = contradiction(result)
    assert found is None if text is None else (found is not None and text in found)
