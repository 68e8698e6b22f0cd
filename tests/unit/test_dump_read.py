"""A dump written and read in one process: every file, every check, and nothing executed."""

import dataclasses
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from ddp_nanguard.capture.rng import restore
from ddp_nanguard.cli import main as cli
from ddp_nanguard.dump import format as dump_format
from ddp_nanguard.dump import open_dump, rank_files, write_dump
from ddp_nanguard.dump import state as state_module
from ddp_nanguard.dump.directories import rotate
from ddp_nanguard.dump.records import SCHEMA_VERSION
from ddp_nanguard.errors import DumpError
from ddp_nanguard.report.text import human_size, report_text
from ddp_nanguard.report.types import FaultReport
from ddp_nanguard.tensors.shards import TensorShard
from tests.dump_requests import DTYPES, bytes_of, random_tensor, report, request


@pytest.fixture
def path(tmp_path):
    """A whole dump of one rank."""
    result = write_dump(request(tmp_path))
    assert result.problems == []
    return Path(result.path)


@pytest.fixture
def one_rank_group(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def change(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def refused(path):
    with pytest.raises(DumpError) as caught:
        open_dump(path)
    (line,) = str(caught.value).splitlines()
    return line


# what is in it


def test_layout(path):
    files = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    assert path.name == "step-00000007"
    assert files == [
        "manifest.json",
        "rank-00000/evidence.json",
        "rank-00000/files.json",
        "rank-00000/history.npz",
        "rank-00000/window.json",
        "rank-00000/window.safetensors",
        "report.txt",
        "state.json",
        "state/shard-00000-00000.safetensors",
        "writer.json",
    ]


def test_every_file_opens_with_its_plain_reader(path):
    for file in path.rglob("*"):
        if file.suffix == ".json":
            assert json.loads(file.read_text(), parse_constant=pytest.fail)
        elif file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                assert [tensors.get_tensor(name) for name in tensors.keys()]  # noqa: SIM118  # no dict
        elif file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as arrays:
                assert {name: arrays[name].shape for name in arrays.files} == {"loss": (2,), "layers/2": (2, 2)}
        elif file.is_file():
            assert file.suffix == ".txt" and file.read_text()


def test_the_manifest_agrees_with_the_report_and_lists_every_file(path):
    manifest = json.loads((path / "manifest.json").read_text())
    expected = dataclasses.replace(report(), dump_path=str(path)).to_dict()
    assert {key: manifest[key] for key in expected} == expected
    listed = {entry["path"] for entry in manifest["files"]}
    files = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert files - listed == {"manifest.json", "writer.json"}
    assert manifest["options"]["dump_keep"] == 5 and manifest["recipe"] == "train:recipe"
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["settings"]["num_threads"] == torch.get_num_threads()


def test_everything_comes_back(path):
    expected = request(path.parent)
    dump = open_dump(path)
    assert dump.report == dataclasses.replace(expected.report, dump_path=str(path))
    assert (dump.ranks, dump.missing_ranks, dump.world_size, dump.names()) == ([0], [], 1, ["model.w"])
    state = dump.plain_state()["registered"]
    assert state["lr"] == 0.1 and state["betas"][0] == 0.9 and math.isnan(state["betas"][1])
    assert state["step"] == 3 and state["step"].dtype is torch.int64
    (micro_batch,) = dump.window(0)
    assert (micro_batch.index, micro_batch.modified, micro_batch.scaler) == (0, ["['x']"], {"scale": 65536.0})
    assert bytes_of(micro_batch.batch["x"]) == bytes_of(expected.window[0].batch["x"])
    assert micro_batch.batch[3] == (None, b"raw") and math.isnan(micro_batch.losses["loss"])
    assert torch.equal(dump.buffers(0)["bn.running_mean"], torch.arange(3.0))
    assert dump.evidence(0) == expected.evidence
    assert math.isnan(dump.history(0)["loss"][1])


def test_the_random_state_comes_back(path, tmp_path):
    wanted = request(tmp_path / "other")
    values = (torch.rand(3), np.random.rand(3))
    dump = open_dump(write_dump(wanted).path)
    assert restore(dump.window(0)[0].random_state) == []
    assert torch.equal(torch.rand(3), values[0]) and np.array_equal(np.random.rand(3), values[1])


def test_special_tensors(tmp_path):
    sparse = torch.eye(3).to_sparse()
    dump = open_dump(write_dump(request(tmp_path, special={"model.embed": sparse})).path)
    assert dump.special(0)["model.embed"].layout == torch.sparse_coo
    assert torch.equal(dump.special(0)["model.embed"].to_dense(), torch.eye(3))


def test_reading_executes_nothing(path):
    """In a fresh process, with every way to unpickle closed and no further module of the user at hand."""
    code = textwrap.dedent(
        """
        import pickle, sys, torch
        from ddp_nanguard.dump import open_dump
        def refuse(*_args, **_kwargs):
            raise AssertionError("unpickled")
        pickle.load = pickle.loads = pickle.Unpickler = pickle._Unpickler = refuse
        torch.load = torch.serialization.load = refuse
        before = set(sys.modules)
        dump = open_dump(sys.argv[1])
        dump.load_state(rank=0), dump.window(0), dump.buffers(0), dump.history(0), dump.plain_state(), dump.evidence(0)
        print(sorted(name for name in set(sys.modules) - before if name.split(".")[0] in ("train", "tests")))
        """
    )
    run = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "[]\n"), run.stderr


def test_a_pickle_in_an_npz_is_refused(path):
    class Trap:
        def __reduce__(self):
            return pytest.fail, ("unpickled",)

    np.savez(path / "rank-00000" / "history.npz", loss=np.array([Trap()], dtype=object))
    with pytest.raises(DumpError, match=r"history.npz is damaged"):
        open_dump(path, verify=False).history(0)
    assert pickle.dumps(Trap())


# state


@pytest.mark.parametrize("through_group", [False, True])
def test_state_bit_for_bit(tmp_path, request_of_all_dtypes, one_rank_group, through_group):
    wanted, tensors = request_of_all_dtypes
    wanted.group = one_rank_group if through_group else None
    result = write_dump(wanted)
    assert result.problems == []
    state = open_dump(result.path).load_state()
    assert set(state) == {*tensors, "model.tied"}
    for name, tensor in tensors.items():
        assert (state[name].dtype, state[name].shape) == (tensor.dtype, tensor.shape)
        assert bytes_of(state[name]) == bytes_of(tensor), name
    assert state["model.tied"] is state["model.float32"]


@pytest.fixture
def request_of_all_dtypes(tmp_path):
    tensors = {f"model.{str(dtype).removeprefix('torch.')}": random_tensor("x", (4, 3), dtype) for dtype in DTYPES}
    tensors["model.scalar"] = torch.tensor(2.5, dtype=torch.bfloat16)
    tensors["model.scalar complex"] = torch.tensor(1 + 2j)
    tensors["model.empty"] = torch.empty(0, 3)
    tensors["model.transposed"] = torch.arange(6.0).reshape(2, 3).T
    tensors["model.slice"] = torch.arange(100.0)[40:43]
    state = [TensorShard.whole(name, tensor) for name, tensor in tensors.items()]
    return request(tmp_path, state=state, aliases={"model.tied": "model.float32"}), tensors


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_reader_takes_state(tmp_path, request_of_all_dtypes):
    """Resharding by others stays possible."""
    wanted, tensors = request_of_all_dtypes
    result = write_dump(wanted)
    plain = {
        name: torch.zeros_like(tensor) for name, tensor in tensors.items() if name in ("model.float32", "model.bool")
    }
    reader = dcp.HuggingFaceStorageReader(str(Path(result.path) / "state"))
    dcp.load(plain, storage_reader=reader, no_dist=True)
    for name, tensor in plain.items():
        assert bytes_of(tensor) == bytes_of(tensors[name])


def test_large_tensors_are_cut_into_bounded_files(tmp_path, monkeypatch):
    """One tensor far above the limit, one row of it too, and many small ones."""
    for module in (dump_format, state_module):
        monkeypatch.setattr(module, "COPY_BYTES", 4096)
    tensors = {"model.big": torch.rand(3, 5000), "model.tall": torch.rand(5000, 2)}
    tensors |= {f"model.{i}": torch.rand(300) for i in range(10)}
    state = [TensorShard.whole(name, tensor) for name, tensor in tensors.items()]
    result = write_dump(request(tmp_path, state=state))
    files = list((Path(result.path) / "state").iterdir())
    assert len(files) > 20 and max(file.stat().st_size for file in files) < 4096 + 2048
    for name, tensor in open_dump(result.path).load_state().items():
        assert torch.equal(tensor, tensors[name])
    alone = write_dump(request(tmp_path, state=state, world_size=2, group=None))
    for name, tensor in open_dump(alone.path).load_state(rank=0).items():
        assert torch.equal(tensor, tensors[name])


def test_load_into(path):
    dump = open_dump(path)
    target = {"model.w": torch.nn.Parameter(torch.zeros(5, 3))}
    dump.load_into(target)
    assert bytes_of(target["model.w"]) == bytes_of(random_tensor("w", (5, 3), torch.float32))
    with pytest.raises(DumpError, match=r"model.w has shape \(5, 3\), the model's has \(3,\); the recipe must build"):
        dump.load_into({"model.w": torch.zeros(3)})


def test_unknown_names_and_ranks(path):
    dump = open_dump(path)
    with pytest.raises(DumpError, match=r"holds no tensor 'model.v'; the recipe must build the model of the run"):
        dump.load_state(["model.v"])
    for read in (dump.window, dump.evidence, dump.history, lambda rank: dump.load_state(rank=rank)):
        with pytest.raises(DumpError, match=r"has no rank 3; it has 0 of 1 ranks"):
            read(3)


def test_without_weights(tmp_path):
    result = write_dump(request(tmp_path, state=[]))
    assert result.problems == []
    dump = open_dump(result.path)
    assert dump.load_state() == {} and dump.manifest.weights.problem == "not asked for"


def test_without_a_dump_dir():
    result = write_dump(request("unused", options={"dump_dir": None}))
    assert (result.path, result.problems) == (None, [])


def test_objects_that_cannot_be_stored_are_noted(tmp_path):
    wanted = request(tmp_path)
    wanted.window[0].batch = {"x": torch.ones(1), "f": lambda: 0}
    result = write_dump(wanted)
    assert result.problems == []
    dump = open_dump(result.path)
    assert dump.evidence(0).notes == (
        "['micro_batches'][0]['batch']['f']: builtins.function left out, it cannot be stored",
    )
    assert torch.equal(dump.window(0)[0].batch["x"], torch.ones(1))


def test_a_batch_that_no_reader_would_take_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_files, "MAX_CONTENT_BYTES", 2000)
    result = write_dump(request(tmp_path))
    (problem,) = result.problems
    assert problem.startswith("window.json not written: a batch has ")
    assert problem.endswith(
        " bytes beside its tensors, at most 2000 can be read again; hold long texts as uint8 tensors"
    )
    with pytest.raises(DumpError, match=r"window.json was not written \(window.json not written: a batch has"):
        open_dump(result.path).window(0)


