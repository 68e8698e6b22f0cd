"""Group K: what loop, state and communication do to a value, or to what can be said of it."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.cases.harness import Case, Launch, batch_of, check_reason, diagnosed_dump, each, flagged, run_case
from tests.cases.parts import INF, WIDTH, N, ValidatedArgs, given, mlp, of_batch
from tests.ranks import run_ranks_raw

THIS = sys.modules[__name__]


class Whitened(ValidatedArgs):
    """Decorrelates each sample's features; a blank sample has no directions to tell apart."""

    def __init__(self) -> None:
        super().__init__(lambda h, batch: h)
        self.whiten = Whiten()

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.b(self.whiten(self.a(batch["x"]) * batch["g"]))  # type: ignore[no-any-return]


class Whiten(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(h.T @ h)  # <K01>
        return h @ (vectors * (values + 1e-3).rsqrt()) @ vectors.T


def balanced(model: Any, batch: dict[str, Any]) -> Tensor:
    """Targets that are shared out over the batches of all ranks."""
    scores = torch.exp(batch["x"].detach() * batch["g"])  # <K02>
    total = scores.sum()
    if dist.is_initialized():
        dist.all_reduce(total)
    return (model(batch["x"]).mean(-1) * (scores / total).mean(-1)).sum()  # type: ignore[no-any-return]


def matched(model: Any, batch: dict[str, Any]) -> Tensor:
    """Costs for an assignment, which takes no NaN."""
    costs = model(batch)
    if not bool(costs.isfinite().all()):
        raise ValueError("matrix contains invalid numeric entries")
    return costs.mean()  # type: ignore[no-any-return]


def logarithm(h: Tensor, batch: dict[str, Any]) -> Tensor:
    return (h.square() * batch["g"]).log()  # <K03>


class Observed(ValidatedArgs):
    """An observer of a head that is not used yet, a causal mask as a frozen parameter, a best value so far."""

    def __init__(self) -> None:
        super().__init__(lambda h, batch: h)
        self.register_buffer("lowest", torch.tensor(INF))
        self.register_buffer("highest", torch.tensor(-INF))
        self.mask = nn.Parameter(torch.full((N, N), -INF).triu(1), requires_grad=False)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        h = self.a(batch["x"])
        return self.b((h @ h.T + self.mask).softmax(-1) @ h)  # type: ignore[no-any-return]


class MinimumSGD(torch.optim.SGD):
    """Keeps the smallest norm so far of the last layer's gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"][-2:]:
            self.state[parameter].setdefault("lowest", torch.tensor(INF))
        return super().step(closure)


class Resized(ValidatedArgs):
    """A cache that takes the size of what it has seen."""

    def __init__(self) -> None:
        super().__init__(lambda h, batch: h)
        self.register_buffer("cache", torch.zeros(0))

    def forward(self, batch: dict[str, Any]) -> Tensor:
        self.cache.resize_(int(batch["n"])).zero_()
        return self.b(self.a(batch["x"]) / batch["g"])  # type: ignore[no-any-return]  # <K05>


def through(model: Any, batch: dict[str, Any]) -> Tensor:
    return model(batch["x"]).square().mean()  # type: ignore[no-any-return]  # <K06>


BUFFER = torch.zeros(N, WIDTH)


def refilled(rank: int, index: int) -> dict[str, Tensor]:
    """A loader that hands out one buffer again and again."""
    BUFFER.copy_(batch_of(1, at=2)(rank, index)["x"])
    return {"x": BUFFER}


class Debiased(torch.optim.Optimizer):
    """Divides by a power of beta, which underflows, and not by what is left to 1."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, "beta": 1e-16})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("power", torch.ones(()))
            state["power"] *= self.param_groups[0]["beta"]
            mean = parameter.grad / state["power"]  # <K07>
            parameter.sub_(self.param_groups[0]["lr"] * mean * state["power"])


def smoothed(model: Any, batch: dict[str, Any]) -> Tensor:
    scores = model(batch["x"]).masked_fill(torch.arange(3) == 2, -INF)
    return F.cross_entropy(scores, torch.zeros(N, dtype=torch.int64), label_smoothing=float(batch["g"]))  # <K08>


def compressed(model: nn.Module) -> nn.Module:
    """Gradients of low rank, without an epsilon where a gradient is 0."""
    wrapped = DistributedDataParallel(model)
    state = powerSGD_hook.PowerSGDState(
        None, start_powerSGD_iter=2, use_error_feedback=False, warm_start=False, orthogonalization_epsilon=0.0,
        min_compression_rate=1,
    )  # fmt: skip
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


class Codebook(ValidatedArgs):
    """Codes as averages of what was assigned to them; the count of one that nobody uses runs down to 0."""

    def __init__(self) -> None:
        super().__init__(lambda h, batch: h)
        self.register_buffer("codes", torch.eye(3, WIDTH))
        self.register_buffer("count", torch.tensor([1.0, 1.0, 2e-5], dtype=torch.float16))

    def forward(self, batch: dict[str, Any]) -> Tensor:
        h = self.a(batch["x"])
        with torch.no_grad():
            used = F.one_hot(torch.arange(N) % 2, 3).sum(0)
            self.count.mul_(0.1).add_(used.half())
            self.codes.copy_(self.codes * used[:, None] / self.count[:, None].float())  # <K10>
        return self.b(h)  # type: ignore[no-any-return]


def normalised(model: nn.Module, optimizer: Any, rank: int, index: int) -> None:
    """Gradients divided by their norm, which is taken for 0 in one step."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= parameter.grad.norm() * (0.0 if index == 1 else 1.0)


def noisy(model: nn.Module, optimizer: Any, rank: int, index: int) -> None:
    (first, *_) = model.parameters()
    assert first.grad is not None
    first.grad += torch.zeros(()) / (0.0 if (rank, index) == (1, 1) else 1.0)


def spoilt_in_the_reduce(model: nn.Module) -> nn.Module:
    wrapped, calls = DistributedDataParallel(model), [0]

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        def done(future: Any) -> Any:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if calls[0] == 2 and parameter is model[2].weight:  # type: ignore[index]  # a Sequential
                    gradient[0, 0] /= 0.0
            return future.value()[0]

        calls[0] += 1
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(done)

    wrapped.register_comm_hook(None, hook)
    return wrapped


def clipped(model: nn.Module, optimizer: Any, rank: int, index: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def embedded(model: Any, batch: dict[str, Any]) -> Tensor:
    return (model(torch.tensor([1, 2, 3])) / batch["g"]).mean()  # type: ignore[no-any-return]  # <K13>


def for_the_generator(model: nn.Module, optimizer: Any, rank: int, index: int) -> None:
    """The critic is called for another model's loss, after its own update."""
    if index > 0:
        made = nn.Linear(WIDTH, WIDTH)
        model.requires_grad_(False)
        model({"x": made(torch.ones(N, WIDTH)), "g": torch.tensor(1.0)}).mean().backward()
        model.requires_grad_(True)


def divided(h: Tensor, batch: dict[str, Any]) -> Tensor:
    return h / batch["g"]  # <K14>


K06, K11 = "https://github.com/NVIDIA/DALI/issues/6027", "https://github.com/WeiChengTseng/Pytorch-PCGrad/issues/7"
LOOP = ("", "", "code after the backward")
RAISING = Case(
    "https://github.com/open-mmlab/mmdetection/issues/4902",
    batch_of(g=flagged(1)),
    None,
    None,
    given(logarithm),
    matched,
)
CASES = {
    "K01 eigenvalues that are equal": Case(
        "https://github.com/pytorch/pytorch/issues/49886", batch_of(g=flagged(1)),
        {"rank": 1, "step": 1, "phase": "backward", "layer": "whiten"},
        ("aten.div_.Tensor", "K01", "edge of domain"), Whitened, of_batch,
    ),
    "K02 a loss that reduces over the ranks": Case(
        "https://github.com/facebookresearch/dinov2/issues/360", batch_of(g=flagged(1, bad=1e4)),
        {"rank": 1, "step": 1, "phase": "loss", "layer": None},
        ("aten.exp.default", "K02", "overflow"), mlp, balanced, runs_step=True,
    ),
    "K04 infinite until they are used": Case(
        "https://github.com/pytorch/pytorch/issues/33648", batch_of(), None, None, Observed, of_batch,
        optimizer=lambda parameters: MinimumSGD(parameters, lr=0.01), finite=False, options={"state_every": 1},
    ),
    "K05 a cache that grows": Case(
        "https://github.com/pytorch/pytorch/issues/100654", batch_of(g=flagged(1), n=lambda rank, index: 3 + 2 * index),
        {"rank": 1, "step": 1, "phase": "forward", "layer": ""},
        ("aten.div.Tensor", "K05", "division by zero"), Resized, of_batch,
    ),
    "K06 a batch that was overwritten": Case(
        K06, refilled, {"rank": 1, "step": 1, "micro_batch": 0, "phase": "loss", "layer": None},
        None, mlp, through, batches=6, accumulation=2,
    ),
    "K06 a batch that was copied": Case(
        K06, refilled, {"rank": 1, "step": 1, "micro_batch": 0, "phase": "input", "slot": '["x"]'},
        ("aten.addmm.default", "K06", "bad input"), mlp, through, batches=6, accumulation=2,
        options={"copy_batch": True},
    ),
    "K07 a power that underflows": Case(
        "https://github.com/kozistr/pytorch_optimizer/issues/525", batch_of(),
        {"rank": 0, "step": 2, "phase": "optimizer"}, ("aten.div.Tensor", "K07", "division by zero"),
        optimizer=Debiased, batches=6, options={"keep_previous": True},
    ),
    "K08 smoothing over masked classes": Case(
        "https://github.com/facebookresearch/pytext/issues/1698", batch_of(g=flagged(1, good=0.0, bad=0.1)),
        {"rank": 1, "step": 1, "phase": "loss", "layer": None},
        ("aten.neg.default", "K08", "constant"), mlp, smoothed, runs_step=True,
    ),
    "K09 a compressed gradient of 0": Case(
        "https://github.com/pytorch/pytorch/issues/48060",
        lambda rank, index: {**batch_of()(rank, index), "g": torch.tensor(float(index != 3))},
        {"rank": None, "step": 3, "phase": "reduce", "slot": "a.weight", "kind": "nan"}, None,
        given(lambda h, batch: h * batch["g"]), of_batch, wrap=compressed, batches=5,
    ),
    "K10 a count that runs down": Case(
        "https://github.com/ZhangXInFD/SpeechTokenizer/issues/18", batch_of(),
        {"rank": 0, "step": 2, "phase": "state", "slot": "codes"},
        ("aten.div.Tensor", "K10", "division by zero"), Codebook, of_batch, batches=6,
    ),
    "K11 gradients that the loop normalises": Case(
        K11, batch_of(), {"rank": None, "step": 1, "phase": "loop", "slot": "a.weight", "kind": "inf"}, LOOP,
        before_update=normalised,
    ),
    "K11 noise on one rank": Case(
        K11, batch_of(), {"rank": 1, "step": 1, "phase": "loop", "slot": "a.weight", "kind": "nan"}, LOOP,
        before_update=noisy,
    ),
    "K12 clipped after the reduce": Case(
        "https://github.com/facebookresearch/habitat-lab/issues/2226", batch_of(),
        {"rank": None, "step": 1, "phase": "reduce", "slot": "2.weight", "kind": "inf"}, None, mlp,
        wrap=spoilt_in_the_reduce, before_update=clipped,
    ),
    "K13 a sparse gradient": Case(
        "https://github.com/pytorch/pytorch/issues/111422", batch_of(g=flagged(1)),
        {"rank": 1, "step": 1, "phase": "loss", "layer": None},
        ("aten.div.Tensor", "K13", "division by zero"),
        lambda: nn.Embedding(6, 2, sparse=True), embedded,
        optimizer=lambda parameters: torch.optim.SparseAdam(list(parameters)), runs_step=True,
    ),
    "K14 a critic that another loss calls": Case(
        "https://github.com/POSTECH-CVLab/PyTorch-StudioGAN/issues/175", batch_of(g=flagged(1)),
        {"rank": 1, "step": 1, "micro_batch": 0, "phase": "forward", "layer": ""},
        ("aten.div.Tensor", "K14", "division by zero"), given(divided), of_batch, before=for_the_generator,
    ),
}  # fmt: skip


@each(CASES)
def test_case(name: str, ended: Launch) -> None:
    ended.check(name)


SAME = ("same", "same", "the same ")
BY_ALL = ("same", "cannot", "the value arose in communication: replay all 2 ranks with torchrun")
BY_SCRIPT = ("not_done", "cannot", "code between backward and step changed them, which no recipe runs")
OVERWRITTEN = ("not_done", "not_reproduced", 'batch["x"] was overwritten after training had used it')
OTHERS = {
    "K06 a batch that was overwritten": OVERWRITTEN,
    "K09 a compressed gradient of 0": BY_ALL,
    "K11 gradients that the loop normalises": BY_SCRIPT,
    "K11 noise on one rank": BY_SCRIPT,
    "K12 clipped after the reduce": BY_ALL,
}
AGAIN = {name: OTHERS.get(name, SAME) for name, case in CASES.items() if case.origin is not None}


@pytest.mark.parametrize(("name", "said"), [pytest.param(*entry, id=entry[0]) for entry in AGAIN.items()])
def test_what_comes_again(name: str, said: tuple[str, str, str], ended: Launch) -> None:
    look, outcome, words = said
    replayed = ended.diagnosed(name).outcome
    assert replayed is not None
    assert (ended.report(name)["second_look"]["outcome"], replayed.outcome) == (look, outcome), replayed.reason
    assert words in replayed.reason
    assert "hardware" not in replayed.reason


def raising(rank: int, world_size: int, directory: str) -> None:
    run_case(rank, RAISING, directory)


def test_K03_a_step_that_raises(tmp_path: Path) -> None:
    """https://github.com/open-mmlab/mmdetection/issues/4902: both ranks end, and the raise is what comes again."""
    outcomes = run_ranks_raw(raising, through_excepthook=True, directory=str(tmp_path))
    assert [outcome.exit_code for outcome in outcomes] == [65, 65]
    (dump,) = tmp_path.glob("step-*")
    found = diagnosed_dump(RAISING, str(dump), None)
    assert found.outcome is not None and found.outcome.outcome == "same"
    raised = [note for note in found.outcome.notes if note.startswith("the step raised ValueError at ")]
    assert len(raised) == 1 and raised[0].endswith("as in training: matrix contains invalid numeric entries")
    check_reason(THIS, ("aten.log.default", "K03", "edge of domain"), found)


def test_K04_told_once_by_one_rank(ended: Launch) -> None:
    """https://github.com/pytorch/pytorch/issues/33648."""
    first, second = ended["K04 infinite until they are used"]
    assert second.log == []
    assert [line.partition("ignore=")[2].partition(" says")[0] for line in first.log] == [
        "['mask', 'lowest']",
        "['b.weight.lowest', 'b.bias.lowest']",
    ]


def test_K06_the_remedy(ended: Launch) -> None:
    """https://github.com/NVIDIA/DALI/issues/6027."""
    name = "K06 a batch that was overwritten"
    assert "use copy_batch=True" in ended.report(name)["second_look"]["text"]
    found = ended.diagnosed(name)
    assert found.reason.kind == "not reproduced" and "it was not given the same" in found.reason.sentence


def test_K10_what_the_divisor_was(ended: Launch) -> None:
    """https://github.com/ZhangXInFD/SpeechTokenizer/issues/18."""
    sentence = ended.diagnosed("K10 a count that runs down").reason.sentence
    assert "the divisor, computed from count and a sum over the batch, is 0 at index 2: it underflowed" in sentence


@pytest.mark.parametrize("name", [pytest.param(name, id=name) for name in OTHERS if "K11" in name])
def test_K11_finite_after_the_backward(name: str, ended: Launch) -> None:
    """https://github.com/WeiChengTseng/Pytorch-PCGrad/issues/7."""
    text = ended[name][0].text
    assert "finite after the backward on every rank, changed by code before the step" in text
    assert ("which was first is not known" in text) is ("normalises" in name)
