"""After `close()` nothing of the guard is left: no hook, no reference that keeps a model past its process group."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from tests.faults import Fault
from tests.ranks import run_ranks
from tests.training import Job, build, train_steps


def _hooks(model: nn.Module) -> int:
    """Hooks on all modules and parameters."""
    count = 0
    for module in model.modules():
        count += len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
    for parameter in model.parameters():
        count += len(parameter._backward_hooks or {})
        count += len(getattr(parameter, "_post_accumulate_grad_hooks", None) or {})
    return count


def _leave(rank: int, world_size: int, jobs: list[Job]) -> list[dict[str, Any]]:
    return [_leave_one(job, rank) for job in jobs]


def _leave_one(job: Job, rank: int) -> dict[str, Any]:
    unguarded = build(Job(job.wrapper, guarded=False), rank)
    train_steps(unguarded)
    hooks = _hooks(unguarded.model)
    del unguarded
    excepthook, threads = sys.excepthook, threading.active_count()
    run = build(job, rank)
    train_steps(run)
    guard = run.guard
    run.close()
    step_hooks = len(run.optimizer._optimizer_step_pre_hooks) + len(run.optimizer._optimizer_step_post_hooks)
    left = {
        "stopped": run.record.error is not None,
        "more hooks": _hooks(run.model) - hooks,
        "step hooks": step_hooks,
        "excepthook": sys.excepthook is excepthook,
        "more threads": threading.active_count() - threads,
    }
    reference = weakref.ref(run.model)
    del run
    gc.collect()
    left["model alive"] = reference() is not None
    assert guard is not None
    return left


@pytest.mark.parametrize("wrapper", ["plain", "ddp", "fsdp1", "fsdp2"])
def test_nothing_is_left_after_close(wrapper: str) -> None:
    stopped = Job(wrapper, fault=Fault("gate.forward", "nan", rank=1, step=1))
    wanted = {"more hooks": 0, "step hooks": 0, "excepthook": True, "more threads": 0, "model alive": False}
    for clean, faulty in run_ranks(_leave, jobs=[Job(wrapper), stopped]):
        assert clean == {"stopped": False, **wanted}
        assert faulty == {"stopped": True, **wanted}


def _copies(rank: int, world_size: int) -> dict[str, Any]:
    """Copies and pickles of a guarded model report nothing and carry no guard; names are the model's own."""
    from ddp_nanguard import NanGuard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    keys = list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=None)
    guard(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    clones = {"deepcopy": copy.deepcopy(model), "pickle": pickle.loads(pickle.dumps(model))}
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    clones["torch.save"] = torch.load(stream, weights_only=False)
    found: dict[str, Any] = {"keys": list(guard.state_dict()) == keys}
    for name, clone in clones.items():
        clone(torch.full((2, 3), float("nan"))).sum().backward()
        found[name] = list(clone.state_dict()) == keys
    optimizer.zero_grad()
    with contextlib.suppress(RuntimeError):
        guard(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        found["undisturbed"] = True
    guard.close()
    return found


def test_copies_of_a_guarded_model_are_plain_models() -> None:
    wanted = {"keys": True, "deepcopy": True, "pickle": True, "torch.save": True, "undisturbed": True}
    assert run_ranks(_copies, world_size=1) == [wanted]
