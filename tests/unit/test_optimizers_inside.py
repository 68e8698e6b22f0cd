"""Optimizers that are wrapped, contained in something, or stepped by another method: followed, judged, or told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ddp_nanguard import NanGuard, NonFiniteError

NAN = float("nan")


class Proxy(torch.optim.Optimizer):
    """An Optimizer by class, without the tables of hooks of one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Copy(torch.optim.Optimizer):
    """Shares everything with the original but its step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})
        self._optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)


class Plain:
    """No Optimizer by class."""

    def __init__(self, optim: Any) -> None:
        self._wrapped = optim

    def step(self) -> None:
        self._wrapped.step()

    def zero_grad(self) -> None:
        self._wrapped.zero_grad()


class Masters:
    """Trains copies of the weights, and copies them back."""

    def __init__(self, *modules: nn.Module) -> None:
        self.weights = [p for module in modules for p in module.parameters()]
        self.masters = [nn.Parameter(p.detach().double()) for p in self.weights]
        self.optimizer = torch.optim.SGD(self.masters, lr=0.1)

    @torch.no_grad()
    def step(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = weight.grad.double()  # type: ignore[union-attr]
        self.optimizer.step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


class Slotted:
    """Has slots of names of its own, and takes everything else from what it wraps."""

    __slots__ = ("__wrapped__",)

    def __init__(self, optimizer: Any) -> None:
        self.__wrapped__ = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)


class Chained:
    """Several, behind slots and in a dict."""

    __slots__ = ("optimizers",)

    def __init__(self, **optimizers: Any) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for each in self.optimizers.values():
            each.step()

    def zero_grad(self) -> None:
        for each in self.optimizers.values():
            each.zero_grad()


class PerPart(torch.optim.Optimizer):
    """One per part of a model, and an Optimizer by class itself, with the parameters of all and no state."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in parts]
        super().__init__([p for each in self.optimizers for p in each.param_groups[0]["params"]], {})

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)

    def step(self, closure: Any = None) -> Any:
        for each in self.optimizers:
            each.step()


class TwoSteps(torch.optim.Optimizer):
    """Steps by another one, in a second pass, as sharpness-aware optimizers do; `step` makes both."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)

    def second_step(self) -> None:
        self.base.step()

    def step(self, closure: Any = None) -> Any:
        self.base.step()
        self.base.step()


def _sgd(*modules: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)


def _trained(
    model: nn.Module, optimizer: Any, step: Callable[[], object], *, bad_at: int | None = None, **options: Any
) -> tuple[int, int | None]:
    """Number of verdicts of a job of four steps, and the step that stopped it."""
    guard = NanGuard(model, optimizer, dump_dir=None, **options)
    try:
        for index, x in enumerate(guard.steps([torch.ones(3, 2)] * 4)):
            loss = guard(x).mean() * (NAN if index == bad_at else 1.0)
            guard.watch(loss=loss)
            loss.backward()
            step()
            for parameter in model.parameters():
                parameter.grad = None
        guard.close()
    except NonFiniteError as error:
        return guard.step, error.report.step
    return guard.step, None


WRAPPED: dict[str, Callable[[nn.Module], Any]] = {
    "proxy": lambda net: Proxy(_sgd(net)),
    "copy": lambda net: Copy(_sgd(net)),
    "plain object": lambda net: Plain(_sgd(net)),
    "proxy of a proxy": lambda net: Plain(Proxy(_sgd(net))),
    "several": lambda net: Chained(first=_sgd(net[0]), second=Plain(_sgd(net[1]))),
    "one per part": lambda net: PerPart(net),
    "master weights": lambda net: Masters(net),
    "slots": lambda net: Slotted(_sgd(net)),
    "dict": lambda net: {"first": _sgd(net[0]), "second": Plain(_sgd(net[1]))},
    "list of wrappers": lambda net: [Plain(_sgd(net[0])), Proxy(_sgd(net[1]))],
}


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize("bad_at", [None, 2])
def test_what_wraps_optimizers_is_followed_to_them(wrap: Callable[[nn.Module], Any], bad_at: int | None) -> None:
    net = _net()
    optimizer = wrap(net)
    given = list(optimizer.values()) if isinstance(optimizer, dict) else optimizer
    given = given if isinstance(given, list) else [given]
    judged = _trained(net, optimizer, lambda: [each.step() for each in given], bad_at=bad_at)
    assert judged == ((4, None) if bad_at is None else (2, 2))


@pytest.mark.parametrize("step", ["step", "second_step"])
def test_an_optimizer_inside_another_one_is_judged_once(step: str) -> None:
    net = _net()
    optimizer = TwoSteps(net.parameters())
    assert _trained(net, optimizer, getattr(optimizer, step)) == (4, None)
    assert _trained(net, optimizer, getattr(optimizer, step), bad_at=1) == (1, 1)


def _by_hand(net: nn.Module) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 0.1 * parameter.grad


def test_the_state_of_a_container_is_that_of_its_optimizers(caplog: pytest.LogCaptureFixture) -> None:
    net = _net()
    optimizer = PerPart(net)

    def step() -> None:
        optimizer.step()
        optimizer.optimizers[1].state[net[1].weight]["exp_avg"].fill_(NAN)

    assert _trained(net, optimizer, step, state_every=1) == (2, 1)
    assert "1.weight.exp_avg" in caplog.text


def test_updates_by_hand_are_told_and_judged_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    net = _net()
    assert _trained(net, _sgd(net), lambda: _by_hand(net), bad_at=3) == (0, 0)
    told = [r.getMessage() for r in caplog.records if "NOTHING IS JUDGED" in r.getMessage()]
    assert len(told) == 1
    assert "used or cleared 2 times since the last verdict, without step() of the optimizer" in told[0]
    assert "(SGD)" in told[0]


def _by_hand_in_place(net: nn.Module) -> None:
    _by_hand(net)
    net.zero_grad(set_to_none=False)


def _without_grad(net: nn.Module) -> None:
    """What a loop does that takes its gradients from ``torch.autograd.grad``."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 0.1


