"""Calls of the model, as a window records them: arguments, gradients of outputs, and what was changed since."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from ddp_nanguard.capture import model_calls
from ddp_nanguard.capture.model_calls import BackwardPass, ModelCall, ModelCalls, screen_of


@pytest.fixture
def calls() -> ModelCalls:
    return ModelCalls(torch.device("cpu"))


def _called(calls: ModelCalls, function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[ModelCall, Any]:
    call = calls.begin(function, args, kwargs, 0, is_step=False)
    return call, calls.end(function(*args, **kwargs))


def test_each_output_gets_its_own_gradient_and_no_more(calls: ModelCalls) -> None:
    """Of ``(logits, loss)`` the loss alone is differentiated: the logits get nothing, though it is made of them."""
    lin = nn.Linear(2, 2)

    def model(values: Tensor) -> tuple[Tensor, Tensor]:
        logits = lin(values)
        return logits, logits.square().mean()

    call, (_, loss) = _called(calls, model, torch.ones(1, 2))
    (3 * loss).backward()
    assert call.num_outputs == 2
    assert list(call.gradients.values()) == [{1: torch.tensor(3.0)}]
    assert [type(event) for event in calls.events] == [ModelCall, BackwardPass]


def test_gradients_of_two_passes_are_kept_apart_and_those_of_one_are_added(calls: ModelCalls) -> None:
    call, output = _called(calls, lambda values: values * 1.0, torch.ones(2, requires_grad=True))
    (output + 2 * output).sum().backward(retain_graph=True)
    output.sum().backward()
    first, second = call.gradients.values()
    assert torch.equal(first[0], torch.full((2,), 3.0))
    assert torch.equal(second[0], torch.ones(2))


def test_the_caller_gets_the_same_values_in_the_same_containers(calls: ModelCalls) -> None:
    values = torch.ones(2, requires_grad=True)
    integers = torch.arange(3)
    _, output = _called(calls, lambda: {"a": (values * 2, integers), "b": None, "c": values})
    assert torch.equal(output["a"][0], torch.full((2,), 2.0))
    assert output["a"][1] is integers and output["b"] is None
    assert output["c"] is values, "a leaf: on an alias of it the gradient would not be the loop's"


def test_the_caller_may_change_an_output_in_place(calls: ModelCalls) -> None:
    """The gradient is that of the model's own output."""
    call, output = _called(calls, lambda values: values * 1.0, torch.ones(2, requires_grad=True))
    output.mul_(3.0)
    output[0] = 0.0
    output.sum().backward()
    assert [gradients[0].tolist() for gradients in call.gradients.values()] == [[0.0, 3.0]]


def test_an_output_without_a_gradient_has_none(calls: ModelCalls) -> None:
    """Not zeros: in the second look it would get those."""

    class First(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
            return first.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return gradient, None

    values = torch.ones(1, requires_grad=True)
    call, (one, other) = _called(calls, lambda: (values * 1.0, values * 2.0))
    First.apply(one, other).sum().backward()
    assert [list(gradients) for gradients in call.gradients.values()] == [[0]]


def test_a_transform_of_torch_func_runs_and_is_a_problem(calls: ModelCalls) -> None:
    def loss(values: Tensor) -> Tensor:
        calls.begin(len, (), {}, 0, is_step=False)
        return calls.end((values * values).sum())  # type: ignore[no-any-return]

    assert torch.func.grad(loss)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert calls.calls[0].problem == "the model was called within a transform of torch.func"


def test_a_call_within_a_call_is_part_of_it(calls: ModelCalls) -> None:
    def model(values: Tensor, depth: int = 0) -> Tensor:
        calls.begin(model, (values,), {}, 0, is_step=False)
        return calls.end(model(values, 1) if depth == 0 else values * 1.0)  # type: ignore[no-any-return]

    model(torch.ones(1, requires_grad=True))
    assert len(calls.calls) == 1 and calls.calls[0].has_returned


def test_a_call_that_raised_has_not_returned_and_the_next_one_has(calls: ModelCalls) -> None:
    calls.begin(len, (), {}, 0, is_step=True)
    calls.abandon()
    call, _ = _called(calls, lambda: 1)
    assert [each.has_returned for each in calls.calls] == [False, True]
    assert calls.calls[1] is call and not calls.is_in_step


def test_a_window_that_is_closed_while_the_model_runs_takes_nothing(calls: ModelCalls) -> None:
    call = calls.begin(len, (), {}, 0, is_step=False)
    calls.clear()
    output = torch.ones(1, requires_grad=True) * 2
    assert calls.end(output) is output
    assert not calls.events and call.args == ()


def test_a_large_gradient_is_a_problem_and_takes_no_memory(calls: ModelCalls, monkeypatch: Any) -> None:
    monkeypatch.setattr(model_calls, "MAX_GRADIENT_BYTES", 100)
    calls.clear()
    call, output = _called(calls, lambda values: values * 1.0, torch.ones(26, requires_grad=True))
    output.sum().backward()
    assert call.problem is not None and "too large to be kept" in call.problem
    assert call.gradients == {}


class _Strange(dict[str, Tensor]):
    """A mapping that cannot be copied."""

    def copy(self) -> dict[str, Tensor]:
        raise TypeError("one of a kind")


def test_an_output_that_cannot_be_followed_is_handed_on_with_a_problem(calls: ModelCalls) -> None:
    strange = _Strange(a=torch.ones(1, requires_grad=True) * 2)
    assert isinstance(strange, Mapping)
    call, output = _called(calls, lambda: strange)
    assert output is strange
    assert call.problem == "the model returns a _Strange, which cannot be followed (one of a kind)"


def test_nothing_holds_an_output_or_its_graph(calls: ModelCalls) -> None:
    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: Tensor, held: Any) -> Tensor:
            ctx.held = held
            return values.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return gradient, None

    class Held:
        pass

    held = Held()
    gone = weakref.ref(held)
    gc.disable()
    try:
        calls.begin(len, (), {}, 0, is_step=False)
        output = calls.end(Node.apply(torch.ones(1, requires_grad=True), held))
        del held
        assert gone() is not None
        del output
        assert gone() is None
    finally:
        gc.enable()


