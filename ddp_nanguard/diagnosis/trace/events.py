"""Events of a trace: operators whose outputs hold non-finite values, and what went into them. Plain data."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ddp_nanguard.report.types import json_safe
from ddp_nanguard.tensors.dtypes import dtype_name
from ddp_nanguard.tensors.minmax import dense_parts, is_plain, kind_of

from .source_lines import SourceLine

SEVERITY: dict[str | None, int] = {None: 0, "-inf": 1, "inf": 2, "nan": 3}
MAX_ROWS = 16


class EventCategory(enum.StrEnum):
    """How an operator came by the non-finite values in its output.

    ``produced``: the output is worse than all inputs, so the operator made the value. ``constant``: the code itself
    wrote the number, such as a mask. ``propagated``: it was in the inputs.
    """

    PRODUCED = "produced"
    CONSTANT = "constant"
    PROPAGATED = "propagated"


class EventPhase(enum.StrEnum):
    """What the step was doing when an operator ran.

    ``step code`` is the forward outside every module; ``recomputation`` is activation checkpointing's second forward,
    in the backward pass; ``loop`` is what comes after a backward pass, until a module is called; ``update`` is the
    optimizer's step.
    """

    FORWARD = "forward"
    STEP_CODE = "step code"
    BACKWARD = "backward"
    RECOMPUTATION = "recomputation"
    LOOP = "loop"
    UPDATE = "update"


@dataclass(frozen=True)
class Operand:
    """One tensor that an operator took or returned.

    Attributes:
        shape, dtype: of the tensor; the dtype without ``torch.``.
        kind: the worst non-finite kind in it, or None.
        minimum, maximum: over its finite elements, None where there are none.
        num_nan, num_inf, num_neg_inf, numel: counts of elements.
        name: the parameter, buffer or batch path that owns the memory, or None.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    num_nan: int = 0
    num_inf: int = 0
    num_neg_inf: int = 0
    numel: int = 0
    name: str | None = None


@dataclass
class NumberCall:
    """One operator call with copies of its arguments, kept so that the rules can inspect the values and call it again.

    Attributes:
        function: the operator overload.
        args, kwargs: arguments before the call; tensors are detached copies. Of the lists of a ``_foreach`` operator
            each holds the one item that belongs to the output.
        output: a detached copy of the non-finite output.
        position: of that output among the tensors that the operator writes or returns.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    position: int = 0


@dataclass(eq=False)
class Event:
    """One operator with a non-finite output.

    Attributes:
        order: position among all operators of the step, from 1.
        operator: name of the overload, as in ``aten.div.Tensor``.
        kind: the worst kind in its output.
        category: how it came by them.
        phase: what the step was doing.
        layer, call: the module it ran in, or whose forward made the autograd node; None in the step's own code.
        lines: the user's code, innermost first; in backward only code of a custom function or hook, so mostly empty.
        forward_lines: in backward, the forward line that made the node.
        node: name of the autograd node that ran, in backward.
        forward_operator: the operator that made the node.
        inputs, output: described for operators that produced the value or took it from outside the step.
        numbers: arguments that are not tensors, as in ``other=0``.
        num_hit: number of elements of the output that are of that kind.
        rows: indices in dim 0 that are hit, where dim 0 is the batch; at most `MAX_ROWS`.
        num_rows: how many rows are hit; None where dim 0 is not the batch.
        parents: orders of the events whose values it took in.
        outside: names of non-finite inputs that no operator of the step made; "" where the memory has no name.
        roots: orders of the events where its value began; at most 8.
        micro_batch: index in the window.
        made: the call itself, for the first 64 described events; None for the rest.
        sequence: autograd's sequence number of the node, in backward.
        before: base names of the operators that ran just before it at the same place of the user's code: what else one
            function of torch is composed of.
    """

    order: int
    operator: str
    kind: str
    category: EventCategory
    phase: EventPhase
    layer: str | None
    call: int | None
    lines: tuple[SourceLine, ...]
    forward_lines: tuple[SourceLine, ...] = ()
    node: str | None = None
    forward_operator: str | None = None
    inputs: tuple[Operand, ...] = ()
    output: Operand | None = None
    numbers: tuple[str, ...] = ()
    num_hit: int = 0
    rows: tuple[int, ...] = ()
    num_rows: int | None = None
    parents: tuple[int, ...] = ()
    outside: tuple[str, ...] = ()
    roots: frozenset[int] = frozenset()
    micro_batch: int | None = None
    made: NumberCall | None = field(default=None, repr=False)
    sequence: int | None = None
    before: tuple[str, ...] = ()

    @property
    def base(self) -> str:
        """The operator's name without namespace, overload and marks of variants: ``div``."""
        return base_name(self.operator)

    @property
    def line(self) -> SourceLine | None:
        """The line to show: where it ran, else the forward line that made the node; None where neither is known."""
        return next(iter((*self.lines, *self.forward_lines)), None)

    def place(self) -> dict[str, Any]:
        """Operator, kind, phase, layer and line as JSON-ready data: one row of a path."""
        line = self.line
        return {
            "operator": self.operator,
            "kind": self.kind,
            "phase": str(self.phase),
            "layer": self.layer,
            "call": self.call,
            "file": line.file if line is not None else None,
            "line": line.number if line is not None else None,
        }

    def to_dict(self) -> dict[str, Any]:
        """The event as JSON-ready data, without tensor values and without the links to other events."""
        hidden = {"made", "roots", "sequence", "parents", "before"}
        kept = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name not in hidden}
        plain = {key: _plain(value) for key, value in kept.items()}
        return json_safe(plain)  # type: ignore[no-any-return]  # a dict stays one


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def base_name(operator: str) -> str:
    """What an overload does: ``aten.div_.Tensor`` and ``aten._foreach_div.List`` give ``div``."""
    parts = operator.split(".")
    name = parts[1] if len(parts) > 1 else parts[0]
    return name.removeprefix("_foreach_").rstrip("_") or name


