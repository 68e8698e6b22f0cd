"""Reasons from the report and the history alone, where no step can be run; and what proves nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ddp_nanguard.diagnosis.rules import REASON_KINDS, RULES, TraceFacts, reason_for
from ddp_nanguard.report.types import FaultReport, FirstOperator, Phase, SecondLook, Site


def site(phase: str, **more: Any) -> Site:
    given = {"rank": 0, "layer": "b", "slot": "b.weight", "kind": "inf", **more}
    return Site(step=9, micro_batch=None, phase=Phase(phase), call=None, **given)


def report(origin: Site, **more: Any) -> FaultReport:
    return FaultReport(9, 2, "ddp", origin, (origin,), **more)


def history(loss: list[float], gradient: float = 1.0) -> dict[str, Any]:
    steps = range(9 - len(loss), 9)
    slots = {f"step.{step}.{key}": np.array([]) for step in steps for key in ("labels", "values")}
    fault = {
        "fault.labels": np.array(["backward|0|b.weight|-|gradient|1"]),
        "fault.values": np.array([[0.0, gradient]]),
    }
    flat = np.ones(len(loss))
    return {**slots, **fault, "steps": np.array(steps), "loss": np.array(loss), "gradient_max": flat}


def test_overflow_in_the_reduce() -> None:
    histories = {0: history([1.0], 40000.0), 1: history([1.0], 30000.0)}
    facts = TraceFacts(report(site("reduce", rank=None)), histories=histories, dtypes={"b.weight": "float32"})
    assert reason_for(facts).kind == "unknown"  # it was reduced in the dtype of the parameter, which holds it
    assert reason_for(replace(facts, wrapper={"comm_hooks": ["quantised"]})).kind == "unknown"
    found = reason_for(replace(facts, wrapper={"comm_hooks": ["fp16_compress_hook"]}))
    assert found.kind == "overflow in the reduce"
    assert found.sentence == (
        "b.weight overflowed in the reduce: every rank's gradient was finite, "
        "their sum of up to 7e+04 is more than float16 holds (6.55e+04)"
    )
    assert found.evidence == ("rank 0: largest 4e+04", "rank 1: largest 3e+04")
    units = [{"mixed_precision": {"param_dtype": None, "reduce_dtype": "float16"}}]
    assert reason_for(replace(facts, wrapper={"units": units})) == found


@pytest.mark.parametrize(
    ("origin", "histories"),
    [
        (site("reduce", rank=None), {0: history([1.0], 4.0), 1: history([1.0], 3.0)}),
        (site("reduce", rank=None), {0: history([1.0], 40000.0)}),
        (site("reduce", rank=None, input_kind="unchecked"), {0: history([1.0], 4e4), 1: history([1.0], 4e4)}),
        (site("state", input_kind="unchecked"), {}),
        (site("optimizer"), {}),
        (site("forward"), {0: history([1.0, 2.0, 3.0, 4.0, 5.0])}),
        (site("forward"), {0: history([1.0, 20.0, 400.0, 8000.0, 16.0])}),
        (site("forward"), {0: history([1.0, 3.0, 9.0, 27.0])}),
        (site("forward"), {0: history([1.0] * 5), 1: history([1.0, 10.0, 100.0, 1e3, 1e4])}),
    ],
    ids=[
        "small sum", "a rank is missing", "not looked at", "written in the step", "an update with nothing known",
        "growth too small", "growth that ended", "growth too short of proof", "growth elsewhere",
    ],
)  # fmt: skip
def test_what_proves_nothing_is_unknown(origin: Site, histories: Any) -> None:
    assert reason_for(TraceFacts(report(origin), histories=histories)).kind == "unknown"


def test_growth_from_the_history_alone() -> None:
    histories = {rank: history([7.0, 1.0, 10.0, 100.0, 1e3, 1e4]) for rank in (0, 1)}
    found = reason_for(TraceFacts(report(site("forward")), histories=histories))
    assert found.sentence == (
        "growth: the loss grew by a factor of 10.00 per step since step 4, on every rank: 100 in step 6, 1e+03 in step "
        "7, 1e+04 in step 8"
    )
    one = reason_for(TraceFacts(report(site("forward")), histories={0: histories[0], 1: history([1.0] * 6)}))
    assert "since step 4, on rank 0: " in one.sentence
    few = {rank: history([7.0, 7.0, 7.0, 1.0, 3.0, 4e6]) for rank in (0, 1)}
    assert (
        "the loss grew by a factor of 2000.00 per step"
        in reason_for(TraceFacts(report(site("loss")), histories=few)).sentence
    )


def test_state_from_the_report_alone() -> None:
    found = reason_for(TraceFacts(report(site("state", kind="nan"), nonfinite_state=("b.weight", "b.bias"))))
    assert (found.kind, found.sentence) == ("state", "b.weight held NaN before the step")
    assert found.evidence == ("damaged: b.weight, b.bias",)


def test_without_any_facts_the_reason_is_unknown() -> None:
    assert reason_for(TraceFacts()).kind == "unknown"
    assert all(rule(TraceFacts()) is None for rule in RULES)


def test_the_list_of_kinds_is_closed() -> None:
    assert len(set(REASON_KINDS)) == len(REASON_KINDS) and REASON_KINDS[-1] == "unknown"


@pytest.mark.parametrize(
    ("outcome", "in_place", "sentence"),
    [
        ("not_reproduced", "finite", "in the replay, on equal software: it was not given the same, or is not"),
        ("not_reproduced", "same", "in the replay, on equal software: it went bad twice where it ran, so suspect what"),
        (None, "finite", "once more in place: it was not given the same, or is not"),
    ],
)
def test_a_second_look_is_evidence(outcome: str | None, in_place: str, sentence: str) -> None:
    divided = FirstOperator(0, "aten.div.Tensor", None, "", False, None) if in_place == "same" else None
    second = SecondLook(in_place, "what came of it", divided)
    found = reason_for(TraceFacts(report(site("forward"), second_look=second), outcome=outcome))
    assert found.kind == "not reproduced"
    assert found.sentence.startswith(f"the same step was finite {sentence}")
    assert found.evidence == ("second look: what came of it",)


def test_a_second_look_that_went_bad_again_says_nothing_by_itself() -> None:
    second = SecondLook("same", "same on all 2 ranks: deterministic")
    assert reason_for(TraceFacts(report(site("forward"), second_look=second))).kind == "unknown"
