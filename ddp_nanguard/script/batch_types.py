"""Builds the batch classes of a script, which has defined or imported them by the time its guard is made."""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class LoadedTypes(Mapping[str, Callable[..., Any]]):
    """Dataclasses, named tuples and enums of modules that are loaded, by ``module.Class``.

    No other class: a dump may be forged, and a name in it must not call what was never made to hold data.
    """

    def get(self, name: str, default: Any = None) -> Any:
        """The class, or the default."""
        module, _, class_name = name.rpartition(".")
        found = getattr(sys.modules.get(module), class_name, None) if module else None
        return found if isinstance(found, type) and _holds_data(found) else default

    def __getitem__(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] | None = self.get(name)
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True


def _holds_data(kind: type) -> bool:
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return dataclasses.is_dataclass(kind) or is_named_tuple or issubclass(kind, enum.Enum)
