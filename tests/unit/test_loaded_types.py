"""Which classes a script's batch is built of by name: those that hold data, never what a forged dump may call."""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

import pytest

from ddp_nanguard.script.batch_types import LoadedTypes


@dataclasses.dataclass
class Batch:
    x: int


class Pair(NamedTuple):
    x: int
    y: int


class Split(enum.Enum):
    TRAIN = "train"


class Anything:
    pass


def test_classes_that_hold_data_are_found() -> None:
    for kind in (Batch, Pair, Split):
        assert LoadedTypes().get(f"{__name__}.{kind.__name__}") is kind
    assert LoadedTypes()[f"{__name__}.Batch"](x=1) == Batch(1)


@pytest.mark.parametrize("name", ["subprocess.Popen", f"{__name__}.Anything", "no_such_module.Batch", "Batch", ""])
def test_nothing_else_is(name: str) -> None:
    assert LoadedTypes().get(name) is None
    with pytest.raises(KeyError):
        LoadedTypes()[name]
