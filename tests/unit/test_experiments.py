"""The step with one thing changed, the smallest window that still fails, and what the command line prints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddp_nanguard.cli.main import main
from ddp_nanguard.diagnosis import experiments
from ddp_nanguard.diagnosis.minimize import minimize, rows_of
from tests.diagnosing import Body, Training, batch, inline_code, of_loss, session_of, square, trained

# -- experiments -------------------------------------------------------------------------------------------------------


def half(h: Tensor) -> Tensor:
    return h * (h.abs().detach() + 1e30).square()


def test_a_wider_dtype_stays_finite(tmp_path: Path) -> None:
    session = session_of(inline_code(half), tmp_path)
    assert experiments.in_dtype(session, "float32").failed is True
    assert experiments.in_dtype(session, "float64").text.startswith("the step is finite")


_runs: list[int] = []


def every_other(h: Tensor) -> Tensor:
    _runs.append(1)
    return h / (h.detach() * 0) if len(_runs) % 2 else h


def test_repetition_counts(tmp_path: Path) -> None:
    _runs.clear()
    session = session_of(inline_code(every_other), tmp_path)
    _runs.clear()
    found = experiments.repeat(session, 4)
    assert found.text.startswith("2 of 4 runs non-finite: 2 times forward · code of (root)")


class Unwritten(Body):
    """Its last row is memory that nobody wrote; only what poison fills integers with makes a NaN of it."""

    def forward(self, values: Tensor) -> Tensor:
        room = torch.empty(6, 4, dtype=torch.int64)
        room[:5] = 0
        poisoned = room == torch.iinfo(torch.int64).max
        return self.b(self.a(values) + torch.where(poisoned, math.nan, 0.0))  # type: ignore[no-any-return]


def test_poisoned_memory_shows_what_was_not_written(tmp_path: Path) -> None:
    def dirty() -> nn.Module:
        return Unwritten(torch.tanh)

    step = lambda model, items: square(model, items) / items["d"]  # noqa: E731
    session = session_of(Training(dirty, step, [batch(d=torch.zeros(()))]), tmp_path)
    before = torch.are_deterministic_algorithms_enabled()
    found = experiments.poison_memory(session)
    assert "code of (root)" in found.text and torch.are_deterministic_algorithms_enabled() is before
    assert experiments.deterministic(session).text.startswith("still fails: loss")


def test_minimize_finds_the_samples(tmp_path: Path) -> None:
    def pair(h: Tensor, items: dict[str, Any]) -> Tensor:
        first, second = (items["i"] == 2).any(), (items["i"] == 5).any()
        return h.square().mean() / (0.0 if first and second else 1.0)

    job = of_loss(pair, i=torch.arange(6))
    job.batches = [batch(i=torch.arange(6) + 10), batch(i=torch.arange(6), ids=list("abcdef"))]
    job.accumulation = 2
    session = session_of(job, tmp_path)
    told: list[tuple[int, int]] = []
    found = minimize(session, lambda runs, samples: told.append((runs, samples)))
    assert found.text == "2 of 12 samples still fail: micro-batch 1: samples 2, 5"
    assert told[-1][1] == 2
    bounded = minimize(session, lambda runs, samples: None, max_runs=3)
    assert "stopped after 3 runs" in bounded.text


def test_rows_of_a_batch() -> None:
    items = {
        "x": torch.arange(6),
        "ids": list("abcdef"),
        "n": 3,
        "pair": (torch.zeros(6, 2), np.arange(6)),
        "w": [1, 2],
    }
    cut = rows_of(items, [1, 4], 6)
    assert cut["x"].tolist() == [1, 4] and cut["ids"] == ["b", "e"] and (cut["n"], cut["w"]) == (3, [1, 2])
    assert cut["pair"][0].shape == (2, 2) and cut["pair"][1].tolist() == [1, 4]


def test_pdb_stops_in_the_users_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[Any] = []

    class Shell:
        def reset(self) -> None:
            pass

        def interaction(self, frame: Any, _: Any) -> None:
            frames.append((frame.f_code.co_name, sorted(frame.f_locals)))

    monkeypatch.setattr(experiments.pdb, "Pdb", Shell)
    assert main(["replay", trained(inline_code(half), tmp_path), "--pdb", "--device", "cpu"]) == 0
    assert frames == [("half", ["h"])]


# -- the command line --------------------------------------------------------------------------------------------------


def test_the_plain_replay_is_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = trained(inline_code(half), tmp_path)
    capsys.readouterr()
    assert main(["replay", dump, "--trace", "--repeat", "2"]) == 0
    text = capsys.readouterr().out
    parts = [
        "replay of rank 0: same",
        "trace of ",
        ": half",
        "^^^",
        "  operator",
        "reason: overflow",
        "--repeat 2: 2 of 2",
    ]
    places = [text.find(part.replace(": half", " in half")) for part in parts]
    assert places == sorted(places) and min(places) >= 0, text


def test_everything_is_in_the_json_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = trained(inline_code(half), tmp_path)
    capsys.readouterr()
    main(["replay", dump, "--trace", "--dtype", "float64", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["outcome"] == "same" and data["cause"]["kind"] == "overflow"
    assert data["trace"]["first_nonfinite_op"]["lines"][0]["function"] == "half"
    assert data["experiments"]["--dtype float64"]["failed"] is False


def test_explain_without_a_recipe_says_what_it_rests_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = inline_code(half, options={"replay": None})
    dump = trained(job, tmp_path)
    capsys.readouterr()
    assert main(["explain", dump]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].startswith("overflow: float32 overflow in `(h.abs().detach() + 1e30).square()`")
    assert "second look in the job: same: deterministic" in text
    assert "the report and the history alone" in text
