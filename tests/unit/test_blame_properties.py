"""A fault at any place of any module tree is named exactly; a clean tree is left alone.

A tree is data (`Part`), drawn by hypothesis. `Net` runs it, `Walk` goes through it without running anything and says
what the report must be: the expectation comes from the drawn data, never from the guard.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.report.types import FaultReport, Site

WIDTH, ROWS, ITEMS, ACCUMULATION = 6, 4, 4, 2
LAYERS = ("linear", "frozen_parameters", "norm", "drop", "identity", "in-place", "writes")
LINES = ("code", "in-place code", "views", "plus tanh")
HOWS = ("plain", "plain", "twice", "residual", "unused", "checkpoint", "reentrant")
GIVES = ("tensor", "tuple", "dict", "dataclass")
FRESH = ("linear", "frozen_parameters", "norm", "drop")
"""Layers whose output may be changed in place: autograd keeps none of it."""

Path = tuple[int, ...]
"""Where a call or a line is: index in the body and number of the call, for every tree from the outermost on."""


@dataclass(frozen=True)
class Part:
    """One part of a tree's body.

    Attributes:
        kind: of `LAYERS`, of `LINES`, ``tree``, or ``fork``: two layers take the same tensor, their outputs are added.
        how: the tree's code calls it, of `HOWS`.
        gives: the container of its output.
        body: of a tree or a fork.
        shared: equal numbers are one module, None: a module of its own.
    """

    kind: str
    how: str = "plain"
    gives: str = "tensor"
    body: tuple[Part, ...] = ()
    shared: int | None = None

    @property
    def is_line(self) -> bool:
        return self.kind in LINES


@dataclass(frozen=True)
class Trap:
    """What goes bad: ``output``, ``grad`` or ``weight`` of a layer's call, or the line's output or gradient."""

    path: Path
    place: str
    value: float
    item: int


# -- the tree as data --------------------------------------------------------------------------------------------------


def _layers() -> st.SearchStrategy[Part]:
    return st.builds(Part, st.sampled_from(LAYERS), st.sampled_from(HOWS), st.sampled_from(GIVES)).map(_possible)


def _possible(part: Part) -> Part:
    """What torch itself can do: a checkpoint keeps its input as it is, a reentrant one gives tensors and tuples."""
    if part.kind == "writes":
        return Part(part.kind, shared=part.shared)
    if part.kind == "in-place" and part.how in ("twice", "checkpoint", "reentrant"):
        return Part(part.kind, "plain", part.gives, shared=part.shared)
    if part.how == "reentrant" and part.gives in ("dict", "dataclass"):
        return Part(part.kind, part.how, "tuple", part.body, part.shared)
    return part


def _bodies(depth: int, shared: tuple[Part, ...]) -> st.SearchStrategy[tuple[Part, ...]]:
    twins = st.tuples(*[st.sampled_from(("linear", "norm", "drop")).map(Part)] * 2)
    parts = [_layers(), _layers(), st.sampled_from(LINES).map(Part), twins.map(lambda body: Part("fork", body=body))]
    if shared:
        parts.append(st.builds(_recalled, st.sampled_from(shared), st.sampled_from(HOWS)))
    if depth:
        nested = _bodies(depth - 1, shared)
        parts += [st.builds(Part, st.just("tree"), st.sampled_from(HOWS), st.sampled_from(GIVES), nested)] * 2
    return st.lists(st.one_of(parts).map(_possible), min_size=1, max_size=4).map(tuple)


def _recalled(part: Part, how: str) -> Part:
    """Called from one more place; what it gives is settled, and a reentrant checkpoint gives no dicts."""
    if how == "reentrant" and part.gives in ("dict", "dataclass"):
        how = "checkpoint"
    return Part(part.kind, how, part.gives, part.body, part.shared)


@st.composite
def trees(draw: st.DrawFn) -> Part:
    """A tree, of which some modules may be called from several places."""
    layer = draw(_layers().filter(lambda part: part.kind != "writes"))
    small = draw(_bodies(0, ()))
    shared = (
        Part(layer.kind, gives=layer.gives, shared=0),
        Part("tree", gives=draw(st.sampled_from(GIVES)), body=small, shared=1),
    )
    return Part("tree", body=draw(_bodies(2, shared)))


@st.composite
def trapped_trees(draw: st.DrawFn) -> tuple[Part, Trap]:
    """A tree and a trap somewhere in it."""
    tree = draw(trees().filter(lambda tree: bool(Walk(tree).spots)))
    spots = Walk(tree).spots
    place = draw(st.sampled_from(sorted({place for _, place in spots})))  # else most would be outputs
    path = draw(st.sampled_from([path for path, where in spots if where == place]))
    value = draw(st.sampled_from((math.nan, math.inf) if place == "output" else (math.nan, math.inf, -math.inf)))
    return tree, Trap(path, place, value, draw(st.integers(0, ITEMS - 1)))


# -- the tree as modules -----------------------------------------------------------------------------------------------


class _SpoilGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, value: float) -> Tensor:
        ctx.value = value
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] + ctx.value, None


class World:
    """What all modules of one tree know: the trap, while it is armed."""

    trap: Trap | None = None

    def add(self, path: Path, place: str) -> float | None:
        """What is to be added here; None where the trap is not."""
        trap = self.trap
        return trap.value if trap is not None and (trap.path, trap.place) == (path, place) else None

    def spoilt(self, values: Tensor, path: Path, place: str) -> Tensor:
        value = self.add(path, place)
        return values if value is None else values + value

    def spoilt_gradient(self, values: Tensor, path: Path, place: str) -> Tensor:
        value = self.add(path, place)
        return values if value is None else _SpoilGradient.apply(values, value)  # type: ignore[no-any-return, no-untyped-call]


@dataclass
class Both:
    """An output of several tensors."""

    main: Tensor
    aside: Tensor


def _given(values: Tensor, gives: str) -> Any:
    aside = values * 0.5
    return {
        "tensor": values,
        "tuple": (aside, values),
        "dict": {"aside": aside, "main": values},
        "dataclass": Both(values, aside),
    }[gives]


def _taken(output: Any) -> Tensor:
    if isinstance(output, tuple):
        return output[1]  # type: ignore[no-any-return]
    if isinstance(output, dict):
        return output["main"]  # type: ignore[no-any-return]
    return output.main if isinstance(output, Both) else output  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One layer without children."""

    def __init__(self, part: Part, world: World) -> None:
        super().__init__()
        self.kind, self.gives, self.world = part.kind, part.gives, world
        if part.kind in ("linear", "frozen_parameters"):
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH, requires_grad=part.kind == "linear")
        if part.kind == "norm":
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, values: Tensor, path: Path) -> Any:
        values = self.world.spoilt_gradient(values, path, "grad")
        match self.kind:
            case "linear" | "frozen_parameters":
                values = F.linear(values, self.world.spoilt_gradient(self.weight, path, "weight"))
            case "norm":
                values = F.batch_norm(values, self.mean, self.variance, training=True)
            case "drop":
                values = F.dropout(values, 0.2)
            case "in-place":
                values = F.leaky_relu(values, 0.5, inplace=True)
            case "writes":
                values.add_(self.world.add(path, "output") or 0.0)
                return None
        return _given(self.world.spoilt(values, path, "output"), self.gives)


