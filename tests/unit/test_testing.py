"""Faults planted by users: one process, each phase named exactly, wrong input refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.inject.injection import Injection
from ddp_nanguard.inject.spec import parse_spec
from ddp_nanguard.testing import PHASES, inject

STEP, MICRO_BATCH, NUM_STEPS, NUM_MICRO_BATCHES = 2, 1, 5, 3


class Net(nn.Module):
    """A layer with parameters, one without, a container with code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.act = nn.Sigmoid()
        self.head = nn.Linear(6, 3)

    def forward(self, values: Tensor) -> Tensor:
        values = self.stem(values)
        return self.head(self.act(values + self.block(values)))  # type: ignore[no-any-return]  # modules return Any


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _batches() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [{"id": n, "x": torch.randn(5, 4, generator=generator)} for n in range(NUM_STEPS * NUM_MICRO_BATCHES)]


def _train(guard: NanGuard, optimizer: torch.optim.Optimizer, with_steps: bool = True) -> None:
    for batch in guard.steps(_batches()) if with_steps else _batches():
        loss = guard(batch["x"]).square().mean()
        guard.watch(loss=loss)
        loss.backward()
        if batch["id"] % NUM_MICRO_BATCHES == NUM_MICRO_BATCHES - 1:
            optimizer.step()
            optimizer.zero_grad()
    guard.close()


def _origin(
    phase: str, layer: str | None, kind: str = "nan", guard_first: bool = False, with_steps: bool = True
) -> tuple[dict[str, Any], Injection]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    where: dict[str, Any] = {"rank": 0, "step": STEP, "phase": phase, "layer": layer, "kind": kind}
    if phase not in ("state", "optimizer"):
        where["micro_batch"] = MICRO_BATCH
    if guard_first:
        guard = NanGuard(model, optimizer, dump_dir=None)
        injection = inject(model, **where)
    else:
        injection = inject(model, **where)
        guard = NanGuard(model, optimizer, dump_dir=None)
    with pytest.raises(NonFiniteError) as raised:
        _train(guard, optimizer, with_steps)
    origin = raised.value.report.to_dict()["origin"]
    guard._detach()
    injection.remove()
    return origin, injection


def _place(origin: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(origin[key] for key in ("rank", "step", "micro_batch", "phase", "layer", "kind"))


@pytest.mark.parametrize("guard_first", [False, True])
@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        *((layer, "nan") for layer in ("stem", "block", "block.1", "act", "head", "")),
        *(("act", "inf"), ("head", "inf"), ("", "inf")),  # before the sigmoid inf would come to nothing
    ],
)
def test_forward(layer: str, kind: str, guard_first: bool) -> None:
    origin, injection = _origin("forward", layer, kind, guard_first)
    assert _place(origin) == (0, STEP, MICRO_BATCH, "forward", layer, kind)
    assert injection.num_fired == 1


@pytest.mark.parametrize("guard_first", [False, True])
@pytest.mark.parametrize("layer", ["stem", "block", "block.1", "act", "head", ""])
def test_backward(layer: str, guard_first: bool) -> None:
    origin, injection = _origin("backward", layer, guard_first=guard_first)
    assert _place(origin) == (0, STEP, MICRO_BATCH, "backward", layer, "nan")
    assert injection.num_fired == 1


@pytest.mark.parametrize("guard_first", [False, True])
@pytest.mark.parametrize("with_steps", [False, True])
def test_input(with_steps: bool, guard_first: bool) -> None:
    origin, _ = _origin("input", None, "nan", guard_first, with_steps)
    assert _place(origin) == (0, STEP, MICRO_BATCH, "input", None, "nan")
    assert origin["slot"] == ('["x"]' if with_steps else '["args"][0]')


def test_a_relu_that_is_off_does_not_hide_a_backward_fault() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.copy_(torch.tensor([-9.0, 1.0, 1.0]))  # type: ignore[operator]  # a parameter
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=None)
    injection = inject(model, rank=0, step=0, phase="backward", layer="1")
    guard(torch.ones(1, 2)).sum().backward()
    with pytest.raises(NonFiniteError, match=r"rank 0, step 0, micro-batch 0, backward: 1 \(call 1\)"):
        optimizer.step()
    guard._detach()
    injection.remove()


def test_loss() -> None:
    origin, _ = _origin("loss", None, "inf")
    assert _place(origin) == (0, STEP, MICRO_BATCH, "loss", None, "inf")


@pytest.mark.parametrize("guard_first", [False, True])
@pytest.mark.parametrize("phase", ["state", "optimizer"])
def test_weights(phase: str, guard_first: bool) -> None:
    origin, _ = _origin(phase, "block.0", guard_first=guard_first)
    assert _place(origin) == (0, STEP, None, phase, "block.0", "nan")
    assert origin["slot"] == "block.0.weight"


