"""The line about a long write: none about a short one, one that stays on a terminal, few in a file."""

from __future__ import annotations

import io

import pytest

from ddp_nanguard.dump import progress
from ddp_nanguard.dump.progress import GIB, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class StepCounter:
    """A clock that the test moves."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StepCounter:
    made = StepCounter()
    monkeypatch.setattr(progress, "time", made)
    return made


def _told(stream: io.StringIO | None, clock: StepCounter, seconds: list[float], **options: bool) -> str:
    with Progress("dump", 4 * GIB, stream=stream, **options) as told:
        for second in seconds:
            clock.now_s = 100.0 + second
            told.tell(GIB // 2)
    return stream.getvalue() if stream is not None else ""


def test_what_is_soon_done_is_not_worth_a_line(clock: StepCounter) -> None:
    assert _told(Terminal(), clock, [0.5, 1.0, 1.9]) == ""


def test_a_file_gets_few_lines(clock: StepCounter) -> None:
    lines = _told(io.StringIO(), clock, [1.0, 2.0, 3.0, 11.0, 12.0]).splitlines()
    assert lines == ["dump: 1.0 of 4.0 GiB, 537 MB/s", "dump: 2.5 of 4.0 GiB, 224 MB/s"]


def test_a_terminal_gets_one_line_that_goes_away(clock: StepCounter) -> None:
    text = _told(Terminal(), clock, [2.0, 2.1, 3.0])
    first, second, cleared = (part for part in text.split("\r") if part)
    assert (first.rstrip(), second.rstrip()) == ("dump: 0.5 of 4.0 GiB, 268 MB/s", "dump: 1.5 of 4.0 GiB, 537 MB/s")
    assert cleared.strip() == "" and "\n" not in text


def test_other_ranks_and_test_runs_are_silent(clock: StepCounter, capsys: pytest.CaptureFixture[str]) -> None:
    assert _told(Terminal(), clock, [5.0], speaks=False) == ""
    assert _told(None, clock, [5.0]) == capsys.readouterr().err == ""


def test_a_closed_stream_ends_nothing(clock: StepCounter) -> None:
    stream = io.StringIO()
    with Progress("dump", GIB, stream=stream) as told:
        stream.close()
        clock.now_s += 5
        told.tell(1)
        told.tell(1)
