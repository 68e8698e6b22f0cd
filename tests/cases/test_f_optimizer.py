"""Group F: optimizer, schedule, running averages, checkpoints."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.dump.read import open_dump
from ddp_nanguard.errors import DumpError
from tests.cases.harness import Case, Launch, batch_of, copied, each, flagged
from tests.cases.parts import NAN, given, mlp, of_batch, spoilt_gradient
from tests.faults import FadingSGD

THIS = sys.modules[__name__]
OPTIM = {"rank": 0, "phase": "optimizer", "call": None, "micro_batch": None}


def step(model: Any, batch: dict[str, Any]) -> Tensor:
    return model(batch["x"]).square().mean()  # type: ignore[no-any-return]  # <step>


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp().half()

    def forward(self, values: Tensor) -> Tensor:
        return self.net(values.half()).float()  # type: ignore[no-any-return]


def tiny(model: Any, batch: dict[str, Any]) -> Tensor:
    return (model(batch["x"]) * 1e-4).sum()  # type: ignore[no-any-return]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def fading(parameters: Any) -> torch.optim.Optimizer:
    optimizer = FadingSGD(parameters, target=2)
    optimizer.param_groups[0]["fuel"] = 3.0
    return optimizer


def warm_up_of_no_steps(model: nn.Module, optimizer: Any, rank: int, index: int) -> None:
    done, length = torch.tensor(0.0), torch.tensor(0.0)
    optimizer.param_groups[0]["lr"] = float(done / length)


def bad_average(model: nn.Module, optimizer: Any, rank: int, index: int) -> None:
    if index == 1 and rank == 1:
        AVERAGES[-1][0].weight.data[0, 1] = NAN  # type: ignore[index, union-attr]  # a Sequential


def averaged(model: nn.Module) -> dict[str, Any]:
    AVERAGES.append(copy.deepcopy(model.module))  # type: ignore[arg-type]  # DDP's module is one
    return {"ema": AVERAGES[-1]}


AVERAGES: list[nn.Module] = []


def updating_average(model: nn.Module, optimizer: Any, rank: int, index: int) -> None:
    """After the update of the step before, as an average is fed."""
    with torch.no_grad():
        for mine, theirs in zip(AVERAGES[-1].parameters(), model.parameters(), strict=True):
            mine.mul_(0.9).add_(theirs, alpha=0.1)


def restored_with_a_bad_moment(model: nn.Module, optimizer: Any, rank: int, index: int) -> None:
    if index == 0:
        for parameter in model.parameters():
            found = {"step": torch.tensor(5.0), "exp_avg": torch.zeros_like(parameter)}
            optimizer.state[parameter] = {**found, "exp_avg_sq": torch.ones_like(parameter)}
        if rank == 1:
            optimizer.state[next(iter(model.parameters()))]["exp_avg"][0, 0] = NAN


def evaluated_elsewhere(model: Any, batch: dict[str, Any]) -> Tensor:
    """The average is evaluated, and looks perfect, while the model is not."""
    if AVERAGES and isinstance(model, NanGuard):
        with torch.no_grad():
            assert AVERAGES[-1](torch.ones(1, 4)).isfinite().all()
    return model(batch["x"]).square().mean() / batch["g"]  # type: ignore[no-any-return]  # <F10>


F01, F06 = "https://github.com/pytorch/pytorch/issues/8860", "https://github.com/ultralytics/ultralytics/pull/24986"
F08 = "https://github.com/NVIDIA/Megatron-LM/issues/5281"
CASES = {
    "F01 eps is zero in half precision": Case(
        F01, batch_of(), {**OPTIM, "step": 0, "slot": "net.0.weight"}, ("", "", "update overflow"), Half, tiny,
        optimizer=adam,
    ),
    "F01 with the weights of before": Case(
        F01, batch_of(), {**OPTIM, "step": 0, "slot": "net.0.weight"},
        ("aten.addcdiv_.default", "", "update overflow"), Half, tiny,
        optimizer=adam, options={"keep_previous": True},
    ),
    "F02 a warm-up of no steps": Case(
        "https://github.com/mlcommons/hpc/pull/27", batch_of(),
        {**OPTIM, "step": 0, "layer": None, "slot": "g0.lr", "kind": "nan"}, ("", "", "hyper-parameter"), mlp, step,
        before_update=warm_up_of_no_steps,
    ),
    "F04 finite gradients, a bad update": Case(
        "https://discuss.pytorch.org/t/another-nan-problem-while-training/121473", batch_of(),
        {**OPTIM, "step": 2, "layer": "2", "slot": "2.weight", "kind": "nan"}, None, mlp, step, optimizer=fading,
        batches=6,
    ),
    "F06 a bad running average": Case(
        F06, batch_of(), {"rank": 1, "step": 1, "phase": "state", "slot": "ema.0.weight", "state": ["ema.0.weight"]},
        None, mlp, step, register=averaged, before=bad_average, batches=4,
    ),
    "F06 a running average that is never fed": Case(
        F06, batch_of(1, at=2), {"rank": 1, "step": 2, "phase": "input", "state": []}, None, mlp, step,
        register=averaged, before=updating_average, batches=4,
    ),
    "F08 a bad moment in what was restored": Case(
        F08, batch_of(), {"rank": 1, "step": 0, "phase": "state", "slot": "0.weight.exp_avg", "kind": "nan"},
        ("", "", "state"), mlp, step, optimizer=adam, before=restored_with_a_bad_moment,
    ),
    "F10 perfect metrics of another copy": Case(
        "https://github.com/ultralytics/ultralytics/issues/19357", batch_of(g=flagged(1)),
        {"rank": 1, "step": 1, "phase": "loss", "slot": "loss"}, ("aten.div.Tensor", "F10", "division by zero"), mlp,
        evaluated_elsewhere, register=averaged, runs_step=True),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@each(CASES)
def test_case(name: str, ended: Launch) -> None:
    ended.check(name)


def test_F01_the_weights_of_before_are_put_back(ended: Launch) -> None:
    """https://github.com/afiaka87/glide-finetune/issues/5."""
    assert all(rank.finite for rank in ended["F01 with the weights of before"])
    report = ended.report("F01 eps is zero in half precision")
    assert "net.0.weight" in report["nonfinite_state"]


