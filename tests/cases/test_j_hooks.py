"""Group J: hooks, and the mechanics of looking at values."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.tensors import minmax as scan
from tests import diagnosing
from tests.cases.harness import Case, Launch, batch_of, each, flagged, train_alone
from tests.cases.parts import INF, NAN, WIDTH, ValidatedArgs, mlp, of_batch, spoilt_gradient
from tests.counting import counting

THIS = sys.modules[__name__]


def step(model: Any, batch: dict[str, Any]) -> Tensor:
    return model(batch["x"]).square().mean()  # type: ignore[no-any-return]  # <step>


class Gate(nn.Module):
    def forward(self, values: Tensor, g: Tensor) -> Tensor:
        return values / g  # <gate>


class Wrapped(ValidatedArgs):
    """A gate that a checkpoint wrapper renames."""

    def __init__(self) -> None:
        super().__init__(lambda h, batch: h)
        self.block = checkpoint_wrapper(Block())

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.b(self.block(self.a(batch["x"]), batch["g"]))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module_list = nn.Linear(WIDTH, WIDTH)  # "module" in a name is not a wrapper
        self.gate = Gate()

    def forward(self, values: Tensor, g: Tensor) -> Tensor:
        return self.gate(self.module_list(values), g)  # type: ignore[no-any-return]


def compiled_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(torch.compile(model, backend="eager"))


@dataclasses.dataclass
class Pair:
    values: Tensor
    name: str


class Odd(nn.Module):
    """Gives back what is no tensor, takes what has a name only, and spoils a value inside of a container."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, values: Tensor, g: Tensor) -> Any:
        h = self.inner(values)
        return {"pair": Pair(h / g, "h"), "n": (1, True, None, "text"), "i": torch.arange(3)}  # <J09>


class Containers(ValidatedArgs):
    def __init__(self) -> None:
        super().__init__(lambda h, batch: h)
        self.odd = Odd()

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.b(self.odd(values=self.a(batch["x"]), g=batch["g"])["pair"].values)  # type: ignore[no-any-return]


class InPlace(ValidatedArgs):
    """In-place activations after layers that are watched."""

    def __init__(self) -> None:
        super().__init__(lambda h, batch: h)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        h = self.relu(self.a(batch["x"]))
        return self.b(spoilt_gradient(h, batch["g"]))  # type: ignore[no-any-return]


def root_of_a_weight(model: Any, batch: dict[str, Any]) -> Tensor:
    return model(batch).mean()  # type: ignore[no-any-return]


