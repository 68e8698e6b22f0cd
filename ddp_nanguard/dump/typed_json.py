"""Reads JSON as the types that a dataclass declares, so that the declaration is the only list of its fields.

`read_as` reads a value as a type, `as_json` is its inverse. A `Rule` beside a type restricts its values further.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import reprlib
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ddp_nanguard.report.types import FaultReport, Natural, Rank, Site

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 60
_SHORT.maxlevel = 2

_NONFINITE = ("nan", "inf", "-inf")
_VALID: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    types.NoneType: "null",
}


class MisfitError(ValueError):
    """A value that does not fit its type or rule.

    Attributes:
        path: keys that lead to it, as in ``origin.evidence.shape[1]``; "" for the whole.
        found: the value, shortened, or "missing".
        valid: a description of valid values; None where the value is missing.
    """

    def __init__(self, path: str, found: str, valid: str | None) -> None:
        super().__init__(f"{path or 'the whole'} is {found}" + ("" if valid is None else f", valid is {valid}"))
        self.path, self.found, self.valid = path, found, valid


@dataclasses.dataclass(frozen=True)
class Counted:
    """The JSON of two fields of a report: a number of ranks, and the first of them.

    Attributes:
        count: number of ranks.
        first: the first of them; the report keeps a bounded number.
    """

    count: Natural
    first: tuple[Rank, ...]


_FORMS: dict[Any, dict[str, Any]] = {
    Site: {"order": None},
    FaultReport: {"num_ranks_affected": None, "ranks_affected": Counted},
}
"""Fields whose JSON has another type than the field itself; None for a field that is not in the JSON."""


def read_as(kind: Any, value: Any, path: str = "") -> Any:
    """``value`` as a ``kind``: a dataclass, an enum, a plain type, any class, or unions and containers of these.

    A number may be written as "nan", "inf" or "-inf". A dataclass with a ``from_dict`` is made by it.

    Args:
        kind: the type.
        value: parsed JSON.
        path: keys that lead to the value, for errors.

    Raises:
        MisfitError: names the first value that does not fit.
    """
    if kind is Any:
        return value
    read = _READERS.get(get_origin(kind))
    if read is not None:
        return read(kind, value, path)
    return _record(kind, value, path) if dataclasses.is_dataclass(kind) else _plain(kind, value, path)


def read_fields(kind: Any, value: Any, path: str = "") -> dict[str, Any]:
    """The fields of a dataclass, read from an object. All must be present; further keys are ignored.

    Args:
        kind: the dataclass.
        value: parsed JSON.
        path: keys that lead to the value, for errors.

    Raises:
        MisfitError: names the first field that is missing or does not fit.
    """
    if not isinstance(value, dict):
        raise _misfit(path, value, "an object")
    fields = {}
    for name, form in fields_in_json(kind).items():
        if name not in value:
            raise MisfitError(_joined(path, name), "missing", None)
        fields[name] = read_as(form, value[name], _joined(path, name))
    return fields


@functools.cache
def fields_in_json(kind: Any) -> dict[str, Any]:
    """Name and type of each field in the JSON of a dataclass."""
    hints = {**get_type_hints(kind, include_extras=True), **getattr(kind, "JSON_FORMS", {}), **_FORMS.get(kind, {})}
    names = [field.name for field in dataclasses.fields(kind)]
    return {name: hints[name] for name in names if hints[name] is not None}


def as_json(value: Any) -> Any:
    """Plain data for strict JSON, the inverse of `read_as`. An object with a ``to_dict`` is converted by it."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()  # half of a surrogate pair could not be printed
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if hasattr(value, "to_dict"):
        return as_json(value.to_dict())
    if dataclasses.is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {as_json(str(key)): as_json(item) for key, item in value.items()}
    return [as_json(item) for item in value] if isinstance(value, (list, tuple)) else value


# -- one reader per form of a type -------------------------------------------------------------------------------------


def _record(kind: Any, value: Any, path: str) -> Any:
    if isinstance(value, kind):
        return value
    fields = read_fields(kind, value, path)
    from_dict = getattr(kind, "from_dict", None)
    return kind(**fields) if from_dict is None else from_dict(value)


def _ruled(kind: Any, value: Any, path: str) -> Any:
    base, rule = get_args(kind)
    try:
        read = read_as(base, value, path)
    except MisfitError as misfit:
        if misfit.path != path:
            raise
        raise _misfit(path, value, rule.valid) from None
    if not rule.holds(read):
        raise _misfit(path, value, rule.valid)
    return read


def _either(kind: Any, value: Any, path: str) -> Any:
    choices = get_args(kind)
    if value is None and types.NoneType in choices:
        return None
    misfits = []
    for choice in choices:
        try:
            return read_as(choice, value, path)
        except MisfitError as misfit:
            misfits.append(misfit)
    # The choice that was read furthest is the one that was meant; its error says more than a list of all choices.
    deepest = max(misfits, key=lambda misfit: len(misfit.path))
    if deepest.path != path:
        raise deepest
    raise _misfit(path, value, " or ".join(misfit.valid or "" for misfit in misfits))


def _literal(kind: Any, value: Any, path: str) -> Any:
    for choice in get_args(kind):
        if type(choice) is type(value) and choice == value:
            return choice
    raise _misfit(path, value, " or ".join(map(repr, get_args(kind))))


def _list(kind: Any, value: Any, path: str) -> list[Any]:
    (item_kind,) = get_args(kind)
    return [read_as(item_kind, item, f"{path}[{index}]") for index, item in enumerate(_sequence(value, path))]


def _tuple(kind: Any, value: Any, path: str) -> tuple[Any, ...]:
    kinds = get_args(kind)
    if len(kinds) == 2 and kinds[1] is ...:
        return tuple(_list(list[kinds[0]], value, path))  # type: ignore[valid-type]  # made at run time
    if len(_sequence(value, path)) != len(kinds):
        raise _misfit(path, value, f"a list of {len(kinds)}")
    return tuple(read_as(kind, item, f"{path}[{n}]") for n, (kind, item) in enumerate(zip(kinds, value, strict=True)))


def _sequence(value: Any, path: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise _misfit(path, value, "a list")
    return value


def _dict(kind: Any, value: Any, path: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _misfit(path, value, "an object")
    key_kind, item_kind = get_args(kind)
    return {
        read_as(key_kind, key, f"a key of {path}"): read_as(item_kind, item, f"{path}[{_SHORT.repr(key)}]")
        for key, item in value.items()
    }


def _plain(kind: Any, value: Any, path: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(_literal(Literal[tuple(member.value for member in kind)], value, path))
    if kind is float and (value in _NONFINITE if isinstance(value, str) else _fits_float(value)):
        return float(value)
    if kind in _VALID and type(value) is kind and (kind is not str or _is_printable(value)):
        return value
    if kind not in _VALID and isinstance(value, kind):
        return value
    raise _misfit(path, value, _VALID.get(kind, f"a {getattr(kind, '__name__', kind)}"))


def _is_printable(text: str) -> bool:
    """Whether a text can be encoded: half of a surrogate pair cannot, and `as_json` writes none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _fits_float(value: Any) -> bool:
    # A larger integer may overflow float().
    return type(value) is float or (type(value) is int and abs(value) <= 2**1000)


_READERS: dict[Any, Callable[[Any, Any, str], Any]] = {
    Annotated: _ruled,
    Union: _either,
    types.UnionType: _either,
    Literal: _literal,
    tuple: _tuple,
    list: _list,
    dict: _dict,
}


def _misfit(path: str, value: Any, valid: str) -> MisfitError:
    return MisfitError(path, _SHORT.repr(value), valid)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
