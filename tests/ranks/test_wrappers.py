"""Conformance suite of the wrappers: the same checks for each kind, on real ranks."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard.hooks.weak import WeakHook, ignore
from ddp_nanguard.wrappers import wrap_like, wrapper_of
from tests.rank_processes import run_ranks

BF16 = torch.bfloat16


class Block(nn.Module):
    """Linear with few rows, BatchNorm, dropout; ``spare`` is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5, momentum=0.3)
        self.drop = nn.Dropout(0.2)
        self.spare = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.relu(self.norm(self.lin(x))))


class Odd(nn.Module):
    """Parameters at the root, one row, in a list and tied; a block twice; a layer used without being called."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.scales = nn.ParameterList([nn.Parameter(torch.full((3, 5), 1.5)), nn.Parameter(torch.ones(2))])
        self.mix = nn.Linear(5, 5, bias=False)
        self.remix = nn.Linear(5, 5, bias=False)
        self.remix.weight = self.mix.weight
        self.blocks = nn.ModuleList([Block(), Block()])
        self.twice = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.uncalled = nn.Linear(5, 7)
        self.register_buffer("shift", torch.tensor([0.5]), persistent=False)
        self.register_buffer("also_shift", self.shift)

    def forward(self, x: Tensor) -> Tensor:
        x = self.remix(torch.tanh(self.mix(x))) * self.gain + self.shift
        for block in self.blocks:
            x = self.twice(block(x))
        x = x * self.scales[0].sum(0) * self.scales[1].sum()
        return F.linear(x, self.uncalled.weight, self.uncalled.bias)


def odd(checkpointing: str | None = None) -> Odd:
    torch.manual_seed(3)
    net = Odd()
    if checkpointing is not None:
        net.blocks[1] = checkpoint_wrapper(net.blocks[1], checkpoint_impl=CheckpointImpl[checkpointing])
    return net


def units(net: Odd) -> list[nn.Module]:
    return [*net.blocks, net.twice]


def shard(net: Odd, *, only_root: bool = False, grouped: bool = False, **options: Any) -> nn.Module:
    if "mp_policy" in options:
        for block in net.blocks:
            fully_shard(block.norm)  # its float buffers do not go with bf16 parameters
    inner = [] if only_root else [list(net.blocks)] if grouped else units(net)
    for unit in inner:
        fully_shard(unit, **options)
    return fully_shard(net, **{**options, "reshard_after_forward": options.get("reshard_after_forward")})


def flatten(net: Odd, **options: Any) -> nn.Module:
    options = {"use_orig_params": True, "device_id": torch.device("cpu"), **options}
    if "mixed_precision" in options:
        for block in net.blocks:
            inner = getattr(block, "_checkpoint_wrapped_module", block)
            inner.norm = FullyShardedDataParallel(inner.norm, **{**options, "mixed_precision": None})
    net.blocks = nn.ModuleList([FullyShardedDataParallel(block, **options) for block in net.blocks])
    net.twice = FullyShardedDataParallel(net.twice, **options)  # type: ignore[assignment]  # a shell around it
    return FullyShardedDataParallel(net, **options)


def mesh_2d() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


WRAP: dict[str, Callable[[Odd], nn.Module]] = {
    "plain": lambda net: net,
    "ddp": lambda net: DistributedDataParallel(net, find_unused_parameters=True),
    "ddp_bucket_view": lambda net: DistributedDataParallel(
        net, find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=1, forward_sync_buffers=False
    ),
    "fsdp2": shard,
    "fsdp2_bf16": lambda net: shard(net, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)),
    "fsdp2_keep": lambda net: shard(net, reshard_after_forward=False),
    "fsdp2_root": lambda net: shard(net, only_root=True),
    "fsdp2_grouped": lambda net: shard(net, grouped=True),
    "fsdp2_offload": lambda net: shard(net, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "hsdp2": lambda net: shard(net, mesh=mesh_2d()),
    "fsdp2_reshard_2": lambda net: shard(net, reshard_after_forward=2),
    "fsdp1": flatten,
    "fsdp1_flat": lambda net: flatten(net, use_orig_params=False),
    "fsdp1_bf16": lambda net: flatten(net, mixed_precision=MixedPrecision(param_dtype=BF16, cast_forward_inputs=True)),
    "fsdp1_grad_op": lambda net: flatten(net, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "fsdp1_grad_op_flat": lambda net: flatten(
        net, use_orig_params=False, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP
    ),
    "fsdp1_no_shard": lambda net: flatten(net, sharding_strategy=ShardingStrategy.NO_SHARD),
    "hsdp1": lambda net: flatten(net, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh_2d()),
}
KINDS = {kind: 4 if kind in ("hsdp2", "hsdp1", "fsdp2_reshard_2") else 2 for kind in WRAP}
VARIANTS = ("fsdp2_keep", "fsdp2_root", "fsdp1_grad_op", "fsdp1_grad_op_flat", "fsdp1_no_shard")
"""They differ in when parameters are gathered and freed."""
each_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.exhaustive] if kind in VARIANTS else []) for kind in WRAP]
)
each_wrapper = pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp2", "fsdp1", "fsdp1_flat"])
NO_SHARD_WARNS = "ignore:The `NO_SHARD` sharding strategy:FutureWarning"


def wrapped(kind: str, checkpointing: str | None = None) -> nn.Module:
    if kind.startswith("ddp") and checkpointing == "REENTRANT":  # DDP takes it with a static graph only
        return DistributedDataParallel(odd(checkpointing), static_graph=True, gradient_as_bucket_view="view" in kind)
    return WRAP[kind](odd(checkpointing))


def batch(rank: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + index)
    return torch.randn(6, 5, generator=generator)


def loss_of(model: nn.Module, rank: int, index: int) -> Tensor:
    torch.manual_seed(1000 + 10 * rank + index)  # dropout
    return model(batch(rank, index)).float().square().mean()


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    elif hasattr(model, "no_sync"):
        with model.no_sync():
            yield
    else:
        yield


def kind_of(kind: str) -> str:
    return kind.partition("_")[0].replace("hsdp", "fsdp")


def names_body(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    model = wrapped(kind, "NO_REENTRANT")
    wrapper = wrapper_of(model)
    held = {id(parameter) for parameter in model.parameters()}
    model(batch(rank, 0))  # some wrappers leave gathered parameters in place
    return {
        "kind": wrapper.kind,
        "modules": [(name, type(module).__name__.removeprefix("FSDP")) for name, module in wrapper.named_modules()],
        "parameters": [name for name, _ in wrapper.named_parameters()],
        "held": held == {id(p) for _, p in wrapper.named_parameters()},
        "buffers": [name for name, _ in wrapper.named_buffers()],
        "aliases": wrapper.aliases(),
        "shapes": {name: (shape, str(dtype)) for name, (shape, dtype) in wrapper.all_shapes().items()},
        "owner": [wrapper.owner_of(name) for name in ("gain", "blocks.1.lin.weight")],
    }


@each_kind
@pytest.mark.filterwarnings(NO_SHARD_WARNS)
def test_names_are_those_of_the_unwrapped_model(kind: str) -> None:
    net = odd()
    results = run_ranks(names_body, KINDS[kind], kind=kind)
    found = results[0]
    assert all(result == found for result in results)
    assert found["kind"] == kind_of(kind) and found["held"]
    assert found["modules"] == [(name, type(module).__name__) for name, module in net.named_modules()]
    assert found["buffers"] == [name for name, _ in net.named_buffers()]
    assert found["aliases"] == {"remix.weight": "mix.weight", "also_shift": "shift"}
    assert found["shapes"] == {name: (tuple(p.shape), "torch.float32") for name, p in net.named_parameters()}
    assert found["owner"] == ["", "blocks.1.lin"]
    flat = ["_flat_param", "blocks.0._flat_param", "blocks.1._flat_param", "twice._flat_param"]
    expected = flat if kind.endswith("_flat") else [name for name, _ in net.named_parameters()]
    assert sorted(found["parameters"]) == sorted(expected)


def gradients_body(rank: int, world_size: int, kind: str) -> list[Any]:
    return [gradients(rank, kind, checkpointing) for checkpointing in (None, "NO_REENTRANT", "REENTRANT")]


def gradients(rank: int, kind: str, checkpointing: str | None) -> Any:
    """Gradients reported per micro-batch (the first without sync) and those of the bare model on the same data."""
    model, bare, seen = wrapped(kind, checkpointing), odd(), [{}, {}]
    if getattr(model, "static_graph", False):
        loss_of(model, rank, 9).backward()  # its first iteration cannot be without sync
        model.zero_grad()
    reported: dict[str, list[Tensor]] = {}
    watch = wrapper_of(model).watch_local_gradients(lambda name, g: reported.setdefault(name, []).append(g.clone()))
    for index in range(2):
        reported.clear()
        with no_sync(model) if index == 0 else contextlib.nullcontext():
            loss_of(model, rank, index).backward()
        seen[index] = {name: torch.stack(grads).sum(0) for name, grads in reported.items()}
    watch.remove()
    own, accumulated = [], []
    for index in range(2):
        before = {name: p.grad.clone() for name, p in bare.named_parameters() if p.grad is not None}
        loss_of(bare, rank, index).backward()
        after = {name: p.grad.clone() for name, p in bare.named_parameters() if p.grad is not None}
        accumulated.append(after)
        own.append({name: grad - before.get(name, 0) for name, grad in after.items()})
    return seen, own, accumulated


def reports_own(kind: str, name: str) -> bool:
    """Whether a micro-batch's own gradient is reported, and not what has accumulated.

    FSDP1 always; FSDP2 for a unit that is called twice, which reduces what it holds before its own gradient comes.
    """
    twice = name.startswith("twice.") and kind not in ("fsdp2_root", "fsdp2_grouped")
    return kind_of(kind) == "fsdp1" or (kind_of(kind) == "fsdp2" and twice)


@each_kind
def test_local_gradients_are_seen_before_the_reduce(kind: str) -> None:
    """Also under no_sync, with unused parameters, tied weights, a block called twice, and checkpointing."""
    results = run_ranks(gradients_body, KINDS[kind], kind=kind)
    used = {name for name, _ in odd().named_parameters() if "spare" not in name}
    for seen, own, accumulated in (one for result in results for one in result):
        for index in range(2):
            assert set(seen[index]) == used
            for name, gradient in seen[index].items():
                if "bf16" in kind:  # its bits are those of a replay on one rank, see below
                    assert gradient.shape == own[index][name].shape and gradient.isfinite().all()
                elif index == 0 or not reports_own(kind, name):
                    assert torch.equal(gradient, accumulated[index][name]), (name, index)
                else:  # a difference of sums, hence not to the bit
                    torch.testing.assert_close(gradient, own[index][name], rtol=1e-4, atol=1e-5)
    assert all(not torch.equal(results[0][0][0][1][name], results[1][0][0][1][name]) for name in used)


def nonfinite_body(rank: int, world_size: int, kind: str) -> list[str]:
    """Rank 1 poisons one weight's gradient in its own backward."""
    model, bad = wrapped(kind), set()
    watch = wrapper_of(model).watch_local_gradients(lambda n, g: None if g.isfinite().all() else bad.add(n))
    with poisoned(rank == 1):
        loss_of(model, rank, 0).backward()
    watch.remove()
    return sorted(bad)


