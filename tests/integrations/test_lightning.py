"""`NanGuardCallback` under Lightning's Trainer: DDP on two ranks, the culprit not rank 0."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import lightning_jobs
from tests.ranks import run_ranks
from tests.scripts.running import first_line, replay

pytestmark = [
    pytest.mark.timeout(180),  # the first test waits for all trainings
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed"),
]

LOSS = "loss: loss is NaN; the model's output was finite"
LINE = "return ((errors * members).sum(0) / members.sum(0)).mean()"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def found(directory: Path) -> list[dict[str, Any]]:
    """Of each rank, what came of each training."""
    names = list(lightning_jobs.JOBS)
    return run_ranks(
        lightning_jobs.fits, world_size=2, timeout_s=110, process_group=False, directory=str(directory), names=names
    )


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("stopped", "rank 1, step 3, micro-batch 0"),
        ("accumulated", "rank 1, step 1, micro-batch 1"),
        ("dict", "rank 1, step 3, micro-batch 0"),
        ("scaled", "rank 1, step 3, micro-batch 0"),
        ("resumed", "rank 1, step 9, micro-batch 0"),
        ("again", "rank 1, step 9, micro-batch 0"),
    ],
)
def test_every_rank_stops_before_the_update_and_names_the_operator(
    found: list[dict[str, Any]], name: str, where: str
) -> None:
    assert found[0][name]["error"] == found[1][name]["error"]
    for each in (rank[name] for rank in found):
        first, *rows = each["error"]
        assert first == f"{where}, {LOSS}"
        assert any(row.startswith("  line:") and LINE in row for row in rows)
        assert "  operator: aten.div.Tensor" in rows
        assert any("division by zero: 0/0" in row and "class 7 is absent" in row for row in rows)
        assert each["weights"] == each["weights_before"] and not each["bad"]


def test_the_dump_holds_the_batch_of_the_culprit_which_is_not_rank_0(found: list[dict[str, Any]]) -> None:
    stopped = found[0]["stopped"]
    assert stopped["parts"] == [0, 1]
    ((labels,),) = [stopped["labels"]]
    assert len(labels) == 40 and set(labels) == set(range(20)) - {7}


def test_the_dump_is_run_again_by_the_script_of_the_training_as_the_culprit(
    directory: Path, found: list[dict[str, Any]]
) -> None:
    dump = directory / "stopped" / found[0]["stopped"]["dump"]
    again = replay(dump, str(Path(__file__).parent / "lightning_train.py"), options=("--trace", "--as-rank", "0"))
    assert (again.code, again.outcome["outcome"], again.outcome["rank"]) == (0, "same", 1), again
    assert first_line(again) == ("aten.div.Tensor", LINE)


def test_manual_optimization_stops_before_its_own_step(found: list[dict[str, Any]]) -> None:
    for each in (rank["manual"] for rank in found):
        assert each["error"][0] == "rank 1, step 3, micro-batch 0, loss: loss is NaN"
        assert each["weights"] == each["weights_before"] and not each["bad"]


@pytest.mark.parametrize(
    ("name", "where"), [("drawn", "step 3, micro-batch 0"), ("manual, accumulated", "step 1, micro-batch 1")]
)
def test_a_step_that_is_more_than_its_loss_names_that_and_says_why_no_more(
    found: list[dict[str, Any]], name: str, where: str
) -> None:
    for each in (rank[name] for rank in found):
        first, *rows = each["error"]
        assert first == f"rank 1, {where}, loss: loss is NaN"
        (again,) = [row for row in rows if row.startswith("  again:")]
        assert again.startswith("  again:    not done: the trainer's step was not handed to the guard")
        assert not each["bad"]


def test_a_skipped_step_leaves_the_epoch_and_what_is_logged_whole(found: list[dict[str, Any]]) -> None:
    for each in (rank["skipped"] for rank in found):
        assert each["error"] is None and not each["bad"]
        assert each["num_steps"] == each["global_step"] == 6  # the second look is not counted
        assert each["kept"] == {"labels": [40] * 6, "steps": 6}


def test_a_clean_run_leaves_the_same_files_to_the_byte(directory: Path, found: list[dict[str, Any]]) -> None:
    for each in (rank["clean"] for rank in found):
        assert each["bare"] == each["guarded"]
    kept = [directory / "clean" / f"of-{name}" for name in ("bare", "guarded")]
    files = [sorted(path.relative_to(place) for path in place.rglob("*") if path.is_file()) for place in kept]
    assert files[0] == files[1] and len([path for path in files[0] if path.suffix == ".ckpt"]) == 6
    for name in files[0]:
        assert (kept[0] / name).read_bytes() == (kept[1] / name).read_bytes(), name


def test_a_bad_update_never_reaches_a_checkpoint(directory: Path, found: list[dict[str, Any]]) -> None:
    for each in (rank["bad update"] for rank in found):
        assert each["error"][0].startswith("rank 0, step 4, state: head.bias is NaN")
        (note,) = [row for row in each["error"] if "last checkpoint that was checked" in row]
        assert "saved/step=3.ckpt (weights before step 3)" in note
    assert sorted(path.name for path in (directory / "bad update" / "saved").iterdir()) == [
        f"step={step}.ckpt" for step in (1, 2, 3)
    ]


def test_numbers_go_to_the_loggers_of_the_trainer_and_not_into_what_it_keeps(
    directory: Path, found: list[dict[str, Any]]
) -> None:
    assert all(name.startswith("train_loss") for name in found[0]["logged"]["logged"])
    head, *rows = (directory / "logged" / "logs" / "lightning_logs" / "one" / "metrics.csv").read_text().splitlines()
    own = [index for index, name in enumerate(head.split(",")) if name.startswith("nanguard/loss")]
    assert len([row for row in rows if own and row.split(",")[own[0]]]) == 3  # steps 0, 2 and 4


def test_a_loop_of_fabric_is_guarded_and_its_own_backward_run_again_in_low_precision(
    found: list[dict[str, Any]],
) -> None:
    for each in (rank["fabric"] for rank in found):
        first, *rows = each["error"]
        assert first == f"rank 1, step 3, micro-batch 0, {LOSS}"
        assert "  operator: aten.div.Tensor" in rows and "  again:    same on all 2 ranks: deterministic" in rows


def test_a_loss_that_only_overflows_when_it_is_scaled_is_no_fault(found: list[dict[str, Any]]) -> None:
    for each in (rank["half"] for rank in found):
        assert each["error"] is None and each["num_steps"] == 6 and not each["bad"]


def test_an_option_that_does_not_exist_is_refused_before_anything_is_launched(found: list[dict[str, Any]]) -> None:
    assert found[0]["misspelled"]["error"].startswith("unknown option 'dump_dri'; valid options: ")


def test_a_stopped_fit_that_is_caught_leaves_a_process_that_can_train(found: list[dict[str, Any]]) -> None:
    for each in (rank["twice"] for rank in found):
        assert each["first"]["error"][0].endswith(LOSS)
        assert each["second"]["error"] is None and each["second"]["global_step"] == 6
