"""The numbers that a logger gets are those of the step, and each adapter writes them where its logger keeps them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_nanguard import NanGuard
from ddp_nanguard.hooks.callbacks import Callback
from ddp_nanguard.loggers import jsonl, mlflow, tensorboard, wandb

INF, NAN = float("inf"), float("nan")


def _train(
    losses: Callable[[nn.Module, int], Tensor | dict[str, Tensor]],
    *,
    steps: int = 3,
    scaler: Any = None,
    **options: Any,
) -> tuple[list[tuple[int, dict[str, float]]], list[float]]:
    """What was told, and the norm of the unscaled gradients of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), fused=options.get("verdict") == "deferred")
    told: list[tuple[int, dict[str, float]]] = []
    options = {"log_every": 1, "dump_dir": None, "look_again": False, **options}
    guard = NanGuard(
        model, optimizer, scaler=scaler, on_metrics=lambda step, numbers: told.append((step, numbers)), **options
    )
    norms = []
    for step in range(steps):
        loss = losses(guard, step)
        guard.watch(loss=loss)
        total = sum(loss.values()) if isinstance(loss, dict) else loss
        (total if scaler is None else scaler.scale(total)).backward()
        scale = 1.0 if scaler is None else scaler.get_scale()
        norms.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()) / scale)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    guard.close()
    return told, norms


def _squared(model: nn.Module, step: int) -> Tensor:
    return model(torch.full((2, 4), 1.0 + step)).square().sum()  # type: ignore[no-any-return]  # modules return Any


def _bad_in_1(model: nn.Module, step: int) -> Tensor:
    return _squared(model, step) / (0.0 if step == 1 else 1.0)


def test_losses_by_name_and_the_norm_of_the_gradients() -> None:
    def terms(model: nn.Module, step: int) -> dict[str, Tensor]:
        output = model(torch.ones(2, 4))
        return {"cls": output.sum() * 0 + 2.0 + step, "box": output.square().sum()}

    told, norms = _train(terms, log_every=2)
    assert [step for step, _ in told] == [0, 2]
    for step, numbers in told:
        assert numbers["nanguard/loss/loss.cls"] == 2.0 + step
        assert numbers["nanguard/grad_norm"] == pytest.approx(norms[step])
        assert {name for name in numbers if "absmax" in name or "headroom" in name} == set(), "no layer is watched"


def test_largest_values_of_layers_and_the_bits_that_are_left() -> None:
    def half(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return model(torch.ones(2, 4)).float().square().sum()  # type: ignore[no-any-return]  # modules return Any

    (_, numbers), *_ = _train(half, layers="every", steps=1)[0]
    for layer in "02":
        largest = numbers[f"nanguard/absmax/{layer}"]
        assert 0 < largest < 2
        assert numbers[f"nanguard/headroom/{layer}"] == pytest.approx(math.log2(65504 / largest))


def test_with_a_scaler_the_norm_is_that_of_unscaled_gradients_and_overflows_are_counted() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def overflows_once(model: nn.Module, step: int) -> Tensor:
        loss = _squared(model, step)
        return (
            loss + torch.sqrt((model.get_parameter("0.weight") * 0).sum()) if step == 1 else loss
        )  # its gradient is infinite

    told, norms = _train(overflows_once, scaler=scaler)
    assert [numbers["nanguard/overflows"] for _, numbers in told] == [0.0, 1.0, 1.0]
    assert [numbers["nanguard/scale"] for _, numbers in told] == [1024.0, 1024.0, 512.0]
    assert told[2][1]["nanguard/grad_norm"] == pytest.approx(norms[2])
    assert not math.isfinite(told[1][1]["nanguard/grad_norm"])


@pytest.mark.parametrize("verdict", ["sync", "deferred"])
def test_a_step_that_is_skipped_is_logged_as_it_was(verdict: str) -> None:
    told, _ = _train(_bad_in_1, on_fault="skip", verdict=verdict)
    assert [step for step, _ in told] == [0, 1, 2]
    assert told[1][1]["nanguard/loss/loss"] == INF
    assert [numbers["nanguard/skips"] for _, numbers in told] == [0.0, 1.0, 1.0]
    assert math.isfinite(told[2][1]["nanguard/loss/loss"])


def test_a_logger_that_is_never_called_is_refused_and_so_is_one_that_cannot_be() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match=r"^on_metrics is given, and option log_every=0 never calls it; give log_ev"):
        NanGuard(model, optimizer, on_metrics=print)
    with pytest.raises(ValueError, match=r"^on_event='print' cannot be called; give a function, or None$"):
        NanGuard(model, optimizer, on_event="print")  # type: ignore[arg-type]  # that is what is tested
    with pytest.raises(ValueError, match=r"^option log_every=-1 is out of range; give a number of at least 0$"):
        NanGuard(model, optimizer, log_every=-1)
    NanGuard(model, optimizer, on_metrics=print, log_every=5, enabled=False).close()