class Tree(nn.Module):
    """A container that runs its body in order; what joins its children is plain code."""

    def __init__(self, part: Part, world: World, pool: dict[int, nn.Module]) -> None:
        super().__init__()
        self.part, self.world = part, world
        for index, child in enumerate(part.body):
            if child.kind == "fork":
                for side, empty_like_this in enumerate(child.body):
                    self.add_module(f"m{index}_{side}", Layer(empty_like_this, world))
            elif not child.is_line:
                self.add_module(f"m{index}", _module(child, world, pool))

    def forward(self, values: Tensor, path: Path) -> Any:
        before: Part | None = None
        for index, child in enumerate(self.part.body):
            if child.kind.startswith(("in-place", "writes")) and not _is_fresh(before):
                values = values * 1.0
            values = self._after(child, index, values, path)
            before = child
        return _given(values, self.part.gives)

    def _after(self, child: Part, index: int, values: Tensor, path: Path) -> Tensor:
        here = (*path, index, 0)
        match child.kind:
            case "code":
                return self.world.spoilt(self.world.spoilt_gradient(values, here, "grad"), here, "output")
            case "in-place code":
                return values.add_(self.world.add(here, "output") or 0.0)
            case "views":
                return values.t().reshape(WIDTH, -1).t()
            case "plus tanh":
                return values + values.tanh()
            case "fork":
                sides = [getattr(self, f"m{index}_{side}")(values, (*path, index, side)) for side in (0, 1)]
                return sides[0] + sides[1]  # type: ignore[no-any-return]
            case "writes":
                getattr(self, f"m{index}")(values, here)
                return values
        return self._called(getattr(self, f"m{index}"), child.how, values, here)

    @staticmethod
    def _called(module: nn.Module, how: str, values: Tensor, path: Path) -> Tensor:
        match how:
            case "twice":
                values = _taken(module(values, path))
                return _taken(module(values, (*path[:-1], 1)))
            case "residual":
                return values + _taken(module(values, path))
            case "unused":
                module(values * 1.0, path)
                return values
            case "checkpoint" | "reentrant":
                return _taken(checkpoint(module, values, path, use_reentrant=how == "reentrant"))
        return _taken(module(values, path))


