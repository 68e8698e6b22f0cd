"""`NanGuardCallback` of transformers: DDP on two ranks, the culprit not rank 0, and loops by accelerate."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integrations import transformers_jobs
from tests.ranks import run_ranks
from tests.replaying import free_port
from tests.scripts.running import first_line, replay

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="it is not installed"),
    pytest.mark.timeout(180),  # many trainings in one launch, on cores that may be shared
]

SCRIPT = Path(__file__).parent / "transformers_train.py"
more = pytest.mark.exhaustive
LOSS = "loss: loss is NaN; the model's output was finite"
LINE = "return -(chosen * mask).sum() / mask.sum()"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("transformers")


def launched(
    directory: Path, names: tuple[str, ...], world_size: int = 2, timeout_s: float = 110
) -> list[dict[str, Any]]:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if world_size > 1 else {}
    return run_ranks(
        transformers_jobs.trainings,
        world_size=world_size,
        timeout_s=timeout_s,
        process_group=False,
        env={**address, "HF_HUB_OFFLINE": "1"},
        directory=str(directory),
        names=list(names),
    )


@pytest.fixture(scope="module")
def found(directory: Path) -> list[dict[str, Any]]:
    """Of each rank, what came of each training."""
    return launched(directory, transformers_jobs.ON_TWO_RANKS)


@pytest.fixture(scope="module")
def found_more(directory: Path) -> list[dict[str, Any]]:
    """Of each rank, what came of each of those that take the suite too long."""
    return launched(directory, transformers_jobs.MORE, timeout_s=170)


def test_a_callback_without_its_trainer_is_told_how_it_is_given(found: list[dict[str, Any]]) -> None:
    told = found[0]["misused"]["error"]
    assert told.startswith("NanGuardCallback(NoneType): give the trainer that it is a callback of")
    assert "guard_trainer(trainer)" in told


def require_stop_at_line(ranks: list[dict[str, Any]], name: str, where: str) -> None:
    assert ranks[0][name]["error"] == ranks[1][name]["error"]
    for each in (rank[name] for rank in ranks):
        first, *rows = each["error"]
        assert first == f"{where}, {LOSS}"
        assert any(row.startswith("  line:") and LINE in row for row in rows)
        assert "  operator: aten.div.Tensor" in rows
        assert any("division by zero: 0/0" in row and "the divisor, a sum over all 15 elements" in row for row in rows)
        assert each["weights_are_those_before"] and not each["bad"] and not each["left"]


@pytest.mark.parametrize("name", ["stopped", "own loss"])
def test_every_rank_stops_before_the_update_and_names_the_operator(found: list[dict[str, Any]], name: str) -> None:
    require_stop_at_line(found, name, "rank 1, step 3, micro-batch 0")


@more
@pytest.mark.parametrize("name", ["bf16", "underflow_overflow", "resumed", "out of memory"])
def test_other_settings_of_the_trainer_change_nothing_of_it(found_more: list[dict[str, Any]], name: str) -> None:
    require_stop_at_line(found_more, name, "rank 1, step 3, micro-batch 0")


@more
def test_of_an_accumulated_step_the_micro_batch_is_named(found_more: list[dict[str, Any]]) -> None:
    require_stop_at_line(found_more, "accumulated", "rank 1, step 1, micro-batch 1")


@more
@pytest.mark.parametrize(
    ("name", "what", "line"),
    [
        ("own tokens", "forward: code of (root) after lm_head: a NaN value", "loss = loss / num_items_in_batch"),
        ("label smoothing", LOSS, "nll_loss = nll_loss.sum() / denominator"),
    ],
)
def test_a_loss_of_the_library_is_named_to_its_line(
    found_more: list[dict[str, Any]], name: str, what: str, line: str
) -> None:
    for each in (rank[name] for rank in found_more):
        first, *rows = each["error"]
        assert first.startswith(f"rank 1, step 3, micro-batch 0, {what}")
        assert any(row.startswith("  line:") and line in row for row in rows)
        assert any('the divisor, batch["num_items_in_batch"], is 0' in row for row in rows)
        assert each["weights_are_those_before"] and not each["bad"]


def test_a_step_that_makes_its_own_loss_is_seen_where_that_is_backpropagated(found: list[dict[str, Any]]) -> None:
    for each in (rank["own step"] for rank in found):
        assert each["error"][0] == f"rank 1, step 3, micro-batch 0, {LOSS}"
        assert each["weights_are_those_before"] and not each["bad"] and not each["left"]
        assert "replay" in each["error"][-1]  # the dump has the labels, which the model is not called with


def test_the_dump_holds_the_batch_of_the_culprit_with_its_labels(found: list[dict[str, Any]]) -> None:
    stopped = found[0]["stopped"]
    assert stopped["parts"] == [0, 1]
    (batch,) = stopped["batches"]
    assert batch["inputs"]["labels"].eq(-100).all() and batch["inputs"]["input_ids"].shape == (1, 16)
    assert batch["num_items_in_batch"] == 8  # of both ranks together: of rank 0's sample


def test_the_dump_runs_again_in_the_script_alone(directory: Path, found: list[dict[str, Any]]) -> None:
    dump = directory / "stopped" / found[0]["stopped"]["dump"]
    again = replay(dump, str(SCRIPT), options=("--trace",))
    assert (again.code, again.outcome["outcome"], again.outcome["rank"]) == (0, "same", 1), again
    assert first_line(again) == ("aten.div.Tensor", LINE)


@more
def test_a_skipped_step_leaves_the_training_whole(found_more: list[dict[str, Any]]) -> None:
    for each in (rank["skipped"] for rank in found_more):
        assert each["error"] is None and not each["bad"] and each["global_step"] == 8


def test_a_clean_run_leaves_the_same_files_to_the_byte(directory: Path, found: list[dict[str, Any]]) -> None:
    for each in (rank["clean"] for rank in found):
        assert each["bare"] == each["guarded"] and each["bare"]["error"] is None
    kept = [directory / "clean" / f"of-{name}" for name in ("bare", "guarded")]
    files = [sorted(path.relative_to(place) for path in place.rglob("*") if path.is_file()) for place in kept]
    assert files[0] == files[1] and len([path for path in files[0] if path.name == "model.safetensors"]) == 2
    for name in files[0]:
        one, other = ((place / name).read_bytes() for place in kept)
        if name.name == "trainer_state.json":
            one, other = _without_times(one), _without_times(other)
        assert one == other, name


def _without_times(state: bytes) -> Any:
    """What the trainer logs of how long an evaluation took differs from run to run."""
    loaded = json.loads(state)
    for row in loaded["log_history"]:
        for name in [name for name in row if name.endswith(("_runtime", "_per_second"))]:
            del row[name]
    return loaded


def require_no_bad_checkpoint(directory: Path, ranks: list[dict[str, Any]], name: str) -> None:
    for each in (rank[name] for rank in ranks):
        assert each["error"][0].startswith("rank 0, step 4, state: transformer.ln_f.bias is NaN")
        (note,) = [row for row in each["error"] if "last checkpoint that was checked" in row]
        assert "saved/checkpoint-3 (weights before step 3)" in note
    saved = sorted((directory / name / "saved").iterdir())
    assert [path.name for path in saved] == [f"checkpoint-{step}" for step in (1, 2, 3)]
    for path in saved:
        assert all(each.isfinite().all() for each in load_file(path / "model.safetensors").values())


def test_a_bad_update_never_reaches_a_checkpoint(directory: Path, found: list[dict[str, Any]]) -> None:
    require_no_bad_checkpoint(directory, found, "bad update")


@more
def test_nor_one_of_the_best_evaluation(directory: Path, found_more: list[dict[str, Any]]) -> None:
    require_no_bad_checkpoint(directory, found_more, "best")


@more
def test_a_stopped_training_that_is_caught_leaves_a_trainer_that_can_train(found_more: list[dict[str, Any]]) -> None:
    for each in (rank["twice"] for rank in found_more):
        assert each["first"]["error"][0].endswith(LOSS)
        assert each["second"]["error"] is None and each["second"]["global_step"] == 8
        assert not each["second"]["left"] and not each["second"]["bad"]


def test_a_loop_by_accelerate_is_stopped_with_the_loss_that_it_backpropagates(found: list[dict[str, Any]]) -> None:
    assert found[0]["accelerate"]["error"] == found[1]["accelerate"]["error"]
    for each in (rank["accelerate"] for rank in found):
        first, *rows = each["error"]
        assert first == f"rank 1, step 1, micro-batch 1, {LOSS}"
        assert any("saved/1 (weights before step 1)" in row for row in rows)
        assert each["weights_are_those_before"] and not each["left"] and each["saved"] == [1]
        assert [bool(batch["labels"].eq(-100).all()) for batch in each["batches"]] == [False, True]


@more
def test_one_process_goes_on_where_it_catches_what_its_own_code_raises(directory: Path) -> None:
    """As in a notebook: nobody waits, so nothing is ended. A scaler's own skips stay its own, and are counted apart."""
    (alone,) = launched(directory, transformers_jobs.ALONE, world_size=1)
    caught = alone["own check"]
    assert caught["first"]["error"] == ["loss is nan"] and not caught["first"]["left"]
    assert caught["second"]["error"] is None and caught["second"]["global_step"] == 16
    assert alone["scaled"] == {"skipped": [False, True, False, True, False], "scale": 512.0, "is_finite": True}
    stopped = alone["one process"]
    assert stopped["error"][0] == f"rank 0, step 7, micro-batch 0, {LOSS}"
    assert stopped["weights_are_those_before"]
    assert torch.equal(stopped["batches"][0]["inputs"]["labels"], torch.full((1, 16), -100))