class Weighted(nn.Module):
    """sqrt of a weight that is 0: the gradient is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, batch: dict[str, Any]) -> Tensor:
        shift = self.scale.sqrt() if batch["g"] == 0 else self.scale  # <J14>
        return self.net(batch["x"]) + shift  # type: ignore[no-any-return]


def repairing(model: Any, batch: dict[str, Any]) -> Tensor:
    """A logger that shows the running mean instead of a NaN; the backward takes the NaN."""
    loss = model(batch["x"]).mean() / batch["g"]  # <J15>
    SHOWN.append(float(loss.detach()) if loss.isfinite() else sum(SHOWN) / max(len(SHOWN), 1))
    return loss  # type: ignore[no-any-return]


SHOWN: list[float] = []
J01, J05 = "https://github.com/pytorch/pytorch/issues/61519", "https://github.com/pytorch/pytorch/issues/111648"
J09 = "https://github.com/pytorch/pytorch/issues/182156"
CASES = {
    "J01 in-place activations": Case(J01, batch_of(g=flagged(None)), None, None, InPlace, of_batch),
    "J01 in-place activations, a bad gradient": Case(
        J01, batch_of(g=flagged(1)), {"rank": 1, "step": 1, "phase": "backward", "layer": "", "inline_code":
        {"layer": "", "after": "b", "before": "relu"}}, None, InPlace, of_batch,
    ),
    "J05 a checkpoint wrapper": Case(
        J05, batch_of(g=flagged(1)), {"rank": 1, "step": 1, "phase": "forward", "layer": "block.gate", "call": 1},
        ("aten.div.Tensor", "gate", "division by zero"), Wrapped, of_batch,
    ),
    "J05 compiled, then DDP": Case(
        "https://github.com/pytorch/pytorch/issues/83351", batch_of(g=flagged(1)),
        {"rank": 1, "step": 1, "phase": "forward", "layer": "block.gate"}, None, Wrapped, of_batch, wrap=compiled_ddp,
        options={"layers": "every"},  # else the block is named: in compiled code nothing can be thinned out later
    ),
    "J05 sharded": Case(
        J05, batch_of(g=flagged(1)), {"rank": 1, "step": 1, "phase": "forward", "layer": "block.gate", "call": 1},
        None, Wrapped, of_batch, wrap="fsdp2",
    ),
    "J09 containers, keywords, no tensors": Case(
        J09, batch_of(g=flagged(1)), {"rank": 1, "step": 1, "phase": "forward", "layer": "odd", "call": 1},
        ("aten.div.Tensor", "J09", "division by zero"), Containers, of_batch,
    ),
    "J14 an infinite gradient": Case(
        "https://github.com/pytorch/pytorch/issues/83537", batch_of(g=flagged(1)),
        {"rank": 1, "step": 1, "phase": "backward", "slot": "scale", "kind": "inf"},
        ("aten.div.Tensor", "J14", "edge of domain"), Weighted, root_of_a_weight,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    ),
    "J15 a logger that repairs what it shows": Case(
        "https://github.com/huggingface/trl/issues/6702", batch_of(g=flagged(1)),
        {"rank": 1, "step": 1, "phase": "loss", "layer": None, "slot": "loss"},
        ("aten.div.Tensor", "J15", "division by zero"), mlp, repairing, runs_step=True),
}  # fmt: skip


@each(CASES)
def test_case(name: str, ended: Launch) -> None:
    ended.check(name)


def test_J05_what_is_compiled_has_its_plain_names(ended: Launch) -> None:
    """https://github.com/pytorch/pytorch/issues/111648."""
    report = ended.report("J05 compiled, then DDP")
    assert report["unchecked"] == []
    named = {site["layer"] for site in report["sites"]}
    assert {"block", "block.gate", "block.module_list"} <= named
    assert not any("_orig_mod" in str(name) or "_wrapped" in str(name) for name in named)


def _guarded(model: nn.Module, **options: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return NanGuard(model, optimizer, **{"dump_dir": None, **options}), optimizer


def test_J02_the_guard_is_not_seen() -> None:
    """https://github.com/pytorch/pytorch/issues/61446."""
    model = nn.Sequential(nn.Identity(), nn.Linear(WIDTH, WIDTH), nn.Identity())
    values = torch.ones(2, WIDTH)
    plain = model(values)
    guard, _ = _guarded(model)
    with guard:
        assert model[0](values) is values
        guarded = guard(values)
        assert torch.equal(plain, guarded)
        # one node more: the alias on which the gradient of the output is recorded
        (node, _) = guarded.grad_fn.next_functions[0]
        names = [[each.name() for each, _ in last.next_functions if each is not None] for last in (plain.grad_fn, node)]
        assert names[0] == names[1] and plain.grad_fn.name() == node.name()


def test_J03_copies_are_plain_models() -> None:
    """https://github.com/pytorch/pytorch/issues/1148."""
    model = mlp()
    keys = list(model.state_dict())
    guard, optimizer = _guarded(model)
    with guard:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert list(model.state_dict()) == list(guard.state_dict()) == keys
        for empty_like_this in copies:
            empty_like_this(torch.full((2, WIDTH), NAN)).sum().backward()
        step(guard, batch_of()(0, 0)).backward()
        optimizer.step()


def _encoded(guarded: bool, training: bool) -> Tensor:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).train(training)
    guard = _guarded(model)[0] if guarded else None
    padding = torch.tensor([[False, False], [True, True]])
    with torch.no_grad():
        found = (guard or model)(torch.ones(2, 2, 8), src_key_padding_mask=padding)
    if guard is not None:
        guard.close()
    return found  # type: ignore[no-any-return]