@contextlib.contextmanager
def poisoned(active: bool) -> Iterator[None]:
    """While active, the gradient of ``uncalled`` is NaN from its functional use on."""
    plain = F.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = plain(x, weight, bias)
        if active and weight.shape[0] == 7:
            y = y + (bias * float("nan")).where(torch.zeros(7, dtype=torch.bool), torch.zeros(7, dtype=y.dtype))
        return y

    F.linear = linear
    try:
        yield
    finally:
        F.linear = plain


@each_wrapper
def test_a_nan_is_seen_only_on_the_rank_that_made_it(kind: str) -> None:
    results = run_ranks(nonfinite_body, KINDS[kind], kind=kind)
    assert results[1] == ["uncalled.bias"]
    assert all(result == [] for rank, result in enumerate(results) if rank != 1)


def train(model: nn.Module, rank: int, steps: int, optimizer: str = "AdamW") -> torch.optim.Optimizer:
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    optim: torch.optim.Optimizer = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01, **options)
    for step in range(steps):
        with no_sync(model):
            loss_of(model, rank, 2 * step).backward()
        loss_of(model, rank, 2 * step + 1).backward()
        optim.step()
        optim.zero_grad()
    return optim


def pieces_body(rank: int, world_size: int, kind: str) -> Any:
    model = wrapped(kind)
    optim = train(model, rank, 2)
    wrapper = wrapper_of(model)
    found = []
    for name, parameter in wrapper.named_parameters():
        found += wrapper.shards("model.", name, parameter, parameter)
        for key, value in optim.state.get(parameter, {}).items():
            if key != "step":
                found += wrapper.shards("optim.0.", name, parameter, value, f".{key}")
    options = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(model, options=options)
    state = get_optimizer_state_dict(model, optim, options=options)["state"]
    full = {f"model.{name}": value for name, value in weights.items()}
    for name, values in state.items():
        full |= {f"optim.0.{name}.{key}": value for key, value in values.items() if key != "step"}
    shards = [(p.name, p.tensor.clone(), p.stored_shape, p.offsets, p.true_shape) for p in found]
    return shards, full, (wrapper.shard_index, wrapper.num_shards, wrapper.replica_index)


