"""Group C: FSDP and other sharding."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ddp_nanguard import NanGuard
from ddp_nanguard.dump.read import open_dump
from tests.cases.harness import Case, Launch, batch_of, check_reason, each, flagged
from tests.cases.parts import NAN, WIDTH, BadWeight, ValidatedArgs, given, mlp, of_batch, spoilt_gradient
from tests.ranks import run_ranks

THIS = sys.modules[__name__]


def step(model: Any, batch: dict[str, Any]) -> Tensor:
    return model(batch["x"]).square().mean()  # type: ignore[no-any-return]  # <step>


def from_meta() -> nn.Module:
    """Built on the meta device; what the init routine forgets is garbage, here for certain a NaN."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))
    model.to_empty(device="cpu")
    for module in model:
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    model[1].weight.data.fill_(NAN)
    model[1].bias.data.zero_()
    return model


class Buffered(nn.Module):
    """A buffer that a loader has to fill on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("scale", torch.ones(3))

    def forward(self, values: Tensor) -> Tensor:
        return self.net(values) * self.scale  # type: ignore[no-any-return]


def missed_on_rank_1(model: nn.Module, optimizer: Any, rank: int, index: int) -> None:
    if rank == 1 and index == 0:
        model.scale.fill_(NAN)  # type: ignore[operator]  # a buffer


def loss_of_zero(model: Any, batch: dict[str, Any]) -> Tensor:
    loss = model(batch["x"]).mean() / batch["g"]
    logged = loss.detach().nan_to_num(0.0, 0.0, 0.0)  # what this trainer's logger shows
    assert logged.isfinite()
    return loss  # type: ignore[no-any-return]


class Local(ValidatedArgs):
    """A scale from what this rank alone sees."""

    def __init__(self) -> None:
        super().__init__(lambda h, batch: h)
        self.quant = Quant()

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.b(self.quant(self.a(batch["x"]), batch["g"]))  # type: ignore[no-any-return]


class Quant(nn.Module):
    def forward(self, values: Tensor, g: Tensor) -> Tensor:
        scale = values.detach().abs().max() * g
        return values / scale * scale  # <C13>


def growing(rank: int, index: int) -> Tensor:
    return torch.tensor(0.0 if (rank, index) == (1, 3) else 1.0)


def rows_of_rank_0(h: Tensor, batch: dict[str, Any]) -> Tensor:
    return spoilt_gradient(h, batch["g"], 0)


def mixed(model: nn.Module) -> nn.Module:
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32, param_dtype=torch.bfloat16))


class Squeezed(nn.Module):
    """A view of a sharded module's output, changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 1)

    def forward(self, values: Tensor) -> Tensor:
        found = self.inner(values).squeeze(-1)
        found += 1.0
        return found  # type: ignore[no-any-return]


C02, C08 = (
    "https://github.com/huggingface/transformers/pull/45649",
    "https://github.com/meta-pytorch/torchrec/pull/4268",
)
WEIGHT = {"rank": 1, "step": 1, "phase": "backward", "slot": "a.weight", "kind": "inf"}
CASES = {
    "C01 a norm that nobody initialised": Case(
        "https://github.com/mosaicml/llm-foundry/pull/1745", batch_of(),
        {"rank": 0, "step": 0, "phase": "state", "layer": "1", "slot": "1.weight", "state": ["1.weight"]},
        None, from_meta, step, wrap="fsdp2",
    ),
    "C02 a tensor that rank 1 never got": Case(
        C02, batch_of(), {"rank": 1, "step": 0, "phase": "state", "slot": "scale", "kind": "nan"}, None, Buffered, step,
        wrap="fsdp2", before=missed_on_rank_1,
    ),
    "C04 a logger that shows 0": Case(
        "https://github.com/huggingface/accelerate/issues/2402", batch_of(g=flagged(1)),
        {"rank": 1, "step": 1, "phase": "loss", "slot": "loss"}, None, mlp, loss_of_zero, wrap="fsdp2",
    ),
    "C05 the wrapper's settings": Case(
        "https://github.com/Lightricks/LTX-2/issues/114", batch_of(1), {"rank": 1, "step": 1, "phase": "input"}, None,
        mlp, step, wrap=mixed,
    ),
    "C08 a gradient of rank 1 by name": Case(
        C08, batch_of(g=flagged(1)), WEIGHT, None, BadWeight, of_batch, wrap="fsdp2"
    ),
    "C09 rows of one shard": Case(
        "https://github.com/baidu-baige/LoongForge/pull/152", batch_of(g=flagged(1)),
        {"rank": 1, "step": 1, "phase": "backward"}, None, given(rows_of_rank_0), of_batch, wrap="fsdp2",
    ),
    "C13 a scale from the local shard": Case(
        "https://github.com/pytorch/torchtitan/issues/3109", batch_of(g=growing),
        {"rank": 1, "step": 3, "phase": "forward", "layer": "quant", "call": 1, "kind": "nan"},
        ("aten.div.Tensor", "C13", "division by zero"), Local, of_batch, wrap="fsdp2", batches=5,
    ),
}  # fmt: skip


