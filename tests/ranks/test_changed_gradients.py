"""Gradients that code of the loop makes non-finite between backward and step, and what comes before it in the order."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard, NonFiniteError, Recipe
from ddp_nanguard.dump import open_dump
from ddp_nanguard.replay.outcome import why_not_replayable
from tests.ranks import run_ranks

BAD_STEP = 2
CLIP = nn.utils.clip_grad_norm_


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def train_step(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def recipe() -> Recipe:
    return Recipe(model=_net(), step=train_step)


def _spoil_reduce(model: DistributedDataParallel, net: nn.Sequential, state: dict[str, Any]) -> None:
    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        def done(future: Any) -> Any:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if state["bad"] and parameter is net[2].weight:
                    gradient.view(-1)[0] = math.nan
            return future.value()[0]

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(done)

    model.register_comm_hook(None, hook)


def _between(name: str, rank: int, model: nn.Module, bad: bool) -> None:
    """Code of the loop, which is fine in other steps."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    if name == "normalised":  # on every rank
        parameters[0].grad.div_(0.0 if bad else 1.0)  # type: ignore[union-attr]
    elif name == "noise":  # on one rank, and only one parameter
        parameters[2].grad = parameters[2].grad + (math.nan if bad and rank == 1 else 0.0)  # type: ignore[operator]
    elif name == "norm":
        CLIP(parameters, math.nan if bad else 1.0)
    elif name == "own all-reduce":
        for parameter in parameters:
            dist.all_reduce(parameter.grad)
    if name in ("noise", "reduce", "reduce on one"):
        CLIP(parameters, 1.0)


def _job(rank: int, name: str, wrap: str, dump_dir: str | None, options: dict[str, Any]) -> Any:
    net, state = _net(), {"bad": False}
    model: Any = {
        "ddp": DistributedDataParallel,
        "fsdp1": lambda m: FullyShardedDataParallel(m, device_id=torch.device("cpu"), use_orig_params=True),
        "fsdp2": fully_shard,
        "plain": lambda m: m,
    }[wrap](net)
    if name.startswith("reduce"):
        _spoil_reduce(model, net, state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused="verdict" in options)
    guard = NanGuard(model, optimizer, dump_dir=dump_dir, replay="tests.ranks.test_changed_gradients:recipe", **options)
    try:
        for step in range(4):
            bad = step == BAD_STEP
            state["bad"] = bad and (rank == 1 or name != "reduce on one")
            values = torch.ones(3, 4)
            if name == "own all-reduce" and bad and rank == 1:
                values = values / 0.0
            loss = train_step(guard, values)
            guard.watch(loss=loss) if name != "own all-reduce" else None
            loss.backward()
            _between(name, rank, model, bad)
            optimizer.step()
            optimizer.zero_grad()
        guard.close()
    except NonFiniteError as error:
        return str(error), error.report.to_dict()
    return None


JOBS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "normalised": ("normalised", "ddp", {}),
    "noise": ("noise", "ddp", {}),
    "noise, deferred": ("noise", "ddp", {"verdict": "deferred"}),
    "norm, fsdp1": ("norm", "fsdp1", {}),
    "normalised, fsdp2": ("normalised", "fsdp2", {}),
    "reduce": ("reduce", "ddp", {}),
    "reduce on one": ("reduce on one", "ddp", {}),
    "own all-reduce": ("own all-reduce", "plain", {}),
}


def _jobs(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found = {}
    for name, (job, wrap, options) in JOBS.items():
        dump_dir = folder if name == "noise" else None
        found[name] = _job(rank, job, wrap, dump_dir, {"group": dist.group.WORLD, **options})
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """All jobs, one after the other in the same two processes, and the folder of the one dump."""
    folder = tmp_path_factory.mktemp("dumps")
    first, second = run_ranks(_jobs, folder=str(folder), timeout_s=50)
    assert first == second
    return first, folder


@pytest.mark.parametrize(
    ("job", "rank", "num_parameters"),
    [
        ("normalised", 0, 1),
        ("noise", 1, 4),
        ("noise, deferred", 1, 4),
        ("norm, fsdp1", 0, 1),
        ("normalised, fsdp2", 0, 1),
    ],
)
def test_code_between_backward_and_step_is_told_with_parameter_and_rank(
    ran: tuple[dict[str, Any], Path], job: str, rank: int, num_parameters: int
) -> None:
    text, report = ran[0][job]
    origin = report["origin"]
    assert (origin["phase"], origin["rank"], origin["step"]) == ("loop", rank, BAD_STEP)
    assert f"rank {rank}, step {BAD_STEP}, loop: gradient of {origin['slot']} is " in text
    assert "finite after the backward on every rank, changed by code before the step" in text
    together = f"{num_parameters} gradients were seen bad together, so which was first is not known"
    assert (together in text) is (num_parameters > 1)
    assert report["second_look"]["outcome"] == "not_done"


@pytest.mark.parametrize("job", ["reduce", "reduce on one"])
def test_what_the_reduce_made_is_told_though_clipping_has_spread_it(ran: tuple[dict[str, Any], Path], job: str) -> None:
    _, report = ran[0][job]
    origin = report["origin"]
    assert (origin["phase"], origin["rank"], origin["slot"]) == ("reduce", None, "2.weight")
    assert report["holders"] == ([0, 1] if job == "reduce" else [1])
    assert all(site["phase"] == "reduce" for site in report["sites"])


def test_what_a_rank_made_is_told_though_an_all_reduce_of_the_loop_has_spread_it(
    ran: tuple[dict[str, Any], Path],
) -> None:
    _, report = ran[0]["own all-reduce"]
    assert (report["origin"]["rank"], report["origin"]["phase"]) == (1, "input")
    assert all(site["phase"] != "loop" for site in report["sites"])


def test_no_recipe_replays_code_of_the_loop(ran: tuple[dict[str, Any], Path]) -> None:
    dump = open_dump(ran[1] / f"step-{BAD_STEP:08}")
    reason = why_not_replayable(dump, alone=True)
    assert reason is not None and "which no recipe runs: replay by the script" in reason
    assert why_not_replayable(dump, alone=True, by_script=True) is None


def _sparse(rank: int, world_size: int, folder: str) -> Any:
    model = DistributedDataParallel(nn.Embedding(6, 2, sparse=True))
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=folder)
    try:
        for step in range(3):
            divisor = 0.0 if rank == 1 and step == BAD_STEP else 1.0
            loss = (guard(torch.tensor([1, 2, 3])) / divisor).mean()
            guard.watch(loss=loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except NonFiniteError as error:
        look = error.report.second_look
        assert look is not None
        return look.outcome
    return None


def test_a_sparse_gradient_is_recorded_as_the_rank_made_it_and_not_as_ddp_divides_it(tmp_path: Path) -> None:
    assert run_ranks(_sparse, folder=str(tmp_path)) == ["same", "same"]
    history = open_dump(tmp_path / f"step-{BAD_STEP:08}").history(0)
    found = dict(zip(history["fault.labels"].tolist(), history["fault.values"].tolist(), strict=True))
    low, high = found["backward|0|weight|-|gradient|1"]
    assert (low, high) == pytest.approx((1 / 6, 1 / 6))
