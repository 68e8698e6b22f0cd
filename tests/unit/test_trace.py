"""What the trace sees of a step: births, constants, lines, modules, rows and the way of a value."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_nanguard.board import Board, Region
from ddp_nanguard.cli import main
from ddp_nanguard.replay import experiments
from ddp_nanguard.replay.minimize import minimize, rows_of
from ddp_nanguard.replay.modules import ModuleStack
from ddp_nanguard.replay.trace import Trace
from tests.diagnosing import Job, diagnosed, marked, session_of, trained
from tests.unit.test_reasons import Body, batch, between, body, of_loss, square

THIS = sys.modules[__name__]


@contextlib.contextmanager
def traced(*named: tuple[str, nn.Module]) -> Iterator[Trace]:
    modules = ModuleStack(named)
    trace = Trace(modules)
    with modules, trace:
        modules.begin_micro_batch()
        yield trace


def categories(trace: Trace) -> list[tuple[str, str]]:
    return [(event.base, event.category) for event in trace.events]


# -- births and what is none
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mask",
    [
        lambda x: x.masked_fill(x > 0, -math.inf),
        lambda x: torch.where(x > 0, -math.inf, x),
        lambda x: torch.where(x > 0, torch.full_like(x, -math.inf), x),
        lambda x: x + torch.triu(torch.full((3, 3), -math.inf), 1),
        lambda x: x.index_fill(0, torch.tensor([1]), -math.inf),
        lambda x: x.clone().fill_(-math.inf),
    ],
    ids=["masked_fill", "where number", "where tensor", "triu", "index_fill", "fill_"],
)
def test_a_mask_is_no_birth(mask: Callable[[Tensor], Tensor]) -> None:
    with traced() as trace:
        mask(torch.ones(3, 3))
    assert trace.events
    assert "birth" not in {event.category for event in trace.events}


def test_a_clean_step_leaves_no_event() -> None:
    x = torch.randn(3, 3, requires_grad=True)
    with traced() as trace:
        x.masked_fill(x > 0, -1e30).softmax(-1).square().sum().backward()  # type: ignore[no-untyped-call]
    assert not trace.events and trace.num_operators > 4


def test_a_birth_out_of_a_mask_begins_there() -> None:
    with traced() as trace:
        loss = torch.zeros(2, 3).masked_fill(torch.tensor(True), -math.inf).softmax(-1).sum()
    birth = trace.birth_of(trace.events[-1])
    assert birth.base == "_softmax" and trace.memory.writer(loss) is trace.events[-1]


def test_a_birth_out_of_an_infinity_begins_with_the_infinity() -> None:
    with traced() as trace:
        large = torch.full((2,), 3e38) * 10
        (large - large).sum()
    assert trace.birth_of(trace.events[-1]).base == "mul"
    assert categories(trace) == [("mul", "birth"), ("sub", "birth"), ("sum", "spread")]


def test_uninitialised_memory_is_no_event() -> None:
    with traced() as trace:
        room = torch.empty(4)
        room.copy_(torch.ones(4))
        torch.empty_like(room)
    assert not trace.events


def test_in_place_operators_are_judged_by_what_they_were_given() -> None:
    x = torch.ones(4)
    with traced() as trace:
        x.div_(0.0)
        x.mul_(2.0)
    assert categories(trace) == [("div", "birth"), ("mul", "spread")]
    assert trace.events[0].inputs[0].maximum == 1.0
    assert trace.events[1].roots == {trace.events[0].order}


def test_a_view_shares_the_history_of_its_base() -> None:
    with traced() as trace:
        base = torch.zeros(4, 4)
        base[1].log_()
        (base.t()[:, 1] * 2).sum()
    assert {trace.birth_of(event).base for event in trace.events} == {"log"}


def test_memory_that_is_overwritten_has_a_new_history() -> None:
    with traced() as trace:
        x = torch.zeros(2).log()
        x.copy_(torch.tensor([1.0, 2.0]))
        y = x / 0
    assert trace.birth_of(trace.events[-1]).base == "div" and trace.memory.writer(y) is trace.events[-1]


def test_a_number_that_the_host_has_read_is_followed() -> None:
    with traced() as trace:
        scale = (torch.zeros(1) / 0).item()
        torch.ones(3) * scale
    assert trace.birth_of(trace.events[-1]).base == "div"


def test_our_own_probes_are_not_traced() -> None:
    board, bad = Board(4), torch.full((3,), math.nan)
    with traced() as trace:
        board.reduce(Region.EVIDENCE, bad, None)
    assert trace.num_operators == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_kinds_of_tensors(dtype: torch.dtype) -> None:
    with traced() as trace:
        torch.zeros(3, dtype=dtype) / torch.zeros(3, dtype=dtype)
    (event,) = trace.events
    assert (event.kind, event.category, event.num_hit) == ("nan", "birth", 3)


def test_sparse_gradients() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    with traced(("table", table)) as trace:
        (table(torch.tensor([1, 3])) * math.inf).sum().backward()
    assert trace.events and trace.events[-1].phase == "backward"


def test_several_outputs_and_empty_ones() -> None:
    with traced() as trace:
        torch.zeros(0, 3).log()
        torch.var_mean(torch.tensor([3e38, -3e38]), 0)
    assert [event.operator for event in trace.events] == ["aten.var_mean.correction"]


# -- lines, modules, phases
# ----------------------------------------------------------------------------------------------------


class Inner(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values + (
            values.abs()
            * 0
        ).sqrt()  # fmt: skip  # <statement over lines>


class Outer(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or Inner()

    def forward(self, values: Tensor, reentrant: bool | None = None) -> Tensor:
        if reentrant is None:
            return self.inner(values)  # type: ignore[no-any-return]
        return checkpoint(self.inner, values, use_reentrant=reentrant)  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_backward_is_mapped_to_the_forward_line(reentrant: bool | None) -> None:
    outer = Outer()
    values = torch.ones(4, 2, requires_grad=True)
    with traced(*outer.named_modules()) as trace:
        outer(values * 1, reentrant).sum().backward()
    birth = trace.birth_of(trace.events[-1])
    assert (birth.phase, birth.node, birth.layer, birth.call) == ("backward", "SqrtBackward0", "inner", 1)
    assert birth.line is not None and birth.line.function == "Inner.forward"
    assert birth.line.expression == "( values.abs() * 0 ).sqrt()"


class Forgetful(nn.Module):
    """Divides by zero only when it runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, values: Tensor) -> Tensor:
        self.runs += 1
        return (values / (0.0 if self.runs > 1 else 1.0)).square()  # <recomputation>


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_value_that_is_bad_only_in_the_recomputation(reentrant: bool) -> None:
    model = Outer(Forgetful())
    values = torch.ones(4, 2, requires_grad=True)
    with traced(*model.named_modules()) as trace:
        model(values * 1, reentrant).sum().backward()
    birth = trace.birth_of(trace.events[-1])
    assert birth.phase == "recomputation" and birth.line is not None
    assert (birth.layer, birth.call, birth.line.number) == ("inner", 1, marked(THIS, "recomputation"))