def worst_kind(kinds: list[str | None]) -> str | None:
    """The worst of several kinds, in the order of `SEVERITY`; None for an empty list."""
    return max(kinds, key=SEVERITY.__getitem__, default=None)


def quick_kind(tensor: Tensor) -> str | None:
    """The worst kind in a tensor; None where it is finite or of a kind that cannot be checked.

    Host sync: two per dense part.
    """
    if is_plain(tensor):
        low, high = torch.aminmax(tensor.detach())
        return kind_of(low.item(), high.item())
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    return worst_kind([quick_kind(part) for part in dense_parts(tensor) or []])


def describe(tensor: Tensor, name: str | None = None) -> Operand:
    """Counts and range of a tensor of any kind; integers are described too.

    Host sync: about six.
    """
    dtype = dtype_name(tensor.dtype)
    parts = _values(tensor)
    if parts is None or not parts:
        return Operand(tuple(tensor.shape), dtype, numel=tensor.numel(), name=name)
    value = parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1).double() for part in parts])
    finite = value[torch.isfinite(value)] if value.is_floating_point() else value.reshape(-1)
    low, high = (t.item() for t in torch.aminmax(finite)) if finite.numel() else (None, None)
    nan, inf, negative = _counts(value, is_complex=tensor.is_complex() and len(parts) == 1)
    kind = "nan" if nan else ("inf" if inf else ("-inf" if negative else None))
    numel = tensor.numel()
    return Operand(tuple(tensor.shape), dtype, kind, low, high, nan, inf, negative, numel, name)


def _counts(value: Tensor, *, is_complex: bool) -> tuple[int, int, int]:
    """How many elements are NaN, +Inf and -Inf; a complex one, whose parts lie in the last dim, counts once."""
    nan, inf, negative = torch.isnan(value), torch.isposinf(value), torch.isneginf(value)
    if is_complex:
        nan, inf, negative = nan.any(-1), inf.any(-1), negative.any(-1)
        inf, negative = inf & ~nan, negative & ~nan & ~inf
    return int(nan.sum()), int(inf.sum()), int(negative.sum())


def _values(tensor: Tensor) -> list[Tensor] | None:
    if tensor.is_floating_point() or tensor.is_complex():
        return dense_parts(tensor)
    try:
        return [tensor.detach().to(torch.int64)] if tensor.numel() and tensor.device.type != "meta" else None
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def hit_mask(tensor: Tensor, kind: str) -> Tensor:
    """Marks the elements of a kind: bool, same shape. Infinities of both signs count unless ``kind`` is "nan"."""
    value = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    # float8 has no isnan and isinf of its own.
    value = value.float() if value.element_size() == 1 else value
    mask = torch.isnan(value) if kind == "nan" else torch.isinf(value)
    return mask.any(-1) if tensor.is_complex() else mask
