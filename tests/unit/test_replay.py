"""What a replay of one rank says: `same` only where nothing differs, and why where something does."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddp_nanguard import NanGuard, NonFiniteError, Recipe
from ddp_nanguard.cli.main import main
from ddp_nanguard.dump import open_dump
from ddp_nanguard.replay import launcher
from ddp_nanguard.replay.session import what_needs_optimizer
from ddp_nanguard.report.types import Phase, Site
from tests.replaying import under_torchrun

WIDTH = 6
FAULT_AT = 2


class Net(nn.Module):
    """Draws from python, numpy and torch; a true ``flag`` makes it divide 0 by 0 in the middle."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        self.drop, self.norm, self.gate = nn.Dropout(0.3), nn.BatchNorm1d(width), Gate()

    def forward(self, values: Tensor, flag: Any) -> Tensor:
        values = self.a(values) * random.random() + float(np.random.rand())
        return self.b(self.gate(self.norm(self.drop(values)), flag))  # type: ignore[no-any-return]


class Gate(nn.Module):
    def forward(self, values: Tensor, flag: Any) -> Tensor:
        return values + torch.zeros(()) / torch.tensor(0.0 if flag else 1.0)


class Counter(Net):
    """Its forward depends on an integer buffer that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))

    def forward(self, values: Tensor, flag: Any) -> Tensor:
        self.count += 1
        return super().forward(values * (1 + self.count[0]), flag)


class Pair(NamedTuple):
    x: Tensor
    flag: bool


@dataclass
class Record:
    x: Tensor
    flag: bool


class Custom:
    def __init__(self, x: Tensor, flag: bool) -> None:
        self.x, self.flag = x, flag


def build(kind: type[nn.Module] = Net, **options: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return kind(**options)


def plain_step(model: Any, batch: Any) -> Tensor:
    x, flag = (batch["in"]["x"], batch["flag"]) if isinstance(batch, dict) else (batch[0], batch[1])
    x = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
    return model(x, flag).square().mean()  # type: ignore[no-any-return]  # the guard returns Any


def attribute_step(model: Any, batch: Any) -> Tensor:
    return model(batch.x, batch.flag).square().mean()  # type: ignore[no-any-return]


def in_place_step(model: Any, batch: Any) -> Tensor:
    batch["in"]["x"].mul_(2.0)
    return plain_step(model, batch)


def named_step(model: Any, batch: Any) -> dict[str, Tensor]:
    return {"ce": plain_step(model, batch)}


def other_random_step(model: Any, batch: Any) -> Tensor:
    random.random()
    return plain_step(model, batch)


def longer_step(model: Any, batch: Any) -> Tensor:
    loss = plain_step(model, batch)
    model.b(batch["in"]["x"])
    return loss


def recipe() -> Recipe:
    return Recipe(build(), plain_step)


def attribute_recipe() -> Recipe:
    return Recipe(build(), attribute_step)


def typed_recipe() -> Recipe:
    types = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in (Record, Custom)}
    return Recipe(build(), attribute_step, batch_types=types)


def in_place_recipe() -> Recipe:
    return Recipe(build(), in_place_step)


def named_recipe() -> Recipe:
    return Recipe(build(), named_step)


def counter_recipe() -> Recipe:
    return Recipe(build(Counter), plain_step)


def other_random_recipe() -> Recipe:
    return Recipe(build(), other_random_step)


def longer_recipe() -> Recipe:
    return Recipe(build(), longer_step)


class Carrying(Net):
    """Is bad once the loop's state, which no dump holds, says so."""

    state = 1.0

    def forward(self, values: Tensor, flag: Any) -> Tensor:
        return super().forward(values * Carrying.state, False)


def carrying_recipe() -> Recipe:
    Carrying.state = 1.0
    return Recipe(build(Carrying), plain_step)


LOOP = {"scale": 1.0, "gradient": 1.0}


def counting_step(model: Any, batch: Any) -> Tensor:
    return plain_step(model, {**batch, "flag": False}) / LOOP["scale"]


def counting_recipe() -> Recipe:
    LOOP.update(scale=1.0, gradient=1.0)
    return Recipe(build(), counting_step)


