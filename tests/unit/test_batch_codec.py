"""Any batch survives the way through JSON and safetensors; what cannot is named."""

import collections
import dataclasses
import enum
import json
import math
import pathlib
import threading
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from ddp_nanguard.dump.batch_codec import UnregisteredObject, pack, unpack
from ddp_nanguard.dump.format import read_tensors, write_tensors
from ddp_nanguard.errors import DumpError
from tests.dump_requests import DTYPES, bytes_of, random_tensor


@pytest.fixture
def through_disk(tmp_path):
    """Packs, writes, reads and unpacks a value."""

    def go(value, types=None):
        packed = pack(value)
        write_tensors(tmp_path, "t.safetensors", packed.tensors)
        structure = json.loads(json.dumps(packed.structure, allow_nan=False))
        return unpack(structure, read_tensors(tmp_path / "t.safetensors", packed.tensors), types)

    return go


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Sample:
    image: Any
    label: Any = 0


class Holder:
    def __init__(self, **fields):
        self.__dict__.update(fields)


class Slotted:
    __slots__ = ("a",)


class Encoding(collections.UserDict):
    pass


class Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        2**100,
        1.5,
        0.1 + 0.2,
        math.inf,
        -math.inf,
        "text",
        "",
        b"bytes",
        b"x" * 5000,
        bytearray(b"abc"),
        1 + 2j,
        [],
        [1, [2, None]],
        (),
        (1, (2,)),
        {},
        {"a": {"b": [1]}},
        {1: "a", ("x", 2): "b"},
        {"$": "a dollar as key"},
        {"$": "tensor", "key": "t0"},
        {1, 2},
        frozenset({"a"}),
        range(1, 9, 2),
        slice(1, None, 2),
        collections.OrderedDict([("b", 1), ("a", 2)]),
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.device("cuda:1"),
        pathlib.Path("/a/b"),
        np.float32(1.1),
        np.int64(-3),
        np.bool_(True),
        np.datetime64("2026-01-02"),
        np.str_("text"),
    ],
    ids=repr,
)
def test_plain_values(through_disk, value):
    result = through_disk({"v": value})["v"]
    assert type(result) is type(value) and result == value


def test_nan_and_negative_zero(through_disk):
    nan, zero = through_disk([math.nan, -0.0])
    assert math.isnan(nan) and math.copysign(1, zero) == -1


def test_order_of_keys_is_kept(through_disk):
    assert list(through_disk({"z": 1, "a": 2, "m": 3})) == ["z", "a", "m"]


def test_namedtuple_comes_back_by_its_fields(through_disk):
    result = through_disk(Point(torch.ones(2), 5))
    assert type(result).__name__ == "Point" and result.y == 5 and torch.equal(result.x, torch.ones(2))
    assert type(through_disk(Point(1, 2), {"Point": Point})) is Point


def test_registered_types_are_rebuilt(through_disk):
    result = through_disk([Sample(torch.ones(2), 3)], {"Sample": Sample})[0]
    assert type(result) is Sample and result.label == 3 and torch.equal(result.image, torch.ones(2))
    full_name = f"{__name__}.Holder"
    assert through_disk(Holder(a=1, b=[2]), {full_name: Holder}).b == [2]
    assert through_disk(Encoding(ids=[1]), {"Encoding": Encoding}) == Encoding(ids=[1])
    assert through_disk(Color.RED, {"Color": Color}) is Color.RED


def test_unregistered_types_keep_their_fields(through_disk):
    result = through_disk(Sample(torch.ones(2), 3))
    assert isinstance(result, UnregisteredObject) and result.label == 3 and torch.equal(result["image"], torch.ones(2))
    assert result.type_name == f"{__name__}.Sample"
    with pytest.raises(
        AttributeError, match=r"Sample is not rebuilt and has no field 'other'; give Recipe.batch_types"
    ):
        _ = result.other
    assert through_disk(Encoding(ids=[1]))["ids"] == [1]
    assert through_disk(Color.RED) == 1


