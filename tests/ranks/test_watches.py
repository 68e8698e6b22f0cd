"""The watch on local gradients: copies, compiled models, checkpoints, parameters that come or go."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from ddp_nanguard.hooks.weak import WeakHook, ignore
from ddp_nanguard.wrappers import wrapper_of
from tests.rank_processes import run_ranks
from tests.ranks.wrapping import WRAP, loss_of, odd, one_backward, wrapped


@pytest.mark.parametrize("kind", ["plain", "ddp"])
def test_a_copy_of_the_model_reports_nowhere(kind: str) -> None:
    assert run_ranks(copies_body, kind=kind) == [(0, 0, 16)] * 2


def copies_body(rank: int, world_size: int, kind: str) -> tuple[int, int, int]:
    model, reported = wrapped(kind), []
    watch = wrapper_of(model).watch_local_gradients(lambda name, gradient: reported.append(name))
    for parameter in model.parameters():
        parameter.grad = None
    counts = []
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (copy.deepcopy(model), torch.load(saved, weights_only=False)):
        loss_of(other, rank, 0).backward()
        counts.append(len(reported))
    loss_of(model, rank, 0).backward()
    watch.remove()
    return counts[0], counts[1], len(reported)


def hooked_module_body(rank: int, world_size: int) -> list[bool]:
    """Forward pre-hooks, too, become no-ops in a copy of the module that they hang on."""
    found = []
    for kind in ("fsdp2", "fsdp1"):
        model = wrapped(kind)
        watch = wrapper_of(model).watch_local_gradients(lambda name, gradient: None)
        hooks = [h for m in model.modules() for h in m._forward_pre_hooks.values() if isinstance(h, WeakHook)]
        found += [bool(hooks), all(pickle.loads(pickle.dumps(h)) is copy.deepcopy(h) is ignore for h in hooks)]
        watch.remove()
    return found


def test_forward_hooks_are_ignored_in_copies() -> None:
    assert run_ranks(hooked_module_body) == [[True] * 4] * 2


def lifetime_body(rank: int, world_size: int, kind: str) -> bool:
    model = wrapped(kind)
    loss_of(model, rank, 0).backward()
    wrapper = wrapper_of(model)
    watch = wrapper.watch_local_gradients(lambda name, gradient, kept=wrapper: None)
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    del model, wrapper, watch
    return gone() is None


@pytest.mark.parametrize("kind", ["plain", "ddp"])
def test_no_cycle_of_hooks_keeps_the_model_alive(kind: str) -> None:
    """FSDP makes cycles of its own."""
    assert run_ranks(lifetime_body, kind=kind) == [True, True]


def unfrozen_body(rank: int, world_size: int, kind: str) -> list[bool]:
    net = odd()
    net.mix.requires_grad_(False)
    model, reported, seen = WRAP[kind](net), set(), []
    watch = wrapper_of(model).watch_local_gradients(lambda name, gradient: reported.add(name))
    for _ in range(2):
        loss_of(model, rank, 0).backward()
        seen.append("mix.weight" in reported)
        reported.clear()
        for name, parameter in wrapper_of(model).named_parameters():
            parameter.requires_grad_(True) if name == "mix.weight" else None
        watch.install_hooks()
    watch.remove()
    return seen


@pytest.mark.parametrize("kind", ["plain", "fsdp2"])
def test_arming_again_hooks_what_was_unfrozen(kind: str) -> None:
    assert run_ranks(unfrozen_body, kind=kind) == [[False, True]] * 2


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_compiled_model_keeps_its_names_and_gradients(kind: str) -> None:
    """The hooks of the watch make no graphs of their own and nothing is compiled again."""
    for names, description, reported, graphs in run_ranks(compiled_body, kind=kind, timeout_s=60):
        assert graphs == [1, 1, 1]
        assert names == [name for name, _ in odd().named_modules()]
        assert description["compiled"] and reported == sorted(
            n for n, _ in odd().named_parameters() if "spare" not in n
        )


def compiled_body(rank: int, world_size: int, kind: str) -> Any:
    model, reported, graphs = torch.compile(wrapped(kind), backend="eager"), set(), []
    wrapper = wrapper_of(model)
    watch = wrapper.watch_local_gradients(lambda name, gradient: reported.add(name))
    for index in range(3):
        loss_of(model, rank, index).backward()
        graphs.append(counters["stats"]["unique_graphs"])
    watch.remove()
    return [name for name, _ in wrapper.named_modules()], wrapper.describe(), sorted(reported), graphs


def outside_body(rank: int, world_size: int) -> list[bool]:
    """The forward under no_sync, the backward outside, and the other way round: DDP goes by the forward."""
    model = wrapped("ddp")
    wrapper, found = wrapper_of(model), []
    watch = wrapper.watch_local_gradients(lambda name, gradient: found.append(wrapper.will_reduce()))
    with model.no_sync():
        loss = loss_of(model, rank, 0)
    loss.backward()
    without = {*found}, same_everywhere(model)
    found.clear()
    loss = loss_of(model, rank, 0)
    with model.no_sync():
        loss.backward()
    watch.remove()
    return [without == ({False}, False), ({*found}, same_everywhere(model)) == ({True}, True)]


def same_everywhere(model: nn.Module) -> bool:
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    others = [torch.empty_like(gradient) for _ in range(2)]
    dist.all_gather(others, gradient)
    return torch.equal(*others)


def test_will_reduce_goes_by_what_ddp_did() -> None:
    assert run_ranks(outside_body) == [[True, True]] * 2


def outer_checkpoint_body(rank: int, world_size: int, kind: str) -> list[bool]:
    """Blocks are FSDP units inside checkpoint wrappers, so the recomputation gathers again."""
    expected = one_backward(odd(), rank)[1]
    found = []
    for impl in CheckpointImpl:
        model = wrapped(kind)
        root = wrapper_of(model).root
        root.blocks[1] = checkpoint_wrapper(root.blocks[1], checkpoint_impl=impl)
        gradients = one_backward(model, rank)[1]
        found.append(all(torch.equal(gradient, expected[name]) for name, gradient in gradients.items()))
        found.append(set(gradients) == set(expected))
    return found


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "fsdp1_flat"])
def test_a_checkpoint_around_a_unit_changes_nothing(kind: str) -> None:
    assert run_ranks(outer_checkpoint_body, kind=kind) == [[True] * 4] * 2


def meta_body(rank: int, world_size: int) -> tuple[list[str], set[str]]:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    fully_shard(net[0])
    wrapper, reported = wrapper_of(fully_shard(net)), []
    watch = wrapper.watch_local_gradients(lambda name, gradient: reported.append(name))
    net.to_empty(device="cpu")
    for parameter in net.parameters():
        nn.init.ones_(parameter)
    net(torch.ones(2, 3)).sum().backward()
    watch.remove()
    return sorted(reported), {parameter.device.type for _, parameter in wrapper.named_parameters()}


def test_parameters_may_be_made_after_the_watch() -> None:
    assert run_ranks(meta_body) == [(["0.bias", "0.weight", "1.bias", "1.weight"], {"cpu"})] * 2


def forward_method_body(rank: int, world_size: int) -> list[int]:
    """A method registered with FSDP2 runs no module hook: its parameters are hooked from the next `arm` on."""
    model, reported, counts = fully_shard(Method()), [], []
    register_fsdp_forward_method(model, "encode")
    watch = wrapper_of(model).watch_local_gradients(lambda name, gradient: reported.append(name))
    for _ in range(2):
        model.encode(torch.ones(2, 4)).sum().backward()
        counts.append(len(reported))
        watch.install_hooks()
    watch.remove()
    return counts


class Method(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)


def test_a_registered_forward_method_is_watched_from_the_next_arm_on() -> None:
    assert run_ranks(forward_method_body) == [[0, 2]] * 2
