"""What a detector for one process offers, and what it gets wrong, without `torch.distributed` and on plain modules."""

from __future__ import annotations

import gc
import io
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_nanguard import FaultReport, NanGuard, NonFiniteError

BAD_STEP = 2


class _Root(nn.Module):
    """``minus`` takes roots of negative numbers in the bad step: a NaN, and none in any other step."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.body = body
        self.last = nn.Linear(4, 1)

    def forward(self, values: Tensor) -> Tensor:
        output = self.body(self.first(values).abs() * values.sign())
        return self.last(output["hidden"] if isinstance(output, dict) else getattr(output, "hidden", output))  # type: ignore[no-any-return]


class Roots(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return (values + 1e-6).sqrt()


class InDict(nn.Module):
    def forward(self, values: Tensor) -> dict[str, Tensor]:
        return {"hidden": (values + 1e-6).sqrt()}


@dataclass
class Output:
    hidden: Tensor


class InDataclass(nn.Module):
    def forward(self, values: Tensor) -> Output:
        return Output((values + 1e-6).sqrt())


class Between(nn.Module):
    """The root is taken by code between two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Identity(), nn.Identity()

    def forward(self, values: Tensor) -> Tensor:
        return self.after((self.before(values) + 1e-6).sqrt())  # type: ignore[no-any-return]  # modules return Any


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, values: Tensor) -> Tensor:
        return self.relu((values + 1e-6).sqrt() * 1)  # type: ignore[no-any-return]  # modules return Any


class _BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]  # torch's takes any number
        (values,) = ctx.saved_tensors
        return gradient * (values + 1e-6).sqrt()


class OwnFunction(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return _BadBackward.apply(values)  # type: ignore[no-any-return]  # torch's has no types


def _train(body: nn.Module, steps: int = 4, **options: Any) -> tuple[NonFiniteError | None, nn.Module, dict[str, Any]]:
    """The error, the model, and its weights from before the bad step."""
    torch.manual_seed(0)
    model = _Root(body)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before: dict[str, Any] = {}
    with NanGuard(model, optimizer, **{"dump_dir": None, "layers": "every", **options}) as guard:
        for step in range(steps):
            before = {name: each.clone() for name, each in model.state_dict().items()} if step == BAD_STEP else before
            try:
                loss = guard(torch.ones(2, 4) * (-1.0 if step >= BAD_STEP else 1.0)).sum()
                guard.watch(loss=loss)
                loss.backward()
                optimizer.step()
            except NonFiniteError as error:
                return error, model, before
            optimizer.zero_grad()
    return None, model, before


def _report(body: nn.Module, **options: Any) -> FaultReport:
    error, _, _ = _train(body, **options)
    assert error is not None
    return error.report


@pytest.mark.parametrize("body", [Roots, InDict, InDataclass], ids=["tensor", "dict", "dataclass"])
@pytest.mark.parametrize("look_again", [False, True], ids=["seen", "looked at again"])
def test_the_layer_is_named_whatever_it_returns_its_output_in(body: Callable[[], nn.Module], look_again: bool) -> None:
    report = _report(body(), look_again=look_again)
    assert report.origin is not None
    assert (report.step, str(report.origin.phase), report.origin.layer) == (BAD_STEP, "forward", "body")
    assert (report.origin.slot, report.origin.kind, report.origin.input_kind) == ("output", "nan", None)


def test_code_between_two_layers_is_not_put_down_to_the_next_layer() -> None:
    origin = _report(Between(), look_again=False).origin
    assert origin is not None
    assert origin.inline_code is not None
    assert (origin.inline_code.layer, origin.inline_code.after, origin.inline_code.before) == (
        "body",
        "body.before",
        "body.after",
    )


def test_one_nan_is_one_event_though_containers_hand_it_on(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Any] = []
    nested = nn.Sequential(nn.Sequential(nn.Sequential(Roots())))
    with caplog.at_level(logging.INFO, "ddp_nanguard"):
        report = _report(nested, look_again=False, on_event=told.append)
    assert report.origin is not None
    assert report.origin.layer == "body.0.0.0"
    assert [event["origin"]["layer"] for event in told] == ["body.0.0.0"]
    assert caplog.messages == [
        "non-finite: rank 0 · step 2 · micro-batch 0 · forward · body.0.0.0 (call 1): finite in, NaN out"
    ]


def test_the_weights_are_those_from_before_the_bad_step() -> None:
    error, model, before = _train(Roots(), look_again=False)
    assert error is not None
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_a_module_that_works_in_place_trains_and_is_seen() -> None:
    assert _train(InPlace(), steps=BAD_STEP)[0] is None
    origin = _report(InPlace(), look_again=False).origin
    assert origin is not None
    assert (origin.layer, origin.inline_code is not None) == ("body", True)


def test_a_backward_of_the_users_own_is_named_with_its_line() -> None:
    report = _report(OwnFunction())
    assert report.origin is not None
    assert str(report.origin.phase) == "backward"
    assert report.second_look is not None
    assert report.second_look.operator is not None
    assert report.second_look.operator.name == "aten.sqrt.default"


def test_types_that_are_left_out_carry_no_hook_and_their_fault_is_seen_all_the_same() -> None:
    report = _report(Roots(), skip_types=("Roots",), look_again=False)
    assert report.origin is not None
    assert report.origin.inline_code is not None, "it is told as code of the layer around it"
    model = _Root(Roots())
    guard = NanGuard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), dump_dir=None, layers="every", skip_types=("Roots",)
    )
    guard(torch.ones(2, 4)).sum().backward()
    assert (len(model.body._forward_hooks), len(model.first._forward_hooks)) == (0, 1)
    guard.close()


def test_it_comes_off_and_goes_on_again() -> None:
    model = _Root(Roots())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        guard = NanGuard(model, optimizer, dump_dir=None, layers="every")
        guard(torch.ones(2, 4)).sum().backward()
        assert model.body._forward_hooks
        optimizer.step()
        guard.close()
        hooks = [[*each._forward_hooks, *each._forward_pre_hooks] for each in model.modules()]
        assert not any(hooks)
        assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_steps_may_run_on_another_thread_than_the_guard_was_made_on() -> None:
    torch.manual_seed(0)
    model = _Root(Roots())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=None, layers="every", look_again=False)
    errors: list[NonFiniteError] = []

    def train() -> None:
        try:
            for step in range(4):
                guard(torch.ones(2, 4) * (-1.0 if step == BAD_STEP else 1.0)).sum().backward()
                optimizer.step()
        except NonFiniteError as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    guard.close()
    (error,) = errors
    assert error.report.origin is not None
    assert (error.report.step, error.report.origin.layer) == (BAD_STEP, "body")


def test_nothing_grows_with_the_number_of_bad_steps(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = _Root(Roots())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    guard = NanGuard(
        model,
        optimizer,
        dump_dir=None,
        layers="every",
        on_loss="warn",
        history=4,
        look_again=False,
        parameter_norm_warn=1e-3,
    )
    counts = []
    for step in range(61):
        loss = guard(torch.ones(2, 4)).sum()
        guard.watch(loss=float("nan"))  # of a term that nobody trains
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (20, 60):
            caplog.clear()
            gc.collect()
            counts.append(len(gc.get_objects()))
    guard.close()
    assert counts[1] - counts[0] < 20


def test_a_whole_model_that_was_saved_under_guard_is_loaded_by_weights_only() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    NanGuard(model, torch.optim.SGD(model.parameters(), lr=0.1), layers="every")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear]):
        loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded[0].weight, model[0].weight)
    assert loaded(torch.full((1, 2), torch.nan)).isnan().all()  # nothing of the guard is awake in it
