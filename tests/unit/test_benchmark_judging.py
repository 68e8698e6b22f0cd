"""The comparison of tools: what counts as a rank that was named, and as a stop in time."""

from __future__ import annotations

from benchmarks import judging
from benchmarks.judging import Expected, Mark
from benchmarks.peers import Statement, Stop


def test_a_rank_is_named_only_by_the_culprit_alone() -> None:
    expected = Expected(False, step=1, rank=1)
    stops = [Stop("alarm", 1, True), Stop("alarm", 1, True)]
    both = judging.judge(Mark("c", "t", "A"), expected, stops, {0: Statement(), 1: Statement()})
    one = judging.judge(Mark("c", "t", "A"), expected, stops, {0: Statement(located=False), 1: Statement()})
    assert (both.letters(), one.letters()) == ("NA·", "NAR")


def test_a_stop_after_the_update_is_late() -> None:
    stops = [Stop("end", 3), Stop("alarm", 2, unchanged=False)]
    late = judging.judge(Mark("c", "t", "A"), Expected(False, step=1, rank=1), stops, {1: Statement()})
    assert (late.outcome, late.letters()) == ("late", "··R")
