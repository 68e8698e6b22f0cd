"""Group H: compiled code, recomputation, accumulation, several calls of one module."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.diagnosis.diagnose import Diagnosis
from ddp_nanguard.replay.outcome import EAGER_NOW
from tests import diagnosing
from tests.cases.harness import Case, Launch, batch_of, check_reason, each, flagged, train_alone
from tests.cases.parts import INF, WIDTH, ValidatedArgs, mlp, of_batch, spoilt_gradient
from tests.counting import counting

THIS = sys.modules[__name__]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


def step(model: Any, batch: dict[str, Any]) -> Tensor:
    return model(batch["x"]).square().mean()  # type: ignore[no-any-return]  # <step>


class Root(nn.Module):
    def forward(self, values: Tensor, g: Tensor) -> Tensor:
        return values + (values * g).abs().sqrt()  # <H03>


class Recomputed(ValidatedArgs):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(lambda h, batch: h)
        self.root, self.reentrant = Root(), reentrant

    def forward(self, batch: dict[str, Any]) -> Tensor:
        h = checkpoint(self.root, self.a(batch["x"]), batch["g"], use_reentrant=self.reentrant)
        return self.b(h)  # type: ignore[no-any-return]


class Twice(ValidatedArgs):
    """One encoder for two inputs, of which the second brings a zero; registered late, run early."""

    def __init__(self) -> None:
        super().__init__(lambda h, batch: h)
        self.late = nn.Linear(WIDTH, WIDTH)
        self.encoder = Encoder()
        self.early = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        h = self.early(self.a(batch["x"]))
        first = self.encoder(h, torch.ones(()))
        second = self.encoder(h, batch["g"])
        return self.b(self.late(first + second))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        return values / divisor  # <H08>


def compiled_first() -> nn.Module:
    """Compiled and called before the guard is there: hooks that come now never run."""
    model = ValidatedArgs(over_zero)
    model.compile(backend="eager")
    model(batch_of(g=torch.tensor(1.0))(0, 0))
    return model


def over_zero(h: Tensor, batch: dict[str, Any]) -> Tensor:
    return h / batch["g"]  # <H01>


H03 = "https://github.com/pytorch/pytorch/issues/81296"
SQRT = {"rank": 1, "step": 1, "phase": "backward", "layer": "root", "call": 1, "kind": "nan"}
BAD_X = {"rank": 1, "phase": "input", "layer": None, "slot": '["x"]', "kind": "nan"}
CASES = {
    "H03 recomputed": Case(
        H03, batch_of(g=flagged(1)), SQRT, ("aten.div.Tensor", "H03", "edge of domain"), lambda: Recomputed(False),
        of_batch,
    ),
    "H03 recomputed, reentrant": Case(
        H03, batch_of(g=flagged(1)), SQRT, ("aten.div.Tensor", "H03", "edge of domain"), lambda: Recomputed(True),
        of_batch,
    ),
    "H04 a skipped window leaves no gradients": Case(
        "https://github.com/espnet/espnet/pull/3283", batch_of(1, at=2), None, None, mlp, step, batches=10,
        accumulation=2, options={"on_fault": "skip"},
    ),
    "H04 micro-batch 0 of 2": Case(
        "https://github.com/NVIDIA-NeMo/Speech/issues/11272", batch_of(1, at=2), {**BAD_X, "step": 1, "micro_batch": 0},
        ("aten.addmm.default", "step", "bad input"), mlp, step, batches=10, accumulation=2,
    ),
    "H05 micro-batch 5 of 8": Case(
        "https://github.com/pytorch/torchtitan/pull/3873", batch_of(1, at=13), {**BAD_X, "step": 1, "micro_batch": 5},
        ("aten.addmm.default", "step", "bad input"), mlp, step, batches=24, accumulation=8,
    ),
    "H08 the second call": Case(
        "https://github.com/huggingface/sentence-transformers/pull/4033", batch_of(g=flagged(1)),
        {"rank": 1, "step": 1, "phase": "forward", "layer": "encoder", "call": 2},
        ("aten.div.Tensor", "H08", "division by zero"), Twice, of_batch,
    ),
}  # fmt: skip


@each(CASES)
def test_case(name: str, ended: Launch) -> None:
    ended.check(name)


def test_H01_hooks_that_come_after_the_compiled_call(tmp_path: Path) -> None:
    """https://github.com/pytorch/pytorch/issues/117758: an eager run names what compiled code hides, and says so."""
    model = compiled_first()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=None)
    batches = [batch_of(g=flagged(0))(0, index) for index in range(3)]
    with pytest.raises(NonFiniteError) as caught:
        train_alone(guard, optimizer, of_batch, batches)
    guard.close()
    report = caught.value.report
    assert report.step == 1 and report.origin is not None
    assert (report.origin.phase, report.origin.layer, report.origin.input_kind) == ("forward", "", None)
    look = report.second_look
    assert look is not None and look.outcome == "same" and report.unchecked == ()
    assert look.text.endswith("compiled; the place is that of an eager run, which is not the compiled step")


