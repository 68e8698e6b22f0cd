"""What may be wrapped and wrapped again: groups and meshes, ignored parameters, tensor parallelism, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard.wrappers import wrap_like, wrapper_of
from tests.rank_processes import run_ranks
from tests.ranks.wrapping import loss_of, odd, one_backward, reassembled, wrapped


def ignored_body(rank: int, world_size: int, kind: str) -> Any:
    net = odd()
    device = torch.device("cpu")
    if kind == "fsdp2":
        model: nn.Module = fully_shard(net, ignored_params={net.gain})
    else:
        model = FullyShardedDataParallel(net, ignored_states=[net.gain], use_orig_params=True, device_id=device)
    wrapper, reported = wrapper_of(model), {}
    watch = wrapper.watch_local_gradients(lambda name, gradient: reported.update({name: gradient.clone()}))
    loss = loss_of(model, rank, 0)
    loss.backward()
    watch.remove()
    again = wrap_like(odd(), wrapper.describe())
    same = torch.equal(loss_of(again, rank, 0), loss)
    shards = wrapper.shards("model.", "gain", net.gain, net.gain)
    return reported["gain"].shape, wrapper.describe() == wrapper_of(again).describe(), same, len(shards)


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_parameters_that_fsdp_ignores_are_watched_and_kept(kind: str) -> None:
    assert run_ranks(ignored_body, kind=kind) == [((1,), True, True, 1)] * 2


def mixture_body(rank: int, world_size: int) -> list[str]:
    cpu = torch.device("cpu")
    nets = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(5)]
    nets[0][0] = FullyShardedDataParallel(nets[0][0], device_id=cpu)
    fully_shard(nets[0][1])
    nets[1][1] = DistributedDataParallel(nets[1][1])
    nets[2][0] = nn.DataParallel(nets[2][0])
    both = DistributedDataParallel(nets[3])
    fully_shard(nets[3][0])
    wrong: list[Any] = [*nets[:3], both, nets[4].parameters, replicate(nets[4])]
    messages = []
    for model in wrong:
        with pytest.raises(ValueError, match=r"; (use|give|wrap) ") as error:
            wrapper_of(model)
        messages.append(str(error.value))
    return messages


def test_what_cannot_be_watched_is_refused_with_a_remedy() -> None:
    assert run_ranks(mixture_body)[0] == [
        "model mixes FullyShardedDataParallel (at 0) and fully_shard (at 1); use one for the whole model",
        "model holds DistributedDataParallel below its root, at 1; give the DDP module itself",
        "model holds nn.DataParallel at 0, which trains all devices from one process; "
        "wrap the module in DistributedDataParallel and start one process per device with torchrun",
        "model mixes DistributedDataParallel (at (root)) and fully_shard (at 0); use one for the whole model",
        "model is a method; give the torch.nn.Module that the training loop calls",
        "model was given to replicate() at (root), which hides its DDP from hooks; "
        "wrap the module in DistributedDataParallel",
    ]


def test_a_module_without_parameters_is_allowed() -> None:
    wrapper = wrapper_of(nn.ReLU())
    assert wrapper.named_parameters() == [] and wrapper.all_shapes() == {}


def facts_body(rank: int, world_size: int) -> dict[str, bool]:
    """What the wrappers build on, straight from torch."""
    found = {}
    model = wrapped("fsdp2")
    objects, fired = [], []
    parameter = dict(model.named_parameters())["uncalled.weight"]
    parameter.register_hook(lambda gradient: fired.append("sharded hook"))
    parameter.register_post_accumulate_grad_hook(lambda p: fired.append(tuple(p.grad.to_local().shape)))
    for _ in range(2):
        loss_of(model, rank, 0).backward()
        group = model._get_fsdp_state()._fsdp_param_groups[0]
        objects.append({id(param._unsharded_param) for param in group.fsdp_params})
    found["fsdp2: the unsharded parameter stays the same object"] = objects[0] == objects[1]
    found["fsdp2: a hook of the sharded parameter never fires"] = "sharded hook" not in fired
    found["fsdp2: a post-accumulate hook of it sees the shard"] = fired == [tuple(parameter.to_local().shape)] * 2
    model, fired = wrapped("fsdp1"), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: fired.append(p))
    loss_of(model, rank, 0).backward()
    found["fsdp1: a post-accumulate hook of an original parameter never fires"] = not fired
    return found


def test_facts_about_fsdp() -> None:
    for found in run_ranks(facts_body):
        assert [fact for fact, holds in found.items() if not holds] == []


def subgroup_body(rank: int, world_size: int, kind: str) -> list[bool]:
    """Each rank wraps again over a group of its own, and over a mesh of all."""
    alone = [dist.new_group([member]) for member in range(world_size)][rank]
    model = wrapped(kind)
    description = wrapper_of(model).describe()
    loss, gradients = one_backward(model, rank)
    single = wrap_like(odd(), description, group=alone)
    same_loss, same_gradients = one_backward(single, rank)
    over_mesh, _ = one_backward(wrap_like(odd(), description, mesh=init_device_mesh("cpu", (world_size,))), rank)
    equal = [torch.equal(gradients[name], same_gradients[name]) for name in gradients]
    return [all(equal), torch.equal(loss, same_loss), torch.equal(loss, over_mesh), wrapper_of(single).will_reduce()]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2_bf16", "fsdp1_flat"])
def test_wrap_like_takes_a_group_or_a_mesh(kind: str) -> None:
    assert run_ranks(subgroup_body, kind=kind) == [[True, True, True, False]] * 2


def tensor_parallel_body(rank: int, world_size: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6, bias=False))
    full = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    wrapper = wrapper_of(fully_shard(net, mesh=mesh["shard"]))
    found = [shard for name, p in wrapper.named_parameters() for shard in wrapper.shards("", name, p, p)]
    shards = [(p.name, p.tensor.clone(), p.stored_shape, p.offsets, p.true_shape) for p in found]
    return shards, full, (wrapper.shard_index, wrapper.num_shards)


def test_pieces_tile_under_tensor_parallelism_too() -> None:
    results = run_ranks(tensor_parallel_body, 4)
    assert [place for _, _, place in results] == [(rank, 4) for rank in range(4)]
    whole = reassembled([shards for shards, _, _ in results])
    assert all(torch.equal(whole[name], tensor) for name, tensor in results[0][1].items())


def unlike_body(rank: int, world_size: int) -> list[str]:
    messages = []
    for kind in ("fsdp2", "fsdp1", "fsdp1_flat"):
        wrapper = wrapper_of(wrapped(kind))
        name, parameter = wrapper.named_parameters()[-1]
        with pytest.raises(ValueError, match="cannot be told") as error:
            wrapper.shards("optim.0.", name, parameter, torch.zeros(3, 1), ".row")
        messages.append(str(error.value).partition(" ")[0])
    net = nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
    wrapper = wrapper_of(
        flattened := FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    )
    with pytest.raises(ValueError, match="not contiguous"):
        wrapper.shards("", "0.weight", flattened.module[0].weight, flattened.module[0].weight)
    return messages


def test_state_of_another_shape_is_refused() -> None:
    first = run_ranks(unlike_body)[0]
    assert first == ["optim.0.uncalled.bias.row", "optim.0.uncalled.bias.row", "optim.0.twice.0.weight.row"]
