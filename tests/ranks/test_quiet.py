"""Legitimate non-finite values must not stop training; each case says what it would be like if they did.

Every case trains a few steps under DDP on two ranks. `Setup.expected` is None where nothing may be raised, else the
origin that must be named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard
from tests.ranks import run_ranks
from tests.training import Loop, listening

NUM_STEPS = 3
NAN, INF = float("nan"), float("inf")


@dataclass
class Setup:
    """A model, its step and its data.

    Attributes:
        step: ``step(model, batch)`` gives the loss, or a dict of losses, or a loss to backpropagate without watching.
        batch: of one rank and step.
        options: of the guard.
        before: runs before each step, on the wrapped model.
        watch_only: what is watched, given the step's losses; default all.
    """

    model: nn.Module
    step: Callable[[Any, Any], Any]
    batch: Callable[[int, int], Any]
    options: dict[str, Any] = field(default_factory=dict)
    before: Callable[[nn.Module, int, int], None] | None = None


def _plain_batch(rank: int, step: int) -> Tensor:
    return torch.full((2, 4), 0.5 + rank + step)


def _sum(model: Any, batch: Tensor) -> Tensor:
    return model(batch).sum()  # type: ignore[no-any-return]  # modules return Any


# -- models -----------------------------------------------------------------------------------------------------------


class Clamped(nn.Module):
    """G02: the child overflows in half precision by design, the parent clamps right after."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4, bias=False).half()
        nn.init.constant_(self.project.weight, 200.0)
        self.head = nn.Linear(4, 2)

    def forward(self, values: Tensor) -> Tensor:
        large = self.project((values * 200.0).half())
        assert large.isinf().all()
        limit = torch.finfo(torch.float16).max - 1000
        return self.head(large.clamp(-limit, limit).float() / limit)  # type: ignore[no-any-return]  # modules return Any


class Sliced(nn.Module):
    """G03: fully masked rows are NaN in the forward and dropped before the loss; one output is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(4, 4)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.tensor([[0.0], [-INF]])
        rows = self.softmax(self.score(values.detach()).detach() + mask)
        assert rows[1].isnan().all()
        return self.score(values)[0] * rows[0], rows


class MaskModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("causal", torch.full((4, 4), -INF).triu(1))

    def forward(self) -> Tensor:
        return self.causal


class MaskedAttention(nn.Module):
    """G04: a causal -inf mask as buffer and as module output, and logits masked with -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = MaskModule()
        self.score = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, values: Tensor) -> Tensor:
        attention = (self.score(values) + self.mask()).softmax(-1)
        return self.head(attention @ values).masked_fill(torch.arange(5) == 4, -INF)  # type: ignore[no-any-return]


class Sentinel(nn.Module):
    """G09: a scale that is NaN until it has been loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("scale", torch.tensor([NAN]))

    def forward(self, values: Tensor) -> Tensor:
        return self.linear(values) * self.scale.nan_to_num(1.0)  # type: ignore[no-any-return]  # modules return Any


class Attention(nn.Module):
    """D03: one sample is padding only."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.need_weights = need_weights

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        values = batch["values"]
        output, _ = self.attention(
            values, values, values, key_padding_mask=batch["padding"], need_weights=self.need_weights
        )
        return output  # type: ignore[no-any-return]  # modules return Any


class MinusInf(nn.Module):
    """-inf out of a layer, turned into zeros by the next."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gate = nn.Threshold(-INF, -INF)

    def forward(self, values: Tensor) -> Tensor:
        masked = self.linear(values).masked_fill(torch.arange(4) > 1, -INF)
        return self.gate(masked).exp()  # type: ignore[no-any-return]  # modules return Any


def _norm_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


# -- steps ------------------------------------------------------------------------------------------------------------


def _used_rows(model: Any, batch: Tensor) -> Tensor:
    used, _ = model(batch)
    return used.sum()  # type: ignore[no-any-return]  # modules return Any


def _masked_cross_entropy(model: Any, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch), torch.zeros(len(batch), dtype=torch.int64))


def _squared_before(model: Any, batch: dict[str, Tensor]) -> Tensor:
    present = ~batch["target"].isnan()
    return (model(batch["values"])[present] - batch["target"][present]).square().mean()  # type: ignore[no-any-return]


def _squared_after(model: Any, batch: dict[str, Tensor]) -> Tensor:
    errors = F.mse_loss(model(batch["values"]), batch["target"], reduction="none")
    return errors[~batch["target"].isnan()].mean()


def _absolute_after(model: Any, batch: dict[str, Tensor]) -> Tensor:
    errors = F.l1_loss(model(batch["values"]), batch["target"], reduction="none")
    return errors[~batch["target"].isnan()].mean()


def _ignoring_cross_entropy(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["values"]), batch["target"], ignore_index=-100)


def _zeroed_ctc(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """G05: a target longer than the input has an infinite loss, which the user zeroes before backward."""
    log_probabilities = model(batch["values"]).log_softmax(-1).reshape(1, 2, 5)
    given = (log_probabilities, batch["target"], torch.tensor([1, 1]), batch["lengths"])
    raw = F.ctc_loss(*given, reduction="none")
    return {"raw": raw.detach(), "used": F.ctc_loss(*given, reduction="sum", zero_infinity=True)}


def _evaluating(model: Any, batch: Tensor) -> Tensor:
    """G07: an evaluation with NaN data before the training step, longer on rank 1."""
    model.eval()
    with torch.no_grad():
        for _ in range(1 + 2 * dist.get_rank()):
            assert model(torch.full_like(batch, NAN)).isnan().any()
    model.train()
    return model(batch).sum()  # type: ignore[no-any-return]  # modules return Any


def _receiving(model: Any, batch: Tensor) -> Tensor:
    """G08: the receiving rank's buffer is garbage until the broadcast has come."""
    received = batch.clone() if dist.get_rank() == 0 else torch.full_like(batch, NAN)
    dist.broadcast(received, 0)
    return model(received).sum()  # type: ignore[no-any-return]  # modules return Any


