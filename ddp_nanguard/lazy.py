"""`resolved`: a package's name, imported when it is first asked for."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from typing import Any


def resolved(package: str, where: Mapping[str, str], name: str) -> Any:
    """The object behind a name that a package exports, or a module in it; the package keeps it, so this runs once.

    Args:
        package: whose ``__getattr__`` asks.
        where: module within the package, by exported name.
        name: that is asked for.

    Raises:
        AttributeError: the package exports no such name.
    """
    found: Any
    if name in where:
        found = getattr(importlib.import_module(f"{package}.{where[name]}"), name)
    elif not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}") is not None:
        found = importlib.import_module(f"{package}.{name}")
    else:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    setattr(sys.modules[package], name, found)
    return found
