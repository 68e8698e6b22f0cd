"""Backward passes through backward passes, and through functions of the user's own: which code made the value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.diagnosis.trace.module_stack import ModuleStack
from ddp_nanguard.diagnosis.trace.trace import Trace
from ddp_nanguard.diagnosis.trace.traced_step import Traced
from ddp_nanguard.diagnosis.trace_text import trace_text


def _penalised(critic: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    given = batch.requires_grad_()
    (gradient,) = torch.autograd.grad(critic(given).sum(), given, create_graph=True)
    size = gradient.pow(2).sum(1).sqrt()
    return {"score": critic(batch.detach()).mean(), "penalty": (size - 1).pow(2).mean()}


def test_a_penalty_is_named_where_a_layer_only_shows_its_gradient(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.01)
    guard = NanGuard(critic, optimizer, dump_dir=None)
    batch = torch.randn(4, 4)
    with torch.no_grad():
        critic[0].bias.fill_(-1e3)  # no unit is active: the gradient of the input is 0
        batch /= 10
    sum(guard.run(_penalised, batch).values()).backward()  # type: ignore[union-attr, no-untyped-call]
    with pytest.raises(NonFiniteError) as raised:
        optimizer.step()
    report = raised.value.report
    first, *rows = str(raised.value).splitlines()
    place = "rank 0, step 0, micro-batch 0, backward: code of the training step (in the backward)"
    assert first == f"{place}: a -Inf gradient that no watched layer made"
    assert caplog.messages[0].startswith("non-finite, first sign, not yet the origin: rank 0 · step 0 · ")
    assert (
        caplog.messages[-1].startswith("non-finite: rank 0 · step 0 · ") and "second look: same" in caplog.messages[-1]
    )
    assert report.origin is not None and report.origin.layer is None and report.second_look is not None
    assert report.second_look.operator is not None and "_penalised" in str(report.second_look.operator.line)
    assert any(row.startswith("  evidence: output of aten.div.Tensor: (4,)") for row in rows), rows
    guard.close()


class _Divides(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values.norm())
        return values * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (size,) = ctx.saved_tensors
        return gradient / size


def test_the_backward_of_the_users_function_is_of_no_operator_of_its_forward() -> None:
    modules = ModuleStack(())
    with modules, Trace(modules) as trace:
        _Divides.apply(torch.zeros(3, requires_grad=True)).sum().backward()
    event = trace.first_nonfinite_op_of(trace.events[-1])
    text = trace_text(Traced("a gradient", event, [event], None, None, None, trace.num_operators))
    assert "  operator  aten.div.Tensor (_DividesBackward) made it\n" in text
    assert "in _Divides.backward (its backward)" in text
