"""What the trace sees of a step: what operators produce, constants, lines, modules, rows and the way of a value."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_nanguard.diagnosis.trace.events import describe
from ddp_nanguard.diagnosis.trace.module_stack import ModuleStack
from ddp_nanguard.diagnosis.trace.trace import Trace
from ddp_nanguard.probes.slot_roles import SlotRole
from ddp_nanguard.probes.slots import SlotBuffer
from tests.diagnosing import Training, body, diagnosed, inline_code, marked, of_loss

THIS = sys.modules[__name__]


@contextlib.contextmanager
def traced(*named: tuple[str, nn.Module]) -> Iterator[Trace]:
    modules = ModuleStack(named)
    trace = Trace(modules)
    with modules, trace:
        modules.begin_micro_batch()
        yield trace


def categories(trace: Trace) -> list[tuple[str, str]]:
    return [(event.base, event.category) for event in trace.events]


# -- produced values, and what are none --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mask",
    [
        lambda x: x.masked_fill(x > 0, -math.inf),
        lambda x: torch.where(x > 0, -math.inf, x),
        lambda x: torch.where(x > 0, torch.full_like(x, -math.inf), x),
        lambda x: x + torch.triu(torch.full((3, 3), -math.inf), 1),
        lambda x: x.index_fill(0, torch.tensor([1]), -math.inf),
        lambda x: x.clone().fill_(-math.inf),
    ],
    ids=["masked_fill", "where number", "where tensor", "triu", "index_fill", "fill_"],
)
def test_a_mask_is_not_produced(mask: Callable[[Tensor], Tensor]) -> None:
    with traced() as trace:
        mask(torch.ones(3, 3))
    assert trace.events
    assert "produced" not in {event.category for event in trace.events}


def test_a_clean_step_leaves_no_event() -> None:
    x = torch.randn(3, 3, requires_grad=True)
    with traced() as trace:
        x.masked_fill(x > 0, -1e30).softmax(-1).square().sum().backward()  # type: ignore[no-untyped-call]
    assert not trace.events and trace.num_operators > 4


def test_a_value_produced_out_of_a_mask_begins_there() -> None:
    with traced() as trace:
        loss = torch.zeros(2, 3).masked_fill(torch.tensor(True), -math.inf).softmax(-1).sum()
    first_nonfinite_op = trace.first_nonfinite_op_of(trace.events[-1])
    assert first_nonfinite_op.base == "_softmax" and trace.memory.writer(loss) is trace.events[-1]


def test_a_value_produced_out_of_an_infinity_begins_with_the_infinity() -> None:
    with traced() as trace:
        large = torch.full((2,), 3e38) * 10
        (large - large).sum()
    assert trace.first_nonfinite_op_of(trace.events[-1]).base == "mul"
    assert categories(trace) == [("mul", "produced"), ("sub", "produced"), ("sum", "propagated")]


def test_uninitialised_memory_is_no_event() -> None:
    with traced() as trace:
        room = torch.empty(4)
        room.copy_(torch.ones(4))
        torch.empty_like(room)
    assert not trace.events


def test_in_place_operators_are_judged_by_what_they_were_given() -> None:
    x = torch.ones(4)
    with traced() as trace:
        x.div_(0.0)
        x.mul_(2.0)
    assert categories(trace) == [("div", "produced"), ("mul", "propagated")]
    assert trace.events[0].inputs[0].maximum == 1.0
    assert trace.events[1].roots == {trace.events[0].order}


def test_a_view_shares_the_history_of_its_base() -> None:
    with traced() as trace:
        base = torch.zeros(4, 4)
        base[1].log_()
        (base.t()[:, 1] * 2).sum()
    assert {trace.first_nonfinite_op_of(event).base for event in trace.events} == {"log"}


def test_memory_that_is_overwritten_has_a_new_history() -> None:
    with traced() as trace:
        x = torch.zeros(2).log()
        x.copy_(torch.tensor([1.0, 2.0]))
        y = x / 0
    assert trace.first_nonfinite_op_of(trace.events[-1]).base == "div" and trace.memory.writer(y) is trace.events[-1]


def test_a_number_that_the_host_has_read_is_followed() -> None:
    with traced() as trace:
        scale = (torch.zeros(1) / 0).item()
        torch.ones(3) * scale
    assert trace.first_nonfinite_op_of(trace.events[-1]).base == "div"


def test_our_own_probes_are_not_traced() -> None:
    slots, bad = SlotBuffer(4), torch.full((3,), math.nan)
    with traced() as trace:
        slots.reduce(SlotRole.EVIDENCE, bad, None)
    assert trace.num_operators == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_kinds_of_tensors(dtype: torch.dtype) -> None:
    with traced() as trace:
        torch.zeros(3, dtype=dtype) / torch.zeros(3, dtype=dtype)
    (event,) = trace.events
    assert (event.kind, event.category, event.num_hit) == ("nan", "produced", 3)


def test_a_complex_element_counts_once() -> None:
    inf, nan = math.inf, math.nan
    parts = [(nan, nan), (nan, inf), (inf, -inf), (0.0, -inf), (1.0, 2.0)]
    found = describe(torch.tensor([complex(*each) for each in parts]))
    assert (found.num_nan, found.num_inf, found.num_neg_inf, found.numel) == (2, 1, 1, 5)


def test_sparse_gradients() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    with traced(("table", table)) as trace:
        (table(torch.tensor([1, 3])) * math.inf).sum().backward()
    assert trace.events and trace.events[-1].phase == "backward"


def test_several_outputs_and_empty_ones() -> None:
    with traced() as trace:
        torch.zeros(0, 3).log()
        torch.var_mean(torch.tensor([3e38, -3e38]), 0)
    assert [event.operator for event in trace.events] == ["aten.var_mean.correction"]


# -- lines, modules, phases --------------------------------------------------------------------------------------------


class Inner(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values + (
            values.abs()
            * 0
        ).sqrt()  # fmt: skip  # <statement over lines>


class Outer(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or Inner()

    def forward(self, values: Tensor, reentrant: bool | None = None) -> Tensor:
        if reentrant is None:
            return self.inner(values)  # type: ignore[no-any-return]
        return checkpoint(self.inner, values, use_reentrant=reentrant)  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_backward_is_mapped_to_the_forward_line(reentrant: bool | None) -> None:
    outer = Outer()
    values = torch.ones(4, 2, requires_grad=True)
    with traced(*outer.named_modules()) as trace:
        outer(values * 1, reentrant).sum().backward()
    first_nonfinite_op = trace.first_nonfinite_op_of(trace.events[-1])
    assert (first_nonfinite_op.phase, first_nonfinite_op.node, first_nonfinite_op.layer, first_nonfinite_op.call) == (
        "backward",
        "SqrtBackward0",
        "inner",
        1,
    )
    assert first_nonfinite_op.line is not None and first_nonfinite_op.line.function == "Inner.forward"
    assert first_nonfinite_op.line.expression == "( values.abs() * 0 ).sqrt()"


class Forgetful(nn.Module):
    """Divides by zero only when it runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, values: Tensor) -> Tensor:
        self.runs += 1
        return (values / (0.0 if self.runs > 1 else 1.0)).square()  # <recomputation>


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_value_that_is_bad_only_in_the_recomputation(reentrant: bool) -> None:
    model = Outer(Forgetful())
    values = torch.ones(4, 2, requires_grad=True)
    with traced(*model.named_modules()) as trace:
        model(values * 1, reentrant).sum().backward()
    first_nonfinite_op = trace.first_nonfinite_op_of(trace.events[-1])
    assert first_nonfinite_op.phase == "recomputation" and first_nonfinite_op.line is not None
    assert (first_nonfinite_op.layer, first_nonfinite_op.call, first_nonfinite_op.line.number) == (
        "inner",
        1,
        marked(THIS, "recomputation"),
    )