def test_a_forward_awaits_its_backward_as_long_as_somebody_holds_it(calls: ModelCalls) -> None:
    call, output = _called(calls, lambda values: values * 1.0, torch.ones(1, requires_grad=True))
    assert call.awaits_backward
    del output
    assert not call.awaits_backward
    call, output = _called(calls, lambda values: values * 1.0, torch.ones(1, requires_grad=True))
    output.sum().backward()
    assert not call.awaits_backward


def _with_numpy(values: Tensor) -> None:
    values.numpy()[0] = 5.0


@pytest.mark.parametrize(
    ("change", "is_seen"),
    [(lambda t: t.add_(1), True), (lambda t: t.data.add_(1), True), (_with_numpy, True), (lambda t: t.sum(), False)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_changed_argument_has_a_path(
    calls: ModelCalls, change: Callable[[Tensor], object], is_seen: bool, dtype: torch.dtype
) -> None:
    if dtype is torch.bfloat16 and change is _with_numpy:
        return
    values = torch.ones(4).to(dtype)
    call, _ = _called(calls, lambda batch: None, {"a": [torch.zeros(1), values]})
    change(values)
    assert call.changed_argument() == ('[0]["a"][1]' if is_seen else None)


def test_a_large_argument_is_told_by_its_version_alone(calls: ModelCalls) -> None:
    values = torch.ones(model_calls.MAX_FINGERPRINT_NUMEL + 1)
    call, _ = _called(calls, lambda values: None, values)
    values.data.add_(1)
    assert call.changed_argument() is None, "its sum would cost a pass over it in every step"
    values.add_(1)
    assert call.changed_argument() == "[0]"


def test_an_argument_that_is_nan_has_not_changed(calls: ModelCalls) -> None:
    call, _ = _called(calls, lambda values: None, torch.full((3,), numpy.nan))
    assert call.changed_argument() is None


def test_a_container_that_the_model_empties_is_kept(calls: ModelCalls) -> None:
    batch = {"a": torch.ones(1)}
    call, _ = _called(calls, lambda batch: batch.pop("a"), batch)
    assert batch == {} and list(call.args[0]) == ["a"]


@torch.inference_mode()
def _inference() -> Tensor:
    return torch.ones(3) * 2


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(0),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3, dtype=torch.bool),
        torch.ones(3, 3).t()[::2],
        torch.ones(3).to_sparse(),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.ones(3, device="meta"),
        nn.Parameter(torch.ones(3)),
        _inference(),
    ],
)
def test_any_tensor_can_be_screened(tensor: Tensor) -> None:
    """Or has no screen, which tells nothing."""
    screen = screen_of(tensor)
    assert screen is None or (screen.shape == () and not screen.requires_grad)


@pytest.mark.parametrize("bad", [numpy.nan, numpy.inf, -numpy.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_a_screen_is_not_finite_where_an_element_is_not(bad: float, dtype: torch.dtype) -> None:
    tensor = torch.ones(1000).to(dtype)
    assert screen_of(tensor).isfinite()  # type: ignore[union-attr]
    tensor[500] = bad
    assert not screen_of(tensor).isfinite()  # type: ignore[union-attr]


def test_weights_that_were_written_since_the_first_call_are_met() -> None:
    weights = [torch.ones(1) for _ in range(1000)]
    calls = ModelCalls(torch.device("cpu"), weights)
    weights[0].add_(1)
    calls.begin(len, (), {}, 0, is_step=False)
    calls.begin(len, (), {}, 0, is_step=False)
    assert not calls.weights_have_changed()
    for weight in weights:
        weight.mul_(2)
    assert calls.weights_have_changed()
