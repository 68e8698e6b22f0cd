"""Group I: replay and reproduction."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from ddp_nanguard.capture import rng
from ddp_nanguard.cli.main import main
from ddp_nanguard.diagnosis import experiments
from ddp_nanguard.dump.read import open_dump
from ddp_nanguard.replay.outcome import EXIT_CODES, Outcome
from tests import diagnosing
from tests.cases.harness import Case, Launch, batch_of, each, flagged
from tests.cases.parts import NAN, WIDTH, ValidatedArgs, of_batch
from tests.diagnosing import Training, batch, inline_code, session_of

THIS = sys.modules[__name__]


class Dropped(ValidatedArgs):
    """What dropout keeps decides whether there is anything to divide by."""

    def __init__(self) -> None:
        super().__init__(lambda h, batch: h)
        self.drop = nn.Dropout(0.5)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        h = self.drop(self.a(batch["x"]))
        noise = random.random() + numpy.random.rand()
        return self.b(h * noise / batch["g"])  # type: ignore[no-any-return]  # <I05>


def own_seed(model: nn.Module, optimizer: Any, rank: int, index: int) -> None:
    """Every rank has a stream of its own; the first micro-batch of a rank moves it on by a different amount."""
    if index == 0:
        torch.manual_seed(1000 + rank)
        numpy.random.seed(2000 + rank)
        random.seed(3000 + rank)


I05 = "https://github.com/NVIDIA/Megatron-LM/pull/6858"
CASES = {
    "I05 every rank has its own random state": Case(
        I05, batch_of(g=flagged(1)), {"rank": 1, "step": 1, "phase": "forward"},
        ("aten.div.Tensor", "I05", "division by zero"), Dropped, of_batch, before=own_seed,
    ),
}  # fmt: skip


@each(CASES)
def test_case(name: str, ended: Launch) -> None:
    ended.check(name)


def test_I05_the_bits_of_rank_1_come_again_alone(ended: Launch) -> None:
    """https://github.com/NVIDIA/Megatron-LM/pull/6858."""
    from ddp_nanguard.replay.session import open_session

    (case,) = CASES.values()
    report = ended.report(next(iter(CASES)))
    diagnosing.replay_with(case.training(1))
    for rank in (0, 1):
        result = open_session([report["dump_path"]], rank, None, "cpu").plain()
        assert result.num_slots > 0 and result.num_same == result.num_slots, (rank, result)
        assert all(result.losses.values())
    dump = open_dump([report["dump_path"]])
    first, second = (dump.window(rank)[0].random_state for rank in (0, 1))
    assert not torch.equal(first.torch, second.torch) and first.python != second.python


_runs: list[int] = []


def every_seventh(h: Tensor) -> Tensor:
    """Bad in its first call in a process, and then never again."""
    _runs.append(1)
    return h * (NAN if len(_runs) == 1 else 1.0)


def test_I01_not_reproduced_is_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """https://github.com/pytorch/pytorch/issues/166211."""
    _runs.clear()
    session = session_of(inline_code(every_seventh), tmp_path)
    result = session.plain()
    assert result.outcome is Outcome.NOT_REPRODUCED and result.reason
    assert experiments.repeat(session, 3).text.startswith("0 of 3 runs non-finite")
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES) and 2 not in EXIT_CODES.values()
    assert main(["replay", str(session.dump.path), "--device", "cpu"]) == EXIT_CODES[Outcome.NOT_REPRODUCED] == 4
    capsys.readouterr()


def _states() -> list[Any]:
    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]


def test_I03_random_states_are_numbers_and_load_without_pickle(tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/issues/40500."""
    job = inline_code(lambda h: h / torch.zeros(()))
    session = session_of(job, tmp_path)
    state = open_dump([str(session.dump.path)]).window(0)[0].random_state
    assert rng.restore(state) == []
    first = _states()
    assert rng.restore(state) == [] and _states() == first
    assert not [path for path in session.dump.path.rglob("*") if path.suffix in (".pt", ".pth", ".pkl", ".pickle")]
    json.loads(next(session.dump.path.rglob("window.json")).read_text())


def test_I03_a_state_that_cannot_be_put_back_is_told() -> None:
    """https://github.com/redai-studio/Relax/pull/317."""
    state = rng.capture()
    state.numpy = {"bit_generator": "MT19937"}
    assert [line.split(":")[0] for line in rng.restore(state)] == ["numpy"]


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, id="I04 float"), pytest.param(torch.int64, id="I04 int")]
)
def test_I04_a_state_that_was_cast(dtype: torch.dtype) -> None:
    """https://github.com/pytorch/ignite/issues/2076."""
    state = rng.capture()
    expected = torch.rand(3)
    state.torch = state.torch.to(dtype)
    assert rng.restore(state) == []
    assert torch.equal(torch.rand(3), expected)


