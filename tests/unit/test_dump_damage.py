"""What is wrong with a dump is said in one line that names the file and the remedy."""

import json
import os
import shutil

import pytest

from ddp_nanguard.dump import open_dump, write_dump
from ddp_nanguard.dump.directories import rotate
from ddp_nanguard.dump.records import SCHEMA_VERSION
from ddp_nanguard.errors import DumpError
from tests.dump_requests import request


def change(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def refused(path):
    with pytest.raises(DumpError) as caught:
        open_dump(path)
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize(
    "name",
    [
        "state/shard-00000-00000.safetensors",
        "state.json",
        "rank-00000/evidence.json",
        "rank-00000/window.safetensors",
        "rank-00000/window.json",
        "rank-00000/history.npz",
        "rank-00000/files.json",
    ],
)
def test_a_changed_or_missing_file_is_named(path, name):
    file = path / name
    data = file.read_bytes()
    file.write_bytes(data[:-2] + (b"0" if data[-2:-1] != b"0" else b"1") + data[-1:])
    assert str(file) in refused(path) and "copy" in refused(path)
    file.write_bytes(data[:-7])
    assert str(file) in refused(path)
    file.unlink()
    assert refused(path).startswith(f"{file} is missing: the dump is incomplete; copy it again")


def test_partial(path):
    partial = path.rename(f"{path}.partial")
    assert refused(partial).startswith(f"{partial} is partial: its writers ended before it was whole; ")
    whole = partial.rename(path)
    (whole / "manifest.json").unlink()
    assert refused(whole).startswith(f"{whole} is partial: ")


def test_newer_schema(path):
    change(path / "manifest.json", schema_version=SCHEMA_VERSION + 1)
    assert refused(path) == (
        f"{path}/manifest.json has schema version {SCHEMA_VERSION + 1}, "
        f"this ddp-nanguard reads version {SCHEMA_VERSION}; upgrade ddp-nanguard"
    )


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "{}", '{"schema_version": "x"}', '{"schema_version": 2}', "\xff\xfe"]
)
def test_a_manifest_that_is_none(path, content):
    (path / "manifest.json").write_bytes(content.encode("latin-1"))
    assert str(path / "manifest.json") in refused(path)


def test_no_dump(tmp_path, path):
    assert refused(tmp_path / "nothing") == f"{tmp_path}/nothing is no directory; {tmp_path} holds {path.name}"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert (
        refused(empty)
        == f"{empty} is no dump and holds none that is whole: there is no manifest.json, see: ddp-nanguard list {empty}"
    )
    assert open_dump(tmp_path).path == path, "a dump_dir with one dump will do"
    write_dump(request(tmp_path, step=8))
    assert "holds 2 whole dumps" in refused(tmp_path)


def test_parts_of_different_dumps(tmp_path, path):
    other = write_dump(request(tmp_path, step=8)).path
    assert (
        refused([path, other]) == f"{other} and {path} are not parts of one dump: their step differs; give parts of one"
    )
    other = write_dump(request(tmp_path, run_id="other")).path
    assert "are from different runs" in refused([path, other])


def test_a_path_that_leaves_the_dump_is_refused(path):
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"].append({"path": "../../../etc/passwd", "size_bytes": 1, "blake2b": "0" * 32})
    change(path / "manifest.json", files=manifest["files"])
    assert (
        refused(path) == f"{path}/manifest.json lists '../../../etc/passwd', which is outside the dump; do not use it"
    )


def test_a_moved_dump_still_opens(tmp_path, path):
    moved = tmp_path / "elsewhere" / "renamed"
    moved.parent.mkdir()
    shutil.move(path, moved)
    assert open_dump(moved).load_state()["model.w"].shape == (5, 3)


def test_rotation_of_whole_dumps_only(tmp_path):
    for step in range(4):
        write_dump(request(tmp_path, step=step, options={"dump_keep": 0}))
    (tmp_path / "step-00000000").rename(tmp_path / "step-00000000.partial")
    busy = tmp_path / "step-00000001" / "rank-00001.partial"
    busy.mkdir()
    newest = tmp_path / "step-00000003"
    rotate(tmp_path, 1, newest)
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink())
    assert names == ["step-00000000.partial", "step-00000001", "step-00000003"]
    os.utime(busy, (0, 0))
    rotate(tmp_path, 1, newest)
    assert not busy.exists() and newest.exists()


def test_a_newer_dump_of_an_earlier_step_survives_rotation(tmp_path):
    """A resumed run faults in an earlier step."""
    for step in (9, 10, 3):
        last = write_dump(request(tmp_path, step=step, options={"dump_keep": 2})).path
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink()) == [
        "step-00000003",
        "step-00000010",
    ]
    assert last.endswith("step-00000003")
