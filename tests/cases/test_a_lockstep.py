"""Group A: one rank goes bad; decisions of one rank alone, and the hangs they cause."""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.distributed import group
from ddp_nanguard.dump.read import open_dump
from tests.cases.harness import Case, Launch, batch_of, diagnosed_dump, each, flagged
from tests.cases.parts import NAN, WIDTH, BadWeight, given, mlp, of_batch, spoilt_gradient
from tests.ranks import run_ranks, run_ranks_raw

THIS = sys.modules[__name__]
BAD_X = {"rank": 1, "step": 1, "phase": "input", "layer": None, "slot": '["x"]', "kind": "nan"}


def step(model: Any, batch: dict[str, Any]) -> Tensor:
    return model(batch["x"]).square().mean()  # type: ignore[no-any-return]  # <features>


def loss_of(model: Any, batch: dict[str, Any]) -> Tensor:
    return model(batch["x"]).mean() / batch["g"]  # type: ignore[no-any-return]  # <loss>


def large(model: Any, batch: dict[str, Any]) -> Tensor:
    return model(batch["x"]).mean() + 3e38  # type: ignore[no-any-return]


def policy(model: Any, batch: dict[str, Any]) -> Tensor:
    chosen = model(batch["x"]).log_softmax(-1)[:, 0]
    return -(chosen * batch["reward"]).mean()  # <reward>


def one_column(h: Tensor, batch: dict[str, Any]) -> Tensor:
    return spoilt_gradient(h, batch["g"], 0)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def bad_momentum(model: nn.Module, optimizer: Any, rank: int, index: int) -> None:
    if index == 0 and rank == 0:
        next(iter(model.parameters())).data[0, 0] = NAN