def test_a_fault_at_another_rank_or_later_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model, other = Net(), Net()
    other.load_state_dict(model.state_dict())
    injections = [inject(other, rank=0, step=99, phase=phase, layer=None) for phase in PHASES if phase != "reduce"]
    for each in (model, other):
        optimizer = torch.optim.AdamW(each.parameters())
        _train(NanGuard(each, optimizer, dump_dir=None), optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    for injection in injections:
        injection.remove()
    for module in other.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert not _global_optimizer_pre_hooks and not _global_optimizer_post_hooks


def test_without_a_guard_steps_are_counted_alone() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    injection = inject(model, rank=0, step=STEP, phase="forward", layer="act", micro_batch=MICRO_BATCH)
    seen = []
    for batch in _batches():
        loss = model(batch["x"]).square().mean()
        seen.append(bool(loss.isnan()))
        if seen[-1]:
            continue
        loss.backward()
        if batch["id"] % NUM_MICRO_BATCHES == NUM_MICRO_BATCHES - 1:
            optimizer.step()
    assert [index for index, bad in enumerate(seen) if bad] == [STEP * NUM_MICRO_BATCHES + MICRO_BATCH]
    injection.remove()
    injection.remove()


def test_the_environment_plants_and_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("NANGUARD_INJECT", "rank=0, step=1, layer=act, phase=forward, kind=nan, micro_batch=2")
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING):
        guard = NanGuard(model, optimizer, dump_dir=None)
        with pytest.raises(NonFiniteError) as raised:
            _train(guard, optimizer)
    place = "rank 0 · step 1 · micro-batch 2 · forward · act: nan"
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        f"NANGUARD_INJECT: a fault will be PLANTED in this job ({place})",
        f"NANGUARD_INJECT: planted ({place})",
    ]
    assert raised.value.report.notes == (f"NANGUARD_INJECT plants a fault in this job: {place}",)
    guard._detach()
    assert not any(module._forward_hooks for module in model.modules())


def test_a_disabled_guard_plants_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("NANGUARD_INJECT", "rank=0,step=1,phase=forward")
    model = Net()
    NanGuard(model, torch.optim.SGD(model.parameters(), lr=0.1), enabled=False)
    assert caplog.messages == ["NANGUARD_INJECT: NOT planted: the guard has enabled=False"]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"layer": "blocks.9"}, "option layer='blocks.9' does not fit; valid: \"\", stem, block, block.0, block.1"),
        ({"layer": "act", "phase": "state"}, "option layer='act' does not fit; valid: stem, block.0, head"),
        ({"layer": "act", "phase": "input"}, "option layer='act' does not fit; valid: None, since phase input belongs"),
        ({"phase": "sideways"}, "option phase='sideways' does not fit; valid: state, input, forward, loss, backward"),
        ({"phase": "reduce"}, "option phase='reduce': a plain model communicates nothing; valid here: state, input"),
        ({"kind": "none"}, "option kind='none' does not fit; valid: nan, inf, -inf"),
        ({"rank": 1}, "option rank=1 does not fit; valid: 0"),
        ({"step": -1}, "option step=-1 does not fit; valid: a whole number from 0"),
        ({"micro_batch": 0.5}, "option micro_batch=0.5 does not fit; valid: a whole number from 0"),
    ],
)
def test_wrong_input_is_refused(changed: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"rank": 0, "step": 0, "layer": "act", "phase": "forward", **changed}
    with pytest.raises(ValueError, match=r"^option ") as raised:
        inject(Net(), **given)
    assert str(raised.value).startswith(text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("rank=0,step=1", "lacks phase"),
        ("rank=0,step=1,phase=forward,when=now", "'when=now' does not fit; valid keys, each once: rank, step, phase"),
        ("rank=zero,step=1,phase=forward", "rank='zero' is no whole number"),
        ("rank=0,rank=0,step=1,phase=forward", "'rank=0' does not fit"),
    ],
)
def test_a_wrong_variable_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=r"^environment variable NANGUARD_INJECT=") as raised:
        parse_spec(text)
    assert complaint in str(raised.value)


def test_a_wrong_layer_in_the_environment_is_refused_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANGUARD_INJECT", "rank=0,step=1,phase=forward,layer=nowhere")
    model = Net()
    with pytest.raises(ValueError, match=r"NANGUARD_INJECT=.*option layer='nowhere' does not fit; valid: \"\", stem"):
        NanGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_update_that_runs_its_backward_in_a_closure_belongs_to_the_step_of_that() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=None)
    inject(model, rank=0, step=1, layer="", phase="optimizer")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = guard(torch.ones(1, 2)).sum()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        return loss

    optimizer.step(closure)
    optimizer.step(closure)
    with pytest.raises(NonFiniteError, match=r"^rank 0, step 1, optimizer: weight is NaN after the update"):
        optimizer.step(closure)