def test_hit_rows_and_the_way_to_the_loss(tmp_path: Path) -> None:
    def spoiled(h: Tensor) -> Tensor:
        keep = torch.ones(6, 1)
        keep[4] = 0
        return h / keep

    found = diagnosed(between(spoiled), tmp_path).traced
    assert found is not None and found.birth is not None
    assert (found.birth.rows, found.birth.num_rows, found.birth.num_hit) == ((4,), 1, 4)
    assert found.path[0] is found.birth and found.target == "loss is NaN"
    assert [event.base for event in found.path] == ["div", "addmm", "pow", "mean"]


def test_an_earlier_fault_that_does_not_reach_the_loss_is_not_the_birth(tmp_path: Path) -> None:
    def wasteful(h: Tensor) -> Tensor:
        (h.detach() * 0).log()  # not used
        return h / (h.detach() * 0)  # <the one that matters>

    found = diagnosed(between(wasteful), tmp_path).traced
    assert found is not None and found.birth is not None and found.birth.line is not None
    assert found.birth.line.number == marked(THIS, "the one that matters")


def test_numpy_batches_are_named(tmp_path: Path) -> None:
    def step(model: Any, items: Any) -> Tensor:
        return model(torch.from_numpy(items["x"])).mean()  # type: ignore[no-any-return]

    values = np.ones((6, 4), dtype=np.float32)
    values[2, 3] = np.nan
    found = diagnosed(Job(body(torch.tanh), step, [{"x": values}]), tmp_path)
    assert found.reason.sentence == 'batch["x"] holds NaN, sample 2'


def test_a_mask_of_the_batch_is_not_blamed(tmp_path: Path) -> None:
    mask = torch.zeros(6, 3)
    mask[1] = -math.inf
    found = diagnosed(of_loss(lambda h, items: (h + items["m"]).softmax(-1).mean(), m=mask), tmp_path)
    assert found.reason.kind == "masked row"
    assert found.reason.evidence[0] == "rows without any score: 1"


# -- experiments
# ----------------------------------------------------------------------------------------------------------------


def half(h: Tensor) -> Tensor:
    return h * (h.abs().detach() + 1e30).square()


