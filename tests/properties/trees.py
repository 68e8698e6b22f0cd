"""Module trees as data: drawn by hypothesis, with a fault somewhere, and what must be said about it.

`Walk` goes through a tree without running anything: the expectation comes from the drawn data, never from the guard.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import strategies as st

ITEMS, ACCUMULATION = 4, 2
LAYERS = ("linear", "frozen_parameters", "norm", "drop", "identity", "in-place", "writes")
LINES = ("code", "in-place code", "views", "plus tanh")
HOWS = ("plain", "plain", "twice", "residual", "unused", "checkpoint", "reentrant")
GIVES = ("tensor", "tuple", "dict", "dataclass")

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
