"""Conformance suite of the wrappers: the same checks for each kind, on real ranks."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from ddp_nanguard.wrappers import wrap_like, wrapper_of
from tests.rank_processes import run_ranks
from tests.ranks.wrapping import (
    KINDS,
    NO_SHARD_WARNS,
    batch,
    each_kind,
    each_wrapper,
    kind_of,
    loss_of,
    no_sync,
    odd,
    one_backward,
    reassembled,
    train,
    wrapped,
)

OfRanks = Callable[[str, str], list[Any]]


def _all_bodies(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    """Each with a fresh model."""
    bodies = {
        "names": names_body,
        "gradients": gradients_body,
        "pieces": pieces_body,
        "reduce": reduce_body,
        "describe": describe_body,
        "nonfinite": nonfinite_body,
        "removal": removal_body,
    }
    return {name: body(rank, world_size, kind) for name, body in bodies.items()}


@pytest.fixture(scope="module")
def of_ranks() -> OfRanks:
    """What a body gave on each rank; all bodies of a kind run in one launch."""

    @functools.cache
    def launch(kind: str) -> list[dict[str, Any]]:
        return run_ranks(_all_bodies, KINDS[kind], kind=kind, timeout_s=50)

    return lambda kind, body: [rank[body] for rank in launch(kind)]


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
def test_names_are_those_of_the_unwrapped_model(kind: str, of_ranks: OfRanks) -> None:
    net = odd()
    results = of_ranks(kind, "names")
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
def test_local_gradients_are_seen_before_the_reduce(kind: str, of_ranks: OfRanks) -> None:
    """Also under no_sync, with unused parameters, tied weights, a block called twice, and checkpointing."""
    results = of_ranks(kind, "gradients")
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
def test_a_nan_is_seen_only_on_the_rank_that_made_it(kind: str, of_ranks: OfRanks) -> None:
    results = of_ranks(kind, "nonfinite")
    assert results[1] == ["uncalled.bias"]
    assert all(result == [] for rank, result in enumerate(results) if rank != 1)


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
def test_pieces_tile_every_parameter_and_state_once_per_replica(kind: str, of_ranks: OfRanks) -> None:
    results = of_ranks(kind, "pieces")
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
def test_will_reduce(kind: str, of_ranks: OfRanks) -> None:
    expected = {"without": {False}, "with": {kind != "plain"}}
    assert of_ranks(kind, "reduce") == [expected] * KINDS[kind]


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


@each_kind
def test_wrap_like_gives_the_same_wrapping_and_alone_the_bits_of_one_rank(kind: str, of_ranks: OfRanks) -> None:
    """Alone without a process group, or, for every second kind, with the default group there already."""
    results = of_ranks(kind, "describe")
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
def test_nothing_is_left_after_remove(kind: str, of_ranks: OfRanks) -> None:
    for (hooks_installed, disarmed, again, removed), late, hooks in of_ranks(kind, "removal"):
        assert hooks_installed > 0 and again > 0
        assert (disarmed, removed, late, hooks) == (0, 0, 0, 0)


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


@pytest.mark.exhaustive  # `test_bits` has the same of the whole guard
@each_kind
def test_training_is_bit_identical_with_and_without_the_watch(kind: str) -> None:
    optimizer = "SGD" if kind.endswith(("_keep", "_flat")) else "AdamW"
    for watched, bare, num_reports in run_ranks(training_body, KINDS[kind], kind=kind, optimizer=optimizer):
        assert num_reports > 0
        assert all(torch.equal(a, b) for a, b in zip(watched, bare, strict=True))
