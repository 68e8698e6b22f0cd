"""``verdict="deferred"``: the device withholds the update, and the host learns of it one step later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.replay.recipe import Recipe
from tests.counting import counting
from tests.ranks import run_ranks, run_ranks_raw
from tests.replaying import replay_alone
from tests.training import Loop

ACCUMULATION, STEPS, FAULT = 2, 6, 3
OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.01, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.norm = nn.Linear(6, 8), nn.Dropout(0.2), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, values: Tensor, scale: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.drop(self.first(values)))) / scale)


def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["values"], batch["scale"]).float().pow(2).mean()


def recipe() -> Recipe:
    return Recipe(model=Net(), step=step, optimizer=OPTIMIZERS["AdamW"])


def batch_of(rank: int, index: int, faulty: bool) -> dict[str, Tensor]:
    values = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * index + rank))
    is_bad = faulty and rank == 1 and index == FAULT * ACCUMULATION + 1
    return {"values": values, "scale": torch.tensor(0.0 if is_bad else 1.0)}


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Weights, optimizer state and buffers of this rank."""
    found = [*model.parameters(), *model.buffers()]
    for parameter in model.parameters():
        found += [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
    return [(t.to_local() if hasattr(t, "to_local") else t).detach().clone() for t in found]


def trained(rank: int, kind: str, optimizer_name: str, faulty: bool, scaled: bool = False, **options: Any) -> Any:
    """Bits before and after each step, what was told, and the bits after that."""
    torch.manual_seed(0)
    net = Net()
    model: nn.Module = DistributedDataParallel(net) if kind == "ddp" else (fully_shard(net) if kind == "fsdp2" else net)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8) if scaled else None
    guard = None
    if options:
        guard = NanGuard(model, optimizer, scaler=scaler, replay=f"{__name__}:recipe", **options)
    seen: list[list[Tensor]] = []
    loop = Loop(model, optimizer, in_bfloat16 if scaled else step, guard, scaler, ACCUMULATION, call=model)
    loop.before_update = lambda index: seen.append(bits(model, optimizer))
    loop.clip = lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    error = loop.until_fault([batch_of(rank, index, faulty) for index in range(ACCUMULATION * STEPS)])
    error = error or (None if guard is None else _late(guard))
    seen.append(bits(model, optimizer))
    told = None if error is None else (error.report.to_dict(), str(error))
    return seen, told, None if error is None else bits(model, optimizer)


