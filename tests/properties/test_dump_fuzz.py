"""Whatever somebody does to the JSON of a dump, reading and replaying it ends in one line or in success, and soon."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddp_nanguard.cli.main import main
from ddp_nanguard.dump import Dump, list_dumps, open_dump
from ddp_nanguard.errors import DumpError
from tests.golden import GOLDEN

FILES = sorted(str(path.relative_to(GOLDEN)) for path in GOLDEN.rglob("*.json"))
OF_RECORDS = [path for path in FILES if "window" not in path]
BIG = 2**63
ODD = [None, True, False, 0, -1, 1, 2, BIG, 10**12, 10**400, 0.5, 1e300, "", "nan", "x", "\ud800", "a\nb", [], {}]
ODD += [[[]], [-1], [BIG, BIG], ["x"], {"": 0}, {"$": "tuple"}, {"$": "object", "type": 3}, {"$": ["a"]}]

odd_values = st.sampled_from(ODD) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
common = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all parts of a JSON value; of long lists to the first and last few."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in sorted({*range(min(4, len(value))), *range(max(0, len(value) - 2), len(value))}):
            yield from places(value[index], (*path, index))


PLACES = [(file, path) for file in FILES for path in places(json.loads((GOLDEN / file).read_text()))]


@st.composite
def changes(draw: Any, files: list[str]) -> tuple[str, str]:
    """A file and its new content."""
    file, path = draw(st.sampled_from([place for place in PLACES if place[0] in files]))
    value = json.loads((GOLDEN / file).read_text())
    what = draw(st.sampled_from(["replace", "replace", "replace", "delete", "nest", "double"]))
    odd = draw(odd_values)
    if not path:
        return file, json.dumps(odd)
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    if what == "delete":
        del parent[path[-1]]
    elif what == "nest":
        depth = draw(st.sampled_from([1, 70, 300, 5000]))
        return file, _nested(value, parent, path[-1], depth)
    elif what == "double" and isinstance(parent, list):
        parent.append(copy.deepcopy(parent[-1]))
    else:
        parent[path[-1]] = odd
    return file, json.dumps(value)


def _nested(value: Any, parent: Any, key: Any, depth: int) -> str:
    inner = json.dumps(parent[key])
    parent[key] = "@here@"
    return json.dumps(value).replace('"@here@"', "[" * depth + inner + "]" * depth, 1)


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path_factory.mktemp("fuzz") / GOLDEN.name))


@contextlib.contextmanager
def changed(dump: Path, file: str, content: str) -> Iterator[None]:
    (dump / file).write_text(content)
    try:
        yield
    finally:
        shutil.copy(GOLDEN / file, dump / file)


def one_line_or_success(act: Callable[[], object]) -> None:
    said = "success"
    try:
        act()
    except DumpError as error:
        said = str(error)
    assert len(said.splitlines()) == 1, said
    assert len(said.encode()) < 1500, said


def read_all(path: Path) -> None:
    opened = open_dump(path, verify=False)
    opened.plain_state()
    for rank in opened.ranks:
        opened.evidence(rank), opened.window(rank), opened.buffers(rank), opened.special(rank), opened.described(rank)
        opened.load_state(rank=rank)


@given(changes(FILES))
@settings(common, max_examples=70)
def test_reading_ends_in_one_line_or_in_success(dump: Path, change: tuple[str, str]) -> None:
    _assert_readable_or_refused(dump, change)


@pytest.mark.exhaustive
@given(changes(FILES))
@settings(common, max_examples=1000)
def test_so_it_does_with_many_more_changes(dump: Path, change: tuple[str, str]) -> None:
    _assert_readable_or_refused(dump, change)


def _assert_readable_or_refused(dump: Path, change: tuple[str, str]) -> None:
    with changed(dump, *change):
        one_line_or_success(lambda: read_all(dump))
        one_line_or_success(lambda: open_dump(dump))
        assert len(list_dumps(dump.parent)) == 1


@given(changes(OF_RECORDS))
@settings(common, max_examples=25)
def test_the_command_line_says_one_line_or_succeeds(dump: Path, change: tuple[str, str]) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # a terminal takes no half of a surrogate pair either
    with changed(dump, *change), contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(out):
        codes = [main(["list", str(dump.parent)]), main(["show", str(dump)]), main(["show", "--json", str(dump)])]
        codes.append(main(["explain", "--no-replay", str(dump)]))
    assert codes[0] == 0 and set(codes) <= {0, 2}
    assert said.getvalue().count("\n") == codes.count(2)


@given(changes(OF_RECORDS))
@settings(common, max_examples=25)
def test_a_replay_ends_in_one_line_or_with_an_outcome(dump: Path, change: tuple[str, str]) -> None:
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch, changed(dump, *change):
        patch.setattr(Dump, "verify", lambda self: None)  # as if the checksums had been made to fit
        with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
            code = main(["replay", str(dump)])
    torch.set_num_threads(before)
    assert code in (0, 2, 3, 4, 5)
    lines = [line for line in said.getvalue().splitlines() if not line.startswith("recipe ")]
    assert len(lines) == (code == 2), said.getvalue()