def test_I04_a_stream_of_another_device_is_told() -> None:
    """https://github.com/lanl/hippynn/pull/12."""
    state = rng.capture()
    state.device, state.device_type = torch.zeros(16, dtype=torch.uint8), "cuda"
    assert [line.split(":")[0] for line in rng.restore(state, device=torch.device("cpu"))] == ["cuda"]


def test_I07_the_state_is_that_of_before_the_forward(tmp_path: Path) -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/pull/14384: of each micro-batch of a window."""
    batches = [batch(g=torch.tensor(1.0)), batch(g=torch.tensor(1.0)), batch(g=torch.tensor(0.0))]
    session = session_of(Training(Dropped, of_batch, batches, accumulation=3), tmp_path)
    result = session.plain()
    assert result.outcome is Outcome.SAME
    assert result.num_same == result.num_slots > 0 and all(result.losses.values())
    states = [micro_batch.random_state.torch for micro_batch in session.dump.window(0)]
    assert not torch.equal(states[0], states[1]) and not torch.equal(states[1], states[2])


class Faulty(diagnosing.Body):
    """A device that is broken in training, and is not there in the replay."""

    broken = True

    def forward(self, values: Tensor) -> Tensor:
        h = self.a(values)
        return self.b(h * NAN if Faulty.broken else h)  # type: ignore[no-any-return]


def test_I09_bad_hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/pytorch/torchtitan/issues/951."""
    session = session_of(Training(lambda: Faulty(torch.tanh), diagnosing.square, [batch()]), tmp_path)
    monkeypatch.setattr(Faulty, "broken", False)
    result = session.plain()
    assert result.outcome is Outcome.NOT_REPRODUCED
    assert "the runs part at " in result.reason and "it gave the same bits twice in training" in result.reason
    assert "hardware" not in result.reason, "nothing tells an input of the model from the device"
    evidence = session.dump.evidence(0)
    assert evidence.host and evidence.device.type


def test_I10_twice_in_one_process(tmp_path: Path) -> None:
    """https://github.com/NVIDIA/Megatron-LM/issues/5026: the second run says what the first said, and nothing loops."""
    session = session_of(inline_code(lambda h: h / (h.detach() * 0)), tmp_path)
    first, second = session.plain(), session.plain()
    assert first.outcome is second.outcome is Outcome.SAME
    assert first.to_dict() == second.to_dict()


def editing(model: Any, items: dict[str, Any]) -> Tensor:
    """Takes the labels out of the batch, and spoils the rest in place."""
    labels = items.pop("labels")
    items["x"].mul_(labels)
    return diagnosing.square(model, items)


@pytest.mark.parametrize("copies", [pytest.param(False, id="I12 by reference"), pytest.param(True, id="I12 copied")])
def test_I12_a_step_that_edits_its_batch(copies: bool, tmp_path: Path) -> None:
    """https://github.com/huggingface/lerobot/pull/323."""
    items = [batch(labels=torch.tensor(NAN))]
    session = session_of(
        Training(lambda: diagnosing.Body(torch.tanh), editing, items, options={"copy_batch": copies}), tmp_path
    )
    (kept,) = session.dump.window(0)
    assert "labels" in kept.batch, "the container is copied in any case"
    assert bool(kept.batch["x"].isfinite().all()) is copies
    result = session.plain()
    told = [*result.notes, *result.differs, result.reason]
    assert any("in place" in line for line in told) is not copies
    if copies:
        assert result.outcome is Outcome.SAME


def test_I12_nothing_changed_in_place_is_not_claimed(tmp_path: Path) -> None:
    """https://github.com/huggingface/lerobot/pull/323."""
    result = session_of(Training(lambda: ValidatedArgs(zero), of_batch, [batch(g=torch.zeros(()))]), tmp_path).plain()
    assert not any("in place" in line for line in [*result.notes, *result.differs, result.reason])


def zero(h: Tensor, items: dict[str, Any]) -> Tensor:
    return h[:, :WIDTH] / items["g"]
