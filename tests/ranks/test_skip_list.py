"""``skips.jsonl``: what a fault writes down, and how a job that begins again passes over it, on all ranks alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

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
    again = _train(_Loader(bad), epochs=2, steps={"skip": own_file}, dump_dir=dump_dir)
    return skipped, again


def test_what_was_skipped_is_passed_over_by_every_rank_when_the_job_begins_again(tmp_path: Path) -> None:
    for rank, (skipped, again) in enumerate(run_ranks(_skip_then_begin_again, dump_dir=str(tmp_path))):
        epoch = [0, -1, 2, 3, -1, 5] if rank == 1 else [0, 1, 2, 3, 4, 5]
        assert skipped == (epoch * 2, None)
        assert again == ([0, 2, 3, 5] * 2, None)
    found = _lines(tmp_path)
    assert [line["positions"] for line in found] == [[[0, 1]], [[0, 4]], [[1, 1]], [[1, 4]]]
    assert [(line["action"], line["step"], line["rank"]) for line in found] == [
        ("skip", step, 1) for step in (1, 4, 7, 10)
    ]
    assert [line["loader_state"] for line in found[:2]] == [{"drawn": 2}, {"drawn": 5}]
    assert len({line["fingerprint"] for line in found}) == 1
    assert all(Path(line["dump"]).is_dir() for line in found)