@pytest.mark.parametrize("value", [threading.Lock(), Slotted(), lambda: 0, torch.nn.Linear(1, 1), Sample, object()])
def test_what_cannot_be_stored_is_named(value):
    packed = pack({"batch": [0, value]})
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    assert packed.notes == [f"['batch'][1]: {kind} left out, it cannot be stored"]
    assert unpack(packed.structure, packed.tensors) == {"batch": [0, UnregisteredObject(kind)]}


def test_cycles_and_bottomless_structures_end():
    loop: list[Any] = [1]
    loop.append(loop)
    packed = pack(loop)
    assert packed.notes == ["[1]: builtins.list left out, it contains itself"]
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    assert "too deep or too large" in pack(deep).notes[0]


def test_one_list_twice_is_no_cycle():
    shared = [1]
    assert pack([shared, shared]).structure == [[1], [1]]


# tensors


def test_dense(through_disk):
    shapes = [(), (0,), (3, 0), (5,), (2, 3, 4)]
    tensors = {(dtype, shape): random_tensor("x", shape, dtype) for dtype in DTYPES for shape in shapes}
    for (dtype, shape), result in through_disk(tensors).items():
        tensor = tensors[dtype, tuple(shape)]
        assert (result.dtype, result.shape, result.stride()) == (dtype, shape, tensor.stride())
        assert bytes_of(result) == bytes_of(tensor)


LAYOUTS = {
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "channels last": torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last),
    "columns": torch.arange(12.0).reshape(3, 4)[:, 1:3],
    "every other": torch.arange(12.0)[::2],
    "expanded": torch.arange(3.0).reshape(3, 1).expand(3, 4),
    "flipped": torch.arange(3.0).flip(0),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_strides_are_kept(through_disk, name):
    tensor = LAYOUTS[name]
    result = through_disk(tensor)
    assert torch.equal(result, tensor) and result.stride() == tensor.stride()


def test_overlapping_and_conjugated_views(through_disk):
    windows = torch.arange(6.0).unfold(0, 3, 1)
    assert torch.equal(through_disk(windows), windows)
    conjugated = torch.tensor([1 + 2j]).conj()
    assert torch.equal(through_disk(conjugated), conjugated)
    negated = torch.tensor([1 + 2j]).conj().imag
    assert negated.is_neg() and torch.equal(through_disk(negated), negated)


def test_four_numbers_do_not_drag_four_megabytes(tmp_path):
    packed = pack({"x": torch.zeros(1_000_000)[:4], "y": torch.zeros(1000, 1000)[::300, ::300]})
    entry = write_tensors(tmp_path, "t.safetensors", packed.tensors)
    assert entry.size_bytes == (tmp_path / "t.safetensors").stat().st_size < 1000
    result = unpack(packed.structure, read_tensors(tmp_path / "t.safetensors", packed.tensors))
    assert result["x"].untyped_storage().nbytes() == 16
    far_apart = pack(torch.zeros(3, 2_000_000)[:, :1])
    assert unpack(far_apart.structure, far_apart.tensors).shape == (3, 1)
    assert "stride" not in far_apart.structure


def test_shared_tensors_stay_one_object(through_disk):
    tensor = torch.ones(3)
    result = through_disk({"a": tensor, "b": [tensor], "c": tensor.clone()})
    assert result["a"] is result["b"][0] and result["a"] is not result["c"]


def test_gradient_flag(through_disk):
    leaf = torch.ones(2, requires_grad=True)
    a, b, c = through_disk([leaf, leaf * 2, torch.nn.Parameter(torch.ones(1))])
    assert (a.requires_grad, b.requires_grad, c.requires_grad) == (True, True, True)
    assert b.is_leaf


def test_sparse(through_disk):
    coo = torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 0]], [3.0, 4.0, math.nan], (2, 3), check_invariants=True)
    result = through_disk(coo)
    assert result.layout == torch.sparse_coo and not result.is_coalesced()
    assert bytes_of(result._values()) == bytes_of(coo._values()) and torch.equal(result._indices(), coo._indices())
    assert through_disk(coo.coalesce()).is_coalesced()