def _is_fresh(part: Part | None) -> bool:
    return part is not None and part.kind in FRESH and part.how == "plain" and part.gives == "tensor"


def _module(part: Part, world: World, pool: dict[int, nn.Module]) -> nn.Module:
    if part.shared is None:
        return Tree(part, world, pool) if part.kind == "tree" else Layer(part, world)
    if part.shared not in pool:
        pool[part.shared] = Tree(part, world, pool) if part.kind == "tree" else Layer(part, world)
    return pool[part.shared]


class Net(nn.Module):
    """A layer with weights, the tree, and another layer."""

    def __init__(self, tree: Part) -> None:
        super().__init__()
        self.world = World()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tree = Tree(tree, self.world, {})

    def forward(self, values: Tensor) -> Tensor:
        return self.last(_taken(self.tree(self.first(values), ())))  # type: ignore[no-any-return]


# -- what must be said -------------------------------------------------------------------------------------------------


@dataclass
class Visit:
    """One call of one module, as the data has it."""

    layer: str
    number: int
    used: bool
    children: list[tuple[Path, Visit]] = field(default_factory=list)


@dataclass(frozen=True)
class Expected:
    """The parts of the origin that the data decides."""

    phase: str
    layer: str
    call: int | None
    slot: str | None
    kind: str
    inline_code: tuple[str, str | None, str | None] | None
    suspects: tuple[str, ...]


class Walk:
    """Goes through a tree in the order of its forward.

    Attributes:
        spots: (path, place) of everything that can be spoilt, where it is settled what must be said.
    """

    def __init__(self, tree: Part) -> None:
        self._names: dict[int, str] = {}
        self._counts: Counter[str] = Counter()
        self._layers: dict[Path, tuple[Visit, Part]] = {}
        self._lines: dict[Path, Visit] = {}
        self._forks: dict[Path, tuple[Visit, tuple[str, ...]]] = {}
        self.spots: list[tuple[Path, str]] = []
        self._name(tree, "tree")
        self._tree(tree, "tree", (), None, used=True)
        self.spots = [spot for spot in self.spots if self._is_settled(*spot)]

    def _is_settled(self, path: Path, place: str) -> bool:
        """Whether the data decides what must be said.

        Left out: an unused branch that spoils the statistics of a norm after it, which stops the run as bad state.
        """
        visit = self._lines[path] if path in self._lines else self._layers[path][0]
        if not visit.used and place == "output":
            after = [at for at, (_, part) in self._layers.items() if part.kind == "norm" and at >= path]
            return not after
        return True

    def _name(self, part: Part, name: str) -> None:
        """A shared module is called by the first place that it is registered at."""
        if part.shared is not None:
            if part.shared in self._names:
                return
            self._names[part.shared] = name
        for index, child in enumerate(part.body):
            self._name(child, f"{name}.m{index}")

    def _visit(self, part: Part, name: str, path: Path, parent: Visit | None, *, used: bool) -> tuple[Visit, str]:
        name = name if part.shared is None else self._names[part.shared]
        self._counts[name] += 1
        visit = Visit(name, self._counts[name], used)
        if parent is not None:
            parent.children.append((path, visit))
        return visit, name

    def _tree(self, part: Part, name: str, path: Path, parent: Visit | None, *, used: bool) -> None:
        visit, name = self._visit(part, name, path, parent, used=used)
        for index, child in enumerate(part.body):
            here = (*path, index, 0)
            if child.kind == "fork":
                self._fork(child, f"{name}.m{index}", (*path, index), visit)
            elif child.is_line:
                self._line(child, here, visit)
            else:
                for number in range(2 if child.how == "twice" else 1):
                    act = self._tree if child.kind == "tree" else self._layer
                    place = (*path, index, number)
                    act(child, f"{name}.m{index}", place, visit, used=used and child.how != "unused")

    def _layer(self, part: Part, name: str, path: Path, parent: Visit | None, *, used: bool) -> None:
        visit, _ = self._visit(part, name, path, parent, used=used)
        self._layers[path] = visit, part
        self.spots.append((path, "output"))
        if part.kind != "writes":
            self.spots.append((path, "grad"))
        if part.kind == "linear":
            self.spots.append((path, "weight"))

    def _fork(self, part: Part, name: str, path: Path, parent: Visit) -> None:
        names = tuple(f"{name}_{side}" for side in range(len(part.body)))
        for side, empty_like_this in enumerate(part.body):
            place = (*path, side)
            self._layer(empty_like_this, names[side], place, parent, used=parent.used)
            self._forks[place] = parent, names

    def _line(self, part: Part, path: Path, visit: Visit) -> None:
        if part.kind in ("code", "in-place code"):
            self._lines[path] = visit
            self.spots.append((path, "output"))
        if part.kind == "code":
            self.spots.append((path, "grad"))

    # what the report must say

    def expected(self, trap: Trap) -> Expected | None:
        """None where nothing may be said: what is not used spoils no loss and gets no gradient."""
        visit = self._lines[trap.path] if trap.path in self._lines else self._layers[trap.path][0]
        if not visit.used:
            return None
        phase = "forward" if trap.place == "output" else "backward"
        kind = "nan" if math.isnan(trap.value) else ("inf" if trap.value > 0 else "-inf")
        if trap.path in self._lines:
            inline_code = self._inline_code(trap, visit) if visit.children else None
            return Expected(phase, visit.layer, visit.number, None, kind, inline_code, ())
        if trap.place == "weight":
            call = visit.number if self._counts[visit.layer] == 1 else None
            return Expected(phase, visit.layer, call, f"{visit.layer}.weight", kind, None, ())
        if trap.place == "grad" and trap.path in self._forks:
            parent, names = self._forks[trap.path]
            return Expected(phase, parent.layer, parent.number, "grad", kind, None, names)
        return Expected(phase, visit.layer, visit.number, trap.place, kind, None, ())

    @staticmethod
    def _inline_code(trap: Trap, visit: Visit) -> tuple[str, str | None, str | None]:
        before = [child.layer for path, child in visit.children if path < trap.path]
        after = [child.layer for path, child in visit.children if path > trap.path]
        return visit.layer, before[-1] if before else None, after[0] if after else None


