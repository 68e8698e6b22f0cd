"""JSON of a dump that is no valid one is refused in one line, which names file, field, value and what is valid."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_nanguard.cli.main import main
from ddp_nanguard.dump import list_dumps, open_dump
from ddp_nanguard.dump.json_files import AGAIN, MAX_JSON_BYTES, MAX_JSON_DEPTH
from ddp_nanguard.dump.records import SCHEMA_VERSION
from ddp_nanguard.errors import DumpError
from tests.golden import GOLDEN
from tests.replaying import under_torchrun

EVIDENCE, FILES, WINDOW = (f"rank-00001/{name}.json" for name in ("evidence", "files", "window"))
BIG = 2**63


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / GOLDEN.name))


def change(file: Path, path: str, value: Any) -> None:
    """Sets the value at ``a.b.0.c``."""
    data = json.loads(file.read_text())
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    inner = data
    for key in parents:
        inner = inner[key]
    inner[last] = value
    file.write_text(json.dumps(data))


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(DumpError) as caught:
        act()
    (line,) = str(caught.value).splitlines()
    return line


def read_everything(dump: Path) -> None:
    opened = open_dump(dump, verify=False)
    opened.plain_state(), opened.evidence(1), opened.window(1), opened.load_state(rank=1)


A_NUMBER = f"a whole number from 0 to {BIG - 1}"
A_RANK = "a rank from 0 to 1048575"
A_SHAPE = f"a shape of at most {BIG - 1} elements"
A_WORLD = "a number of ranks from 1 to 1048576"
A_PHASE = "'state' or 'input' or 'forward' or 'loss' or 'backward' or 'reduce' or 'loop' or 'optimizer'"
A_WRAPPER = "'plain' or 'ddp' or 'fsdp1' or 'fsdp2'"
AN_OPTION = "what NanGuard takes (option exit_code=0 is out of range; give a code from 1 to 255)"
LARGE = [2**40, 2**40]
LONG, SHORTENED = "x" * 99, f"'{'x' * 27}...{'x' * 28}'"

OF_MANIFEST: list[tuple[str, Any, str]] = [
    ("step", "2", f"step is '2', valid is {A_NUMBER}"),
    ("step", True, f"step is True, valid is {A_NUMBER}"),
    ("step", 2.0, f"step is 2.0, valid is {A_NUMBER}"),
    ("step", BIG, f"step is {BIG}, valid is {A_NUMBER}"),
    ("step", -1, f"step is -1, valid is {A_NUMBER}"),
    ("world_size", 10**12, f"world_size is 1000000000000, valid is {A_WORLD}"),
    ("world_size", 0, f"world_size is 0, valid is {A_WORLD}"),
    ("world_size", 1, "sites[0].rank is 1, valid is a rank below world_size=1"),
    ("origin.rank", BIG, f"origin.rank is {BIG}, valid is {A_RANK} or null"),
    ("origin.phase", "later", f"origin.phase is 'later', valid is {A_PHASE}"),
    ("origin.kind", "NaN", "origin.kind is 'NaN', valid is 'nan' or 'inf' or '-inf'"),
    ("sites.2.evidence.shape", [-1], f"sites[2].evidence.shape[0] is -1, valid is {A_NUMBER}"),
    ("sites.2.evidence.shape", LARGE, f"sites[2].evidence.shape is {LARGE}, valid is {A_SHAPE}"),
    ("settings.num_threads", 9999, "settings.num_threads is 9999, valid is a number of threads from 1 to 4096"),
    ("settings.default_dtype", None, "settings.default_dtype is None, valid is a text"),
    ("wrapper_description.kind", 3, f"wrapper_description.kind is 3, valid is {A_WRAPPER}"),
    ("options.exit_code", 0, f"options is refused, valid is {AN_OPTION}"),
    ("options.watch", "loss", "options.watch is 'loss', valid is a list"),
    ("shapes", {"model.w": {"shape": [1]}}, "shapes['model.w'].dtype is missing"),
    ("cause", "\ud800", r"cause is '\ud800', valid is a text"),
    ("problems", ["a\nb"], r"problems[0] is 'a\nb', valid is one line of text"),
    ("recipe", ["x"], "recipe is ['x'], valid is a text or null"),
    ("files.0.blake2b", LONG, f"files[0].blake2b is {SHORTENED}, valid is 16 bytes in hexadecimal"),
    ("files.0.path", "a\nb", r"files[0].path is 'a\nb', valid is a printable path"),
]
OF_OTHERS: list[tuple[str, str, Any, str]] = [
    (EVIDENCE, "known_nonfinite", [["a", "b"]], "known_nonfinite[0] is ['a', 'b'], valid is a list of 3"),
    (EVIDENCE, "hyper_parameters", {"g0.lr": "fast"}, "hyper_parameters['g0.lr'] is 'fast', valid is a number"),
    (EVIDENCE, "scaler", 1, "scaler is 1, valid is an object or null"),
    (FILES, "tensors", {"model.scale": 4}, "tensors['model.scale'] is 4, valid is an object"),
    (WINDOW, "micro_batches.0.index", None, "micro_batches[0].index is None, valid is a whole number"),
    (WINDOW, "micro_batches.0.losses", {"loss": 1.0}, "micro_batches[0].losses['loss'] is 1.0, valid is a Tensor"),
    (WINDOW, "micro_batches", {}, "micro_batches is {}, valid is a list"),
    ("state.json", "tensors", [], "tensors is [], valid is an object"),
    ("state.json", "structure.optimizers.0.groups", 7, "optimizers[0].groups is 7, valid is a list"),
]


@pytest.mark.parametrize(
    ("file", "path", "value", "said"), [*(("manifest.json", *case) for case in OF_MANIFEST), *OF_OTHERS]
)
def test_a_field_that_does_not_fit(file: str, path: str, value: Any, said: str, dump: Path) -> None:
    change(dump / file, path, value)
    assert refused(lambda: read_everything(dump)) == f"{dump / file}: {said}; {AGAIN}"


OR_COPY = "see Recipe.batch_types, or copy the dump again"
UNHASHABLE = "(TypeError: unhashable type: 'list')"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("$", "tensors", "a value of kind 'tensors' cannot be unpacked; upgrade ddp-nanguard"),
        ("stride", [2**40], f"stride [{2**40}] does not fit shape (4,); copy the dump again"),
        ("id", [], f"a value of kind 'tensor' cannot be unpacked {UNHASHABLE}; {OR_COPY}"),
    ],
)
def test_a_tensor_of_a_batch_that_does_not_fit(key: str, value: Any, said: str, dump: Path) -> None:
    change(dump / WINDOW, f"micro_batches.0.batch.x.{key}", value)
    assert refused(lambda: read_everything(dump)) == f"{dump / WINDOW}: micro_batches[0]['batch']['x']: {said}"


def nested(levels: int) -> bytes:
    return b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (nested(MAX_JSON_DEPTH + 1), f"nested deeper than {MAX_JSON_DEPTH} levels"),
        (nested(10**6), f"nested deeper than {MAX_JSON_DEPTH} levels"),
        (b'{"step": NaN}', "NaN is no number of JSON"),
        (b'{"step": -Infinity}', "-Infinity is no number of JSON"),
        (b'{"step": 1e999}', "1e999 is beyond the numbers of a float64"),
        (b'{"step": 1, "step": 2}', "key 'step' is there twice"),
        (b"[1]", "an object is valid, not a list"),
        (b"null", "an object is valid, not a NoneType"),
        (b'{"a": "\xff"}', "byte 7 is no UTF-8"),
        (b"{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ],
)
@pytest.mark.parametrize("file", ["manifest.json", EVIDENCE])
def test_what_is_no_strict_json(content: bytes, said: str, file: str, dump: Path) -> None:
    (dump / file).write_bytes(content)
    assert refused(lambda: read_everything(dump)) == f"{dump / file} is no valid JSON ({said}); {AGAIN}"


def test_numbers_without_end(dump: Path) -> None:
    (dump / "manifest.json").write_text('{"step": ' + "9" * 10**6 + "}")
    assert refused(lambda: open_dump(dump)).startswith(f"{dump}/manifest.json is no valid JSON (Exceeds the limit ")


def test_a_file_beyond_its_size_is_not_read(dump: Path) -> None:
    with open(dump / "manifest.json", "r+b") as file:
        file.truncate(10 * MAX_JSON_BYTES)
    line = f"{dump}/manifest.json has {10 * MAX_JSON_BYTES} bytes, valid are at most {MAX_JSON_BYTES}; {AGAIN}"
    assert refused(lambda: open_dump(dump)) == line


def test_a_pipe_is_not_waited_for(dump: Path) -> None:
    (dump / EVIDENCE).unlink()
    os.mkfifo(dump / EVIDENCE)
    assert (
        refused(lambda: open_dump(dump, verify=False).evidence(1)) == f"{dump / EVIDENCE} is no regular file; {AGAIN}"
    )


@pytest.mark.parametrize(
    ("version", "remedy"), [(1, "read it with the ddp-nanguard that wrote it"), (3, "upgrade ddp-nanguard")]
)
@pytest.mark.parametrize("file", ["manifest.json", FILES])
def test_another_version(version: int, remedy: str, file: str, dump: Path) -> None:
    change(dump / file, "schema_version", version)
    said = f"has schema version {version}, this ddp-nanguard reads version {SCHEMA_VERSION}; {remedy}"
    assert refused(lambda: open_dump(dump)) == f"{dump / file} {said}"


@pytest.mark.parametrize("version", [None, "2", True, 0, 2.0])
def test_no_version(version: Any, dump: Path) -> None:
    change(dump / "manifest.json", "schema_version", version)
    said = "has no schema_version; this is no dump of ddp-nanguard"
    assert refused(lambda: open_dump(dump)) == f"{dump}/manifest.json {said}"


def test_a_rank_beyond_the_world(dump: Path) -> None:
    shutil.copytree(dump / "rank-00001", dump / "rank-00007")
    assert refused(lambda: open_dump(dump)) == f"{dump}/rank-00007 is of a rank beyond world_size=2; {AGAIN}"
    (dump / "rank-00007").rename(dump / "rank-\N{SUPERSCRIPT TWO}")
    assert open_dump(dump).ranks == [0, 1]


def test_a_part_outside_its_tensor(dump: Path) -> None:
    for rank in (0, 1):
        change(
            dump / f"rank-0000{rank}/files.json", "tensors.model.scale".replace(".scale", ""), None
        ) if False else None
        data = json.loads((dump / f"rank-0000{rank}/files.json").read_text())
        data["tensors"]["model.scale"]["stored_shape"] = [2, 2]
        (dump / f"rank-0000{rank}/files.json").write_text(json.dumps(data))
    line = refused(lambda: open_dump(dump, verify=False).load_state())
    assert line.endswith(
        f"shard-00000-00000.safetensors: 'model.scale' lies outside its tensor of shape (2, 2); {AGAIN}"
    )


@pytest.mark.parametrize("content", [nested(10**5), b'{"schema_version": 1}', b"\xff", b"[]", b""])
def test_every_entry_point(
    content: bytes, dump: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (dump / "manifest.json").write_bytes(content)
    commands = [
        ["show"],
        ["show", "--json"],
        ["replay"],
        ["replay", "--trace"],
        ["explain"],
        ["explain", "--no-replay"],
    ]
    for command in commands:
        assert main([*command, str(dump)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and err.startswith(f"ddp-nanguard: {dump}/manifest.json "), err
    under_torchrun(monkeypatch)
    assert main(["replay", str(dump)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["list", str(dump.parent)]) == 0
    assert "unreadable, see show" in capsys.readouterr().out
    (summary,) = list_dumps(dump.parent)
    assert (summary.whole, summary.world_size, summary.step) == (False, 0, 2)


def test_the_largest_world_is_read_in_no_time(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(dump / "manifest.json", "world_size", 2**20)
    began = time.monotonic()
    assert len(open_dump(dump).missing_ranks) == 2**20 - 2
    assert main(["show", str(dump)]) == 0 and "2 of 1048576 ranks" in capsys.readouterr().out
    assert time.monotonic() - began < 30
