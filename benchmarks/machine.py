"""What a figure is worth nothing without: the machine, the versions, and what else ran meanwhile."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "lightning", "transformers")


def machine() -> dict[str, Any]:
    """Ready for JSON."""
    versions = {name: version for name in PACKAGES if (version := _version(name)) is not None}
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
    }


def described(found: dict[str, Any]) -> str:
    """One line for people."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"{found['cores']} cores of {found['processor']}, Python {found['python']}, {versions}"


def load() -> float:
    """Processes that ran or wanted to, on average over the last minute."""
    return round(os.getloadavg()[0], 2)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
