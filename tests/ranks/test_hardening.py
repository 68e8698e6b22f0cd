"""Jobs that try to part the ranks: dying peers, caught errors, skips, odd modules, wrong input on one rank only."""

from __future__ import annotations

import collections.abc
import contextlib
import copy
import gc
import io
import os
import pickle
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.ranks import run_ranks, run_ranks_raw
from tests.training import digest, random_digest, seed

NAN = float("nan")
INF = float("inf")


def _model(*, norm: bool = False) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 3), nn.BatchNorm1d(3) if norm else nn.Tanh(), nn.Linear(3, 2)]
    return DistributedDataParallel(nn.Sequential(*layers))


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _guard(*args: Any, **options: Any) -> Any:
    from ddp_nanguard import NanGuard

    return NanGuard(*args, **{"dump_dir": None, "timeout_s": 5, **options})


def _values(bad: bool) -> Tensor:
    return torch.ones(2, 4) / (0.0 if bad else 1.0)


def _step(guard: Any, optimizer: torch.optim.Optimizer, values: Tensor) -> None:
    guard(values).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _ended(run: Callable[[], object]) -> str | None:
    """The first line of the error that ended it, with its class."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None


def _finite(model: nn.Module) -> bool:
    return all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def _state(model: nn.Module) -> dict[str, str]:
    found = [*model.named_parameters(), *model.named_buffers()]
    return {name: digest(torch.view_as_real(t.detach()) if t.is_complex() else t) for name, t in found}


# -- one verdict for all, or for none ----------------------------------------------------------------------------------


def _forward_between(rank: int, world_size: int) -> int:
    model = _model()
    first, second = (torch.optim.SGD(model.module[index].parameters(), lr=0.1) for index in (0, 2))
    guard = _guard(model, [first, second])
    for _ in range(3):
        guard(_values(False)).sum().backward()
        first.step()
        if rank == 0:
            guard(_values(False))  # a logger's forward, no backward
            next(iter(guard.steps([_values(False)])))
        second.step()
        model.zero_grad()
    guard.close()
    return guard.step


def test_only_a_backward_asks_for_a_verdict() -> None:
    assert run_ranks(_forward_between) == [3, 3]


def _without_losses(rank: int, world_size: int) -> list[int]:
    return [_without_loss(rank, idle_step) for idle_step in range(3)]


def _without_loss(rank: int, idle_step: int) -> int:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = _sgd(model)
    guard = _guard(model, optimizer)
    for step in range(3):
        if rank == 0 or step != idle_step:
            guard(_values(False)).sum().backward()
        for parameter in model.parameters():  # gradients are reduced by hand
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    guard.close()
    return guard.step


def test_a_rank_without_a_loss_keeps_step() -> None:
    assert run_ranks(_without_losses) == [[3, 3, 3], [3, 3, 3]]


def _caught(rank: int, world_size: int) -> Any:
    """Training that goes on after an error: zero_grad, next batch, next fault. Then steps without a backward."""
    from ddp_nanguard import NonFiniteError

    model = _model(norm=True)
    optimizer = _sgd(model)
    guard = _guard(model, optimizer, first_step=1000)
    caught = []
    for step in range(6):
        values = torch.randn(4, 4) / (0.0 if rank == 1 and step in (1, 4) else 1.0)
        try:
            _step(guard, optimizer, values)
        except NonFiniteError as error:
            caught.append((error.report.step, error.report.to_dict()["origin"]["rank"]))
        optimizer.zero_grad()
    went_on = (caught, guard.step, _finite(model), bool(model.module[1].running_mean.isfinite().all()))
    guard(_values(rank == 1)).sum().backward()
    retries = [_ended(optimizer.step) is not None for _ in range(3)]
    optimizer.zero_grad()
    guard.close()
    return went_on, retries, _finite(model)


def test_a_caught_error_leaves_the_process_usable_and_the_weights_alone() -> None:
    for went_on, retries, finite in run_ranks(_caught):
        assert went_on == ([(1001, 1), (1003, 1)], 1004, True, True)
        assert retries == [True, True, True], "a step after a fault, without a new backward, is no new verdict"
        assert finite


def _in_context(rank: int, world_size: int) -> Any:
    from ddp_nanguard import NonFiniteError

    model = _model()
    optimizer = _sgd(model)
    hook, threads, steps = sys.excepthook, threading.active_count(), []
    for _ in range(3):
        try:
            with _guard(model, optimizer) as guard:
                for step in range(3):
                    _step(guard, optimizer, _values(rank == 1 and step == 1))
        except NonFiniteError:
            steps.append(guard.step)
        optimizer.zero_grad()
    del guard
    reference = weakref.ref(model)
    del model, optimizer
    gc.collect()
    return steps, reference() is None, threading.active_count() - threads, sys.excepthook is hook


def test_an_error_caught_around_the_context_manager_leaves_nothing_behind() -> None:
    assert run_ranks(_in_context) == [([1, 1, 1], True, 0, True)] * 2


def _gan(rank: int, world_size: int, bad: bool) -> Any:
    torch.manual_seed(0)
    maker, judge = DistributedDataParallel(nn.Linear(3, 4)), DistributedDataParallel(nn.Linear(4, 1))
    maker_optimizer, judge_optimizer = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
    maker_guard, judge_guard = _guard(maker, maker_optimizer), _guard(judge, judge_optimizer)

    def train() -> None:
        for step in range(3):
            noise = torch.randn(4, 3) / (0.0 if bad and rank == 1 and step == 1 else 1.0)
            (judge_guard(maker_guard(noise).detach()).mean() - judge_guard(torch.randn(4, 4)).mean()).backward()
            judge_optimizer.step()
            judge_optimizer.zero_grad()
            (-judge_guard(maker_guard(noise)).mean()).backward()
            maker_optimizer.step()
            maker_optimizer.zero_grad()
            judge_optimizer.zero_grad()
        maker_guard.close()
        judge_guard.close()

    return _ended(train), maker_guard.step, _finite(maker) and _finite(judge)


def test_two_guards_in_one_process_stop_together() -> None:
    assert run_ranks(_gan, bad=False) == [(None, 3, True)] * 2
    first, second = run_ranks(_gan, bad=True)
    assert first == second
    assert first[0].startswith("NonFiniteError: rank 1, step 1")
    assert first[2]


def _two_exit_codes(rank: int, world_size: int) -> None:
    models = [_model(), _model()]
    optimizers = [_sgd(model) for model in models]
    closed, guard = (
        _guard(model, optimizer, exit_code=70 + index)
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True))
    )
    closed.close()
    _step(guard, optimizers[1], _values(rank == 1))


def test_a_closed_guard_leaves_the_exit_to_the_open_one() -> None:
    assert [outcome.exit_code for outcome in run_ranks_raw(_two_exit_codes, through_excepthook=True)] == [71, 71]


def _often(rank: int, world_size: int) -> tuple[int, int]:
    model = _model()
    optimizer = _sgd(model)
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        guard = _guard(model, optimizer)
        _step(guard, optimizer, _values(False))
        guard.close()
    return threading.active_count() - threads, len(os.listdir("/proc/self/fd")) - files


def test_guards_built_and_closed_often_leave_no_threads_and_no_files() -> None:
    for threads, files in run_ranks(_often):
        assert threads == 0
        assert files < 10


# -- peers that die ----------------------------------------------------------------------------------------------------


def _lost_peer(rank: int, world_size: int, policy: str, signal_number: int, dump_dir: str) -> Any:
    """Rank 1 is killed or stopped in the fault round; rank 0 ends it for good when it is done itself."""
    from ddp_nanguard import NonFiniteError
    from ddp_nanguard.blame import triage

    store = dist.distributed_c10d._get_default_store()
    store.set(f"pid-{rank}", str(os.getpid()))
    model = _model()
    optimizer = _sgd(model)
    guard = _guard(model, optimizer, on_fault=policy, timeout_s=1, dump_dir=dump_dir)
    if rank == 1:
        triage.report_of = lambda *args: os.kill(os.getpid(), signal_number)  # type: ignore[assignment]
    start = time.monotonic()
    try:
        for step in range(4):
            _step(guard, optimizer, _values(rank == 1 and step == 1))
    except NonFiniteError as error:
        return error.report.step, str(error), time.monotonic() - start, os.listdir(error.report.dump_path or "")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(store.get("pid-1")), signal.SIGKILL)


@pytest.mark.parametrize(
    ("policy", "signal_number"), [("skip", signal.SIGKILL), ("skip", signal.SIGSTOP), ("stop", signal.SIGSTOP)]
)
def test_a_rank_that_has_lost_its_peer_stops_and_speaks_for_itself(
    policy: str, signal_number: int, tmp_path: Any
) -> None:
    first, second = run_ranks_raw(
        _lost_peer, timeout_s=15, policy=policy, signal_number=signal_number, dump_dir=str(tmp_path / "dumps")
    )
    assert second.exit_code == -signal.SIGKILL
    assert first.exit_code == 0, first.describe()
    assert first.value is not None, "it went on alone"
    step, text, seconds, files = first.value
    assert step == 1
    assert seconds < 6
    assert "rank-00000" in files
    assert "every rank's own gradient was finite" not in text, "rank 1 was not asked"


def _both_raise(rank: int, world_size: int, dump_dir: str) -> None:
    model = _model()
    guard = _guard(model, _sgd(model), dump_dir=dump_dir, timeout_s=4)
    guard(_values(True))
    time.sleep(0.3 * rank)
    raise ValueError("a validator of the user's own")


def test_ranks_that_raise_one_after_the_other_write_one_dump(tmp_path: Any) -> None:
    outcomes = run_ranks_raw(_both_raise, through_excepthook=True, dump_dir=str(tmp_path))
    assert [outcome.exit_code for outcome in outcomes] == [65, 65]
    assert sorted(path.name for path in tmp_path.glob("*/rank-*")) == ["rank-00000", "rank-00001"]


# -- skip --------------------------------------------------------------------------------------------------------------


def _skips_with_scaler(rank: int, num_optimizers: int, **kind: bool) -> Any:
    model = _model()
    parts = [model.module[0], model.module[2]] if num_optimizers == 2 else [model]
    optimizers = [torch.optim.AdamW(part.parameters(), **kind) for part in parts]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    guard = _guard(model, optimizers, scaler=scaler, on_fault="skip")
    seen = []
    for step in range(6):
        before = _state(model)
        scaler.scale(guard(_values(rank == 1 and step in (1, 3, 4))).sum()).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        state = scaler.state_dict()
        seen.append((state["scale"], state["_growth_tracker"], _state(model) != before))
        model.zero_grad()
    guard.close()
    return seen


def _all_skips_with_scaler(rank: int, world_size: int) -> Any:
    kinds = [(1, {"fused": True}), (2, {"fused": True}), (1, {"foreach": True}), (2, {"foreach": True})]
    return [_skips_with_scaler(rank, number, **kind) for number, kind in kinds]


def test_every_skip_leaves_scale_and_growth_tracker() -> None:
    trackers_and_moves = [(1, True), (1, False), (2, True), (2, False), (2, False), (3, True)]
    for runs in run_ranks(_all_skips_with_scaler):
        assert runs == [[(256.0, *pair) for pair in trackers_and_moves]] * 4


def _unowned(rank: int, world_size: int) -> Any:
    """An optimizer over the head only: nobody else clears the gradients of the body."""
    model = _model()
    head = torch.optim.SGD(model.module[2].parameters(), lr=0.1)
    guard = _guard(model, head, on_fault="skip")

    def train() -> None:
        for step in range(4):
            _step(guard, head, _values(rank == 1 and step == 1))
        guard.close()

    skipped = _ended(train), guard.step, _finite(model)

    model = _model()
    head = torch.optim.SGD(model.module[2].parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    guard = _guard(model, head, scaler=scaler)

    def train_with_scaler() -> None:
        for step in range(2):
            loss = guard(_values(False)).sum()
            if rank == 1 and step == 1:
                loss = loss + torch.sqrt((model.module[0].weight * 0).sum())  # finite, its gradient is not
            scaler.scale(loss).backward()
            scaler.unscale_(head)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(head)
            scaler.update()

    return skipped, _ended(train_with_scaler) is not None, _finite(model)


def test_gradients_that_no_optimizer_owns() -> None:
    for skipped, stopped, finite in run_ranks(_unowned):
        assert skipped == (None, 4, True), "a skip clears them too"
        assert finite, "no scaler was going to skip this one"
        assert stopped


def _skip_in_window(rank: int, view: bool) -> list[str]:
    """A window of three micro-batches whose first is bad, against a run that never had it."""
    states = []
    for has_bad_window in (True, False):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        model = DistributedDataParallel(module, gradient_as_bucket_view=view)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        guard = _guard(model, optimizer, on_fault="skip")
        for step in [0, 1, 2, 3] if has_bad_window else [0, 1, 3]:
            torch.manual_seed(100 * step + rank)
            for index in range(3):
                values = torch.randn(4, 4) / (0.0 if (rank, step, index) == (1, 2, 0) else 1.0)
                with model.no_sync() if index < 2 else contextlib.nullcontext():
                    guard(values).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        guard.close()
        moments = {str(i): digest(s["momentum_buffer"]) for i, s in enumerate(optimizer.state.values())}
        states.append(_state(model) | moments)
    return [name for name in states[0] if states[0][name] != states[1][name]]


def _skip_in_windows(rank: int, world_size: int) -> list[list[str]]:
    return [_skip_in_window(rank, view) for view in (False, True)]


def test_after_a_skipped_window_all_is_as_if_it_had_never_been() -> None:
    assert run_ranks(_skip_in_windows) == [[[], []]] * 2


class _Counting(nn.Module):
    """Buffers of several kinds, changed by every forward, one of them replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("turns", torch.zeros((), dtype=torch.int64))
        self.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))
        self.register_buffer("moving", torch.zeros(2), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        self.turns += 1
        self.phase += 1j
        self.moving = self.moving + 1
        return self.linear(values)


def _skip_buffers(rank: int, world_size: int) -> list[str]:
    model = DistributedDataParallel(_Counting())
    optimizer = _sgd(model)
    guard = _guard(model, optimizer, on_fault="skip")
    _step(guard, optimizer, _values(False))
    before = _state(model)
    _step(guard, optimizer, _values(rank == 1))
    after = _state(model)
    guard.close()
    return [name for name in before if before[name] != after[name]]


def test_a_skip_puts_back_buffers_of_every_kind() -> None:
    assert run_ranks(_skip_buffers) == [[], []]


# -- compiled, evaluated, checked --------------------------------------------------------------------------------------


def _compiled(rank: int, world_size: int) -> Any:
    from ddp_nanguard import NonFiniteError

    model = DistributedDataParallel(
        torch.compile(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), backend="eager")
    )
    optimizer = _sgd(model)
    guard = _guard(model, optimizer, on_fault="skip")
    _step(guard, optimizer, torch.randn(4, 4))
    before = _state(model)
    (guard(torch.randn(4, 4)).sum() * (INF if rank == 1 else 1.0)).backward()
    optimizer.step()
    moved = [name for name, value in _state(model).items() if before[name] != value]
    optimizer.zero_grad()
    guard.close()
    guard = _guard(model, optimizer)
    try:
        for step in range(3):
            _step(guard, optimizer, torch.randn(4, 4) / (0.0 if rank == 1 and step == 1 else 1.0))
    except NonFiniteError as error:
        return moved, error.report.to_dict()["origin"]["phase"], str(error), bool(error.report.unchecked)
    return moved, None, "", False