@pytest.mark.filterwarnings("ignore:Sparse.*beta state")
@pytest.mark.parametrize("convert", ["to_sparse_csr", "to_sparse_csc", "to_sparse_bsr", "to_sparse_bsc"])
def test_compressed(through_disk, convert):
    dense = torch.tensor([[0.0, 1, 0, 2], [3, 0, 0, 0]])
    tensor = getattr(dense, convert)(*((1, 2),) if "bs" in convert else ())
    result = through_disk(tensor)
    assert result.layout == tensor.layout and torch.equal(result.to_dense(), dense)


@pytest.mark.filterwarnings("ignore")  # torch announces the end of its own quantised tensors
def test_quantised(through_disk):
    tensor = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 3, torch.qint8)
    result = through_disk(tensor)
    assert result.dtype is torch.qint8 and result.q_scale() == 0.5 and torch.equal(result.int_repr(), tensor.int_repr())
    scales, zeros = torch.tensor([0.5, 0.25], dtype=torch.float64), torch.tensor([0, 1])
    tensor = torch.quantize_per_channel(torch.arange(4.0).reshape(2, 2), scales, zeros, 0, torch.quint8)
    result = through_disk(tensor)
    assert result.dtype is torch.quint8 and torch.equal(result.dequantize(), tensor.dequantize())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested(through_disk, layout):
    tensor = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(4, 3)], layout=layout)
    result = through_disk({"n": tensor})["n"]
    assert result.is_nested and result.layout == layout
    assert all(torch.equal(a, b) for a, b in zip(result.unbind(), tensor.unbind(), strict=True))


def test_packed_sequence_and_meta(through_disk):
    sequence = pack_sequence([torch.ones(3), torch.zeros(1)])
    result = through_disk(sequence)
    assert type(result) is PackedSequence and torch.equal(result.data, sequence.data)
    meta = through_disk(torch.empty(2, 3, device="meta", dtype=torch.float16))
    assert meta.is_meta and meta.shape == (2, 3) and meta.dtype is torch.float16


def test_tensor_subclass_becomes_plain_with_a_note():
    class Tagged(torch.Tensor):
        pass

    packed = pack({"x": torch.ones(2).as_subclass(Tagged)})
    assert packed.notes[0].endswith("Tagged is kept as a plain tensor")
    assert type(unpack(packed.structure, packed.tensors)["x"]) is torch.Tensor


def test_tensors_go_back_to_the_accelerator_only_if_they_were_there():
    packed = pack({"x": torch.ones(2), "y": torch.ones(2)})
    packed.structure["x"]["device"] = "cuda:3"
    result = unpack(packed.structure, packed.tensors, device=torch.device("meta"))
    assert result["x"].is_meta and not result["y"].is_meta


# numpy


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.array(3),
        np.zeros((0, 2)),
        np.arange(3, dtype=">i4"),
        np.array([1 + 2j]),
        np.array([True, False]),
        np.array(["ab", "c"]),
        np.array(["2026-01-02"], dtype="M8[D]"),
        np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8", (1,))]),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(10)[::3],
        np.arange(2000.0),
        np.array([1, "two", None], dtype=object),
    ],
    ids=repr,
)
def test_arrays(through_disk, array):
    result = through_disk([array])[0]
    assert result.dtype == array.dtype and result.shape == array.shape and np.array_equal(result, array)
    assert result.flags.writeable


# what is read is not trusted


@pytest.mark.parametrize(
    "structure",
    [
        {"$": "nothing"},
        {"$": "__class__"},
        {"$": "tensor"},
        {"$": "tensor", "id": "i0", "device": "cpu", "layout": "dense", "dtype": "float32", "shape": [2], "key": "t9"},
        {"$": "namedtuple", "type": "a.B", "names": ["x; import os"], "items": [1]},
        {"$": "dtype", "value": "ops"},
        {"$": "array", "dtype": "|O", "shape": [1], "base64": "AAAAAAAAAAA="},
        {"$": "same", "id": "i5"},
    ],
    ids=str,
)
def test_malformed_structures_are_refused(structure):
    with pytest.raises(DumpError, match=r"cannot be unpacked|is unknown to torch"):
        unpack({"v": structure}, {})