def test_hit_rows_and_the_way_to_the_loss(tmp_path: Path) -> None:
    def spoiled(h: Tensor) -> Tensor:
        keep = torch.ones(6, 1)
        keep[4] = 0
        return h / keep

    found = diagnosed(inline_code(spoiled), tmp_path).traced
    assert found is not None and found.first_nonfinite_op is not None
    assert (found.first_nonfinite_op.rows, found.first_nonfinite_op.num_rows, found.first_nonfinite_op.num_hit) == (
        (4,),
        1,
        4,
    )
    assert found.path[0] is found.first_nonfinite_op and found.target == "loss is NaN"
    assert [event.base for event in found.path] == ["div", "addmm", "pow", "mean"]


def test_an_earlier_fault_that_does_not_reach_the_loss_is_not_the_first(tmp_path: Path) -> None:
    def wasteful(h: Tensor) -> Tensor:
        (h.detach() * 0).log()  # not used
        return h / (h.detach() * 0)  # <the one that matters>

    found = diagnosed(inline_code(wasteful), tmp_path).traced
    assert found is not None and found.first_nonfinite_op is not None and found.first_nonfinite_op.line is not None
    assert found.first_nonfinite_op.line.number == marked(THIS, "the one that matters")


def test_numpy_batches_are_named(tmp_path: Path) -> None:
    def step(model: Any, items: Any) -> Tensor:
        return model(torch.from_numpy(items["x"])).mean()  # type: ignore[no-any-return]

    values = np.ones((6, 4), dtype=np.float32)
    values[2, 3] = np.nan
    found = diagnosed(Training(body(torch.tanh), step, [{"x": values}]), tmp_path)
    assert found.reason.sentence == 'batch["x"] holds NaN, sample 2'


def test_a_mask_of_the_batch_is_not_blamed(tmp_path: Path) -> None:
    mask = torch.zeros(6, 3)
    mask[1] = -math.inf
    found = diagnosed(of_loss(lambda h, items: (h + items["m"]).softmax(-1).mean(), m=mask), tmp_path)
    assert found.reason.kind == "masked row"
    assert found.reason.evidence[0] == "rows without any score: 1"


# -- what cannot be followed -------------------------------------------------------------------------------------------


def _refuse(*args: Any) -> None:
    raise NotImplementedError("a kind of tensor that nobody can look into")


@pytest.mark.parametrize("is_lenient", [True, False])
def test_a_failure_to_follow_ends_the_step_or_the_following(is_lenient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second look peers wait for a rank that traces: there the step goes on without the trace."""
    monkeypatch.setattr(Trace, "_look", _refuse)
    with traced() as trace:
        trace.is_lenient = is_lenient
        if not is_lenient:
            with pytest.raises(NotImplementedError):
                torch.ones(2) / 0
            return
        assert (torch.ones(2) / 0).tolist() == [math.inf] * 2
        num_operators = trace.num_operators
        torch.ones(2).exp()
    assert trace.failure == "NotImplementedError: a kind of tensor that nobody can look into"
    assert trace.num_operators == num_operators, "it goes on following"