@each_kind
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_pieces_tile_every_parameter_and_state_once_per_replica(kind: str) -> None:
    results = run_ranks(pieces_body, KINDS[kind], kind=kind)
    full = results[0][1]
    names = {f"model.{name}" for name, _ in odd().named_parameters()}
    replicas = {place[2] for _, _, place in results}
    assert len({place for _, _, place in results}) == len(results)
    assert len(results) == len(replicas) * results[0][2][1]
    for replica in replicas:
        if kind == "plain":
            full = next(other for _, other, place in results if place[2] == replica)
        whole = reassembled([shards for shards, _, place in results if place[2] == replica])
        assert names <= set(whole) and any(".exp_avg_sq" in name for name in whole)
        for name, tensor in whole.items():
            assert torch.equal(tensor, full[name]), name


def reassembled(shards: list[list[Any]]) -> dict[str, Tensor]:
    """The full tensors, each element of which exactly one rank gives."""
    whole: dict[str, Tensor] = {}
    times: dict[str, Tensor] = {}
    shapes = {}
    for name, tensor, stored_shape, offsets, true_shape in (shard for shard in shards for shard in shard):
        assert tensor.numel() and not tensor.requires_grad
        place = tuple(slice(at, at + size) for at, size in zip(offsets, tensor.shape, strict=True))
        whole.setdefault(name, torch.zeros(stored_shape))[place] = tensor
        times.setdefault(name, torch.zeros(stored_shape))[place] += 1
        shapes[name] = true_shape
    assert all((count == 1).all() for count in times.values())
    return {name: tensor.reshape(shapes[name]) for name, tensor in whole.items()}


