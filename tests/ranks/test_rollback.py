"""Training goes on after a stop: by the example, with a new guard or with the old one, whatever the wrapper."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import run_ranks
from tests.ranks.small import guard_of, is_finite, rows, sgd

EXAMPLES = Path(__file__).parents[2] / "examples"


def _example(rank: int, world_size: int, out: str) -> Any:
    sys.path.insert(0, str(EXAMPLES))  # as a script there would have it
    example = importlib.import_module("rollback")
    found = [example.train(36, Path(out) / "one")]
    found.append(example.train(36, Path(out) / "one"))  # the same job once more: it knows by now
    example.CORRUPT = [7, 101, 207, 309, 401]
    from ddp_nanguard import NonFiniteError

    try:
        example.train(36, Path(out) / "many")
    except NonFiniteError as error:
        found.append(str(error).splitlines()[0])
    return found


def test_the_example_goes_back_passes_over_the_batch_and_ends_after_a_bounded_number(tmp_path: Path) -> None:
    first, second = run_ranks(_example, timeout_s=40, out=str(tmp_path))
    (loss, num_rollbacks), (again, none), error = first
    assert (num_rollbacks, none, loss < 1.0) == (1, 0, True)
    assert second[0][1] == 1 and second[1][1] == 0, "its loss is that of its own batch"
    assert again == loss, "passing over the batch from the beginning gives the same training"
    assert error == second[2]
    assert error.startswith("rank ") and "input: batch[0] holds +Inf" in error
    assert len((tmp_path / "many" / "nan_dumps" / "skips.jsonl").read_text().splitlines()) == 4


def _model(wrapper: str) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    return {"plain": lambda n: n, "ddp": DistributedDataParallel, "fsdp2": fully_shard}[wrapper](net)


def _go_on(rank: int, wrapper: str, new_guard: bool) -> Any:
    """Two stops, in steps 2 and 4; after each the state of two steps before is loaded."""
    from ddp_nanguard import NonFiniteError

    model = _model(wrapper)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0) if wrapper == "ddp" else None
    guard = guard_of(model, optimizer, scaler=scaler)
    kept: list[Any] = []
    errors = []
    for number in range(7):
        kept.append(copy.deepcopy((model.state_dict(), optimizer.state_dict(), scaler and scaler.state_dict())))
        try:
            loss = guard(rows(rank == 1 and number in (2, 4))).square().sum()
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
        except NonFiniteError as error:
            errors.append(error)  # kept, with all that it holds
            if scaler is not None:
                scaler.update()  # it remembers that it has unscaled
                scaler.load_state_dict(kept[-3][2])
            if new_guard:
                guard.close()
                guard = guard_of(model, optimizer, scaler=scaler, first_step=number - 2)
            model.load_state_dict(kept[-3][0])
            optimizer.load_state_dict(kept[-3][1])
        optimizer.zero_grad()
    guard.close()
    return [str(error).splitlines()[0] for error in errors], guard.step, is_finite(model)


def _go_on_in_all_ways(rank: int, world_size: int) -> Any:
    return [_go_on(rank, wrapper, new) for wrapper in ("plain", "ddp", "fsdp2") for new in (False, True)]


def test_after_a_stop_the_old_guard_goes_on_or_a_new_one_takes_its_place() -> None:
    for found in run_ranks(_go_on_in_all_ways):
        place = 'micro-batch 0, input: batch["args"][0] holds +Inf'
        # the old guard counts the steps that had a verdict and were not stopped
        old = ([f"rank 1, step {step}, {place}" for step in (2, 3)], 5, True)
        # the new one counts from the step that it is told
        new = ([f"rank 1, step {step}, {place}" for step in (2, 1)], 4, True)
        assert found == [old, new] * 3
