"""Reads operator schemas: which arguments an operator writes, whether it is a view, a communication, a host read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .events import base_name

_OVERWRITES = {
    "copy", "fill", "zero", "normal", "uniform", "random", "bernoulli", "exponential", "cauchy", "geometric",
    "log_normal", "set", "resize",
}  # fmt: skip
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
FILLS = {
    "masked_fill", "fill", "full", "full_like", "new_full", "where", "scalar_tensor", "lift_fresh", "index_fill",
    "constant_pad_nd", "index_put",
}  # fmt: skip
"""Operators that write a number of the code unchanged: an infinity written by one of them is a mask."""
_BATCH_NORMS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
"""They write their running statistics, which their schemas do not declare."""
_COMMUNICATION = ("c10d.", "_c10d_functional.")
_TO_ONE_RANK = {"send", "recv", "recv_any_source"}
"""Not waited for: two ranks that send to each other before either receives would deadlock."""
_LIFTED = {"lift_fresh", "lift", "lift_fresh_copy"}


@dataclass(frozen=True)
class Operator:
    """What the schema of one overload says.

    Attributes:
        name: full name, such as ``aten.div.Tensor``.
        base: name without namespace and overload, such as ``div``.
        is_view: its outputs share memory with its inputs, and nothing is written.
        writes: names of the arguments that it writes.
        overwrites: the former contents of what it writes do not affect the result.
        makes_empty: its output is uninitialised memory.
        is_literal: it turns a number of the user's code into a tensor.
        reads_number: the host reads the value of its input (``item()``).
        communicates: it is a collective; all ranks of a group take part.
        names: argument names, by position.
    """

    name: str
    base: str
    is_view: bool
    writes: frozenset[str]
    overwrites: bool
    makes_empty: bool
    is_literal: bool
    reads_number: bool
    communicates: bool
    names: tuple[str, ...]


class Operators(dict[Any, "Operator | None"]):
    """Maps an overload to its `Operator`, read on first use; None for a function without a schema."""

    def __missing__(self, function: Any) -> Operator | None:
        self[function] = found = _read(function)
        return found


def _read(function: Any) -> Operator | None:
    schema = getattr(function, "_schema", None)
    if schema is None:
        return None
    name = str(function)
    base = base_name(name)
    writes = frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    if base in _BATCH_NORMS:
        writes |= {"running_mean", "running_var"}
    communicates = is_communication(name)
    if communicates and name.startswith("c10d."):  # whose schemas do not say so
        outputs = {a.name for a in schema.arguments if a.name.startswith("output")}
        writes = frozenset(outputs or {a.name for a in schema.arguments if a.name.startswith("tensor")})
    is_out = any(a.is_out for a in schema.arguments)
    aliases = any(r.alias_info is not None for r in schema.returns)
    return Operator(
        name=name,
        base=base,
        is_view=aliases and not writes and base not in _LIFTED,
        writes=writes,
        overwrites=is_out or base in _OVERWRITES or any(name.startswith("output") for name in writes),
        makes_empty=base in _EMPTY,
        is_literal=base in _LIFTED,
        reads_number=base == "_local_scalar_dense",
        communicates=communicates,
        names=tuple(a.name for a in schema.arguments),
    )


def is_communication(name: str) -> bool:
    """Whether an operator is a collective, such as ``c10d.allreduce_.default``; point-to-point operators are not."""
    return name.startswith(_COMMUNICATION) and base_name(name) not in _TO_ONE_RANK


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors among arguments or outputs, in lists and tuples too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)


def numbers_of(value: Any) -> Iterator[float]:
    """The Python floats among arguments that are NaN or infinite, in lists and tuples too."""
    if isinstance(value, float) and not math.isfinite(value):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from numbers_of(item)


def kinds_of(numbers: Iterable[float]) -> list[str]:
    """The kind of each non-finite number: "nan", "inf" or "-inf"."""
    return ["nan" if number != number else ("inf" if number > 0 else "-inf") for number in numbers]


def named_arguments(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """The arguments of a call as (name, value), positional ones first; defaults that were not passed are left out."""
    return [*zip(operator.names, args, strict=False), *kwargs.items()]
