"""Group B: mixed precision, loss scaling, clipping."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_nanguard.distributed import group, verdict
from tests.cases.harness import Case, Launch, batch_of, each, flagged
from tests.cases.parts import NAN, WIDTH, BadWeight, given, mlp, of_batch, spoilt_gradient
from tests.training.jobs import wrap_ddp_with_half_hook

THIS = sys.modules[__name__]


def scaler(scale: float = 2.0**10, interval: int = 2000) -> Any:
    return lambda: torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)


def step(model: Any, batch: dict[str, Any]) -> Tensor:
    return model(batch["x"]).square().mean()  # type: ignore[no-any-return]  # <step>


def hot(model: Any, batch: dict[str, Any]) -> Tensor:
    return model(batch["x"]).square().mean() * 1e3  # type: ignore[no-any-return]


def spoilt() -> nn.Module:
    model = mlp()
    model[2].weight.data[1, 2] = NAN  # type: ignore[index, union-attr]  # a Sequential
    return model


def over_zero(h: Tensor, batch: dict[str, Any]) -> Tensor:
    return h / (batch["g"] * h.detach())  # <B13>


def half_bad(h: Tensor, batch: dict[str, Any]) -> Tensor:
    return spoilt_gradient(h.bfloat16(), batch["g"].bfloat16()).float()


def wide_sum(h: Tensor, batch: dict[str, Any]) -> Tensor:
    large = h.detach().half() * 0 + 30000 * (1 - batch["g"]).half()
    return h + large.sum(1, keepdim=True)  # <B12>


class Bfloat(nn.Module):
    """All in bfloat16, with one bad weight gradient where "g" is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = BadWeight().bfloat16()

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.inner({"x": batch["x"].bfloat16(), "g": batch["g"].bfloat16()}).float()  # type: ignore[no-any-return]


def clip(model: nn.Module, optimizer: Any, rank: int, index: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


class EarlySGD(torch.optim.SGD):
    """Returns without a word where a gradient is bad, as some sharded optimizers do."""

    def step(self, closure: Any = None) -> Any:
        if all(bool(p.grad.isfinite().all()) for p in self.param_groups[0]["params"]):
            return super().step(closure)
        return None


class Nan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, g: Tensor) -> Tensor:
        ctx.g = g
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * (math.nan if ctx.g == 0 else 1.0), None


class NanWeight(BadWeight):
    def forward(self, batch: dict[str, Any]) -> Tensor:
        weight = Nan.apply(self.a.weight, batch["g"])  # type: ignore[no-untyped-call]  # torch's own
        return self.b(nn.functional.linear(batch["x"], weight, self.a.bias))  # type: ignore[no-any-return]


def large_gradients(model: Any, batch: dict[str, Any]) -> Tensor:
    """Elements of 1e25 and more: finite, their squares are not."""
    return (model(batch["x"]) * 1e25).mean()  # type: ignore[no-any-return]


def forty_thousand(model: Any, batch: dict[str, Any]) -> Tensor:
    return model(batch["x"].abs() * 0 + 1).sum() * (40000 / 6) * (1 if batch["g"] == 0 else 1e-3)  # type: ignore[no-any-return]


def in_step_1(rank: int, index: int) -> Tensor:
    return torch.tensor(float(index != 1))


def one_layer() -> nn.Module:
    return nn.Linear(WIDTH, 1, bias=False)


def none_of_it(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-30)