def test_F01_the_eps_is_told_once_by_one_rank(ended: Launch) -> None:
    """https://github.com/pytorch/pytorch/issues/8860."""
    told = [[line for line in rank.log if "raise eps" in line] for rank in ended["F01 eps is zero in half precision"]]
    assert [len(lines) for lines in told] == [1, 0]
    assert told[0][0].startswith("optimizer Adam, group 0: eps=1e-08 is 0 in torch.float16, so that a zero gradient")


def test_F02_every_rank_has_the_bad_rate(ended: Launch) -> None:
    """https://github.com/mlcommons/hpc/pull/27."""
    report = ended["F02 a warm-up of no steps"][1].report
    assert report is not None and report["ranks_affected"]["count"] == 2


def test_F06_the_average_stays_finite(ended: Launch) -> None:
    """https://github.com/ultralytics/ultralytics/pull/24986."""
    assert all(rank.finite for rank in ended["F06 a running average that is never fed"])


def test_F07_checkpoints_of_before_the_fault_stay(tmp_path: Path) -> None:
    """https://github.com/kyutai-labs/pocket-tts/pull/262."""
    model = given(lambda h, batch: spoilt_gradient(h, batch["g"]))()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=tmp_path / "dumps")

    def train() -> None:
        for index, batch in enumerate(guard.steps([batch_of(g=flagged(0, at=5))(0, index) for index in range(9)])):
            of_batch(guard, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            guard.check()  # also judges the update that is to be saved
            torch.save(model.state_dict(), tmp_path / f"{index}.pt")
            (tmp_path / f"{index - 3}.pt").unlink(missing_ok=True)

    with pytest.raises(NonFiniteError) as caught:
        train()
    guard.close()
    assert caught.value.report.step == 5
    saved = sorted(tmp_path.glob("*.pt"))
    assert [path.stem for path in saved] == ["2", "3", "4"]
    assert all(bool(t.isfinite().all()) for path in saved for t in torch.load(path, weights_only=True).values())
    assert Path(str(caught.value.report.dump_path)).parent == tmp_path / "dumps"


def test_F08_a_dump_knows_when_it_is_damaged(ended: Launch, tmp_path: Path) -> None:
    """https://github.com/NVIDIA/Megatron-LM/issues/5281."""
    report = ended.report("F08 a bad moment in what was restored")
    dump = copied(report["dump_path"], tmp_path / "step-00000000")
    assert all(entry.blake2b for entry in open_dump(dump, verify=False).manifest.files)
    path = dump / "rank-00001" / "window.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DumpError, match=r"window\.safetensors"):
        open_dump([str(dump)])


def test_F08_the_same_failure_again_overwrites_nothing(tmp_path: Path) -> None:
    """https://github.com/NVIDIA/Megatron-LM/issues/5281; the launcher is told by the exit code, which is always one."""
    origins = []
    for _ in range(2):
        torch.manual_seed(0)
        model = mlp()
        optimizer = adam(model.parameters())
        restored_with_a_bad_moment(model, optimizer, 1, 0)
        guard = NanGuard(model, optimizer, dump_dir=tmp_path)
        step(guard, batch_of()(0, 0)).backward()
        with pytest.raises(NonFiniteError) as caught:
            optimizer.step()
        guard.close()
        origins.append(caught.value.report.origin)
    assert origins[0] == origins[1]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000000", "step-00000000.2"]