# -- data -------------------------------------------------------------------------------------------------------------


def _missing_labels(rank: int, step: int) -> dict[str, Tensor]:
    return {"values": _plain_batch(rank, step), "target": torch.tensor([[0.0, NAN], [1.0, 2.0]])}


def _ignored_labels(rank: int, step: int) -> dict[str, Tensor]:
    target = [-100, -100] if rank == 1 and step == 1 else [0, 1]
    return {"values": _plain_batch(rank, step), "target": torch.tensor(target)}


def _padded(rank: int, step: int) -> dict[str, Tensor]:
    padding = torch.zeros(2, 3, dtype=torch.bool)
    padding[1] = rank == 1 and step == 1
    return {"values": torch.linspace(0, 1, 24).reshape(2, 3, 4), "padding": padding}


def _ctc(rank: int, step: int) -> dict[str, Tensor]:
    lengths = [1, 3] if rank == 1 and step == 1 else [1, 1]
    return {
        "values": _plain_batch(rank, step),
        "target": torch.tensor([[1, 2, 3], [1, 2, 3]]),
        "lengths": torch.tensor(lengths),
    }


def _loaded_before_the_first_step(model: nn.Module, rank: int, step: int) -> None:
    model.module.scale.fill_(2.0)  # type: ignore[operator, union-attr]  # DDP's module is a Sentinel


def _bad_buffer_on_rank_1(model: nn.Module, rank: int, step: int) -> None:
    if rank == 1 and step == 1:
        model.module[1].running_mean.div_(0.0)  # type: ignore[operator, index, union-attr]  # a Sequential


CASES: dict[str, Callable[[], Setup]] = {
    "G02 child overflows, parent clamps": lambda: Setup(Clamped(), _sum, _plain_batch),
    "G03 bad rows sliced away, bad output unused": lambda: Setup(Sliced(), _used_rows, _plain_batch),
    "G04 -inf masks, buffers and logits": lambda: Setup(
        MaskedAttention(), _masked_cross_entropy, lambda rank, step: torch.full((4, 4), 0.1 * (1 + rank))
    ),
    "G05 inf loss zeroed, on_loss=warn": lambda: Setup(nn.Linear(4, 5), _zeroed_ctc, _ctc, {"on_loss": "warn"}),
    "G07 NaN in evaluation": lambda: Setup(nn.Sequential(nn.Linear(4, 2), nn.Dropout()), _evaluating, _plain_batch),
    "G08 garbage in a receive buffer": lambda: Setup(nn.Linear(4, 2), _receiving, _plain_batch),
    "G09 sentinel filled before the first step": lambda: Setup(
        Sentinel(), _sum, _plain_batch, before=_loaded_before_the_first_step
    ),
    "G09 sentinel never filled, ignored by name": lambda: Setup(Sentinel(), _sum, _plain_batch, {"ignore": ("scale",)}),
    "D03 padded row, need_weights=False": lambda: Setup(Attention(need_weights=False), _sum, _padded),
    "E03a missing labels masked before the loss": lambda: Setup(nn.Linear(4, 2), _squared_before, _missing_labels),
    "E03c missing labels masked after L1": lambda: Setup(nn.Linear(4, 2), _absolute_after, _missing_labels),
    "E05 no label left, on_loss=warn": lambda: Setup(
        nn.Linear(4, 2), _ignoring_cross_entropy, _ignored_labels, {"on_loss": "warn"}
    ),
    "-inf out of a layer": lambda: Setup(MinusInf(), _sum, _plain_batch),
    "buffer healed by DDP's broadcast": lambda: Setup(_norm_model(), _sum, _plain_batch, before=_bad_buffer_on_rank_1),
}

