"""`rerun`: the step of a fault once more in place, on all ranks or on none, and without a trace in the job."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddp_nanguard.dump.read import Dump, open_dump
from ddp_nanguard.report.types import SecondRun
from tests import models
from tests.faults import Fault, nan_at
from tests.ranks import run_ranks
from tests.replaying import replay_alone
from tests.training import WRAPPERS, Job, Record, build, digest, end_record, train_steps

NUM_MICRO_BATCHES = 3
RECIPE = models.recipe


def _drawing_recipe() -> Any:
    torch.rand(1), random.random(), numpy.random.rand()
    return RECIPE()


def _no_recipe() -> Any:
    raise LookupError("its files are gone")


@dataclass
class Rerun:
    """What one rank saw of a job: its record, how often the recipe's step ran, and digests of the gradients left."""

    record: Record
    num_steps: int
    gradients: dict[str, str]


def _run(rank: int, world_size: int, jobs: list[tuple[Job, str]]) -> list[Rerun]:
    return [_run_one(rank, job, change) for job, change in jobs]


def _run_one(rank: int, job: Job, change: str) -> Rerun:
    calls: list[int] = []

    def step(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
        calls.append(rank)
        return models.train_step(model, _changed(batch, change if rank == 1 else "same", len(calls)))

    models.recipe = _no_recipe if change == "no recipe" and rank == 1 else _drawing_recipe
    models._changed_step = step  # what the recipe of this process gives; a replay elsewhere has the real one
    run = build(job, rank)
    if change == "live model":
        models.recipe = lambda: dataclasses.replace(RECIPE(), model=run.model.module)
    train_steps(run)
    end_record(run)
    gradients = {n: digest(p.grad) for n, p in run.model.named_parameters() if p.grad is not None}
    if run.record.error is None:
        run.close()
    return Rerun(run.record, len(calls), gradients)


def _changed(batch: dict[str, Any], change: str, call: int) -> dict[str, Any]:
    """``finite``: the fault was there the first time only. ``elsewhere``: it is in another place the second time."""
    fault = batch["fault"]
    if change == "raise" and call == 2:
        raise ZeroDivisionError("the recipe fails\non one rank")
    if change == "talk":
        dist.all_reduce(torch.ones(1))
    if change == "in place":
        batch["image"].zero_()
    if change == "finite":
        return {**batch, "fault": fault * 0}
    return {**batch, "fault": fault.roll(2)} if change == "elsewhere" else batch


def _job(wrapper: str, dump_dir: Path | None, fault: Fault | None = None, **options: Any) -> Job:
    fault = fault or nan_at("gate.forward", rank=1, step=1, micro_batch=1)
    return Job(
        wrapper,
        num_steps=3,
        num_micro_batches=NUM_MICRO_BATCHES,
        fault=fault,
        clip=fault.place != "reduce",
        options={"rerun": True, **options},
        dump_dir=None if dump_dir is None else str(dump_dir),
    )


def _dump(run: Rerun) -> Dump:
    assert run.record.report is not None
    return open_dump(run.record.report["dump_path"])


def _second_run(run: Rerun) -> SecondRun:
    second = _dump(run).report.rerun
    assert second is not None
    return second


CASES = {
    "same": ("same", {"same": [0, 1]}, "same on all 2 ranks: deterministic"),
    "finite": ("finite", {"finite": [1], "same": [0]}, "rank 1 finite on the second run, same inputs and random"),
    "raise": ("failed", {"failed": [1], "same": [0]}, "could not be run on rank 1: ZeroDivisionError: the recipe"),
    "elsewhere": ("elsewhere", {"elsewhere": [1], "same": [0]}, "rank 1 elsewhere on the second run: now first at"),
    "talk": ("failed", {"failed": [1], "same": [0]}, "could not be run on rank 1: the step communicates"),
    "no recipe": ("not_run", {}, "not rerun: rank 1: recipe 'tests.models:recipe' raised LookupError: its files are"),
    "live model": (
        "not_run",
        {},
        "not rerun: rank 0: the recipe hands out modules or tensors of the model in",
    ),
}
ALIKE = ("plain", "fsdp1")
"""A rerun is the recipe's model on each rank alone; these differ from DDP and FSDP2 in how weights come back."""
EVERYWHERE = ("same", "finite", "raise")
"""The others do not depend on the wrapper, or are about DDP."""
NUM_STEPS = {"raise": [NUM_MICRO_BATCHES, 2], "talk": [NUM_MICRO_BATCHES, 1], "no recipe": [0, 0], "live model": [0, 0]}


each_wrapper = pytest.mark.parametrize(
    "wrapper", [pytest.param(name, marks=[pytest.mark.exhaustive] if name in ALIKE else []) for name in WRAPPERS]
)


@each_wrapper
def test_the_second_run_tells_a_code_bug_from_a_suspect_device(wrapper: str, tmp_path: Path) -> None:
    cases = list(CASES) if wrapper == "ddp" else EVERYWHERE
    ranks = run_ranks(_run, timeout_s=40, jobs=[(_job(wrapper, tmp_path / case), case) for case in cases])
    for position, case in enumerate(cases):
        outcome, of_ranks, text = CASES[case]
        first, second = ranks[0][position], ranks[1][position]
        assert first.record.error == second.record.error
        assert first.record.report == second.record.report
        assert first.record.error is not None
        dump = _dump(first)
        rerun = _second_run(first).to_dict()
        assert first.record.report is not None
        assert rerun == first.record.report["rerun"]
        assert rerun["outcome"] == outcome, rerun
        assert rerun["ranks"] == {name: {"count": len(r), "first": r} for name, r in of_ranks.items()}
        assert rerun["text"].startswith(text), rerun
        assert f"  rerun:    {text}" in first.record.error
        assert f"  rerun     {text[:60]}" in (dump.path / "report.txt").read_text()
        own = [dump.evidence(rank).rerun or {} for rank in (0, 1)]
        assert [each["outcome"] for each in own] == ["same" if of_ranks else outcome, outcome]
        num_steps = NUM_STEPS.get(case, [NUM_MICRO_BATCHES] * 2)
        assert [first.num_steps, second.num_steps] == num_steps  # one rerun, never another within it
        assert dump.manifest.weights.complete
    assert "suspect device" in _second_run(ranks[0][1]).text
    assert "identical up to" in _second_run(ranks[0][1]).text
    begins = "not reproduced: the same step was finite once more in place, on the same device: "
    assert _dump(ranks[0][1]).report.cause.startswith(begins)


def test_a_dump_whose_rerun_failed_replays(tmp_path: Path) -> None:
    ranks = run_ranks(_run, jobs=[(_job("fsdp2", tmp_path), "raise")])
    (replayed,) = replay_alone([str(_dump(ranks[0][0]).path)], {"NANGUARD_ON_FAULT": "warn"})
    assert (replayed.code, replayed.outcome["outcome"]) == (0, "same")


@each_wrapper
def test_a_rerun_leaves_no_trace(wrapper: str, tmp_path: Path) -> None:
    """Weights, optimizer, buffers, random states, losses and the dump itself are those of a run without it."""
    places = {rerun: tmp_path / f"{rerun}" for rerun in (False, True)}
    jobs = [(_job(wrapper, place, on_fault="skip", rerun=rerun), "in place") for rerun, place in places.items()]
    for without, again in run_ranks(_run, timeout_s=40, jobs=jobs):
        assert [without.num_steps, again.num_steps] == [0, NUM_MICRO_BATCHES]
        assert again.record == without.record
    contents = [_content(place) for place in places.values()]
    assert contents[0] == contents[1]
    assert len(contents[1]) > 20


def test_a_rerun_leaves_the_gradients_to_whoever_catches_the_error() -> None:
    jobs = [(_job(wrapper, None, rerun=rerun), "in place") for wrapper in WRAPPERS for rerun in (False, True)]
    for runs in run_ranks(_run, timeout_s=40, jobs=jobs):
        for without, again in zip(runs[::2], runs[1::2], strict=True):
            assert again.gradients == without.gradients != {}
            assert again.record.after == without.record.after
            assert again.record.random_after == without.record.random_after


def _content(dump_dir: Path) -> dict[str, bytes]:
    (dump,) = (path.parent for path in dump_dir.glob("*/manifest.json"))
    names = ("window.json", "window.safetensors", "history.npz", "state.json")
    files = {str(path.relative_to(dump)): path.read_bytes() for path in dump.rglob("*") if path.name in names}
    return {**files, **{name: tensor.numpy().tobytes() for name, tensor in open_dump(str(dump)).load_state().items()}}


def test_the_environment_asks_for_a_rerun_and_never_for_a_second_one(tmp_path: Path) -> None:
    job = dataclasses.replace(_job("ddp", tmp_path), options={})
    for (run,) in run_ranks(_run, env={"NANGUARD_RERUN": "1"}, jobs=[(job, "same")]):
        assert run.num_steps == NUM_MICRO_BATCHES
        assert run.record.report is not None
        assert run.record.report["rerun"]["outcome"] == "same"
    assert len(list(tmp_path.glob("*/manifest.json"))) == 1


REASONS = {
    "lr": "the update is at fault",
    "parameter": "blocks.0.conv.weight was bad already",
    "reduce": "same on all 2 ranks: up to the communication, which was not run",
    "input": "same on all 2 ranks: deterministic",
}


def test_faults_that_no_step_shows_are_not_rerun(tmp_path: Path) -> None:
    faults = [Fault(place, "huge" if place == "reduce" else "nan", rank=1, step=1) for place in REASONS]
    jobs = [(_job("ddp", None, fault), "same") for fault in faults]
    for runs in run_ranks(_run, jobs=jobs):
        for run, text in zip(runs, REASONS.values(), strict=True):
            assert run.record.report is not None
            assert run.record.report["rerun"]["text"].removeprefix("not rerun: ").startswith(text)
            assert run.num_steps == (NUM_MICRO_BATCHES if text.startswith("same") else 0)


def _without_recipe(rank: int, world_size: int) -> str:
    from ddp_nanguard import NanGuard

    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match="rerun") as caught:
        NanGuard(model, torch.optim.SGD(model.parameters()), rerun=True, replay=RECIPE_NAME if rank == 0 else None)
    return str(caught.value)


RECIPE_NAME = "tests.models:recipe"


def test_a_rerun_without_a_recipe_is_refused_on_every_rank() -> None:
    first, second = run_ranks(_without_recipe)
    assert first == second
    assert first.startswith("rank 1: option rerun=True runs the recipe's step, and there is no recipe; give replay=")
