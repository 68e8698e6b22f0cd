"""The comparison of tools: what it finds in two cases, with the tools that need no other package."""

from __future__ import annotations

import pytest

from benchmarks.diagnosis import compare
from benchmarks.diagnosis_text import document, table
from benchmarks.judging import Mark

pytestmark = pytest.mark.exhaustive
TOOLS = ["ddp_nanguard", "detect_anomaly", "forward hooks", "gradient check"]
FAULT, QUIET = "C13 a scale from the local shard", "G03 bad rows are sliced away"


@pytest.fixture(scope="module")
def marks() -> list[Mark]:
    return compare([FAULT], TOOLS) + compare([QUIET], ["ddp_nanguard", "forward hooks"])


def test_what_each_tool_said(marks: list[Mark]) -> None:
    found = {(mark.case, mark.tool): (mark.letters(), mark.outcome, mark.hang, mark.broke) for mark in marks}
    assert found == {
        (FAULT, "ddp_nanguard"): ("NARLOPW", "stopped", False, False),
        (FAULT, "detect_anomaly"): ("N·R····", "stopped", True, False),
        (FAULT, "forward hooks"): ("N·RL···", "stopped", True, False),
        (FAULT, "gradient check"): ("NA·····", "stopped", False, False),
        (QUIET, "ddp_nanguard"): ("", "quiet", False, False),
        (QUIET, "forward hooks"): ("", "false alarm", False, False),
    }


def test_the_row_of_the_guard(marks: list[Mark]) -> None:
    head, _, first, *_ = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(marks).splitlines()]
    assert dict(zip(head, first, strict=True)) == {
        "tool": "ddp_nanguard", "cases": "2", "noticed /1": "1", "all ranks /1": "1", "rank /1": "1", "layer /1": "1",
        "operator /1": "1", "line /1": "1", "why /1": "1", "false alarms /1": "0", "hangs": "0", "broke": "0",
    }  # fmt: skip


def test_the_document_names_every_case_and_tool(marks: list[Mark]) -> None:
    text = document([mark for mark in marks if mark.case == FAULT])
    assert all(tool in text for tool in TOOLS)
    assert "[C13](https://github.com/pytorch/torchtitan/issues/3109) a scale from the local shard" in text
    assert "- none" in text.partition("## Where ddp_nanguard's answer is missing")[2].partition("##")[0]