# -- the properties ----------------------------------------------------------------------------------------------------


# what torch says of a reentrant checkpoint in another one, whose first run has no graph
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
REPEATABLE = settings(
    deadline=None,
    derandomize=True,
    database=None,  # no directory in the repository
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)


def _report(tree: Part, trap: Trap | None) -> FaultReport | None:
    torch.manual_seed(0)
    model = Net(tree)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = NanGuard(model, optimizer, dump_dir=None)
    batches = [torch.randn(ROWS, WIDTH) for _ in range(ITEMS)]
    with contextlib.closing(guard), contextlib.suppress(NonFiniteError):
        try:
            for index, batch in enumerate(guard.steps(batches)):
                model.world.trap = trap if trap is not None and trap.item == index else None
                loss = guard(batch).square().mean()
                guard.watch(loss=loss)
                loss.backward()
                if (index + 1) % ACCUMULATION == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        except NonFiniteError as error:
            return error.report
    return None


def _said(site: Site, expected: Expected) -> Expected:
    inline_code = (
        None
        if site.inline_code is None
        else (str(site.inline_code.layer), site.inline_code.after, site.inline_code.before)
    )
    if site.phase == "backward" and inline_code is not None and expected.inline_code is not None:
        inline_code = (
            inline_code[0],
            *expected.inline_code[1:],
        )  # where in the order of gradients has no name of its own
    slot = None if expected.slot is None else site.slot
    return Expected(str(site.phase), site.layer or "", site.call, slot, site.kind, inline_code, site.suspects)


@pytest.mark.timeout(300)  # a failure is shrunk first
@settings(REPEATABLE, max_examples=200)
@given(trapped_trees())
def test_the_origin_is_named_exactly(drawn: tuple[Part, Trap]) -> None:
    tree, trap = drawn
    report, expected = _report(tree, trap), Walk(tree).expected(trap)
    event(f"{expected.phase} {trap.place}" if expected is not None else "quiet")
    if expected is None:
        assert report is None
        return
    assert report is not None and report.origin is not None
    assert _said(report.origin, expected) == expected
    assert (report.origin.step, report.origin.micro_batch) == divmod(trap.item, ACCUMULATION)


@pytest.mark.timeout(300)
@settings(REPEATABLE, max_examples=60)
@given(trees())
def test_a_clean_tree_is_left_alone(tree: Part) -> None:
    assert _report(tree, None) is None
