"""The form of the files of a dump, in lines: ``python -m tests.golden.forms`` writes it for a new `SCHEMA_VERSION`.

What records declare, and what is found in the golden dump. A form that is written is never written over: a dump of that
version may lie on somebody's disk.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np

from ddp_nanguard.dump.rank_records import PlainState, RankEvidence, RankFileList, UnpackedState, WindowContent, Writer
from ddp_nanguard.dump.records import SCHEMA_VERSION, Manifest
from ddp_nanguard.dump.typed_json import fields_in_json
from ddp_nanguard.report.types import FaultReport
from tests.golden import GOLDEN

DECLARED = {
    "manifest.json, of the report": FaultReport,
    "manifest.json": Manifest,
    "rank-*/evidence.json": RankEvidence,
    "rank-*/files.json": RankFileList,
    "rank-*/window.json": WindowContent,
    "state.json": PlainState,
    "state.json, unpacked": UnpackedState,
    "writer.json": Writer,
}
FOUND = (
    "manifest.json",
    "rank-*/evidence.json",
    "rank-*/files.json",
    "rank-*/window.json",
    "state.json",
    "writer.json",
)
HISTORY = "rank-*/history.npz"
NAMES = {types.NoneType: "null", Any: "any", ...: "any number"}


def path_of(version: int) -> Path:
    """Of the form of a version."""
    return Path(__file__).parent / f"form-{version}.txt"


def form(dump: Path) -> str:
    """The form of a dump and of the records of this package."""
    lines = []
    for name, kind in DECLARED.items():
        lines += [f"# {name}, declared", *_declared(kind, "")]
    for pattern in FOUND:
        values = [json.loads(file.read_text()) for file in sorted(dump.glob(pattern))]
        found = [line for value in values for line in _found(value, "")]
        lines += [f"# {pattern}, found", *sorted(set(found))]
    lines += [f"# {HISTORY}, found", *sorted(_arrays(dump))]
    return "\n".join(lines) + "\n"


def _arrays(dump: Path) -> set[str]:
    """Names, kinds of dtype and dims of the arrays; numbers of steps are left open."""
    found = set()
    for file in sorted(dump.glob(HISTORY)):
        with np.load(file) as archive:
            found |= {f"{re.sub(r'[0-9]+', '*', n)}: {archive[n].dtype.kind}, {archive[n].ndim} dims" for n in archive}
    return found


def _declared(kind: Any, path: str) -> Iterator[str]:
    if dataclasses.is_dataclass(kind):
        for name, inner in fields_in_json(kind).items():
            yield from _declared(inner, f"{path}.{name}" if path else name)
        return
    origin, parts = get_origin(kind), get_args(kind)
    if origin is dict:
        yield from _declared(parts[1], f"{path}.*")
    elif origin is list or (origin is tuple and parts[-1] is ...):
        yield from _declared(parts[0], f"{path}[]")
    elif origin in (Union, types.UnionType) and dataclasses.is_dataclass(parts[0]):
        yield from _declared(parts[0], f"{path}?")
    elif origin is Annotated and get_origin(parts[0]) is tuple:
        yield from _declared(parts[0], f"{path}, {parts[1].valid},")
    else:
        yield f"{path}: {_type_text(kind)}"


def _type_text(kind: Any) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return ", ".join([_type_text(parts[0]), *(rule.valid for rule in parts[1:])])
    if origin is Literal:
        return " | ".join(map(repr, parts))
    if origin in (Union, types.UnionType):
        return " | ".join(map(_type_text, parts))
    if origin is not None:
        return f"{origin.__name__} of {', '.join(map(_type_text, parts))}"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return " | ".join(repr(member.value) for member in kind)
    return NAMES.get(kind) or str(kind.__name__)


def _found(value: Any, path: str) -> Iterator[str]:
    """Keys and types; of an object or a list without items that it is one."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _found(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for item in value:
            yield from _found(item, f"{path}[]")
    else:
        yield f"{path}: {NAMES.get(type(value), type(value).__name__)}"


if __name__ == "__main__":
    text = form(GOLDEN)
    with open(path_of(SCHEMA_VERSION), "x") as file:
        file.write(text)
    print(f"{file.name} is written")