def test_buffers_of_a_compiled_model() -> None:
    """They are spoilt by the step's own forward, not before it; a skip puts them back."""
    for moved, phase, text, says_unchecked in run_ranks(_compiled, timeout_s=40):
        assert not says_unchecked, "the second guard has its hooks compiled in anew"
        assert phase is not None
        assert phase != "state", text
        assert moved == []


def _evaluated(rank: int, world_size: int) -> Any:
    """An encoder evaluated in every way that does not go through the guard."""
    shown = []
    for guarded in (False, True):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        model = DistributedDataParallel(nn.TransformerEncoder(layer, 2))
        optimizer = _sgd(model)
        guard = _guard(model, optimizer) if guarded else None
        outputs = []
        for _ in range(2):
            _step(guard or model, optimizer, torch.randn(2, 5, 8))
            model.eval()
            mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
            with torch.no_grad():
                values = torch.randn(2, 5, 8)
                for part in (guard or model, model, model.module, model.module.layers[0]):
                    outputs.append(digest(part(values, src_key_padding_mask=mask)))
            model.train()
        if guard is not None:
            guard.close()
        shown.append(outputs)
    return shown


def test_an_encoder_evaluated_between_steps_gives_the_same_bits() -> None:
    for unguarded, guarded in run_ranks(_evaluated):
        assert guarded == unguarded


