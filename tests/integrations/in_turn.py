"""Several trainings in one launch: a trainer's library is imported once."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.replaying import torchrun_variables

Job = Callable[[], dict[str, Any]]


def in_turn(jobs: Mapping[str, Job], rank: int, world_size: int, directory: str, names: list[str]) -> dict[str, Any]:
    """What came of each training that is named, each in a directory of its own, on ranks as torchrun starts them."""
    warnings.simplefilter("ignore")
    if world_size > 1:
        os.environ |= torchrun_variables(rank, world_size)
    found = {}
    for name in names:
        place = Path(directory) / name
        place.mkdir(exist_ok=True)
        os.chdir(place)
        found[name] = jobs[name]()
    return found