# what is wrong with it


@pytest.mark.parametrize(
    "name",
    [
        "state/shard-00000-00000.safetensors",
        "state.json",
        "report.txt",
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
        == f"{empty} is no dump but holds no whole dump; give one of them, see: ddp-nanguard list {empty}"
    )
    assert open_dump(tmp_path).path == path, "a dump_dir with one dump will do"
    write_dump(request(tmp_path, step=8))
    assert "holds 2 dumps" in refused(tmp_path)


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


# directories


def test_rotation_of_whole_dumps_only(tmp_path):
    for step in range(4):
        write_dump(request(tmp_path, step=step, options={"dump_keep": 0}))
    (tmp_path / "step-00000000").rename(tmp_path / "step-00000000.partial")
    busy = tmp_path / "step-00000001" / "rank-00001.partial"
    busy.mkdir()
    newest = tmp_path / "step-00000003"
    rotate(tmp_path, 1, newest)
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert names == ["step-00000000.partial", "step-00000001", "step-00000003"]
    os.utime(busy, (0, 0))
    rotate(tmp_path, 1, newest)
    assert not busy.exists() and newest.exists()


def test_a_newer_dump_of_an_earlier_step_survives_rotation(tmp_path):
    """A resumed run faults in an earlier step."""
    for step in (9, 10, 3):
        last = write_dump(request(tmp_path, step=step, options={"dump_keep": 2})).path
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["step-00000003", "step-00000010"]
    assert last.endswith("step-00000003")


# command line


def run_cli(capsys, *arguments):
    try:
        code = cli.main([str(argument) for argument in arguments])
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    return code, out, err


def test_cli_list(tmp_path, path, capsys):
    write_dump(request(tmp_path, step=123456789, options={"dump_keep": 0}))
    (tmp_path / "step-00000008.partial" / "rank-00003").mkdir(parents=True)
    code, out, err = run_cli(capsys, "list", tmp_path)
    assert (code, err) == (0, "")
    header, first, second, third = out.splitlines()
    assert header.split() == ["STEP", "WHEN", "DUMP", "RANKS", "SIZE", "STATUS", "ORIGIN"]
    assert first.split()[0] == "7" and "step-00000007  " in first and "1/1" in first and "whole" in first
    assert "rank 0 · micro-batch 1 · forward · layers.2.act (call 1): finite in, NaN out" in first
    assert second.split()[0] == "8" and "1/?" in second and "partial" in second
    assert third.split()[0] == "123456789"
    columns = {
        line.rindex(text) for line, text in zip((first, second, third), ("whole", "partial", "whole"), strict=True)
    }
    assert columns == {header.index("STATUS")}


def test_cli_list_of_nothing(tmp_path, capsys):
    assert run_cli(capsys, "list", tmp_path) == (0, "no dumps\n", "")
    line = f"ddp-nanguard: {tmp_path}/x does not exist: nothing went bad there yet, or the run had another dump_dir\n"
    assert run_cli(capsys, "list", tmp_path / "x") == (2, "", line)


def test_cli_show(path, capsys):
    code, out, err = run_cli(capsys, "show", path)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[:2] == ["rank 0, step 7, micro-batch 1, forward", "  layers.2.act (call 1): finite in, NaN out"]
    assert lines[-1] == f"  next      ddp-nanguard replay {path} --trace"
    assert "\x1b" not in out and max(len(line) for line in lines if str(path) not in line) <= 110
    code, out, _ = run_cli(capsys, "show", path, "--json")
    assert code == 0 and json.loads(out) == {
        "schema_version": SCHEMA_VERSION,
        **dataclasses.replace(report(), dump_path=str(path)).to_dict(),
    }


@pytest.mark.parametrize("arguments", [[], ["show"], ["list"], ["nothing"], ["show", "--frames", "x"]])
def test_cli_wrong_usage(arguments, capsys):
    code, out, err = run_cli(capsys, *arguments)
    assert (code, out) == (2, "") and "usage: ddp-nanguard" in err


def test_cli_unusable_dump(path, capsys):
    (path / "manifest.json").write_text("{")
    code, out, err = run_cli(capsys, "show", path)
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith(
        f"ddp-nanguard: {path}/manifest.json is no valid"
    )


# the text


def test_report_text():
    text = report_text(dataclasses.replace(report(12, 8), dump_path="nan_dumps/step-00000012"))
    assert text.splitlines() == [
        "rank 0, step 12, micro-batch 1, forward",
        "  layers.2.act (call 1): finite in, NaN out",
        "",
        "  evidence  (4, 4) float32: 3 NaN, 1 Inf, 0 -Inf of 16; largest finite 2.5; ranks affected: 0",
        "  cause     the log of a negative number",
        "  state     all 8 ranks stopped before the update; weights are those of step 11",
        "",
        "  next      ddp-nanguard replay nan_dumps/step-00000012 --trace",
    ]


def test_report_text_of_damage_and_of_nothing():
    damaged = dataclasses.replace(
        report(), nonfinite_state=tuple(f"model.w{i}" for i in range(9)), origin=None, sites=()
    )
    text = report_text(damaged)
    assert text.startswith("step 7\n  the log of a negative number\n")
    assert "DAMAGED: model.w0, model.w1, model.w2, model.w3, model.w4, model.w5 and 3" in text
    assert isinstance(FaultReport.from_dict(damaged.to_dict()), FaultReport)
    assert "\x1b[31m" in report_text(report(), color=True)


def test_human_size():
    assert [human_size(size) for size in (0, 999, 2048, 412 * 2**20, 3 * 2**30)] == [
        "0 B",
        "999 B",
        "2.0 KiB",
        "412 MiB",
        "3.0 GiB",
    ]