def into_buckets(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


WEIGHT = {"rank": 1, "step": 1, "phase": "backward", "kind": "inf", "slot": "a.weight"}
A05 = "https://github.com/NVIDIA-NeMo/Speech/pull/637"
A20 = "https://github.com/NVIDIA/Megatron-LM/issues/5026"
CASES = {
    "A01 NaN on rank 1, rank 0's loss is finite": Case(
        "https://github.com/ecmwf/WeatherGenerator/pull/2718",
        batch_of(1), BAD_X, ("aten.addmm.default", "features", "bad input"), mlp, step,
    ),
    "A05 the loss of rank 0": Case(
        A05, batch_of(g=flagged(0)), {"rank": 0, "step": 1, "phase": "loss", "slot": "loss"},
        ("aten.div.Tensor", "loss", "division by zero"), mlp, loss_of, runs_step=True),
    "A05 the loss of rank 1": Case(
        A05, batch_of(g=flagged(1)), {"rank": 1, "step": 1, "phase": "loss", "slot": "loss"},
        None, mlp, loss_of,
    ),
    "A05 finite losses whose sum overflows": Case(A05, batch_of(), None, None, mlp, large),
    "A06 inf in the shard of another rank": Case(
        "https://github.com/facebookresearch/fairscale/issues/754",
        batch_of(g=flagged(1)), {"rank": 1, "step": 1, "phase": "backward"},
        None, given(one_column), of_batch, wrap="fsdp2",
    ),
    "A08 stops in the step of the fault": Case(
        "https://github.com/NVIDIA-NeMo/Speech/pull/578",
        batch_of(0, at=3), {**BAD_X, "rank": 0, "step": 3, "micro_batch": 0}, None, mlp, step, batches=10,
    ),
    "A09 a reward that is NaN": Case(
        "https://github.com/facebookresearch/habitat-lab/issues/2226",
        batch_of(reward=flagged(1, at=4, bad=NAN)), {"rank": 1, "step": 4, "phase": "input", "slot": '["reward"]'},
        ("aten.mul.Tensor", "reward", "bad input"), mlp, policy, batches=6, runs_step=True),
    "A11 a skipped step is as if it had not been": Case(
        "https://github.com/OpenBMB/BMTrain/issues/108",
        batch_of(0), None, None, normed, step, options={"on_fault": "skip"},
    ),
    "A11 damaged state is not skipped": Case(
        "https://github.com/OpenBMB/BMTrain/issues/108",
        batch_of(), {"rank": 0, "step": 0, "phase": "state", "slot": "0.weight"}, None, normed, step,
        before=bad_momentum, options={"on_fault": "skip"},
    ),
    "A12 no rank waits for a timeout": Case(
        "https://github.com/pytorch/torchtitan/pull/3863",
        batch_of(1), BAD_X, None, mlp, step, options={"timeout_s": 600.0},
    ),
    "A16 sharded weights": Case(
        "https://github.com/pytorch/pytorch/issues/77562",
        batch_of(1), BAD_X, ("aten.addmm.default", "features", "bad input"), mlp, step, wrap="fsdp2",
    ),
    "A20 the gradient of rank 1": Case(A20, batch_of(g=flagged(1)), WEIGHT, None, BadWeight, of_batch),
    "A20 gradients as views of buckets": Case(
        A20, batch_of(g=flagged(1)), WEIGHT, None, BadWeight, of_batch, wrap=into_buckets
    ),
}  # fmt: skip


@each(CASES)
def test_case(name: str, ended: Launch) -> None:
    ended.check(name)


def test_A01_rank_0_sees_nothing_itself(ended: Launch) -> None:
    """https://github.com/ecmwf/WeatherGenerator/pull/2718."""
    first, second = ended["A01 NaN on rank 1, rank 0's loss is finite"]
    assert torch.tensor(first.losses).isfinite().all()
    assert torch.tensor(second.losses).isnan().any()
    assert "rank 1" in first.text


def test_A12_the_message_is_short(ended: Launch) -> None:
    """https://github.com/pytorch/torchtitan/pull/3863."""
    for rank in ended["A12 no rank waits for a timeout"]:
        assert len(rank.text.splitlines()[0]) < 200
        assert "tensor(" not in rank.text and len(rank.text) < 3000


def test_A08_the_message_names_the_step(ended: Launch) -> None:
    """https://github.com/NVIDIA-NeMo/Speech/pull/578."""
    assert "step 3" in ended["A08 stops in the step of the fault"][1].text.splitlines()[0]


def test_A16_every_rank_left_its_part(ended: Launch) -> None:
    """https://github.com/pytorch/pytorch/issues/77562."""
    report = ended.report("A16 sharded weights")
    dump = open_dump([report["dump_path"]])
    assert list(dump.ranks) == [0, 1]
    assert dump.manifest.weights.complete


def test_A17_a_missing_rank_is_tolerated(ended: Launch, tmp_path: Path) -> None:
    """https://github.com/huggingface/accelerate/pull/4105."""
    name = "A01 NaN on rank 1, rank 0's loss is finite"
    report = ended.report(name)
    dump = shutil.copytree(report["dump_path"], tmp_path / Path(report["dump_path"]).name)
    shutil.rmtree(dump / "rank-00000")
    assert list(open_dump([str(dump)]).ranks) == [1]
    assert diagnosed_dump(CASES[name], str(dump), rank=1).reason.kind == "bad input"


# -- loops of one's own ------------------------------------------------------------------------------------------------


def _context(**options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, NanGuard(model, optimizer, **{"dump_dir": None, "timeout_s": 5, **options})


def _values(bad: bool) -> Tensor:
    return torch.ones(2, 4) / (0.0 if bad else 1.0)


def _float_maximum(rank: int) -> list[float]:
    """What a float MAX makes of a NaN on each rank in turn."""
    found = []
    for bad_rank in (0, 1):
        value = torch.tensor([NAN if rank == bad_rank else 5.0])
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        found.append(float(value))
    return found


def _checked_together(rank: int) -> list[bool]:
    _, optimizer, guard = _context(on_fault="skip")
    answers = []
    for index in range(4):
        loss = guard(_values(rank == 1 and index == 1)).mean()
        guard.watch(loss=loss)
        answers.append(guard.check())
        if not answers[-1]:
            continue  # no backward, on every rank
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    guard.close()
    return answers


def _joined(rank: int) -> str:
    model, optimizer, guard = _context()
    try:
        with model.join():
            guard(_values(False)).sum().backward()
            optimizer.step()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        guard.close()
    return "ran"


def _on_its_own_shard(rank: int) -> int:
    """One rank reads its part of a sharded model, its peer does nothing."""
    model = fully_shard(nn.Linear(4, 6))
    parts = [parameter.to_local() for parameter in model.parameters()] if rank == 1 else []  # type: ignore[attr-defined]
    return sum(part.numel() for part in parts)


def _own_loops(rank: int, world_size: int) -> dict[str, Any]:
    logging.disable(logging.CRITICAL)
    return {
        "maximum": _float_maximum(rank),
        "checked": _checked_together(rank),
        "joined": _joined(rank),
        "own shard": _on_its_own_shard(rank),
    }


@pytest.fixture(scope="module")
def own_loops() -> list[dict[str, Any]]:
    return run_ranks(_own_loops)


def test_A02_all_ranks_skip_together(own_loops: list[dict[str, Any]]) -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/issues/5243."""
    assert [found["checked"] for found in own_loops] == [[True, False, True, True]] * 2


def test_A05_a_float_maximum_depends_on_the_rank(own_loops: list[dict[str, Any]]) -> None:
    """https://github.com/ml-explore/mlx/issues/4072."""
    for found in own_loops:
        on_first, on_second = found["maximum"]
        assert on_first != on_first and on_second == 5.0, "torch has changed: this is why flags are integers"


def test_A16_a_shard_is_read_without_peers(own_loops: list[dict[str, Any]]) -> None:
    """https://github.com/pytorch/pytorch/issues/77562."""
    assert own_loops[1]["own shard"] == 15


def test_A18_uneven_inputs_are_refused(own_loops: list[dict[str, Any]]) -> None:
    """https://github.com/pytorch/pytorch/issues/38174."""
    for found in own_loops:
        assert found["joined"].startswith("ValueError: ") and "join" in found["joined"]


def _validated(rank: int, world_size: int, dump_dir: str) -> None:
    _, optimizer, guard = _context(dump_dir=dump_dir, timeout_s=3)
    for index in range(3):
        output = guard(_values(rank == 1 and index == 1))
        if not output.isfinite().all():
            raise ValueError("a validator of the user's own")
        output.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_A03_a_validator_that_raises_on_one_rank(tmp_path: Path) -> None:
    """https://github.com/ai2cm/ace/pull/850; the guard cannot make the peers raise what it never saw, only end them."""
    outcomes = run_ranks_raw(_validated, timeout_s=20, through_excepthook=True, dump_dir=str(tmp_path / "dumps"))
    assert not any(outcome.hung for outcome in outcomes)
    assert all(outcome.exit_code not in (0, None) for outcome in outcomes)
    assert outcomes[1].error_type == "ValueError"
    assert list((tmp_path / "dumps").rglob("rank-00001"))


WORLDS = {"gloo": "gloo", "staged": "staged", "both": "cpu:gloo,cuda:staged"}


def _verdict_devices(rank: int, world_size: int) -> dict[tuple[str, str], str]:
    """By backend of the group and the model's device, where the flag goes; ``staged`` takes nothing of the CPU."""
    groups = {name: dist.new_group([0], backend=backend) for name, backend in WORLDS.items()}
    return {
        (name, device): group._verdict_device(of, torch.device(device)).type
        for name, of in groups.items()
        for device in ("cpu", "cuda")
    }


def test_A13_the_flag_goes_where_the_backend_can_reduce_it(simulated: str) -> None:
    """https://github.com/dylanyunlon/Neuron_SP/issues/150."""
    (found,) = run_ranks(_verdict_devices, 1, device=simulated)
    assert found == {
        ("gloo", "cpu"): "cpu",
        ("gloo", "cuda"): "cpu",
        ("staged", "cpu"): "cuda",
        ("staged", "cuda"): "cuda",
        ("both", "cpu"): "cpu",
        ("both", "cuda"): "cuda",
    }


def test_A17_writing_ones_own_part_needs_no_peer(tmp_path: Path) -> None:
    """https://github.com/huggingface/accelerate/pull/4105: without any group there is a dump."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=tmp_path)
    guard(_values(True)).sum().backward()
    with pytest.raises(NonFiniteError) as caught:
        optimizer.step()
    guard.close()
    assert open_dump([str(caught.value.report.dump_path)]).manifest.weights.complete
