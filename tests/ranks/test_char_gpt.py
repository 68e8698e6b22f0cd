"""The example that diverges by its learning rate: the history alone says that values grew, how fast and since when."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddp_nanguard import NonFiniteError
from ddp_nanguard.cli.main import main
from ddp_nanguard.dump import open_dump
from tests.ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
LEARNING_RATE, NUM_STEPS = 1.0, 40
SERIES = {"the largest gradient": "gradient_max", "the loss": "loss"}


def _diverge(rank: int, world_size: int, out: str, amp: bool) -> str:
    sys.path.insert(0, str(EXAMPLES))  # as a script there would have it
    example = importlib.import_module("char_gpt")
    example.USES_AMP = amp
    try:
        example.train(LEARNING_RATE, NUM_STEPS, out, torch.device("cpu"))
    except NonFiniteError as error:
        return str(error)
    return ""


def _largest_finite_activations(history: dict[str, Any]) -> list[float]:
    found = []
    for step in history["steps"].tolist():
        rows = zip(history[f"step.{step}.labels"].tolist(), history[f"step.{step}.values"].tolist(), strict=True)
        sizes = [max(abs(low), abs(high)) for label, (low, high) in rows if label.split("|")[0] == "forward"]
        found.append(max((size for size in sizes if math.isfinite(size)), default=0.0))
    return found


def _grown(history: dict[str, Any]) -> tuple[str, int, float]:
    """(what, first step, factor per step) of what grew most while it grew in every step up to the last."""
    steps = history["steps"].tolist()
    series = {name: [abs(value) for value in history[key].tolist()] for name, key in SERIES.items()}
    series["the largest activation"] = _largest_finite_activations(history)
    totals = {}
    for name, values in series.items():
        rises = [later > earlier for earlier, later in itertools.pairwise(values)]
        num_rises = len(list(itertools.takewhile(bool, reversed(rises))))
        if num_rises >= 3:
            first = len(values) - 1 - num_rises
            totals[name] = (values[-1] / values[first], steps[first], num_rises)
    name = max(totals, key=lambda each: totals[each][0])
    total, first_step, num_rises = totals[name]
    return name, first_step, math.exp(math.log(total) / num_rises)


@pytest.mark.parametrize("amp", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["fp32", "amp"])
def test_growth_by_the_learning_rate_is_read_from_the_history(
    amp: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = run_ranks(_diverge, timeout_s=50, out=str(tmp_path), amp=amp)
    assert first == second != ""
    (dump,) = tmp_path.glob("step-*")
    assert main(["explain", str(dump), "--no-replay", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    report = open_dump(dump).report
    assert report.origin is not None
    with np.load(dump / f"rank-{report.origin.rank:05d}" / "history.npz", allow_pickle=False) as history:
        name, first_step, factor = _grown(dict(history))
    assert (said["trace"], said["cause"]["kind"]) == (None, "growth")
    sentence = said["cause"]["sentence"]
    assert sentence.startswith(
        f"growth: {name} grew by a factor of {factor:.2f} per step since step {first_step}, on every rank: "
    )
    assert sentence.endswith("; trained by SGD with lr=1")
    live = said["cause"]["sentence"].replace("on every rank", f"as seen on rank {report.origin.rank}")
    assert report.cause == live and f"cause:    {live}" in first