def reduce_body(rank: int, world_size: int, kind: str) -> dict[str, set[bool]]:
    model = wrapped(kind)
    wrapper = wrapper_of(model)
    seen: dict[str, set[bool]] = {"without": set(), "with": set()}
    now = "without"
    watch = wrapper.watch_local_gradients(lambda name, gradient: seen[now].add(wrapper.will_reduce()))
    with no_sync(model):
        loss_of(model, rank, 0).backward()
    now = "with"
    loss_of(model, rank, 1).backward()
    watch.remove()
    return seen


@each_kind
def test_will_reduce(kind: str) -> None:
    expected = {"without": {False}, "with": {kind != "plain"}}
    assert run_ranks(reduce_body, KINDS[kind], kind=kind) == [expected] * KINDS[kind]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp1", "fsdp1_flat"])
@pytest.mark.filterwarnings("ignore:FSDP is switching")
def test_one_rank_reduces_nothing(kind: str) -> None:
    assert run_ranks(reduce_body, 1, kind=kind) == [{"without": {False}, "with": {False}}]


def describe_body(rank: int, world_size: int, kind: str) -> Any:
    model = wrapped(kind)
    description = json.loads(json.dumps(wrapper_of(model).describe()))
    again = wrap_like(odd(), description)
    loss, gradients = one_backward(model, rank)
    other, _ = one_backward(again, rank)
    return description, wrapper_of(model).describe(), wrapper_of(again).describe(), (loss, other), gradients