class Scaled(torch.autograd.Function):
    """Its backward depends on what the loop has counted."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / LOOP["gradient"]


def backward_step(model: Any, batch: Any) -> Tensor:
    loss: Tensor = Scaled.apply(plain_step(model, {**batch, "flag": False}))
    return loss


def backward_recipe() -> Recipe:
    LOOP.update(scale=1.0, gradient=1.0)
    return Recipe(build(), backward_step)


def wide_recipe() -> Recipe:
    return Recipe(build(width=WIDTH + 1), plain_step)


def no_recipe() -> int:
    return 3


def as_dict(x: Tensor, flag: bool) -> dict[Any, Any]:
    nested = {"x": x, "none": None, "text": "é", "whole": 3, "bytes": b"ab"}
    return {"in": nested, "flag": flag, "list": [1, (2.5, math.nan)], 5: torch.arange(3)}


def fault(
    directory: Path,
    *,
    name: str = "recipe",
    batch_of: Callable[[Tensor, bool], Any] = as_dict,
    step: Callable[[Any, Any], Any] = plain_step,
    model: nn.Module | None = None,
    watch: str = "loss",
    accumulation: int = 1,
    register: dict[str, Any] | None = None,
    before_update: Callable[[int], object] = bool,
    after_update: Callable[[], object] = bool,
    **options: Any,
) -> str:
    """Trains into a fault; the path of its dump."""
    model = model or build()
    rest = [*model.norm.parameters(), *model.b.parameters()]  # type: ignore[union-attr, operator]  # modules of Net
    optimizers = [
        torch.optim.AdamW(model.a.parameters(), lr=0.01, amsgrad=True),  # type: ignore[operator, union-attr]
        torch.optim.SGD([{"params": rest[:2], "lr": 0.1}, {"params": rest[2:], "lr": 0.2}], lr=0.1, momentum=0.9),
    ]
    guard = NanGuard(
        model, optimizers, dump_dir=str(directory), replay=f"{__name__}:{name}", **{"layers": "every", **options}
    )
    guard.register(**(register or {}))
    items = [batch_of(torch.randn(4, WIDTH), index == FAULT_AT) for index in range(6)]
    with contextlib.closing(guard):
        try:
            for index, batch in enumerate(guard.steps(items)):
                losses = step(guard, batch)
                total = sum(losses.values()) if isinstance(losses, dict) else losses
                if watch:
                    guard.watch(**{watch: total})
                total.backward()
                if (index + 1) % accumulation == 0:
                    before_update(index)
                    for optimizer in optimizers:
                        optimizer.step()
                    model.zero_grad()
                    after_update()
        except NonFiniteError as error:
            return str(error.report.dump_path)
    raise AssertionError("no fault")


@dataclass(frozen=True)
class Said:
    code: int
    outcome: dict[str, Any]
    text: str


def replayed(dump: str, capsys: pytest.CaptureFixture[str], *options: str) -> Said:
    capsys.readouterr()
    threads = torch.get_num_threads()
    code = main(["replay", dump, "--json", *options])
    torch.set_num_threads(threads)
    output = capsys.readouterr()
    outcome = json.loads(output.out) if output.out.strip() else {}
    return Said(code, outcome, output.out + output.err)


# -- the same


@pytest.mark.parametrize(
    ("batch_of", "options"),
    [
        (as_dict, {}),
        (lambda x, flag: (x, flag), {}),
        (Pair, {}),
        (lambda x, flag: {"in": {"x": x.numpy()}, "flag": np.bool_(flag)}, {}),
        (as_dict, {"accumulation": 3}),
        (as_dict, {"keep_previous": True, "accumulation": 2}),
    ],
    ids=["dict", "tuple", "namedtuple", "numpy", "accumulation", "keep_previous"],
)
def test_the_same_step(batch_of: Any, options: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = replayed(fault(tmp_path, batch_of=batch_of, **options), capsys)
    assert (said.code, said.outcome["outcome"]) == (0, "same"), said.text
    assert said.outcome["replayed"]["layer"] == "gate"


@pytest.mark.parametrize("batch_of", [Record, Custom])
def test_custom_batches_by_the_registry(batch_of: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = fault(tmp_path, batch_of=batch_of, step=attribute_step, name="typed_recipe")
    assert replayed(dump, capsys).code == 0


@pytest.mark.parametrize("batch_of", [Record, Custom])
def test_a_batch_that_cannot_be_rebuilt_is_one_clear_line(
    batch_of: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump = fault(tmp_path, batch_of=batch_of, step=attribute_step, name="attribute_recipe")
    said = replayed(dump, capsys)
    assert said.code in {0, 2, 5}
    assert said.code == 0 or "batch_types" in said.text


@pytest.mark.parametrize(
    ("name", "step", "watch"), [("recipe", plain_step, "total"), ("named_recipe", named_step, "ce")]
)
def test_the_name_of_a_loss_does_not_matter(
    name: str, step: Any, watch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = replayed(fault(tmp_path, name=name, step=step, watch=watch), capsys)
    assert said.code == 0, said.text


def test_an_integer_buffer_is_that_of_before_the_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = replayed(fault(tmp_path, name="counter_recipe", model=build(Counter)), capsys)
    assert said.code == 0 or any("count" in note for note in said.outcome["notes"]), said.text


def test_a_batch_changed_in_place_is_the_same_only_from_a_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = replayed(fault(tmp_path / "reference", name="in_place_recipe", step=in_place_step), capsys)
    assert changed.code == 3
    assert "in place" in changed.text and "copy_batch" in changed.text
    copied = fault(tmp_path / "copy", name="in_place_recipe", step=in_place_step, copy_batch=True)
    assert replayed(copied, capsys).code == 0


# -- not the same


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("other_random_recipe", 3, "first different"),
        ("wide_recipe", 2, "shape"),
        ("no_recipe", 2, "Recipe"),
        ("missing", 2, "has no function 'missing'"),
    ],
)
def test_another_recipe(name: str, code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = replayed(fault(tmp_path), capsys, "--recipe", f"{__name__}:{name}")
    assert said.code == code
    assert words in said.text


def test_a_step_that_runs_more_than_was_recorded_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = replayed(fault(tmp_path), capsys, "--recipe", f"{__name__}:longer_recipe")
    assert said.code == 3 or any("more" in note for note in said.outcome["notes"])


def test_wrong_usage_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = fault(tmp_path)
    assert replayed(dump, capsys, "--rank", "7").code == 2
    assert replayed(dump, capsys, "--device", "banana").code == 2
    assert replayed(str(tmp_path / "nothing"), capsys).code == 2


def test_a_registered_module_is_no_part_of_a_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was looked at, so hardware is not to be suspected."""
    model = build()
    ema = copy.deepcopy(model)

    def spoil(index: int) -> None:
        if index == 1:
            ema.a.weight.data[0, 0] = math.nan  # type: ignore[union-attr, index, operator]  # a parameter

    said = replayed(fault(tmp_path, model=model, register={"ema": ema}, before_update=spoil), capsys)
    assert said.outcome["recorded"]["slot"] == "ema.a.weight"
    assert said.code == 5
    assert "hardware" not in said.text