STOPPING: dict[str, tuple[Callable[[], Setup], dict[str, Any]]] = {
    "G05 inf loss, default policy": (
        lambda: Setup(nn.Linear(4, 5), _zeroed_ctc, _ctc),
        {"rank": 1, "step": 1, "phase": "loss", "layer": None, "slot": "loss.raw", "kind": "inf"},
    ),
    "D03 padded row, need_weights=True": (
        lambda: Setup(Attention(need_weights=True), _sum, _padded),
        {"rank": 1, "step": 1, "phase": "forward", "layer": "attention", "call": 1, "slot": "output", "kind": "nan"},
    ),
    "E03b missing labels masked after the square": (
        lambda: Setup(nn.Linear(4, 2), _squared_after, _missing_labels),
        {"rank": 0, "step": 0, "phase": "backward", "layer": "", "slot": "grad", "kind": "nan"},
    ),
    "E05 no label left, default policy": (
        lambda: Setup(nn.Linear(4, 2), _ignoring_cross_entropy, _ignored_labels),
        {"rank": 1, "step": 1, "phase": "loss", "layer": None, "slot": "loss", "kind": "nan"},
    ),
}


@dataclass
class Result:
    """How a case ended: steps done, the origin if one was raised, warnings of the guard, whether weights moved."""

    num_steps: int
    origin: dict[str, Any] | None
    warnings: list[str]
    moved: bool
    finite: bool


def _run_cases(rank: int, world_size: int, names: list[str]) -> list[Result]:
    known = {**CASES, **{name: build for name, (build, _) in STOPPING.items()}}
    return [_run_case(rank, known[name]()) for name in names]


def _run_case(rank: int, case: Setup) -> Result:
    torch.manual_seed(0)
    model = DistributedDataParallel(case.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    batches = [case.batch(rank, step) for step in range(NUM_STEPS)]
    with listening() as warnings:
        guard = NanGuard(model, optimizer, dump_dir=None, timeout_s=10, **case.options)
        loop = Loop(model, optimizer, case.step, guard=guard, total=_used)
        if case.before is not None:
            loop.before_batch = lambda step, batch: case.before(model, rank, step)
        error = loop.until_fault(batches)
        num_steps = guard.step
        guard.close()
    moved = any(not torch.equal(before, after) for before, after in zip(start, model.parameters(), strict=True))
    finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    return Result(num_steps, None if error is None else error.report.to_dict()["origin"], warnings, moved, finite)


def _used(loss: Any) -> Tensor:
    return loss["used"] if isinstance(loss, dict) else loss  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def ended() -> dict[str, list[Result]]:
    """All cases in one launch, each with a fresh model and guard."""
    names = [*CASES, *STOPPING]
    first, second = run_ranks(_run_cases, timeout_s=40, names=names)
    return {name: [first[index], second[index]] for index, name in enumerate(names)}


@pytest.mark.parametrize("name", CASES)
def test_quiet(name: str, ended: dict[str, list[Result]]) -> None:
    for result in ended[name]:
        assert result.origin is None
        assert result.num_steps == NUM_STEPS
        assert result.moved
        assert result.finite


@pytest.mark.parametrize("name", STOPPING)
def test_the_same_values_do_stop_where_they_do_harm(name: str, ended: dict[str, list[Result]]) -> None:
    _, expected = STOPPING[name]
    first, second = ended[name]
    assert first.origin == second.origin
    assert first.origin is not None
    assert {key: first.origin[key] for key in expected} == expected
    assert first.num_steps == second.num_steps == expected["step"]


def test_a_healed_buffer_and_a_tolerated_loss_are_warnings(ended: dict[str, list[Result]]) -> None:
    healed = ended["buffer healed by DDP's broadcast"][1].warnings
    assert any("1.running_mean" in line for line in healed), healed
    tolerated = [line for result in ended["E05 no label left, on_loss=warn"] for line in result.warnings]
    assert any("loss" in line for line in tolerated), tolerated


def test_legitimate_values_give_no_warning(ended: dict[str, list[Result]]) -> None:
    silent = [name for name in CASES if "on_loss=warn" not in name and "healed" not in name]
    assert {name: result.warnings for name in silent for result in ended[name] if result.warnings} == {}


def _overflowing(rank: int, world_size: int) -> tuple[int, list[float]]:
    """B02: the first overflows under a scaler are its search for a scale."""
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    guard = NanGuard(model, optimizer, scaler=scaler, dump_dir=None, timeout_s=10)
    scales: list[float] = []
    loop = Loop(model, optimizer, _sum, guard=guard, scaler=scaler)
    loop.after_update = lambda step: scales.append(scaler.get_scale())
    loop.run([_plain_batch(rank, step) for step in range(6)])
    step = guard.step
    guard.close()
    return step, scales


def test_the_first_overflows_of_a_scaler_are_let_through() -> None:
    first, second = run_ranks(_overflowing)
    assert first == second
    step, scales = first
    assert step == 6
    assert scales[0] == 2.0**126
    assert scales[-1] < scales[0]