@pytest.mark.parametrize("update", [_by_hand_in_place, _without_grad])
def test_updates_by_hand_after_some_by_step_are_told(
    update: Callable[[nn.Module], None], caplog: pytest.LogCaptureFixture
) -> None:
    net = _net()
    optimizer = _sgd(net)
    guard = NanGuard(net, optimizer, dump_dir=None)
    for index, x in enumerate(guard.steps([torch.ones(3, 2)] * 5)):
        loss = guard(x).mean()
        if index < 2 or update is _by_hand_in_place:
            loss.backward()
        if index < 2:
            optimizer.step()
            optimizer.zero_grad()
        else:
            update(net)
    told = [r.getMessage() for r in caplog.records if "NOTHING IS JUDGED" in r.getMessage()]
    assert [text.partition(":")[0] for text in told] == ["step 2"]
    guard.watch(loss=loss * NAN)
    with pytest.raises(NonFiniteError):
        guard.close()


def test_weights_that_the_loop_has_changed_within_the_step_are_not_called_those_of_the_last() -> None:
    net = _net()
    optimizer = _sgd(net)
    guard = NanGuard(net, optimizer, dump_dir=None)
    (guard(torch.ones(3, 2)).mean() * NAN).backward()
    with torch.no_grad():
        net[0].weight.add_(1.0)
    with pytest.raises(NonFiniteError, match="the loop had changed weights within the step: load a checkpoint"):
        optimizer.step()
    guard.close()


def test_accumulation_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    net = _net()
    caplog.set_level(logging.WARNING)
    optimizer = _sgd(net)
    guard = NanGuard(net, optimizer, dump_dir=None)
    for index, x in enumerate(guard.steps([torch.ones(3, 2)] * 12)):
        guard(x).mean().backward()
        if index % 6 == 5:
            optimizer.step()
            optimizer.zero_grad()
    guard.close()
    assert guard.step == 2
    assert not caplog.records


def test_a_close_on_the_way_of_an_exception_judges_nothing() -> None:
    net = _net()
    guard = NanGuard(net, _sgd(net), dump_dir=None)

    def train() -> None:
        try:
            (guard(torch.ones(3, 2)).mean() * NAN).backward()
            raise KeyError("of the job")
        finally:
            guard.close()

    with pytest.raises(KeyError, match="of the job"):
        train()


def test_a_job_that_trains_where_it_handles_an_exception_is_judged_at_the_end() -> None:
    net = _net()

    def train() -> None:
        try:
            raise KeyError("of the job")
        except KeyError:
            guard = NanGuard(net, _sgd(net), dump_dir=None)
            (guard(torch.ones(3, 2)).mean() * NAN).backward()
            guard.close()

    with pytest.raises(NonFiniteError):
        train()


NO_OPTIMIZER: dict[str, Callable[[nn.Module], Any]] = {
    "scheduler": lambda net: torch.optim.lr_scheduler.StepLR(_sgd(net), 1),
    "proxy of nothing": lambda net: Proxy(object()),  # type: ignore[arg-type]
    "plain object of nothing": lambda net: Plain(object()),
    "module": lambda net: net,
    "number": lambda net: 5,
}


@pytest.mark.parametrize("wrap", NO_OPTIMIZER.values(), ids=NO_OPTIMIZER)
def test_what_is_no_optimizer_is_refused_in_one_line(wrap: Callable[[nn.Module], Any]) -> None:
    net = _net()
    with pytest.raises(ValueError, match=r"^optimizer is a \w+.*; give a torch.optim.Optimizer, or several of them$"):
        NanGuard(net, wrap(net), dump_dir=None)


@pytest.mark.parametrize("model", [nn.Linear(2, 1), None, "model"], ids=repr)
@pytest.mark.parametrize("optimizer", [None, 5, [], Plain(object()), nn.Linear(2, 2)], ids=lambda o: type(o).__name__)
def test_a_guard_that_is_switched_off_takes_anything(model: Any, optimizer: Any) -> None:
    guard = NanGuard(model, optimizer, enabled=False, scaler=5, replay=7, group="x", timeout_s=-1)  # type: ignore[arg-type]
    assert list(guard.steps([1, 2])) == [1, 2]
    guard.close()


def test_a_guard_that_is_switched_off_counts_the_steps_of_what_is_wrapped() -> None:
    net = _net()
    optimizer = Plain(_sgd(net))
    assert _trained(net, optimizer, optimizer.step, enabled=False) == (4, None)
