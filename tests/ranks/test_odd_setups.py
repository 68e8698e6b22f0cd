"""Odd modules, losses and optimizers train to the same bits with and without the guard."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.ranks import run_ranks
from tests.ranks.small import guard_of, state_of
from tests.training import digest, random_digest, seed


class _Block(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, values: Tensor) -> Tensor:
        return self.last(checkpoint(self.inner, self.first(values), use_reentrant=self.reentrant))


class _Transformed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mapped, self.differentiated = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        own = dict(self.differentiated.named_parameters())
        slope = torch.func.grad(lambda v: torch.func.functional_call(self.differentiated, own, (v,)).sum())(values)
        jacobian = torch.vmap(torch.func.jacrev(self.differentiated))(values).sum()
        return torch.vmap(self.mapped)(values) + slope + jacobian


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, values: Tensor) -> Tensor:
        return (values.to(torch.complex64) @ self.weight).abs()


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.linear = nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        return self.linear(self.table((values.abs() * 3).long().clamp(0, 9)).sum(1))


class _Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.silent = nn.Identity()

    def forward(self, values: Tensor) -> dict[str, Any]:
        return {"out": self.linear(values), "none": None, "text": "x", "set": {1}, "nested": [(self.silent(values),)]}


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 4))


def _with_user_hooks() -> nn.Module:
    net = _net()
    net[0].register_forward_hook(lambda module, args, output: output * 1.5)
    net[0].register_full_backward_hook(lambda module, inputs, outputs: None)
    net[4].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    net[4].weight.register_hook(lambda gradient: gradient * 2)
    net[4].weight.register_post_accumulate_grad_hook(_halve)
    return net


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def _with_parametrizations() -> nn.Module:
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 8))
    return nn.Sequential(normed, nn.Tanh(), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)))


def _loss_of(output: Any) -> Tensor:
    return (output["out"] if isinstance(output, dict) else output).pow(2).mean()


def _usual(call: Any, model: nn.Module) -> Tensor:
    loss = _loss_of(call(torch.randn(4, 4)))
    loss.backward()
    return loss


def _twice(call: Any, model: nn.Module) -> Tensor:
    loss = _loss_of(call(torch.randn(4, 4)))
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def _penalty(call: Any, model: nn.Module) -> Tensor:
    values = torch.randn(4, 4, requires_grad=True)
    output = call(values).sum()
    (slope,) = torch.autograd.grad(output, values, create_graph=True)
    loss = output.pow(2) + slope.pow(2).sum()
    loss.backward()
    return loss


def _evaluating(call: Any, model: nn.Module) -> Tensor:
    model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            call(torch.randn(4, 4))
    model.train()
    return _usual(call, model)


def _anomaly(call: Any, model: nn.Module) -> Tensor:
    with torch.autograd.set_detect_anomaly(True), torch.autograd.graph.save_on_cpu():
        return _usual(call, model)


def _raising_first(call: Any, model: nn.Module) -> Tensor:
    with contextlib.suppress(RuntimeError):
        call(torch.randn(4, 4)).view(3)
    return _usual(call, model)


def _scripted(call: Any, model: nn.Module) -> Tensor:
    with torch.jit.optimized_execution(False):  # else the second run of a script has other bits than the first
        return _usual(call, model)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def _plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _zero(parameters: Any) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.Adam, lr=0.01)


def _tensor_lr(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.01))


SETUPS: dict[str, tuple[Callable[[], nn.Module], Any, Any, dict[str, Any] | None]] = {
    "static graph": (_net, _usual, _adam, {"static_graph": True}),
    "checkpoint, static graph": (lambda: _Block(False), _usual, _adam, {"static_graph": True}),
    "reentrant checkpoint, static graph": (lambda: _Block(True), _usual, _adam, {"static_graph": True}),
    "reentrant checkpoint": (lambda: _Block(True), _usual, _adam, {}),
    "bucket view": (_net, _usual, _adam, {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}),
    "torch.func": (_Transformed, _usual, _adam, {"find_unused_parameters": True}),
    "complex": (_Complex, _usual, _plain_sgd, {}),
    "sparse gradient": (_Sparse, _usual, _plain_sgd, {}),
    "containers": (_Containers, _usual, _adam, {}),
    "hooks of the user": (_with_user_hooks, _usual, _adam, {}),
    "parametrizations": (_with_parametrizations, _usual, _adam, {}),
    "retain_graph": (lambda: nn.Linear(4, 4), _twice, _adam, {}),
    "gradient penalty": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), _penalty, _adam, {}),
    "gradient penalty, plain": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), _penalty, _adam, None),
    "evaluation between": (_net, _evaluating, _plain_sgd, {}),
    "anomaly mode": (_net, _anomaly, _adam, {}),
    "a loss that raised": (_net, _raising_first, _adam, None),
    "sharded optimizer": (_net, _usual, _zero, {}),
    "tensor lr": (_net, _usual, _tensor_lr, {}),
    "scripted part": (lambda: nn.Sequential(torch.jit.script(nn.Linear(4, 4)), _net()), _scripted, _adam, {}),
}


def _both_ways(rank: int, world_size: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # torch's own, about the setups
    found: dict[str, Any] = {}
    for name in SETUPS:
        try:
            found[name] = [_run_setup(name, rank, guarded) for guarded in (False, True)]
        except Exception as error:
            found[name] = [f"{type(error).__name__}: {error}", None]
    return found


def _run_setup(name: str, rank: int, guarded: bool) -> Any:
    build, backward, optimize, ddp_options = SETUPS[name]
    torch.manual_seed(0)
    model = build() if ddp_options is None else DistributedDataParallel(build(), **ddp_options)
    optimizer = optimize(model.parameters())
    guard = guard_of(model, optimizer) if guarded else None
    seed(rank)
    losses = []
    for _ in range(3):
        losses.append(digest(backward(guard or model, model)))
        optimizer.step()
        optimizer.zero_grad()
    if guard is not None:
        guard.close()
    moments = [digest(v) for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return losses, state_of(model), moments, random_digest()


def test_odd_setups_train_to_the_same_bits() -> None:
    for found in run_ranks(_both_ways, timeout_s=40):
        assert list(found) == list(SETUPS)
        assert {name: both for name, both in found.items() if both[0] != both[1]} == {}