def test_an_interrupt_passes_through() -> None:
    def interrupted(step: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Callback("on_metrics", interrupted)(3)


NUMBERS = {"nanguard/absmax/(root)": 2.5, "nanguard/loss/loss[1]": INF, "nanguard/grad_norm": NAN}


def test_jsonl_appends_one_strict_line_per_step(tmp_path: Path) -> None:
    log = jsonl(tmp_path / "metrics.jsonl")
    log(3, NUMBERS)
    log(4, {"nanguard/skips": 0.0})

    def refused(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=refused) for line in lines] == [
        {"step": 3, "nanguard/absmax/(root)": 2.5, "nanguard/loss/loss[1]": "inf", "nanguard/grad_norm": "nan"},
        {"step": 4, "nanguard/skips": 0.0},
    ]


def test_tensorboard_holds_every_number_at_its_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:  # type: ignore[no-untyped-call]  # torch's has no types
        tensorboard(writer)(3, NUMBERS)
    (path,) = tmp_path.iterdir()
    values = [(event.step, each) for event in EventFileLoader(str(path)).Load() for each in event.summary.value]
    found = {each.tag: (step, each.tensor.float_val[0]) for step, each in values}
    assert found.keys() == NUMBERS.keys()
    assert {step for step, _ in found.values()} == {3}
    assert [str(found[name][1]) for name in NUMBERS] == ["2.5", "inf", "nan"]


class _Run:
    """Takes what a W&B run takes, and no more."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, Any], int | None]] = []

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.rows.append((data, step))


def test_wandb_gets_the_step_as_a_number_of_the_row_and_never_as_its_own_step() -> None:
    run = _Run()
    wandb(run)(3, {"nanguard/skips": 1.0})
    wandb(run, step_metric="train/global_step")(4, {"nanguard/skips": 2.0})
    assert run.rows == [
        ({"nanguard/skips": 1.0, "trainer/global_step": 3}, None),
        ({"nanguard/skips": 2.0, "train/global_step": 4}, None),
    ]


class _Mlflow:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log_metrics(
        self,
        metrics: dict[str, float],
        step: int | None = None,
        synchronous: bool | None = None,
        run_id: str | None = None,
    ) -> None:
        self.calls.append((metrics, step, run_id))


def test_mlflow_gets_names_that_it_accepts() -> None:
    module = _Mlflow()
    mlflow(module)(3, {"nanguard/absmax/(root)": 2.5, "nanguard/loss/loss[1]": 1.0})
    mlflow(module, run_id="r")(4, {"nanguard/absmax/blocks.0": 2.5})
    assert module.calls == [
        ({"nanguard/absmax/_root_": 2.5, "nanguard/loss/loss_1_": 1.0}, 3, None),
        ({"nanguard/absmax/blocks.0": 2.5}, 4, "r"),
    ]
