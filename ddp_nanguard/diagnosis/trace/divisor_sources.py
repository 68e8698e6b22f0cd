"""Finds the reduction that a small finite tensor was computed from, through casts and simple arithmetic.

A division by zero is explained by where its divisor came from, and the divisor itself is finite, so no event of the
trace records it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .operators import Operator, named_arguments, tensors_of
from .source_lines import CodeLocation, SourceLine
from .storage_names import key_of, storage_of, weak_reference

_REDUCTIONS = {
    "sum", "mean", "nansum", "count_nonzero", "bincount", "var", "std", "linalg_vector_norm", "norm", "amax", "amin",
    "max", "min", "prod",
}  # fmt: skip
_DERIVING = {"_to_copy", "clone", "rsub", "sub", "add", "mul", "clamp", "clamp_min", "neg", "detach", "abs"}
_MAX_NUMEL = 1 << 16


@dataclass(frozen=True)
class DivisorSource:
    """The reduction that a divisor was computed from.

    Attributes:
        operator: base name of the reduction, such as ``sum``.
        dims: reduced dimensions, not negative; None where all were reduced.
        shape: shape of the tensor that was reduced.
        spot: the line of user code that called the reduction, None where there was none on the stack.
    """

    operator: str
    dims: tuple[int, ...] | None
    shape: tuple[int, ...]
    spot: CodeLocation | None

    @property
    def line(self) -> SourceLine | None:
        """The source line of the reduction, or None where `spot` is None."""
        return self.spot.line() if self.spot is not None else None


class DivisorSources:
    """Maps a storage to the reduction whose result it holds or was computed from."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[DivisorSource, Any]] = {}

    def note(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, spot: CodeLocation | None
    ) -> None:
        """Record the operator's result where it is a reduction, or simple arithmetic on the result of one.

        Results of more than 65536 elements are not recorded, nor arithmetic that combines two known reductions.

        Args:
            operator: what its schema says.
            args: its positional arguments.
            kwargs: its keyword arguments.
            output: what it returned.
            spot: the user's code that called it, or None.
        """
        if operator.base not in _REDUCTIONS and operator.base not in _DERIVING:
            return
        result = next(tensors_of(output), None)
        source = next(tensors_of(args), None)
        if result is None or source is None or result.numel() > _MAX_NUMEL:
            return
        if operator.base in _REDUCTIONS:
            named = dict(named_arguments(operator, args, kwargs))
            name = operator.base.removeprefix("linalg_vector_")
            self._keep(result, DivisorSource(name, _dims(named.get("dim"), source.dim()), tuple(source.shape), spot))
            return
        known = [origin for tensor in tensors_of(args) if (origin := self.of(tensor)) is not None]
        if len(known) == 1 and result.shape == source.shape:
            self._keep(result, known[0])

    def of(self, tensor: Tensor) -> DivisorSource | None:
        """The reduction that ``tensor`` holds or was computed from, or None."""
        found = self._found.get(key_of(tensor))
        return None if found is None else found[0]

    def _keep(self, tensor: Tensor, origin: DivisorSource) -> None:
        storage = storage_of(tensor)
        if storage is not None:
            # The key is an address: without the reference it could be given to another storage, which would inherit the
            # source.
            self._found[key_of(tensor)] = (origin, weak_reference(storage))


def _dims(given: Any, num_dims: int) -> tuple[int, ...] | None:
    dims = [given] if isinstance(given, int) and not isinstance(given, bool) else given
    if not isinstance(dims, (list, tuple)) or not dims:
        return None
    return tuple(dim % num_dims for dim in dims if isinstance(dim, int))
