"""The report as text."""

import dataclasses

import pytest

from ddp_nanguard.report.messages import what, where
from ddp_nanguard.report.text import error_text, fault_rows, human_size, replay_lacks, report_text
from ddp_nanguard.report.types import FaultReport, InlineCode, Phase, SecondLook
from tests.dump_requests import report


def test_report_text():
    text = report_text(dataclasses.replace(report(12, 8), dump_path="nan_dumps/step-00000012"))
    assert text.splitlines() == [
        "rank 0, step 12, micro-batch 1, forward",
        "  layers.2.act (call 1): finite in, NaN out",
        "",
        "  evidence  (4, 4) float32: 3 NaN, 1 Inf, 0 -Inf of 16; largest finite 2.5; ranks affected: 0",
        "  cause     the log of a negative number",
        "  state     all 8 ranks stopped before the update; weights are those of step 11",
        "",
        "  next      ddp-nanguard replay nan_dumps/step-00000012 --trace",
    ]


def test_report_text_of_damage_and_of_nothing():
    damaged = dataclasses.replace(
        report(), nonfinite_state=tuple(f"model.w{i}" for i in range(9)), origin=None, sites=()
    )
    text = report_text(damaged)
    assert text.startswith("step 7\n  the log of a negative number\n")
    assert "DAMAGED: model.w0, model.w1, model.w2, model.w3, model.w4, model.w5 and 3" in text
    assert isinstance(FaultReport.from_dict(damaged.to_dict()), FaultReport)
    assert "\x1b[31m" in report_text(report(), color=True)


def test_human_size():
    assert [human_size(size) for size in (0, 999, 2048, 412 * 2**20, 3 * 2**30)] == [
        "0 B",
        "999 B",
        "2.0 KiB",
        "412 MiB",
        "3.0 GiB",
    ]


@pytest.mark.parametrize(
    ("recipe", "redact", "dump_weights", "remedy"),
    [
        (None, False, True, 'to replay, give replay="module:function"'),
        (None, True, True, "to replay, train with redact=False"),
        ("train:recipe", True, True, "to replay, train with redact=False"),
        ("train:recipe", False, False, "to replay, train with dump_weights=True"),
    ],
)
def test_the_error_and_the_report_name_the_same_next_command(recipe, redact, dump_weights, remedy):
    found = dataclasses.replace(report(12, 8), dump_path="nan_dumps/step-00000012")
    lacks = replay_lacks(recipe, redact=redact, dump_weights=dump_weights)
    expected = f"ddp-nanguard show nan_dumps/step-00000012; {remedy}"
    assert error_text(found, lacks).splitlines()[-1] == f"  next:     {expected}"
    assert ("next", expected) in fault_rows(found, lacks)
    assert error_text(found, replay_lacks("train:recipe", redact=False, dump_weights=True)).endswith("--trace")


def test_a_second_look_is_told_by_its_outcome_first():
    told = {
        "same": "same on all 2 ranks: deterministic",
        "finite": "rank 1 finite on the second run, identical up to loss",
        "not_done": "not done: no call of the model was seen in the step",
    }
    rows = {
        outcome: dict(fault_rows(dataclasses.replace(report(), second_look=SecondLook(outcome, text)), None))
        for outcome, text in told.items()
    }
    assert [row["again"] for row in rows.values()] == [told["same"], f"finite: {told['finite']}", told["not_done"]]


def test_code_in_the_backward_is_told_by_the_forward():
    origin = dataclasses.replace(
        report().origin, phase=Phase.BACKWARD, slot="grad", inline_code=InlineCode("head", "head.w", "enc")
    )
    assert what(origin).startswith("code of head between enc and head.w (in the backward): ")
    first = dataclasses.replace(origin, inline_code=InlineCode("head", "head.w", None))
    assert what(first).startswith("code of head before head.w (in the backward): ")
    last = dataclasses.replace(origin, inline_code=InlineCode("head", None, "enc"))
    assert what(last).startswith("code of head after enc (in the backward): ")


def test_one_ranks_view_of_the_reduce_speaks_of_no_other_gradient():
    alone = dataclasses.replace(
        report().origin, rank=None, phase=Phase.REDUCE, layer=None, call=None, slot="w", input_kind="unchecked"
    )
    text = f"{', '.join(where(alone))}: {what(alone)}"
    assert text.startswith("a rank not known here, ") and text.endswith(
        "by the reduce, from another rank or made there"
    )
    assert "every rank" not in text and "no single rank" not in text