def test_a_wider_dtype_stays_finite(tmp_path: Path) -> None:
    session = session_of(between(half), tmp_path)
    assert experiments.in_dtype(session, "float32").failed is True
    assert experiments.in_dtype(session, "float64").text.startswith("the step is finite")


_runs: list[int] = []


def every_other(h: Tensor) -> Tensor:
    _runs.append(1)
    return h / (h.detach() * 0) if len(_runs) % 2 else h


def test_repetition_counts(tmp_path: Path) -> None:
    _runs.clear()
    session = session_of(between(every_other), tmp_path)
    _runs.clear()
    found = experiments.repeat(session, 4)
    assert found.text.startswith("2 of 4 runs non-finite: 2 times forward · code of (root)")


class Unwritten(Body):
    def forward(self, values: Tensor) -> Tensor:
        room = torch.empty(6, 4)
        room[:5] = 0
        return self.b(self.a(values) + room)  # type: ignore[no-any-return]


def test_poisoned_memory_shows_what_was_not_written(tmp_path: Path) -> None:
    def dirty() -> nn.Module:
        return Unwritten(torch.tanh)

    step = lambda model, items: square(model, items) / items["d"]  # noqa: E731
    session = session_of(Job(dirty, step, [batch(d=torch.zeros(()))]), tmp_path)
    before = torch.are_deterministic_algorithms_enabled()
    found = experiments.poison_memory(session)
    assert "code of (root)" in found.text and torch.are_deterministic_algorithms_enabled() is before
    assert experiments.deterministic(session).text.startswith("still fails: loss")


def test_minimize_finds_the_samples(tmp_path: Path) -> None:
    def pair(h: Tensor, items: dict[str, Any]) -> Tensor:
        first, second = (items["i"] == 2).any(), (items["i"] == 5).any()
        return h.square().mean() / (0.0 if first and second else 1.0)

    job = of_loss(pair, i=torch.arange(6))
    job.batches = [batch(i=torch.arange(6) + 10), batch(i=torch.arange(6), ids=list("abcdef"))]
    job.accumulation = 2
    session = session_of(job, tmp_path)
    told: list[tuple[int, int]] = []
    found = minimize(session, lambda runs, samples: told.append((runs, samples)))
    assert found.text == "2 of 12 samples still fail: micro-batch 1: samples 2, 5"
    assert told[-1][1] == 2
    bounded = minimize(session, lambda runs, samples: None, max_runs=3)
    assert "stopped after 3 runs" in bounded.text


def test_rows_of_a_batch() -> None:
    items = {
        "x": torch.arange(6),
        "ids": list("abcdef"),
        "n": 3,
        "pair": (torch.zeros(6, 2), np.arange(6)),
        "w": [1, 2],
    }
    cut = rows_of(items, [1, 4], 6)
    assert cut["x"].tolist() == [1, 4] and cut["ids"] == ["b", "e"] and (cut["n"], cut["w"]) == (3, [1, 2])
    assert cut["pair"][0].shape == (2, 2) and cut["pair"][1].tolist() == [1, 4]


def test_pdb_stops_in_the_users_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[Any] = []

    class Shell:
        def reset(self) -> None:
            pass

        def interaction(self, frame: Any, _: Any) -> None:
            frames.append((frame.f_code.co_name, sorted(frame.f_locals)))

    monkeypatch.setattr(experiments.pdb, "Pdb", Shell)
    assert main(["replay", trained(between(half), tmp_path), "--pdb", "--device", "cpu"]) == 0
    assert frames == [("half", ["h"])]


# -- the command line
# --------------------------------------------------------------------------------------------------------


def test_the_plain_replay_is_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = trained(between(half), tmp_path)
    capsys.readouterr()
    assert main(["replay", dump, "--trace", "--repeat", "2"]) == 0
    text = capsys.readouterr().out
    parts = [
        "replay of rank 0: same",
        "trace of ",
        ": half",
        "^^^",
        "  operator",
        "reason: overflow",
        "--repeat 2: 2 of 2",
    ]
    places = [text.find(part.replace(": half", " in half")) for part in parts]
    assert places == sorted(places) and min(places) >= 0, text


def test_everything_is_in_the_json_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = trained(between(half), tmp_path)
    capsys.readouterr()
    main(["replay", dump, "--trace", "--dtype", "float64", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["outcome"] == "same" and data["cause"]["kind"] == "overflow"
    assert data["trace"]["birth"]["lines"][0]["function"] == "half"
    assert data["experiments"]["--dtype float64"]["failed"] is False


def test_explain_without_a_recipe_says_what_it_rests_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = between(half, options={"replay": None})
    dump = trained(job, tmp_path)
    capsys.readouterr()
    assert main(["explain", dump]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0] == "no rule fits what is known"
    assert "the report and the history alone" in text