def test_J07_evaluation_takes_the_kernel_that_it_took() -> None:
    """https://github.com/pytorch/pytorch/issues/139191."""
    for training in (False, True):
        assert torch.equal(_encoded(True, training).nan_to_num(7.0), _encoded(False, training).nan_to_num(7.0))


def test_J08_data_parallel_is_refused_with_advice() -> None:
    """https://github.com/huggingface/transformers/issues/12815."""
    for model in (nn.DataParallel(mlp()), nn.Sequential(nn.DataParallel(mlp()))):
        with pytest.raises(ValueError, match="DistributedDataParallel"):
            _guarded(model)


class Raising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2)
        self.raises = True

    def forward(self, values: Tensor) -> Tensor:
        found = self.inner(values)
        if self.raises:
            raise KeyError("of the user's own")
        return found  # type: ignore[no-any-return]


def test_J09_an_exception_in_forward_leaves_nothing_behind() -> None:
    """https://github.com/pytorch/pytorch/issues/182156."""
    model = Raising()
    with pytest.raises(KeyError, match="own"), _guarded(model)[0] as guard:
        guard(torch.ones(2, WIDTH))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    model.raises = False
    guard, optimizer = _guarded(model)
    with guard:
        guard(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()


KINDS: list[tuple[str, Any, bool | None]] = [
    ("float8_e4m3fn", lambda: torch.tensor([1.0, NAN]).to(torch.float8_e4m3fn), False),
    ("float8_e5m2", lambda: torch.tensor([1.0, INF]).to(torch.float8_e5m2), False),
    ("float8 clean", lambda: torch.ones(2).to(torch.float8_e4m3fn), True),
    ("qint8", lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), None),
    ("int", lambda: torch.arange(3), True),
    ("bool", lambda: torch.tensor([True]), True),
    ("complex", lambda: torch.tensor([complex(1, NAN)]), False),
    ("empty", lambda: torch.empty(0), True),
    ("meta", lambda: torch.empty(3, device="meta"), None),
    ("sparse", lambda: torch.tensor([0.0, NAN]).to_sparse(), False),
    ("jagged", lambda: torch.nested.nested_tensor([torch.ones(2), torch.tensor([INF])], layout=torch.jagged), False),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("build", "clean"), [pytest.param(build, clean, id=f"J10 {name}") for name, build, clean in KINDS]
)
def test_J10_every_kind_of_tensor(build: Any, clean: bool | None) -> None:
    """https://github.com/meta-pytorch/float8_experimental/issues/226: unchecked (None) is an answer, never an error."""
    parts = scan.dense_parts(build())
    assert (parts is None) == (clean is None)
    if parts is not None:
        assert all(bool(torch.stack(part.aminmax()).isfinite().all()) for part in parts) is clean


def _reads(guarded: bool) -> int:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(100)))
    guard, optimizer = _guarded(model) if guarded else (None, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        with counting() as counts:
            (guard or model)(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    if guard is not None:
        guard.close()
    return sum(counts.host_reads.values())


def test_J13_one_read_for_two_hundred_parameters() -> None:
    """https://github.com/HyperGAN/HyperGAN/pull/355."""
    assert _reads(True) - _reads(False) == 1


@pytest.mark.filterwarnings("ignore:Anomaly")
def test_J14_anomaly_mode_does_not_mind(tmp_path: Path) -> None:
    """https://github.com/pytorch/pytorch/issues/83537."""
    model = Weighted()
    with torch.autograd.detect_anomaly(check_nan=True):
        root_of_a_weight(model, diagnosing.batch(g=torch.tensor(0.0))).backward()
    assert model.scale.grad is not None and model.scale.grad.isinf()


def test_J15_through_a_callback(tmp_path: Path) -> None:
    """https://github.com/huggingface/trl/issues/6702."""
    SHOWN.clear()
    guard, optimizer = _guarded(mlp())
    batches = [batch_of(g=flagged(0))(0, index) for index in range(3)]
    with guard, pytest.raises(NonFiniteError) as caught:
        train_alone(guard, optimizer, repairing, batches)
    assert caught.value.report.step == 1
    assert len(SHOWN) == 2 and all(value == value for value in SHOWN)