WEIGHT = {"rank": 1, "step": 1, "phase": "backward", "kind": "inf", "slot": "a.weight"}
STATE = {"rank": 0, "step": 0, "phase": "state", "layer": "2", "slot": "2.weight", "kind": "nan"}
B01, B02 = "https://github.com/NVIDIA/apex/issues/318", "https://github.com/Lightning-AI/pytorch-lightning/issues/9799"
B04, B10 = "https://github.com/pytorch/pytorch/issues/46849", "https://github.com/epfLLM/Megatron-LLM/issues/33"
COLLAPSING = {
    "B01 many overflows in a row": Case(
        B01, batch_of(), {}, None, mlp, hot, scaler=scaler(2.0**127),
        options={"max_consecutive_overflows": 3, "scale_floor": 0.0}, batches=10,
    ),
    "B03 a scale under its floor": Case(
        "https://github.com/facebookresearch/fairseq/issues/1529", batch_of(), {}, None, mlp, hot,
        scaler=scaler(2.0**127), options={"scale_floor": 2.0**125}, batches=10,
    ),
}  # fmt: skip
CASES = {
    **COLLAPSING,
    "B01 a bad weight under a scaler": Case(
        B01, batch_of(), STATE, ("aten.addmm.default", "step", "state"), spoilt, step, scaler=scaler(), batches=30
    ),
    "B01 a bad forward under a scaler": Case(
        "https://github.com/openai/guided-diffusion/issues/50", batch_of(g=flagged(1)),
        {"rank": 1, "step": 1, "phase": "forward"}, ("aten.div.Tensor", "B13", "division by zero"),
        given(over_zero), of_batch, scaler=scaler(), batches=30,
    ),
    "B02 the search for a scale": Case(
        B02, batch_of(), None, None, mlp, hot, scaler=scaler(2.0**127), batches=8, options={"scale_floor": 0.0}
    ),
    "B04 clipping after one NaN": Case(
        B04, batch_of(g=flagged(1)), {**WEIGHT, "kind": "nan"}, None, NanWeight, of_batch, before_update=clip
    ),
    "B04 clipping after one inf": Case(
        B04, batch_of(g=flagged(1)), WEIGHT, None, BadWeight, of_batch, before_update=clip
    ),
    "B04 clipping of what is large": Case(
        B04, batch_of(), None, None, mlp, large_gradients, before_update=clip, options={"grad_norm_warn": 1e30}
    ),
    "B09 an optimizer that returns early": Case(
        "https://github.com/deepspeedai/DeepSpeed/issues/8415", batch_of(g=flagged(1, at=0)), {**WEIGHT, "step": 0},
        None, BadWeight, of_batch, optimizer=lambda parameters: EarlySGD(parameters, lr=0.01), batches=10,
    ),
    "B10 float32": Case(B10, batch_of(g=flagged(1)), WEIGHT, None, BadWeight, of_batch),
    "B10 bfloat16": Case(B10, batch_of(g=flagged(1)), {**WEIGHT, "slot": "inner.a.weight"}, None, Bfloat, of_batch),
    "B10 float32, a bad loss": Case(
        B10, batch_of(g=flagged(1)), {"rank": 1, "step": 1, "phase": "forward"}, None, given(over_zero), of_batch
    ),
    "B10 the same with clipping": Case(
        B10, batch_of(g=flagged(1)), {"rank": 1, "step": 1, "phase": "forward"}, None, given(over_zero), of_batch,
        before_update=clip,
    ),
    "B10 the same with a scaler": Case(
        B10, batch_of(g=flagged(1)), {"rank": 1, "step": 1, "phase": "forward"}, None, given(over_zero), of_batch,
        scaler=scaler(),
    ),
    "B12 a norm that overflows": Case(
        "https://github.com/facebookresearch/fairseq/issues/4555", batch_of(), None, None, mlp, large_gradients,
        optimizer=none_of_it,
    ),
    "B12 a sum that overflows in half precision": Case(
        "https://github.com/facebookresearch/fairseq/issues/4555", batch_of(g=flagged(1)),
        {"rank": 1, "step": 1, "phase": "forward", "kind": "inf"}, ("aten.sum.dim_IntList", "B12", "overflow"),
        given(wide_sum), of_batch,
    ),
    "B13 a scale that never changes": Case(
        "https://github.com/deepspeedai/DeepSpeed/issues/1599", batch_of(g=flagged(1, at=0)),
        {"rank": 1, "step": 0, "phase": "forward"}, ("aten.div.Tensor", "B13", "division by zero"),
        given(over_zero), of_batch, scaler=scaler(1.0, 10**6), batches=10,
    ),
    "B14 finite on every rank": Case(
        "https://github.com/pytorch/pytorch/pull/59522", batch_of(g=in_step_1),
        {"rank": None, "step": 1, "phase": "reduce", "slot": "weight", "kind": "inf"}, None,
        one_layer, forty_thousand, wrap=wrap_ddp_with_half_hook,
    ),
}  # fmt: skip


@each({name: case for name, case in CASES.items() if name not in COLLAPSING})
def test_case(name: str, ended: Launch) -> None:
    ended.check(name)


@each(COLLAPSING)
def test_a_scale_that_collapses(name: str, ended: Launch) -> None:
    for rank in ended[name]:
        assert rank.report is not None and rank.report["cause"].startswith("scale collapse"), rank.text
        assert rank.finite and rank.unchanged
        assert rank.report["step"] == (2 if name.startswith("B01") else 3)
    reason = ended.diagnosed(name).reason
    assert reason.kind == "scale collapse"


def test_B01_the_first_step_settles_it(ended: Launch) -> None:
    """https://github.com/NVIDIA/apex/issues/715."""
    assert [len(rank.losses) for rank in ended["B01 a bad weight under a scaler"]] == [1, 1]


def test_B02_the_scale_came_down(ended: Launch) -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/issues/9799."""
    for rank in ended["B02 the search for a scale"]:
        assert torch.tensor(rank.losses).isfinite().all()
        assert 0 < rank.scale < 2.0**127


def test_B04_a_norm_that_overflows_is_told(ended: Launch) -> None:
    """https://github.com/pytorch/pytorch/issues/46849."""
    log = ended["B04 clipping of what is large"][0].log
    assert any("norm" in line for line in log), log


class Delayed:
    """The handle of a reduction that takes its time; the result is there only after `wait`."""

    def __init__(self, words: Tensor) -> None:
        self.words = words

    def wait(self) -> None:
        time.sleep(0.05)
        bad = verdict.Ballot(ran_backward=True).packed(torch.tensor(int(verdict.Severity.FAULT)))
        self.words.copy_(bad)


def test_B07_the_flag_is_read_after_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/pytorch/pytorch/pull/115710."""

    def all_reduce(words: Tensor, *, async_op: bool = False, **more: Any) -> Delayed | None:
        work = Delayed(words)
        return work if async_op else work.wait()

    peers = group.RankGroup(None, 1.0, torch.device("cpu"))
    peers.connected = True
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    assert peers.all_reduce_verdict(torch.tensor(0), ran_backward=True).read()[0] is verdict.Severity.FAULT


def test_B14_nobody_began_it(ended: Launch) -> None:
    """https://github.com/pytorch/pytorch/pull/59522."""
    report = ended.report("B14 finite on every rank")
    assert report["holders"] == [0, 1]
    reason = ended.diagnosed("B14 finite on every rank").reason
    assert reason.kind == "overflow in the reduce" and "every rank's gradient was finite" in reason.sentence