def _checked(rank: int, world_size: int) -> Any:
    from ddp_nanguard import NonFiniteError

    model = _model(norm=True)
    optimizer = _sgd(model)
    guard = _guard(model, optimizer)

    def train() -> None:
        for _ in range(3):
            with torch.inference_mode():
                guard.check()  # before a checkpoint, after an evaluation
            _step(guard, optimizer, torch.randn(4, 4))
        with torch.inference_mode():
            guard.close()

    in_inference = _ended(train), guard.step
    model = _model()
    optimizer = _sgd(model)
    guard = _guard(model, optimizer)
    try:
        for step, values in enumerate(guard.steps([_values(False)] * 4)):
            loss = guard(values).sum()
            guard.watch(loss=loss)
            if not guard.check():  # so that all ranks skip together, before anyone's backward
                continue
            (loss * (NAN if rank == 1 and step == 2 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    except NonFiniteError as error:
        return in_inference, error.report.step
    return in_inference, None


def test_a_check_may_fall_anywhere() -> None:
    for in_inference, stopped_in in run_ranks(_checked):
        assert in_inference == (None, 3)
        assert stopped_in == 2, "a check before the backward is no step of its own"


# -- the same bits -----------------------------------------------------------------------------------------------------


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
    guard = _guard(model, optimizer) if guarded else None
    seed(rank)
    losses = []
    for _ in range(3):
        losses.append(digest(backward(guard or model, model)))
        optimizer.step()
        optimizer.zero_grad()
    if guard is not None:
        guard.close()
    moments = [digest(v) for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return losses, _state(model), moments, random_digest()


def test_odd_setups_train_to_the_same_bits() -> None:
    for found in run_ranks(_both_ways, timeout_s=40):
        assert list(found) == list(SETUPS)
        assert {name: both for name, both in found.items() if both[0] != both[1]} == {}


# -- copies, numbers, batches ------------------------------------------------------------------------------------------


def _copies(rank: int, world_size: int) -> Any:
    model = _model(norm=True)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    guard = _guard(model, optimizer, scaler=scaler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = guard(torch.randn(4, 4))
        scaler.scale(output.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        for thing in (output, [*model.parameters()], guard.state_dict(), optimizer.state_dict(), scaler.state_dict()):
            torch.save(thing, io.BytesIO())
        torch.optim.swa_utils.AveragedModel(model.module)
        copies = [copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))]
        optimizers = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    guard.close()
    hooks = [hook for each in optimizers for hook in getattr(each, "_optimizer_step_pre_hooks", {}).values()]
    return [str(w.message) for w in caught], [c.step.__self__ is c for c in copies], hooks


def test_copies_and_pickles_of_what_is_guarded_are_plain() -> None:
    assert run_ranks(_copies) == [([], [True, True], [])] * 2


class _Wrapping(collections.abc.MutableMapping[str, Any]):
    """A batch class around a dict of its own."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.items_ = items

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)

    def copy(self) -> _Wrapping:
        return _Wrapping(dict(self.items_))


def _small_things(rank: int, world_size: int) -> Any:
    model = nn.Linear(4, 2)
    optimizer = _sgd(model)
    values = torch.ones(2, 4)
    guard = _guard(model, optimizer, copy_batch=True)
    (same,) = [batch["values"] is values for batch in guard.steps([_Wrapping({"values": values})])]
    guard.close()
    stopped = {}
    numbers = {"float32": numpy.float32("nan"), "array": numpy.array(NAN), "float64": numpy.float64(NAN)}
    for name, number in numbers.items():
        guard = _guard(model, optimizer)
        loss = guard(values).sum()
        guard.watch(loss=loss, other=number)
        loss.backward()
        stopped[name] = _ended(optimizer.step) is not None
        optimizer.zero_grad()
        guard.close()
    return same, stopped


def test_batches_stay_the_users_own_and_numpy_numbers_are_losses() -> None:
    ((same, stopped),) = run_ranks(_small_things, world_size=1)
    assert same
    assert stopped == {"float32": True, "array": True, "float64": True}


# -- wrong input on one rank only --------------------------------------------------------------------------------------

WRONG: dict[str, dict[str, Any]] = {
    "optimizer": {"optimizer": None},
    "no optimizer": {"optimizer": []},
    "replay": {"replay": 5},
    "group": {"group": [0, 1]},
    "timeout_s": {"timeout_s": INF},
    "scale_floor": {"scale_floor": NAN},
    "max_skips": {"max_skips": 1.5},
    "dump_dir": {"dump_dir": 3},
    "scaler": {"scaler": "yes"},
    "watch": {"watch": "loss"},
}


def _outside(rank: int, world_size: int) -> str | None:
    group = dist.new_group([0, 1])
    model = nn.Linear(4, 2)
    return _ended(lambda: _guard(model, _sgd(model), group=group).close())


def _over_a_part(rank: int, world_size: int) -> str | None:
    group = dist.new_group([0, 1])
    if rank == 2:
        return None
    model = DistributedDataParallel(nn.Linear(4, 2), process_group=group)
    return _ended(lambda: _guard(model, _sgd(model)).close())  # group= is missing


def test_a_group_that_does_not_fit_is_refused() -> None:
    outside = run_ranks(_outside, world_size=3, timeout_s=12)
    assert outside[:2] == [None, None]
    assert outside[2] is not None and outside[2].startswith("ValueError: ") and "group" in outside[2]
    for found in run_ranks(_over_a_part, world_size=3, timeout_s=12)[:2]:
        assert found is not None and found.startswith("ValueError: ") and "group=" in found


def _lazy(rank: int, world_size: int) -> str | None:
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d())
    return _ended(lambda: _guard(model, _sgd(model)))


def test_a_lazy_model_is_refused_with_the_remedy() -> None:
    for found in run_ranks(_lazy):
        assert found is not None
        assert found.startswith("ValueError: ")
        assert "one forward" in found


def _wrong(rank: int, world_size: int, names: list[str], everywhere: bool) -> dict[str, str | None]:
    found = {}
    for name in names:
        model = _model()
        arguments: dict[str, Any] = {"optimizer": _sgd(model)} | (WRONG[name] if everywhere or rank == 1 else {})
        found[name] = _ended(lambda a=arguments, m=model: _guard(m, a.pop("optimizer"), **a).close())
    return found


def _is_told(name: str, text: str | None) -> bool:
    return text is not None and text.startswith("ValueError: ") and name.split()[-1] in text


RISKY = ["optimizer", "no optimizer", "replay", "group"]  # not refused by a type check alone: one launch for each


@pytest.mark.parametrize("names", [[name for name in WRONG if name not in RISKY], *([name] for name in RISKY)])
def test_wrong_input_on_one_rank_is_a_value_error_on_all(names: list[str]) -> None:
    outcomes = run_ranks_raw(_wrong, timeout_s=12, names=names, everywhere=False)
    assert not any(outcome.hung for outcome in outcomes), "the peers of the rank with the wrong input wait"
    for outcome in outcomes:
        assert {name: text for name, text in outcome.value.items() if not _is_told(name, text)} == {}


def test_wrong_input_everywhere_names_the_option() -> None:
    for found in run_ranks(_wrong, names=list(WRONG), everywhere=True):
        assert {name: text for name, text in found.items() if not _is_told(name, text) or "disagree" in text} == {}
