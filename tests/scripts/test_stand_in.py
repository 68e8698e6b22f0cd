"""One process stands for all ranks of a group: what each collective gives; and how Python comes to know of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddp_nanguard.script.launch import INTERCEPT
from tests.ranks import run_ranks

RANK, SIZE = 1, 3


def alone(rank: int, world_size: int) -> dict[str, Any]:
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DistributedSampler

    from ddp_nanguard.script import meeting

    os.environ |= {
        "NANGUARD_REPLAY": "dump",
        "NANGUARD_REPLAY_OPTIONS": f"--rank 1 --as-rank {RANK} --world-size {SIZE}",
    }
    meeting.init_process_group(dist.init_process_group, "gloo", init_method="tcp://nowhere:1")
    found: dict[str, Any] = {"rank": dist.get_rank(), "size": dist.get_world_size(), "backend": dist.get_backend()}
    for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        value = torch.tensor([2.0, -1.0])
        dist.all_reduce(value, op=getattr(dist.ReduceOp, name))
        found[name] = value.tolist()
    parts = [torch.empty(2) for _ in range(SIZE)]
    dist.all_gather(parts, torch.tensor([1.0, 2.0]))
    whole = torch.empty(2 * SIZE)
    dist.all_gather_into_tensor(whole, torch.tensor([1.0, 2.0]))
    found["gathered"] = ([part.tolist() for part in parts], whole.tolist())
    own = torch.empty(1)
    dist.reduce_scatter_tensor(own, torch.arange(3.0))
    found["scattered"] = own.tolist()
    exchanged = torch.empty(SIZE)
    dist.all_to_all_single(exchanged, torch.arange(3.0))
    found["exchanged"] = exchanged.tolist()
    objects = [None] * SIZE
    dist.all_gather_object(objects, {"rank": 1})
    found["objects"] = objects
    given = ["mine"]
    meeting.broadcast_object_list(dist.broadcast_object_list, given, src=RANK)
    found["broadcast"] = given
    dist.barrier()
    dist.monitored_barrier()
    pair, other = dist.new_group([1, 2], backend="gloo"), dist.new_group([0, 2])
    found["groups"] = (dist.get_rank(pair), dist.get_world_size(pair), other is dist.GroupMember.NON_GROUP_MEMBER)
    mesh = init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("outer", "inner"))
    found["mesh"] = (tuple(mesh.get_coordinate()), mesh["inner"].size())
    found["functional"] = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD).tolist()
    found["sampled"] = list(DistributedSampler(range(6), shuffle=False))
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    model(torch.tensor([[1.0, 3.0]])).sum().backward()
    found["gradient"] = model.module.weight.grad.flatten().tolist()
    return found


def test_each_collective_answers_as_if_all_ranks_were_like_this_one() -> None:
    (found,) = run_ranks(alone, world_size=1, process_group=False)
    assert found == {
        "rank": 1,
        "size": 3,
        "backend": "gloo",
        "SUM": [6.0, -3.0],
        "AVG": [2.0, -1.0],
        "MAX": [2.0, -1.0],
        "MIN": [2.0, -1.0],
        "PRODUCT": [8.0, -1.0],
        "gathered": ([[1.0, 2.0]] * 3, [1.0, 2.0] * 3),
        "scattered": [3.0],
        "exchanged": [1.0] * 3,
        "objects": [{"rank": 1}] * 3,
        "broadcast": ["mine"],
        "groups": (0, 2, True),
        "mesh": ((0, 1), 3),
        "functional": [3.0, 3.0],
        "sampled": [1, 4],
        "gradient": [1.0, 3.0],
    }


def _collectives() -> dict[str, Callable[[Tensor], Tensor]]:
    """Each takes a tensor of `SIZE` rows and gives what the collective left in memory that was empty before."""
    from torch.distributed import _functional_collectives as functional
    from torch.distributed import nn as differentiable

    def parts(x: Tensor) -> list[Tensor]:
        return [torch.empty_like(x) for _ in range(SIZE)]

    def into(like: Tensor, run: Callable[[Tensor], object]) -> Tensor:
        run(like)
        return like

    def listed(like: list[Tensor], run: Callable[[list[Tensor]], object]) -> Tensor:
        run(like)
        return torch.stack(like)

    def rows_of(x: Tensor) -> list[Tensor]:
        return list(x.clone().unbind())

    world = dist.group.WORLD
    assert world is not None
    return {
        "all_gather": lambda x: listed(parts(x), lambda out: dist.all_gather(out, x)),
        "all_gather_into_tensor": lambda x: into(
            torch.empty(SIZE * SIZE, 2), lambda out: dist.all_gather_into_tensor(out, x)
        ),
        "gather": lambda x: listed(parts(x), lambda out: dist.gather(x, out, dst=RANK)),
        "reduce_scatter": lambda x: into(torch.empty(2), lambda out: dist.reduce_scatter(out, rows_of(x))),
        "reduce_scatter_tensor": lambda x: into(torch.empty(1, 2), lambda out: dist.reduce_scatter_tensor(out, x)),
        "scatter": lambda x: into(torch.empty(2), lambda out: dist.scatter(out, rows_of(x), src=RANK)),
        "all_to_all": lambda x: listed(list(torch.empty(SIZE, 2)), lambda out: dist.all_to_all(out, rows_of(x))),
        "all_to_all_single": lambda x: into(torch.empty(SIZE, 2), lambda out: dist.all_to_all_single(out, x)),
        "all_reduce": lambda x: into(x.clone(), dist.all_reduce),
        "functional all_gather": lambda x: functional.all_gather_tensor(x, 0, world).clone(),
        "functional all_reduce": lambda x: functional.all_reduce(x, "sum", world).clone(),
        "functional reduce_scatter": lambda x: functional.reduce_scatter_tensor(x, "sum", 0, world).clone(),
        "functional all_to_all": lambda x: functional.all_to_all_single(x, None, None, world).clone(),
        "differentiable all_gather": lambda x: torch.cat(differentiable.functional.all_gather(x)),
        "differentiable all_reduce": lambda x: differentiable.functional.all_reduce(x.clone()),
        "differentiable all_to_all": lambda x: differentiable.functional.all_to_all_single(torch.empty(SIZE, 2), x),
        "differentiable reduce_scatter": lambda x: differentiable.functional.reduce_scatter(torch.empty(2), rows_of(x)),
    }


def in_a_trace(rank: int, world_size: int) -> dict[str, Any]:
    """The operator at which the trace lets begin what was NaN before a collective, by collective."""
    import warnings

    from ddp_nanguard.diagnosis.trace.module_stack import ModuleStack
    from ddp_nanguard.diagnosis.trace.trace import Trace
    from ddp_nanguard.script import meeting

    warnings.simplefilter("ignore", FutureWarning)
    options = f"--rank 1 --as-rank {RANK} --world-size {SIZE}"
    os.environ |= {"NANGUARD_REPLAY": "dump", "NANGUARD_REPLAY_OPTIONS": options}
    meeting.init_process_group(dist.init_process_group, "gloo", init_method="tcp://nowhere:1")
    first: dict[str, Any] = {}
    for name, run in _collectives().items():
        modules = ModuleStack(())
        with modules, Trace(modules) as trace:
            run(torch.zeros(SIZE, 2) / 0).sum()
        first[name] = trace.first_nonfinite_op_of(trace.events[-1]).base
    for name, run in {
        "broadcast": lambda x: dist.broadcast(x, src=0),
        "recv": lambda x: dist.recv(x, src=0),
        "scatter": lambda x: dist.scatter(x, src=0),
    }.items():
        modules = ModuleStack(())
        with modules, Trace(modules) as trace:
            unknown = torch.empty(2)
            run(unknown)
        first[f"{name} of rank 0"] = trace.memory.name_of(unknown)
    return first


def test_what_a_collective_leaves_was_written_by_it() -> None:
    (found,) = run_ranks(in_a_trace, world_size=1, process_group=False)
    for name in ("broadcast", "recv", "scatter"):
        assert found.pop(f"{name} of rank 0") == f"what another rank gives in {name}, which a replay alone has not"
    assert len(found) == 17 and set(found.values()) == {"div"}, found


@pytest.mark.parametrize("replayed", [True, False])
def test_a_hidden_sitecustomize_is_run_and_nothing_of_torch_is_imported(tmp_path: Path, replayed: bool) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('theirs', __name__)")
    env = {name: value for name, value in os.environ.items() if not name.startswith("NANGUARD_")}
    env |= {"PYTHONPATH": os.pathsep.join([str(INTERCEPT), str(tmp_path)])} | (
        {"NANGUARD_REPLAY": "x"} if replayed else {}
    )
    code = "import sys; print('torch' in sys.modules, type(sys.meta_path[0]).__module__)"
    ended = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=30, check=True
    )
    finder = "sitecustomize" if replayed else "_frozen_importlib"
    theirs, ours = ended.stdout.splitlines()
    assert theirs == "theirs sitecustomize"
    assert ours.startswith("False ") and (finder in ours) == replayed