def _miscompiled(directory: Path, is_in_replay: bool) -> Diagnosis:
    """A backend that makes another result than the code says, in training and perhaps in the replay."""

    def miscompiled(graph: Any, example: Any) -> Any:
        return lambda *args: [out * INF if out.is_floating_point() else out for out in graph.forward(*args)]

    builds = itertools.chain([True], itertools.repeat(is_in_replay))

    def build() -> nn.Module:
        model = diagnosing.Body(torch.tanh)
        if next(builds):
            model.compile(backend=miscompiled)
        return model

    job = diagnosing.Training(build, diagnosing.square, [diagnosing.batch()])
    return diagnosing.diagnosed(job, directory)


@pytest.mark.parametrize("is_in_replay", [True, False])
def test_H02_finite_in_eager_is_said(is_in_replay: bool, tmp_path: Path) -> None:
    """https://github.com/huggingface/lerobot/pull/4179, https://github.com/pytorch/pytorch/issues/130000."""
    found = _miscompiled(tmp_path, is_in_replay)
    assert found.outcome is not None and found.traced is not None and found.traced.first_nonfinite_op is None
    assert str(found.outcome.outcome) == ("same" if is_in_replay else "not_reproduced")
    assert (EAGER_NOW in found.outcome.differs) is not is_in_replay
    assert found.reason.kind == "not reproduced"
    assert "finite when it runs eagerly" in found.reason.sentence
    assert [line.split(":")[0] for line in found.reason.evidence] == ["compiled", "eager"]


def test_H04_gradients_under_accumulation(tmp_path: Path) -> None:
    """https://github.com/espnet/espnet/pull/3283: the window after a skipped one starts from nothing."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=None, on_fault="skip")
    for index in range(2):
        step(guard, batch_of(0, at=0)(0, index)).backward()
    optimizer.step()
    assert all(p.grad is None or bool((p.grad == 0).all()) for p in model.parameters())
    guard.close()


def _reads(guarded: bool) -> int:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NanGuard(model, optimizer, dump_dir=None) if guarded else None
    for _ in range(2):  # the first step also looks at optimizer state
        with counting() as counts:
            for index in range(8):
                step(guard or model, batch_of()(0, index)).backward()
            optimizer.step()
            optimizer.zero_grad()
    if guard is not None:
        guard.close()
    return sum(counts.host_reads.values())


def test_H05_one_read_for_eight_micro_batches() -> None:
    """https://github.com/pytorch/torchtitan/pull/3873."""
    assert _reads(True) - _reads(False) == 1


class Once(ValidatedArgs):
    """Bad only when it runs again in the backward."""

    runs = 0

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.b(checkpoint(self.part, self.a(batch["x"]), use_reentrant=False))  # type: ignore[no-any-return]

    def part(self, values: Tensor) -> Tensor:
        Once.runs += 1
        return (values * (INF if Once.runs % 2 == 0 else 1.0)).exp()  # <H03 again>


def test_H03_bad_only_when_it_is_recomputed(tmp_path: Path) -> None:
    """https://github.com/pytorch/pytorch/issues/81296: no forward is blamed that was finite."""
    Once.runs = 0
    job = diagnosing.Training(lambda: Once(lambda h, batch: h), of_batch, [diagnosing.batch(g=torch.tensor(1.0))])
    session = diagnosing.session_of(job, tmp_path)
    origin = session.dump.report.origin
    assert origin is not None and str(origin.phase) == "backward"


def test_H08_execution_order_decides(tmp_path: Path) -> None:
    """https://github.com/pytorch/pytorch/issues/81296: registered late, run early."""
    job = diagnosing.Training(Twice, of_batch, [diagnosing.batch(g=torch.tensor(0.0))])
    check_reason(THIS, ("aten.div.Tensor", "H08", "division by zero"), diagnosing.diagnosed(job, tmp_path))


def test_H04_local_gradients_under_no_sync(tmp_path: Path) -> None:
    """https://github.com/espnet/espnet/pull/3283: the bad gradient of the first of two micro-batches is named."""
    job = diagnosing.Training(lambda: ValidatedArgs(lambda h, batch: spoilt_gradient(h, batch["g"])), of_batch, [])
    job.batches = [diagnosing.batch(g=torch.tensor(g)) for g in (0.0, 1.0)]
    job.accumulation = 2
    origin = diagnosing.session_of(job, tmp_path).dump.report.origin
    assert origin is not None and (str(origin.phase), origin.micro_batch) == ("backward", 0)