def in_bfloat16(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return step(model, batch)


def _late(guard: NanGuard) -> NonFiniteError | None:
    """What the last step's verdict says at the end."""
    try:
        guard.close()
    except NonFiniteError as error:
        return error
    return None


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _clean(rank: int, world_size: int, kind: str, names: list[str], scaled: bool) -> Any:
    found = []
    for name in names:
        plain, _, _ = trained(rank, kind, name, faulty=False, scaled=scaled)
        guarded, error, _ = trained(rank, kind, name, False, scaled, verdict="deferred", dump_dir=None)
        found.append((name, error, all(same(a, b) for a, b in zip(plain, guarded, strict=True))))
    return found


@pytest.mark.parametrize(("kind", "scaled"), [("ddp", False), ("fsdp2", False), ("ddp", True)])
def test_a_clean_run_trains_to_the_same_bits(kind: str, scaled: bool) -> None:
    names = list(OPTIMIZERS) if kind == "ddp" and not scaled else ["AdamW"]  # DTensors take no other fused one
    for found in run_ranks(_clean, kind=kind, names=names, scaled=scaled):
        assert found == [(name, None, True) for name in names]


def _faulty(rank: int, world_size: int, kind: str, names: list[str], scaled: bool, dump_dir: str) -> Any:
    found = []
    for name in names:
        options = {"verdict": "deferred", "dump_dir": f"{dump_dir}/{name}"}
        seen, error, after = trained(rank, kind, name, True, scaled, **options)
        assert error is not None and after is not None
        num_weights = 6
        found.append((name, *error, len(seen), same(seen[FAULT][:num_weights], after[:num_weights]),
                      same(seen[FAULT][num_weights:], after[num_weights:])))  # fmt: skip
    return found


@pytest.mark.parametrize(("kind", "scaled"), [("ddp", False), ("fsdp2", False), ("ddp", True)])
def test_the_faulty_update_is_withheld_and_told_one_step_later(kind: str, scaled: bool, tmp_path: Path) -> None:
    names = ["AdamW", "SGD", "Adagrad", "plain SGD"] if kind == "ddp" and not scaled else ["AdamW"]
    ranks = run_ranks(_faulty, kind=kind, names=names, scaled=scaled, dump_dir=str(tmp_path))
    for results in zip(*ranks, strict=True):
        for name, report, text, num_seen, same_weights, _ in results:
            origin = report["origin"]
            place = (origin["rank"], origin["step"], origin["micro_batch"], origin["phase"], origin["layer"])
            assert place == (1, FAULT, 1, "forward", ""), (name, text)
            assert text == results[0][2] and report["step"] == FAULT
            assert num_seen == FAULT + 3, "the host learns of it in the next step, and no later"
            assert same_weights, f"{name}: weights are not those from before the faulty step"
    if not scaled:
        (replayed,) = replay_alone([ranks[0][0][1]["dump_path"]])
        assert replayed.code == 0, replayed.output


def _skipped(rank: int, world_size: int, verdict: str) -> Any:
    options = {"verdict": verdict, "on_fault": "skip", "dump_dir": None}
    seen, error, _ = trained(rank, "ddp", "AdamW", True, **options)
    return seen, error


def test_skip_goes_on_to_the_same_weights_as_a_verdict_at_once() -> None:
    """The buffers differ: the next forward has run on those of the faulty step before the host knew."""
    for (sync, no_error), (deferred, error) in zip(
        run_ranks(_skipped, verdict="sync"), run_ranks(_skipped, verdict="deferred"), strict=True
    ):
        assert no_error is None and error is None
        assert same(sync[-1][:6], deferred[-1][:6])


def _caught(rank: int, world_size: int) -> Any:
    """What is told, and in which step, where the loop goes on after each stop; the weights that are left."""
    found = {}
    for name, bad, options in (
        ("two in a row", {3, 4}, {}),
        ("last", {7}, {"watch": ("forward", "loss", "backward")}),
        ("learning rate", set(), {}),
    ):
        torch.manual_seed(0)
        net = Net()
        optimizer = OPTIMIZERS["AdamW"](net.parameters())
        guard = NanGuard(net, optimizer, dump_dir=None, verdict="deferred", **options)
        told: list[Any] = []
        loop = Loop(net, optimizer, step, guard=guard, call=net)
        loop.before_batch = lambda index, batch, name=name, optimizer=optimizer: _set_lr(optimizer, name, index)
        loop.caught = lambda index, error, told=told: told.append(_summary(index, error))
        loop.run([_scaled(batch_of(0, index, False), index not in bad) for index in range(8)])
        late = _late(guard)
        told += [] if late is None else [_summary("close", late)]
        found[name] = told, all(bool(t.isfinite().all()) for t in bits(net, optimizer))
    return found


def _set_lr(optimizer: torch.optim.Optimizer, name: str, index: int) -> None:
    optimizer.param_groups[0]["lr"] = float("nan") if name == "learning rate" and index == 3 else 0.01


def _scaled(batch: dict[str, Tensor], is_good: bool) -> dict[str, Tensor]:
    return {**batch, "scale": batch["scale"] * is_good}


def _summary(when: Any, error: NonFiniteError) -> Any:
    origin = error.report.origin
    return when, error.report.step, None if origin is None else (str(origin.phase), origin.slot)


def test_the_step_that_a_stop_gives_up_leaves_nothing_behind() -> None:
    (found,) = run_ranks(_caught, world_size=1, process_group=False)
    assert found == {
        "two in a row": ([(4, 3, ("forward", "input"))], True),  # the fifth goes with it; the sixth is clean
        "last": ([("close", 7, ("forward", "input"))], True),
        "learning rate": ([(4, 3, ("optimizer", "g0.lr"))], True),  # a number again when the host learns of it
    }


def _unfrozen(rank: int, world_size: int) -> list[float]:
    """The momentum of parameters that are unfrozen in a bad step, as many as were trained before."""
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    net = nn.Sequential(first, last)
    optimizer = OPTIMIZERS["SGD"](net.parameters())
    spoilt = [torch.full((36,), 1e30) for _ in range(50)]  # what a momentum that is never written then reads
    del spoilt
    guard = NanGuard(net, optimizer, dump_dir=None, verdict="deferred", on_fault="skip")
    last.requires_grad_(False)
    for index in range(6):
        if index == 3:
            first.requires_grad_(False)
            last.requires_grad_(True)
        loss = net(torch.ones(4, 6) / (0.0 if index == 3 else 1.0)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    guard.close()
    return [float(optimizer.state[parameter]["momentum_buffer"].abs().max()) for parameter in last.parameters()]


def test_a_parameter_without_state_is_judged_at_once() -> None:
    (momentum,) = run_ranks(_unfrozen, world_size=1, process_group=False)
    assert max(momentum) < 100


def _own_error(rank: int, world_size: int, dump_dir: str) -> None:
    model = DistributedDataParallel(Net())
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    guard = NanGuard(model, optimizer, dump_dir=dump_dir, verdict="deferred", timeout_s=10.0)
    batches = [batch_of(rank, ACCUMULATION * index + 1, True) for index in range(STEPS)]
    for index, batch in enumerate(guard.steps(batches)):
        if (rank, index) == (1, FAULT + 1):
            raise RuntimeError("the loss was not finite")
        loss = step(model, batch)
        guard.watch(loss=loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_an_error_of_the_loop_before_the_host_has_learnt(tmp_path: Path) -> None:
    """The step that the device has withheld is dumped, on both ranks."""
    for outcome in run_ranks_raw(_own_error, timeout_s=40, dump_dir=str(tmp_path), through_excepthook=True):
        assert not outcome.hung and outcome.exit_code == 65, outcome.describe()
        assert f"rank 1 · step {FAULT} · micro-batch 0 · loss" in outcome.output, outcome.describe()
    (path,) = tmp_path.glob("step-*")
    assert path.name == f"step-{FAULT:08d}" and {"rank-00000", "rank-00001"} <= {p.name for p in path.iterdir()}


def _counted(rank: int, world_size: int, verdict: str | None) -> Any:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    guard = None if verdict is None else NanGuard(model, optimizer, dump_dir=None, verdict=verdict)
    counts = []
    for index in range(5):
        with counting() as counted:
            batch = batch_of(rank, index, False)
            for item in guard.steps([batch]) if guard is not None else [batch]:
                loss = step(model, item)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        counts.append((dict(counted.calls), sum(counted.host_reads.values())))
    return counts


def test_one_collective_and_one_read_of_the_step_before() -> None:
    plain = run_ranks(_counted, verdict=None)[0]
    for counts in run_ranks(_counted, verdict="deferred"):
        calls = [
            mine.get("all_reduce", 0) - other.get("all_reduce", 0)
            for (mine, _), (other, _) in zip(counts, plain, strict=True)
        ]
        reads = [mine - other for (_, mine), (_, other) in zip(counts, plain, strict=True)]
        assert calls == [1, 1, 1, 1, 1]
        assert reads == [1, 0, 1, 1, 1], (
            "the first step is judged at once; later ones read the answer of the one before"
        )


def test_the_process_goes_on_after_a_raise() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    guard = NanGuard(model, optimizer, verdict="deferred", dump_dir=None)
    told: list[Any] = []
    loop = Loop(model, optimizer, step, guard=guard, call=model, accumulation=2)
    for number in range(12):  # each step has an iterator of its own
        batches = [batch_of(0, 10 * number + index, False) for index in range(2)]
        if number in (3, 8):
            batches[1]["scale"].zero_()
        loop.caught = lambda _, error, number=number: told.append(
            (number, error.report.step, error.report.to_dict()["origin"]["micro_batch"])
        )
        loop.run(batches)
    guard.close()
    assert told == [(4, 3, 1), (9, 7, 1)], "told one step later; a window that ends in a raise has no number"
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("build", "options", "text"),
    [
        (lambda p: torch.optim.AdamW(p), {}, "this AdamW does not; give Adam, AdamW, SGD or Adagrad with fused=True"),
        (lambda p: torch.optim.RMSprop(p), {}, "this RMSprop does not"),
        (OPTIMIZERS["AdamW"], {"keep_previous": True}, "option keep_previous=True with verdict='deferred'"),
    ],
    ids=["not fused", "no such flag", "keep_previous"],
)
def test_what_cannot_be_deferred_is_refused(build: Any, options: dict[str, Any], text: str) -> None:
    model = Net()
    with pytest.raises(ValueError, match="verdict='deferred'") as caught:
        NanGuard(model, build(model.parameters()), verdict="deferred", dump_dir=None, **options)
    assert text in str(caught.value)


def _holding_nothing(rank: int, world_size: int) -> Any:
    """Under FSDP1 the flat range of rank 1 is padding: no parameter of its own ever has a gradient there."""
    torch.manual_seed(0)
    net = nn.Linear(1, 1, bias=False)
    model = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    guard = NanGuard(model, optimizer, verdict="deferred", dump_dir=None, timeout_s=10)
    try:
        for number in range(3):
            for value in guard.steps([torch.full((2, 1), float("nan") if number == 0 and rank == 0 else 1.0)]):
                loss = model(value).pow(2).mean()
                guard.watch(loss=loss)
                loss.backward()
                held = [parameter.grad is not None for parameter in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
    except NonFiniteError as error:
        return held, number, error.report.single_rank_view
    return held, None, None


def test_a_rank_that_holds_nothing_reads_the_first_verdict_too() -> None:
    ranks = run_ranks(_holding_nothing)
    assert ranks[0][0] == [True] and ranks[1][0] == [False], "the set-up is what it is meant to be"
    assert [ended for _, *ended in ranks] == [[0, False], [0, False]]