def test_sites_that_differ_while_every_bit_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The registered module is bad and so is the forward: whatever is said, it is said in words."""
    model = build()
    ema = copy.deepcopy(model)

    def spoil(index: int) -> None:
        if index == FAULT_AT:
            ema.a.weight.data[0, 0] = math.nan  # type: ignore[union-attr, index, operator]

    said = replayed(fault(tmp_path, model=model, register={"ema": ema}, before_update=spoil), capsys)
    assert said.code in {3, 5}
    assert said.outcome["reason"]


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_an_update_is_run_again_by_the_recipes_optimizer(has_optimizer: bool) -> None:
    origin = Site(0, 2, None, Phase.OPTIMIZER, "stem", None, "stem.weight", "nan")
    recipe = Recipe(nn.Linear(1, 1), lambda model, batch: model(batch), torch.optim.SGD if has_optimizer else None)
    needed = what_needs_optimizer(SimpleNamespace(report=SimpleNamespace(origin=origin)), recipe)
    assert needed is None if has_optimizer else "give Recipe(model=..., step=..., optimizer=" in str(needed)


@pytest.mark.parametrize("layers", ["none", "blocks", "every"])
def test_under_a_scaler_the_outputs_of_the_model_compare_whatever_was_watched(
    layers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump = fault(tmp_path, layers=layers, scaler=torch.amp.GradScaler("cpu", init_scale=2.0))
    said = replayed(dump, capsys)
    assert (said.code, said.outcome["outcome"]) == (0, "same"), said.text
    with np.load(Path(dump) / "rank-00000" / "history.npz", allow_pickle=False) as history:
        assert any("root output" in label for label in history["fault.labels"].tolist())


# -- nothing differs, or it is said where ------------------------------------------------------------------------------


def test_a_loss_that_training_did_not_watch_is_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = replayed(fault(tmp_path, watch="", layers="none"), capsys)
    assert (said.code, said.outcome["reason"].partition(";")[0]) == (0, "the same site and the same bits"), said.text


def _for_another_loss(model: Any) -> None:
    """A critic that is called for the loss of what it judges: no step of its own."""
    model.requires_grad_(False)
    model.eval()(torch.zeros(4, WIDTH, requires_grad=True), False).sum().backward()
    model.train().requires_grad_(True)


def test_a_call_of_the_model_for_another_loss_is_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build()
    path = fault(tmp_path, model=model, layers="none", after_update=lambda: _for_another_loss(model))
    said = replayed(path, capsys)
    assert said.code == 0, said.text
    assert any("is a call of the model without a watched loss" in note for note in said.outcome["notes"])


def _replaced(guard: Any, batch: Any) -> Tensor:
    loss = plain_step(guard, batch)
    guard.watch(loss=loss)
    return loss if loss.isfinite() else torch.stack([p.sum() for p in guard.parameters()]).sum() * 0


def _zeroed(guard: Any, batch: Any) -> Tensor:
    loss = plain_step(guard, batch)
    guard.watch(loss=loss)
    loss.data.nan_to_num_()
    return loss


def _twice(guard: Any, batch: Any) -> Tensor:
    loss = plain_step(guard, batch)
    guard.watch(half=loss)
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]  # torch's own
    return loss


@pytest.mark.parametrize(
    ("step", "note"),
    [
        (_replaced, "the loop replaced the loss of micro-batch 0 before the backward"),
        (_zeroed, "loss of micro-batch 0 was written after it was watched"),
        (_twice, "training took another number of backward passes than the step"),
    ],
)
def test_what_the_loop_made_of_the_loss_is_no_difference(
    step: Callable[[Any, Any], Any], note: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = fault(tmp_path, step=step, watch="", layers="none")
    said = replayed(path, capsys)
    assert (said.code, said.outcome["outcome"]) == (0, "same"), said.text
    assert note in " ".join(said.outcome["notes"])
    report = open_dump([path]).report
    assert report.origin is not None and report.second_look is not None
    assert (report.origin.phase, report.origin.layer, report.second_look.outcome) == (Phase.FORWARD, "gate", "same")


@pytest.mark.parametrize(
    ("name", "kind", "step", "state", "words"),
    [
        ("carrying_recipe", Carrying, plain_step, {}, "model or loss took in what this run does not give them"),
        ("counting_recipe", Net, counting_step, {"scale": 0.0}, "the runs part at loss of micro-batch 0"),
        ("backward_recipe", Net, backward_step, {"gradient": 0.0}, "the losses are the same, so a hook, or code in or"),
    ],
)
def test_what_is_not_reproduced_is_told_by_where_the_runs_part(
    name: str,
    kind: type[nn.Module],
    step: Callable[[Any, Any], Any],
    state: dict[str, float],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def spoil(index: int) -> None:
        LOOP.update(state if index == FAULT_AT - 1 else {})
        Carrying.state = math.nan if index == FAULT_AT - 1 and not state else 1.0

    LOOP.update(scale=1.0, gradient=1.0)
    path = fault(tmp_path, name=name, model=build(kind), step=step, before_update=spoil, layers="none")
    said = replayed(path, capsys)
    assert said.code == 4, said.text
    assert words in said.outcome["reason"]
    assert "hardware" not in said.text


def test_a_batch_that_was_overwritten_is_another_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    buffer = torch.zeros(4, WIDTH)
    numbers = iter(range(10))

    def refilled(x: Tensor, flag: bool) -> dict[Any, Any]:
        return as_dict(buffer, False)

    def step(model: Any, batch: Any) -> Tensor:
        buffer.fill_(math.nan if next(numbers) == FAULT_AT else 1.0)
        return plain_step(model, batch)

    path = fault(tmp_path, batch_of=refilled, step=step, before_update=lambda _: buffer.fill_(1.0), layers="none")
    said = replayed(path, capsys)
    assert said.code == 4, said.text
    assert 'batch["in"]["x"] was overwritten after training had used it' in said.outcome["reason"]
    assert said.outcome["reason"].endswith("train with copy_batch=True to keep what training used")
    assert "hardware" not in said.text


@pytest.mark.parametrize(
    ("num_devices", "num_processes", "is_named", "backend"),
    [(4, 4, False, "nccl"), (1, 2, False, "gloo"), (4, 2, True, "gloo"), (4, 1, True, "nccl")],
    ids=["one each", "two on one", "one named for both", "alone on a named one"],
)
def test_processes_that_share_a_device_communicate_over_gloo(
    num_devices: int, num_processes: int, is_named: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_torchrun(monkeypatch, 0, num_processes)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: num_devices)
    assert launcher.backend_for(torch.device("cuda", 0), is_named) == backend
    assert launcher.backend_for(torch.device("cpu"), False) == "gloo"


def test_processes_share_the_devices_of_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking how many there are is what this machine cannot answer: it has no accelerator."""
    under_torchrun(monkeypatch, 3, 4)
    assert launcher.own_device() == torch.device("cpu")
    monkeypatch.setattr(launcher, "accelerator", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert launcher.own_device() == torch.device("cuda", 1)
