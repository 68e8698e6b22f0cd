"""A dump written and read in one process: every file, and every tensor bit for bit."""

import dataclasses
import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from ddp_nanguard.capture.rng import restore
from ddp_nanguard.dump import format as dump_format
from ddp_nanguard.dump import open_dump, rank_files, write_dump
from ddp_nanguard.dump import state as state_module
from ddp_nanguard.dump.history import SERIES
from ddp_nanguard.errors import DumpError
from ddp_nanguard.tensors.shards import TensorShard
from tests.dump_requests import DTYPES, bytes_of, history, random_tensor, report, request


@pytest.fixture
def one_rank_group(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


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
                shapes = {name: arrays[name].shape for name in arrays.files if "." not in name}
                assert shapes == dict.fromkeys(("steps", *SERIES), (2,))
        elif file.is_file():
            assert file.suffix == ".txt" and file.read_text()


def test_the_manifest_agrees_with_the_report_and_lists_every_file(path):
    manifest = json.loads((path / "manifest.json").read_text())
    expected = dataclasses.replace(report(), dump_path=str(path)).to_dict()
    assert {key: manifest[key] for key in expected} == expected
    listed = {entry["path"] for entry in manifest["files"]}
    files = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert files - listed == {"manifest.json", "report.txt", "writer.json"}
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


def test_a_pickle_in_an_npz_is_refused(path):
    class Trap:
        def __reduce__(self):
            return pytest.fail, ("unpickled",)

    np.savez(path / "rank-00000" / "history.npz", loss=np.array([Trap()], dtype=object))
    with pytest.raises(DumpError, match=r"history.npz is damaged"):
        open_dump(path, verify=False).history(0)
    assert pickle.dumps(Trap())


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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fault.values": None}, "array 'fault.values' is missing"),
        ({"steps": None}, "array 'steps' is missing"),
        ({"steps": np.array([5, 6, 7])}, "array 'loss' is float64 (2,)"),
        ({"loss": np.array(["1", "2"])}, "array 'loss' is <U1 (2,)"),
        ({"steps": np.array([5.0, 6.0])}, "array 'steps' is float64 (2,)"),
        ({"fault.labels": np.array(["forward"])}, "array 'fault.labels': 'forward' is no label of a slot"),
        ({"fault.labels": np.array(["forward|x|a|1|output|1"])}, "array 'fault.labels': "),
    ],
)
def test_a_history_that_is_none(path, change, said):
    arrays = {name: array for name, array in {**history(), **change}.items() if array is not None}
    np.savez(path / "rank-00000" / "history.npz", **arrays)
    with pytest.raises(DumpError) as caught:
        open_dump(path, verify=False).history(0)
    assert said in str(caught.value) and str(caught.value).endswith("; copy the dump again from where it was written")


def test_unknown_names_and_ranks(path):
    dump = open_dump(path)
    with pytest.raises(DumpError, match=r"holds no tensor 'model.v'; the recipe must build the model of the run"):
        dump.load_state(["model.v"])
    for read in (dump.window, dump.evidence, dump.history, lambda rank: dump.load_state(rank=rank)):
        with pytest.raises(DumpError, match=r"has no rank 3; of world_size=1 it has rank 0"):
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
