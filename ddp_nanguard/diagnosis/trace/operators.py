"""What an operator's schema says: which arguments it writes, whether it only looks at memory in another way."""

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
"""Operators that write a number of the code as it is: with an infinity that is a mask."""
_BATCH_NORMS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
"""They change their running statistics, which their schemas do not say."""
_COMMUNICATION = ("c10d.", "_c10d_functional.")
_TO_ONE_RANK = {"send", "recv", "recv_any_source"}
"""Waited for at once, two ranks that send to each other before either receives would wait for ever."""
_LIFTED = {"lift_fresh", "lift", "lift_fresh_copy"}


@dataclass(frozen=True)
class Operator:
    """One overload.

    Attributes:
        name: ``aten.div.Tensor``.
        base: ``div``.
        is_view: its outputs share memory with its inputs, and nothing is written.
        writes: names of arguments that it writes.
        overwrites: what they held does not matter to the result.
        makes_empty: its output holds whatever the memory held.
        is_literal: a number of the user's code becomes a tensor.
        reads_number: the host reads its input.
        communicates: all ranks of a group take part in it.
        names: of its arguments, by position.
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
    """Overload -> what its schema says, None for what has no schema."""

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
    """Whether all ranks of a group take part in an operator, such as ``c10d.allreduce_.default``."""
    return name.startswith(_COMMUNICATION) and base_name(name) not in _TO_ONE_RANK


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Tensors among arguments or outputs, in lists too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)


def numbers_of(value: Any) -> Iterator[float]:
    """Non-finite numbers among arguments."""
    if isinstance(value, float) and not math.isfinite(value):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from numbers_of(item)


def kinds_of(numbers: Iterable[float]) -> list[str]:
    """Their kinds of being non-finite."""
    return ["nan" if number != number else ("inf" if number > 0 else "-inf") for number in numbers]


def named_arguments(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """(name, value) of the arguments that were given."""
    return [*zip(operator.names, args, strict=False), *kwargs.items()]
