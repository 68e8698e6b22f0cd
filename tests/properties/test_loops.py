"""A fault at any place of any training loop is named exactly, on every rank; a clean loop trains to the same bits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties.loop_jobs import run_clean, run_shapes
from tests.properties.loop_shapes import REFUSED, STEPS, LoopFault, Said, Shape, clean_loops, expected, faulty_loops
from tests.properties.test_origins import REPEATABLE
from tests.ranks import run_ranks

IN_A_ROW = 15
"""Loops that one launch of two ranks runs."""


def _rows_of(loops: st.SearchStrategy[Shape]) -> st.SearchStrategy[list[Shape]]:
    return st.lists(loops, min_size=IN_A_ROW, max_size=IN_A_ROW)


FOUND = [
    # the next forward of a deferred step has given rank 0's spoilt buffers to all ranks: "finite" on the other one
    Shape("ddp", norm=True, deferred=True, fault=LoopFault("forward", rank=0, step=1, block=2)),
    Shape("ddp", norm=True, deferred=True, critic=True, watched=False, fault=LoopFault("forward", 0, 1, block=2)),
    # what clips DTensors raises no version of theirs: told as a bad update
    Shape("fsdp2", clip="torch", fault=LoopFault("code", rank=1, step=1)),
    Shape("fsdp2", clip="torch", deferred=True, fault=LoopFault("code", rank=0, step=2)),
    Shape("fsdp2", surgery="scale", fault=LoopFault("code", rank=1, step=0)),
    # clipping has made all gradients bad: the first of them was named
    Shape("ddp", clip="torch", fault=LoopFault("code", rank=1, step=1)),
    # an EMA's weights, looked at after the loss, were taken for the end of a replayed graph: "loss"
    Shape("plain", watched=True, ema="registered", fault=LoopFault("moved", rank=0, step=1)),
    # a sparse gradient, looked at by itself, was told to be the first
    Shape("ddp", sparse=True, fault=LoopFault("grad", rank=0, step=2, block=2)),
    # ranks that got it by the loop's own averaging: "a hook of the job has changed them"
    Shape(frozen=True, fault=LoopFault("grad", rank=0, step=1, block=1)),
    # an optimizer whose step calls its parent's had two verdicts a step
    Shape("ddp", entry="model", loader=False, fault=LoopFault("moved", rank=0, step=1)),
    # a loss that nobody has shown to the guard
    Shape(watched=False, second_call=True, fault=LoopFault("loss", rank=0, step=1, call=2)),
    # no second look among gradients that wait to be reduced
    Shape("fsdp2", 2, no_sync=True, watched=False, ends="smallest", fault=LoopFault("forward", 1, STEPS, block=2)),
    Shape(
        "fsdp1", 2, no_sync=True, watched=False, deferred=True, ends="flag", fault=LoopFault("forward", 1, 2, block=2)
    ),
]
"""Loops in which something else was said once."""


def test_what_was_wrong_once_is_named_exactly() -> None:
    _assert_named(FOUND)


def _assert_named(shapes: list[Shape]) -> None:
    first, second = run_ranks(run_shapes, timeout_s=120, shapes=shapes)
    for shape, mine, other in zip(shapes, first, second, strict=True):
        assert mine.get("text") == other.get("text"), shape
        assert not {line for line in mine["told"] + other["told"] if "NOTHING IS JUDGED" in line}, shape
        assert _said(shape, mine) == expected(shape), (shape, mine.get("text"))


def _said(shape: Shape, outcome: dict[str, Any]) -> Said | None:
    report = outcome.get("report")
    if report is None:
        return REFUSED if outcome.get("is_refused") else None
    origin, wanted = report["origin"], expected(shape)
    assert origin is not None, shape
    if origin["phase"] == "loop" and origin["suspects"]:
        return Said(origin["rank"], origin["step"], origin["micro_batch"], "loop", None, None)
    layer = origin["layer"]
    slot = origin["slot"] if wanted is not None and wanted.slot is not None else None
    return Said(origin["rank"], origin["step"], origin["micro_batch"], origin["phase"], layer, slot)


def _assert_clean(shapes: list[Shape]) -> None:
    for rank in run_ranks(run_clean, timeout_s=120, shapes=shapes):
        for shape, (unguarded, guarded) in zip(shapes, rank, strict=True):
            assert guarded == {**unguarded, "told": []}, shape


@pytest.mark.timeout(300)  # a failure is shrunk first
@settings(REPEATABLE, max_examples=2)
@given(_rows_of(faulty_loops()))
def test_the_fault_is_named_exactly(shapes: list[Shape]) -> None:
    _assert_named(shapes)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@settings(REPEATABLE, max_examples=400)
@given(_rows_of(faulty_loops()))
def test_so_it_is_in_many_more_loops(shapes: list[Shape]) -> None:
    _assert_named(shapes)


@pytest.mark.timeout(300)
@settings(REPEATABLE, max_examples=2)
@given(_rows_of(clean_loops()))
def test_a_clean_loop_trains_to_the_same_bits(shapes: list[Shape]) -> None:
    _assert_clean(shapes)
