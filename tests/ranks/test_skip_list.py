"""``skips.jsonl``: what a fault writes down, and how a job that begins again passes over it, on all ranks alike."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from torch import Tensor

from ddp_nanguard.dump.skip_list import read_skips
from tests.ranks import run_ranks
from tests.ranks.small import ended, guard_of, rows, sgd, small_model


class _Loader:
    """Numbered batches, some of them bad, that tells where it is, as a loader that can be resumed does."""

    def __init__(self, bad: tuple[int, ...], count: int = 6, state: Any = None) -> None:
        self.bad, self.count, self.state, self.drawn = bad, count, state, 0

    def __iter__(self) -> Any:
        for index in range(self.count):
            self.drawn = index + 1
            yield rows(index in self.bad) + index

    def state_dict(self) -> Any:
        return {"drawn": self.drawn} if self.state is None else self.state


def _number(values: Tensor) -> int:
    return -1 if values.isinf().any() else int(values[0, 0]) - 1


def _train(
    loader: Any, *, accumulation: int = 1, epochs: int = 1, steps: dict[str, Any] | None = None, **options: Any
) -> tuple[list[int], str | None]:
    """The numbers of the batches that were trained on, and how it ended."""
    model = small_model()
    optimizer = sgd(model)
    guard = guard_of(model, optimizer, look_again=False, **options)
    seen: list[int] = []

    def train() -> None:
        for _ in range(epochs):
            for index, values in enumerate(guard.steps(loader, **(steps or {}))):
                seen.append(_number(values))
                guard(values).sum().backward()
                if (index + 1) % accumulation == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        guard.close()

    return seen, ended(train)


def _lines(dump_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (dump_dir / "skips.jsonl").read_text().splitlines()]


def _skip_then_begin_again(rank: int, world_size: int, dump_dir: str) -> Any:
    bad = (1, 4) if rank == 1 else ()
    skipped = _train(_Loader(bad), epochs=2, on_fault="skip", dump_dir=dump_dir)
    own_file = f"{dump_dir}/skips.jsonl" if rank == 0 else f"{dump_dir}/only-the-first-rank-reads"
    said: list[str] = []
    logger = logging.getLogger("ddp_nanguard.fault.skip_lists")
    logger.addFilter(lambda record: said.append(record.getMessage()) or False)  # type: ignore[func-returns-value]
    again = _train(_Loader(bad), epochs=2, steps={"skip": own_file}, dump_dir=dump_dir)
    return skipped, again, said


def test_what_was_skipped_is_passed_over_by_every_rank_when_the_job_begins_again(tmp_path: Path) -> None:
    for rank, (skipped, again, said) in enumerate(run_ranks(_skip_then_begin_again, dump_dir=str(tmp_path))):
        epoch = [0, -1, 2, 3, -1, 5] if rank == 1 else [0, 1, 2, 3, 4, 5]
        assert skipped == (epoch * 2, None)
        assert again == ([0, 2, 3, 5] * 2, None)
        told = f"guard.steps: passing over 4 batches of 4 steps in {tmp_path / 'skips.jsonl'}"
        assert said == ([told] if rank == 0 else []), "once, though both epochs asked"
    found = _lines(tmp_path)
    assert [line["positions"] for line in found] == [[[0, 1]], [[0, 4]], [[1, 1]], [[1, 4]]]
    assert [(line["action"], line["step"], line["rank"]) for line in found] == [
        ("skip", step, 1) for step in (1, 4, 7, 10)
    ]
    assert [skipped.state_dict() for skipped in read_skips(str(tmp_path / "skips.jsonl"))[:2]] == [
        {"drawn": 2},
        {"drawn": 5},
    ]
    assert len({line["fingerprint"] for line in found}) == 1
    assert all(Path(line["dump"]).is_dir() for line in found)


def _stop_and_go_on(rank: int, world_size: int, dump_dir: str) -> Any:
    """Windows of two micro-batches; the job stops, and begins again within its second epoch."""
    bad = (3,) if rank == 1 else ()
    told: list[dict[str, Any]] = []
    options = {"dump_dir": dump_dir, "accumulation": 2, "on_event": told.append}
    stopped = _train(_Loader(bad), steps={"epoch": 1}, **options)
    again = _train(_Loader(bad), steps={"epoch": 1, "skip": Path(dump_dir) / "skips.jsonl"}, **options)
    later = _train(_Loader((1,), count=4), steps={"epoch": 1, "start": 2, "skip": f"{dump_dir}/skips.jsonl"}, **options)
    other = _train(_Loader(()), steps={"epoch": 2, "skip": f"{dump_dir}/skips.jsonl"}, **options)
    return (stopped, again, later, other), told


def test_a_stop_is_passed_over_with_its_whole_window_and_told_once_on_the_first_rank(tmp_path: Path) -> None:
    (first, told), (second, untold) = run_ranks(_stop_and_go_on, dump_dir=str(tmp_path))
    error = "NonFiniteError: rank 1, step 1, micro-batch 1, input: batch holds +Inf"
    for rank, (stopped, again, later, other) in enumerate((first, second)):
        assert stopped == ([0, 1, 2, -1 if rank == 1 else 3], error)
        assert again == ([0, 1, 4, 5], None)
        assert later == ([2, 3], None), "batches 0 and 1 of that loader are 2 and 3 of the epoch"
        assert other == ([0, 1, 2, 3, 4, 5], None), "the same numbers of another epoch are other batches"
    (line,) = _lines(tmp_path)
    assert (line["action"], line["positions"], line["rank"]) == ("stop", [[1, 2], [1, 3]], 1)
    assert line["fault"] == "input · batch: +Inf"
    (event,) = told
    assert (event["event"], event["step"], event["origin"]["rank"]) == ("stop", 1, 1)
    assert event["fingerprint"] == line["fingerprint"]
    assert event["text"].splitlines()[0] == error.removeprefix("NonFiniteError: ")
    assert json.loads(json.dumps(event, allow_nan=False)) == event
    assert untold == []


def _events_of_policies(rank: int, world_size: int) -> Any:
    found = []
    for options in ({"on_fault": "skip"}, {"on_fault": "warn"}):
        told: list[dict[str, Any]] = []
        _train(_Loader((1,) if rank == 1 else (), count=2), on_event=told.append, **options)
        found.append([(event["event"], event["text"]) for event in told])
    return found


def test_skips_and_what_is_let_through_are_events_too() -> None:
    first, second = run_ranks(_events_of_policies)
    through = "(let through; further ones of this layer and phase are counted)"
    assert first == [
        [("skip", "step 1 skipped on all ranks (1 of at most 10)")],
        [
            ("warn", f"non-finite: rank 1 · step 1 · micro-batch 0 · input · batch holds +Inf {through}"),
            (
                "warn",
                "non-finite: rank 0 · step 1 · optimizer · 0.weight is NaN after the update, and was not before it "
                + through,
            ),
        ],
    ]
    assert second == [[], []]


def _bad_lists(rank: int, world_size: int, dump_dir: str) -> Any:
    model = small_model()
    guard = guard_of(model, sgd(model), timeout_s=2)
    Path(dump_dir, f"rank-{rank}.jsonl").write_text("{" if rank == 0 else "")
    return [
        ended(lambda: guard.steps([], skip=f"{dump_dir}/rank-{rank}.jsonl")),
        ended(lambda: guard.steps([], skip=3)),
        ended(lambda: guard.steps([], skip=f"{dump_dir}/none.jsonl")),
        ended(lambda: guard.steps([], epoch=-1)),
        ended(lambda: guard.steps([], start=None)),
        ended(lambda: guard.steps([], skip=f"{dump_dir}/none-2.jsonl")) if rank == 0 else None,
    ]


def test_a_bad_list_is_one_line_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(_bad_lists, dump_dir=str(tmp_path))
    assert first[:5] == second[:5]
    bad, no_path, missing, epoch, start = first[:5]
    assert bad.startswith(f"ValueError: guard.steps(skip=...): {tmp_path}/rank-0.jsonl, line 1 is no skipped step (")
    assert bad.endswith("); remove that line")
    assert no_path == "ValueError: guard.steps(skip=3) is no path; give that of a skips.jsonl, or None"
    assert missing is None, "the first run has no list yet"
    assert epoch == "ValueError: guard.steps(epoch=-1) does not fit; give a whole number of at least 0"
    assert start == "ValueError: guard.steps(start=None) does not fit; give a whole number of at least 0"
    assert first[5].startswith(f"ValueError: guard.steps(skip='{tmp_path}/none-2.jsonl'): not all ranks ask for a list")
    assert first[5].endswith("; give skip= on every rank")
