"""Shadow parameters: a model that is run again leaves nothing behind, whatever it does and however it ends."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_nanguard.wrappers import wrapper_of
from ddp_nanguard.wrappers.aside import HeldOutsideError, attributes_kept, gradients_aside, has_hooks_of_the_job
from tests.ranks.small import state_of


class Odd(nn.Module):
    """Tied weights, one module under two names, a frozen parameter, BatchNorm, an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.tied = nn.Linear(3, 3), nn.Linear(3, 3)
        self.tied.weight = self.lin.weight
        self.again = self.lin
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.norm = nn.BatchNorm1d(3)
        self.rnn = nn.LSTM(3, 3)
        self.lin.weight.__dict__["tag"] = "of the job"

    def forward(self, values: Tensor) -> Tensor:
        assert self.lin.weight is self.tied.weight is self.again.weight
        assert self.lin.weight.__dict__["tag"] == "of the job"
        values = self.again(self.tied(self.lin(values))) * self.frozen
        return self.rnn(self.norm(values).unsqueeze(0))[0]  # type: ignore[no-any-return]


def _places(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Which parameters and buffers the modules hold, and where their memory is."""
    found = [
        (f"{path}.{name}", tensor)
        for path, module in model.named_modules(remove_duplicate=False)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    ]
    return {name: (id(tensor), tensor.data_ptr()) for name, tensor in found}


def _aside(model: nn.Module, saved: dict[str, Tensor] | None = None) -> contextlib.AbstractContextManager[None]:
    return wrapper_of(model).aside(saved or {}, keep_gradients=True)


def test_a_forward_and_a_backward_leave_no_trace() -> None:
    model = Odd()
    model(torch.randn(4, 3)).sum().backward()
    places, state = _places(model), state_of(model)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    versions = [parameter._version for parameter in model.parameters()]
    with _aside(model):
        for _ in range(2):
            model(torch.randn(4, 3)).sum().backward()
        assert state_of(model) != state, "its own buffers have moved"
        shadows = dict(model.named_parameters())
        assert all(shadows[name].grad is not None for name in ("lin.weight", "rnn.weight_ih_l0"))
        assert not shadows["frozen"].requires_grad
    assert (_places(model), state_of(model)) == (places, state)
    assert all(parameter.grad is gradients[name] for name, parameter in model.named_parameters())
    assert [parameter._version for parameter in model.parameters()] == versions
    assert all(weight is getattr(model.rnn, name) for weight, name in zip(
        model.rnn._flat_weights, model.rnn._flat_weights_names, strict=True
    ))  # fmt: skip


def test_the_shadow_uses_the_memory_of_the_weights_and_not_that_of_the_buffers() -> None:
    model = Odd()
    places = _places(model)
    with _aside(model):
        now = _places(model)
    assert now["lin.weight"][1] == places["lin.weight"][1]
    assert now["norm.running_mean"][1] != places["norm.running_mean"][1]


def test_buffers_begin_as_they_were_saved() -> None:
    model = Odd()
    with _aside(model, {"norm.running_mean": torch.full((3,), 7.0)}):
        assert model.norm.running_mean.tolist() == [7.0] * 3  # type: ignore[union-attr]
    assert model.norm.running_mean.tolist() == [0.0] * 3  # type: ignore[union-attr]


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_a_step_that_raises_leaves_no_trace_either(stage: str) -> None:
    model = Odd()
    places, state = _places(model), state_of(model)

    def fall() -> None:
        output = model.__dict__["output"] = model(torch.randn(4, 3))
        if stage == "backward":
            output.register_hook(lambda gradient: 1 / 0)
            output.sum().backward()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), _aside(model):
        fall()
    assert (_places(model), state_of(model)) == (places, state)
    assert not hasattr(model, "output")
    assert all(parameter.grad is None and not parameter._backward_hooks for parameter in model.parameters())


def test_a_live_parameter_takes_no_gradient() -> None:
    """Its own hooks do not run either: the refusal comes first where they were registered before it."""
    model = nn.Linear(2, 2)
    live = model.weight
    with pytest.raises(HeldOutsideError, match="parameter weight is used outside"), _aside(model):
        (model(torch.ones(1, 2)).sum() + live.sum()).backward()
    assert live.grad is None


def test_attributes_are_put_back_and_new_ones_are_gone() -> None:
    model = Odd()
    model.__dict__["count"] = 1
    with attributes_kept(model):
        model.__dict__["count"] = 2
        model.norm.__dict__["new"] = torch.ones(1)
        model.register_buffer("late", torch.ones(1))
        model.lin = nn.Linear(1, 1)
        model.eval()
        del model.norm
    assert model.__dict__["count"] == 1
    assert not hasattr(model.norm, "new") and not hasattr(model, "late")
    assert model.lin is model.again
    assert all(module.training for module in model.modules())


def test_what_a_wrapper_manages_is_left_to_it() -> None:
    model = nn.Linear(2, 2)
    view = torch.ones(2, 2)
    with attributes_kept(model, {model: {"weight"}}):
        model.__dict__["weight"] = view
        model.__dict__["other"] = view
    assert model.__dict__["weight"] is view and "other" not in model.__dict__


@pytest.mark.parametrize("keep", [True, False])
def test_sharded_gradients_and_hooks_are_set_aside(keep: bool) -> None:
    parameter = nn.Parameter(torch.ones(2))
    calls: list[Any] = []
    parameter.register_post_accumulate_grad_hook(calls.append)
    gradient = parameter.grad = torch.full((2,), 3.0)
    with gradients_aside([parameter], keep):
        assert parameter.grad is None
        (2 * parameter).sum().backward()
        assert calls == []
    assert parameter.grad is (gradient if keep else None)
    (2 * parameter).sum().backward()
    assert len(calls) == 1


def test_hooks_of_the_job_are_told_from_ours() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert not has_hooks_of_the_job(parameter)
    model = nn.Linear(2, 2)
    watch = wrapper_of(model).watch_local_gradients(lambda name, gradient: None)
    assert model.weight._backward_hooks or model.weight._post_accumulate_grad_hooks
    assert not has_hooks_of_the_job(model.weight)
    watch.remove()
    model.weight.register_hook(lambda gradient: gradient * 2)
    assert has_hooks_of_the_job(model.weight)


class Keeping(nn.Module):
    """Changes in place what it keeps in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.seen = torch.zeros(2), deque([1], maxlen=2)
        self.states: dict[str, Any] = {"preds": [torch.ones(1)], "names": {"one"}}
        self.register_buffer("count", torch.zeros(1))
        self.alias = self.count

    def forward(self, value: Tensor) -> None:
        self.total += value
        self.seen.append(2)
        self.states["preds"].append(value)
        self.states["preds"][0].mul_(3)
        self.states["names"].clear()
        self.states["more"] = ()
        self.count += 1


def test_what_a_call_changes_in_place_holds_again_what_it_held() -> None:
    model = Keeping()
    total, preds = model.total, model.states["preds"]
    with attributes_kept(model):
        model(torch.full((2,), float("nan")))
    assert model.total is total and total.tolist() == [0, 0]
    assert list(model.seen) == [1] and model.states == {"preds": [torch.ones(1)], "names": {"one"}}
    assert model.states["preds"] is preds
    assert model.alias is model.count and model.count == 1  # buffers are put back by those that run the step