def alone_body(rank: int, world_size: int, description: Any, of_rank: int) -> Any:
    return *one_backward(wrap_like(odd(), description), of_rank), dist.is_initialized()


def one_backward(model: nn.Module, rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    reported: dict[str, list[Tensor]] = {}
    watch = wrapper_of(model).watch_local_gradients(lambda name, g: reported.setdefault(name, []).append(g.clone()))
    loss = loss_of(model, rank, 0)
    loss.backward()
    watch.remove()
    return loss.detach(), {name: torch.stack(parts).sum(0) for name, parts in reported.items()}


@each_kind
def test_wrap_like_gives_the_same_wrapping_and_alone_the_bits_of_one_rank(kind: str) -> None:
    """Alone without a process group, or, for every second kind, with the default group there already."""
    results = run_ranks(describe_body, KINDS[kind], kind=kind)
    for description, after, again, (loss, other), *_ in results:
        assert description == after == again
        assert torch.equal(loss, other)
    description, _, _, (loss, _), gradients = results[1]
    with_group = list(KINDS).index(kind) % 2 == 1
    ((alone, others, initialized),) = run_ranks(
        alone_body, 1, process_group=with_group, description=description, of_rank=1
    )
    assert torch.equal(loss, alone)
    assert set(gradients) == set(others)
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)
    assert initialized == (with_group or kind != "plain")


def training_body(rank: int, world_size: int, kind: str, optimizer: str) -> Any:
    states, names = [], []
    for watched in (True, False):
        model = wrapped(kind)
        wrapper = wrapper_of(model)
        watch = wrapper.watch_local_gradients(lambda name, gradient: names.append(name)) if watched else None
        train(model, rank, 5, optimizer)
        if watch is not None:
            watch.remove()
        state = [wrapper.local(tensor) for _, tensor in [*wrapper.named_parameters(), *wrapper.named_buffers()]]
        states.append([tensor.clone() for tensor in state])
    return *states, len(names)


@each_kind
def test_training_is_bit_identical_with_and_without_the_watch(kind: str) -> None:
    optimizer = "SGD" if kind.endswith(("_keep", "_flat")) else "AdamW"
    for watched, bare, num_reports in run_ranks(training_body, KINDS[kind], kind=kind, optimizer=optimizer):
        assert num_reports > 0
        assert all(torch.equal(a, b) for a, b in zip(watched, bare, strict=True))


def hooks_of(model: nn.Module) -> int:
    parameters = [getattr(p, "_unsharded_param", p) for p in model.parameters()]
    per_module = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    return per_module + sum(len(p._post_accumulate_grad_hooks or ()) + len(p._backward_hooks or ()) for p in parameters)


def removal_body(rank: int, world_size: int, kind: str) -> Any:
    model, reported = wrapped(kind), []
    loss_of(model, rank, 0).backward()
    before = hooks_of(model)
    watch = wrapper_of(model).watch_local_gradients(lambda name, gradient: reported.append(name))
    counts = []
    for action in ("install_hooks", "remove_hooks", "install_hooks", "remove"):
        pending = loss_of(model, rank, 1)
        getattr(watch, action)()
        pending.backward()  # a graph from before a disarm does not report either
        loss_of(model, rank, 1).backward()
        counts.append(len(reported))
        reported.clear()
    watch.install_hooks()
    loss_of(model, rank, 2).backward()
    with torch.no_grad():
        loss_of(model, rank, 3)
    return counts, len(reported), hooks_of(model) - before


@each_wrapper
def test_nothing_is_left_after_remove(kind: str) -> None:
    for (hooks_installed, disarmed, again, removed), late, hooks in run_ranks(removal_body, KINDS[kind], kind=kind):
        assert hooks_installed > 0 and again > 0
        assert (disarmed, removed, late, hooks) == (0, 0, 0, 0)


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
