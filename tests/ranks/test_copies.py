"""Copies and pickles of what is guarded; batches and numbers of the user's own classes."""

from __future__ import annotations

import collections.abc
import copy
import io
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import nn

from tests.ranks import run_ranks
from tests.ranks.small import NAN, ended, guard_of, sgd, small_model


def _copies(rank: int, world_size: int) -> Any:
    model = small_model(norm=True)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    guard = guard_of(model, optimizer, scaler=scaler)
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
    optimizer = sgd(model)
    values = torch.ones(2, 4)
    guard = guard_of(model, optimizer, copy_batch=True)
    (same,) = [batch["values"] is values for batch in guard.steps([_Wrapping({"values": values})])]
    guard.close()
    stopped = {}
    numbers = {"float32": numpy.float32("nan"), "array": numpy.array(NAN), "float64": numpy.float64(NAN)}
    for name, number in numbers.items():
        guard = guard_of(model, optimizer)
        loss = guard(values).sum()
        guard.watch(loss=loss, other=number)
        loss.backward()
        stopped[name] = ended(optimizer.step) is not None
        optimizer.zero_grad()
        guard.close()
    return same, stopped


def test_batches_stay_the_users_own_and_numpy_numbers_are_losses() -> None:
    ((same, stopped),) = run_ranks(_small_things, world_size=1)
    assert same
    assert stopped == {"float32": True, "array": True, "float64": True}
