"""Finds what a small finite tensor was computed from: reductions and named memory, through casts and simple arithmetic.

A division by zero is explained by where its divisor came from, and the divisor itself is finite, so no event of the
trace records it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from .operators import Operator, tensors_of
from .source_lines import CodeLocation, SourceLine
from .storage_names import key_of, storage_of, weak_reference

_REDUCTIONS = {
    "sum", "mean", "nansum", "count_nonzero", "bincount", "var", "std", "linalg_vector_norm", "norm", "amax", "amin",
    "max", "min", "prod",
}  # fmt: skip
_SHRINKS = {"mul", "div", "pow", "_to_copy"}
"""Of non-zero numbers they make a zero only where that underflows."""
_DERIVING = {*_SHRINKS, "clone", "rsub", "sub", "add", "clamp", "clamp_min", "neg", "detach", "abs", "copy", "sqrt"}
_MAX_NUMEL = 1 << 16
_MAX_PARTS = 3


@dataclass(frozen=True)
class Reduction:
    """A reduction that a divisor was computed from.

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


@dataclass(frozen=True, eq=False)
class DivisorSource:
    """All that a divisor was computed from.

    Attributes:
        parts: reductions, and names of memory from before the step, such as a buffer.
        underflowed: marks the elements that underflowed to 0 on the way, in the shape of the divisor; None for none.
        spot: the user's code at which they did.
        dtype: in which they did.
    """

    parts: tuple[Reduction | str, ...]
    underflowed: Tensor | None = None
    spot: CodeLocation | None = None
    dtype: str = ""


class DivisorSources:
    """Maps a storage to what its contents were computed from.

    Args:
        name_of: the name of memory from before the step, or None.
    """

    def __init__(self, name_of: Callable[[Tensor], str | None]) -> None:
        self._name_of = name_of
        # None: written by something else, or computed from what is not known
        self._found: dict[int, tuple[DivisorSource | None, Any]] = {}

    def note(
        self, operator: Operator, given: list[tuple[str, Any, Any]], output: Any, spot: CodeLocation | None
    ) -> None:
        """Record the operator's result where it is a reduction, or simple arithmetic on what is known.

        Results of more than 65536 elements are not recorded. What another operator writes is forgotten.

        Args:
            operator: what its schema says.
            given: its arguments: name, object passed, value before the call.
            output: what it returned.
            spot: the user's code that called it, or None.
        """
        known = self._source_of(operator, given, output, spot)
        if known is None or (operator.writes and not _is_whole(next(tensors_of(output)))):
            for name, original, _ in given if operator.writes and not operator.is_view else ():
                if name in operator.writes:
                    self._forget(original)
            return
        result = next(tensors_of(output))
        self._keep(result, self._shrunk(known, operator, given, result, spot))

    def of(self, tensor: Tensor) -> DivisorSource | None:
        """What ``tensor`` holds or was computed from, or None."""
        if key_of(tensor) in self._found:
            return self._found[key_of(tensor)][0]
        name = self._name_of(tensor)
        return DivisorSource((name,)) if name else None

    def _source_of(
        self, operator: Operator, given: list[tuple[str, Any, Any]], output: Any, spot: CodeLocation | None
    ) -> DivisorSource | None:
        result = next(tensors_of(output), None)
        tensors = list(tensors_of([original for _, original, _ in given]))
        if operator.base not in _REDUCTIONS | _DERIVING or "._foreach_" in operator.name:
            return None
        if result is None or not tensors or result.numel() > _MAX_NUMEL:
            return None
        if operator.base in _REDUCTIONS:
            dim = next((value for name, _, value in given if name == "dim"), None)
            name = operator.base.removeprefix("linalg_vector_")
            return DivisorSource((Reduction(name, _dims(dim, tensors[0].dim()), tuple(tensors[0].shape), spot),))
        tensors = tensors[1:] if operator.base == "copy" else tensors
        # of a result that another tensor has stretched no element belongs to one of the source
        fits = operator.base == "copy" or result.shape == tensors[0].shape
        return self._together([self.of(tensor) for tensor in tensors]) if fits else None

    @staticmethod
    def _together(found: list[DivisorSource | None]) -> DivisorSource | None:
        """The sources of several operands as one; None where one of them is not known."""
        known = [source for source in found if source is not None]
        parts = tuple(dict.fromkeys(part for source in known for part in source.parts))
        if len(known) < len(found) or not parts or len(parts) > _MAX_PARTS:
            return None
        shrunk = next((source for source in known if source.underflowed is not None), known[0])
        return replace(shrunk, parts=parts)

    def _shrunk(
        self,
        source: DivisorSource,
        operator: Operator,
        given: list[tuple[str, Any, Any]],
        result: Tensor,
        spot: CodeLocation | None,
    ) -> DivisorSource:
        """The source, with the elements that have just underflowed. Host sync: one, of results that are followed."""
        # asking for a value of a distributed tensor would communicate
        is_local = all(type(each) in (Tensor, Parameter) for each in tensors_of([value for _, _, value in given]))
        if operator.base not in _SHRINKS or not is_local or not result.is_floating_point():
            return source
        zeros = result.detach() == 0
        for _, _, value in given[:1] if operator.base in {"pow", "div", "_to_copy"} else given[:2]:
            is_there = value != 0
            # what is cast may come from another device
            zeros = zeros & (is_there.to(zeros.device) if isinstance(is_there, Tensor) else is_there)
        if not bool(zeros.any()):
            return source
        return replace(source, underflowed=zeros, spot=spot, dtype=str(result.dtype).removeprefix("torch."))

    def _forget(self, tensors: Any) -> None:
        for tensor in tensors_of(tensors):
            if self._found.get(key_of(tensor)) is not None or self._name_of(tensor):
                self._keep(tensor, None)

    def _keep(self, tensor: Tensor, source: DivisorSource | None) -> None:
        storage = storage_of(tensor)
        if storage is not None:
            # The key is an address: without the reference it could be given to another storage, which would inherit the
            # source.
            self._found[key_of(tensor)] = (source, weak_reference(storage))


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is all of its memory: what is written into a part says nothing of the rest."""
    storage = storage_of(tensor)
    return storage is not None and storage.nbytes() == tensor.numel() * tensor.element_size()


def _dims(given: Any, num_dims: int) -> tuple[int, ...] | None:
    dims = [given] if isinstance(given, int) and not isinstance(given, bool) else given
    if not isinstance(dims, (list, tuple)) or not dims:
        return None
    return tuple(dim % num_dims for dim in dims if isinstance(dim, int))