@each(CASES)
def test_case(name: str, ended: Launch) -> None:
    ended.check(name)


def test_C01_the_operator_that_met_the_weight(ended: Launch) -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/pull/17627."""
    found = ended.diagnosed("C01 a norm that nobody initialised")
    assert found.reason.sentence == "1.weight held NaN before any training"
    check_reason(THIS, ("aten.native_layer_norm.default", "step", "state"), found)


def test_C02_only_rank_1(ended: Launch) -> None:
    """https://github.com/huggingface/transformers/pull/45649."""
    report = ended.report("C02 a tensor that rank 1 never got")
    assert {site["rank"] for site in report["sites"] if site["phase"] == "state"} == {1}


def test_C05_the_report_can_be_compared(ended: Launch) -> None:
    """https://github.com/Lightricks/LTX-2/issues/114."""
    report = ended.report("C05 the wrapper's settings")
    assert report["wrapper"] == "fsdp2"
    described = str(open_dump([report["dump_path"]]).manifest.wrapper_description.details)
    assert "bfloat16" in described and "float32" in described, described


def test_C13_the_steps_before_are_in_the_history(ended: Launch) -> None:
    """https://github.com/pytorch/torchtitan/issues/3109."""
    report = ended.report("C13 a scale from the local shard")
    history = open_dump([report["dump_path"]]).history(1)
    assert {0, 1, 2} <= {int(step) for step in history["steps"]}


# -- setups of one's own -----------------------------------------------------------------------------------------------


def _squeezed(guarded: bool) -> list[Any]:
    """Losses and weights, or what the model fails with."""
    torch.manual_seed(0)
    model = Squeezed()
    fully_shard(model.inner)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=None, timeout_s=5) if guarded else None
    found: list[Any] = []
    try:
        for index in range(3):
            loss = (guard or model)(batch_of()(0, index)["x"]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss))
    except RuntimeError as error:
        found.append(str(error).splitlines()[0])
    if guard is not None:
        guard.close()
    return [*found, *(parameter.to_local().tolist() for parameter in model.parameters())]  # type: ignore[attr-defined]


def _in_backward(rank: int) -> dict[str, Any]:
    """Each parameter is updated inside the backward; on rank 1 the gradient of the one that comes last goes bad."""
    torch.manual_seed(0)
    model = BadWeight()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    found: dict[str, Any] = {"type": None, "text": ""}
    try:
        guard = NanGuard(model, list(optimizers.values()), dump_dir=None, timeout_s=5)
        for index in range(3):
            of_batch(guard, batch_of(g=flagged(1))(rank, index)).backward()
    except Exception as error:
        found["type"], found["text"] = type(error).__name__, str(error)
    found["finite"] = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    return found


def _hooks_that_never_fire() -> dict[str, int]:
    model = fully_shard(nn.Linear(4, 2))
    calls = {"hook": 0, "post": 0}

    def count(name: str) -> None:
        calls[name] += 1

    model.weight.register_hook(lambda gradient: count("hook"))
    model.weight.register_post_accumulate_grad_hook(lambda parameter: count("post"))
    model(torch.ones(2, 4)).sum().backward()
    return calls


def _setups(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "squeezed": [_squeezed(False), _squeezed(True)],
        "in backward": _in_backward(rank),
        "hooks": _hooks_that_never_fire(),
    }


@pytest.fixture(scope="module")
def setups() -> list[dict[str, Any]]:
    return run_ranks(_setups)


def test_C06_all_ranks_stop(setups: list[dict[str, Any]]) -> None:
    """https://github.com/meta-pytorch/torchtune/issues/2825."""
    first, second = [found["in backward"] for found in setups]
    assert first["type"] == second["type"] == "ValueError"
    assert first["text"] == second["text"] and "inside the backward" in first["text"]


def test_C06_an_optimizer_inside_the_backward(setups: list[dict[str, Any]]) -> None:
    """https://github.com/meta-pytorch/torchtune/issues/2825: refused, or looked at before the inner update."""
    for found in setups:
        refused = found["in backward"]["type"] == "ValueError"
        assert refused or (found["in backward"]["finite"] and "backward" in found["in backward"]["text"])


def test_C08_hooks_of_sharded_parameters_never_fire(setups: list[dict[str, Any]]) -> None:
    """https://github.com/meta-pytorch/torchrec/pull/4268."""
    assert setups[0]["hooks"] == {"hook": 0, "post": 1}


def test_C12_a_view_changed_in_place_runs_as_without_a_guard(setups: list[dict[str, Any]]) -> None:
    """https://github.com/pytorch/pytorch/issues/181832."""
    for found in setups:
        without, guarded = found["squeezed"]
        assert guarded == without
