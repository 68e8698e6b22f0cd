"""Any batch as JSON plus tensors, and back: containers become plain types with a tag, nothing is ever pickled.

JSON values stand for themselves; everything else is an object whose ``$`` names its kind. A dict whose keys are all
strings, none of them ``$``, stands for itself too.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import enum
import itertools
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from ddp_nanguard.errors import DumpError

from .format import dtype_name, dtype_of, restored, storable

TAG = "$"
INLINE_BYTES = 1024
"""Byte strings up to this length go into the JSON, longer ones beside the tensors."""
MAX_VALUES = 200_000
"""Values of one batch; a structure that has more is not a batch but something that dangles from it."""
MAX_DEPTH = 64
MAX_SPAN = 2**20
"""Elements that a strided view may span without being compacted."""

Types = Mapping[str, Callable[..., Any]]
"""Builders of batch classes by name, ``module.Class`` or ``Class``."""


class Packed(NamedTuple):
    """A value as JSON and tensors.

    Attributes:
        structure: JSON-ready.
        tensors: dense, in dtypes that safetensors takes, on the device they were on; views stay views until written.
        notes: what could not be kept as it was, with its path.
    """

    structure: Any
    tensors: dict[str, torch.Tensor]
    notes: list[str]


@dataclasses.dataclass(frozen=True)
class UnregisteredObject:
    """Stands for an object whose class is not in the registry; its fields are attributes and items.

    Attributes:
        type_name: ``module.Class`` of the original.
        fields: what it held; None where nothing of it could be kept.
    """

    type_name: str
    fields: Any = None

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields")
        if name.startswith("__") or "type_name" not in self.__dict__:  # copy and pickle ask an object without fields
            raise AttributeError(name)
        if isinstance(fields, dict) and name in fields:
            return fields[name]
        raise AttributeError(f"{self.type_name} is not rebuilt and has no field {name!r}; give Recipe.batch_types")

    def __getitem__(self, key: Any) -> Any:
        return self.fields[key]


def unregistered_type(value: Any, depth: int = 8) -> str | None:
    """The type name of the first `UnregisteredObject` in a value, None where there is none."""
    if isinstance(value, UnregisteredObject):
        return value.type_name
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    found = (unregistered_type(item, depth - 1) for item in items) if depth else ()
    return next((name for name in found if name is not None), None)


def pack(value: Any) -> Packed:
    """Turns a value into JSON and tensors.

    Objects are kept field by field where they have a ``__dict__``; what cannot be kept leaves a placeholder that names
    its type, and a note.
    """
    packer = _Packer()
    structure = packer.pack(value, "", 0)
    return Packed(structure, packer.tensors, packer.notes)


def unpack(
    structure: Any,
    tensors: Mapping[str, torch.Tensor],
    types: Types | None = None,
    device: torch.device | None = None,
) -> Any:
    """The inverse of `pack`.

    Args:
        structure: of `Packed`.
        tensors: of `Packed`, or read from a file, on the CPU.
        types: builders of batch classes. A mapping or sequence class is called with a dict or list of its items, any
            other with its fields as keywords. Without a builder the value is an `UnregisteredObject`.
        device: where tensors go that were on an accelerator; None leaves them where they are.

    Raises:
        DumpError: the structure is malformed, or a builder refuses its fields.
    """
    return _Unpacker(tensors, types or {}, device).unpack(structure)


class _Packer:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.notes: list[str] = []
        self._seen: dict[int, str] = {}
        self._alive: list[Any] = []  # ids are unique only while their objects live
        self._open: set[int] = set()
        self._numbers = itertools.count()
        self._left = MAX_VALUES

    def pack(self, value: Any, path: str, depth: int) -> Any:
        self._left -= 1
        if depth > MAX_DEPTH or self._left < 0:
            return self._placeholder(value, path, "too deep or too large")
        if id(value) in self._open:
            return self._placeholder(value, path, "it contains itself")
        simple = self._simple(value, path)
        if simple is not NotImplemented:
            return simple
        self._open.add(id(value))
        try:
            return self._container(value, path, depth + 1)
        finally:
            self._open.discard(id(value))

    def _simple(self, value: Any, path: str) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {TAG: "float", "value": str(value)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, (np.ndarray, np.generic)) and not np.asarray(value).dtype.hasobject:
            return self._array(value)
        if isinstance(value, (bytes, bytearray)):
            return {TAG: "bytes", "mutable": isinstance(value, bytearray), **self._bytes(bytes(value))}
        if isinstance(value, enum.Enum):
            return {
                TAG: "enum",
                "type": _type_name(value),
                "name": value.name,
                "value": self.pack(value.value, path, 0),
            }
        return self._plain_value(value, path)

    def _plain_value(self, value: Any, path: str) -> Any:
        if isinstance(value, complex):
            return {TAG: "complex", "real": str(value.real), "imag": str(value.imag)}
        if isinstance(value, (torch.dtype, torch.device)):
            return (
                {TAG: "dtype", "value": dtype_name(value)}
                if isinstance(value, torch.dtype)
                else {TAG: "device", "value": str(value)}
            )
        if isinstance(value, pathlib.PurePath):
            return {TAG: "path", "value": str(value)}
        if isinstance(value, range):
            return {TAG: "range", "value": [value.start, value.stop, value.step]}
        for base in (bool, int, float, str):
            if isinstance(value, base):
                self.notes.append(f"{path or 'value'}: {_type_name(value)} is kept as {base.__name__}")
                return self._simple(base(value), path)
        return NotImplemented

    def _container(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, slice):
            parts = [value.start, value.stop, value.step]
            return {TAG: "slice", "items": self._items(parts, path, depth)}
        if isinstance(value, (list, tuple)):
            return self._sequence(value, path, depth)
        if isinstance(value, (set, frozenset)):
            return {TAG: type(value).__name__, "items": self._items(value, path, depth)}
        if isinstance(value, (np.ndarray, np.generic)):
            array = np.asarray(value, dtype=object)
            return {
                TAG: "objects",
                "shape": list(array.shape),
                "items": self._items(array.ravel().tolist(), path, depth),
            }
        if isinstance(value, Mapping):
            return self._mapping(value, path, depth)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
            return self._object(value, {**getattr(value, "__dict__", {}), **fields}, path, depth)
        return self._unknown(value, path, depth)

    def _items(self, values: Any, path: str, depth: int) -> list[Any]:
        return [self.pack(item, f"{path}[{index}]", depth) for index, item in enumerate(values)]

    def _sequence(self, value: list[Any] | tuple[Any, ...], path: str, depth: int) -> Any:
        if type(value) is list:
            return self._items(value, path, depth)
        if type(value) is tuple:
            return {TAG: "tuple", "items": self._items(value, path, depth)}
        if isinstance(value, torch.Size):
            return {TAG: "size", "items": list(value)}
        names = getattr(value, "_fields", None)
        items = self._items(value, path, depth)
        if names is not None:
            return {TAG: "namedtuple", "type": _type_name(value), "names": list(names), "items": items}
        return {TAG: "sequence", "type": _type_name(value), "tuple": isinstance(value, tuple), "items": items}

    def _mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> Any:
        pairs = list(value.items())
        plain = all(type(key) is str for key, _ in pairs)
        if plain and type(value) is dict and TAG not in value:
            return {key: self.pack(item, f"{path}[{key!r}]", depth) for key, item in pairs}
        items = [
            [self.pack(key, f"{path} key", depth), self.pack(item, f"{path}[{key!r}]", depth)] for key, item in pairs
        ]
        kinds: dict[type, str] = {dict: "dict", collections.OrderedDict: "ordered"}
        kind = kinds.get(type(value), "mapping")
        return (
            {TAG: kind, "type": _type_name(value), "items": items} if kind == "mapping" else {TAG: kind, "items": items}
        )

    def _object(self, value: Any, fields: Mapping[str, Any], path: str, depth: int) -> Any:
        packed = {name: self.pack(item, f"{path}.{name}", depth) for name, item in fields.items()}
        return {TAG: "object", "type": _type_name(value), "fields": packed}

    def _unknown(self, value: Any, path: str, depth: int) -> Any:
        fields = getattr(value, "__dict__", None)
        if isinstance(value, (type, torch.nn.Module)) or callable(value) or not fields:
            return self._placeholder(value, path, "it cannot be stored")
        return self._object(value, fields, path, depth)

    def _placeholder(self, value: Any, path: str, why: str) -> dict[str, Any]:
        self.notes.append(f"{path or 'value'}: {_type_name(value)} left out, {why}")
        return {TAG: "placeholder", "type": _type_name(value)}

    # tensors and arrays

    def _store(self, tensor: torch.Tensor) -> str:
        key = f"t{next(self._numbers)}"
        self.tensors[key] = storable(tensor)
        return key

    def _bytes(self, data: bytes) -> dict[str, Any]:
        if len(data) <= INLINE_BYTES:
            return {"base64": base64.b64encode(data).decode()}
        return {"key": self._store(torch.frombuffer(bytearray(data), dtype=torch.uint8))}

    def _array(self, value: Any) -> dict[str, Any]:
        array = np.asarray(value)
        description = array.dtype.str if array.dtype.fields is None else np.lib.format.dtype_to_descr(array.dtype)
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {TAG: kind, "dtype": description, "shape": list(array.shape), **self._bytes(array.tobytes())}

    def _tensor(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        if id(tensor) in self._seen:
            return {TAG: "same", "id": self._seen[id(tensor)]}
        identity = f"i{len(self._seen)}"
        try:
            node = self._tensor_node(self._known_class(tensor, path))
        except (RuntimeError, NotImplementedError, TypeError, KeyError) as error:
            return self._placeholder(tensor, path, f"it cannot be read: {str(error).splitlines()[0][:120]}")
        self._seen[id(tensor)] = identity
        self._alive.append(tensor)
        flags = {"grad": True} if tensor.requires_grad else {}
        return {TAG: "tensor", "id": identity, "device": str(tensor.device), **flags, **node}

    def _known_class(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            return tensor.detach()
        if hasattr(tensor, "to_local"):
            self.notes.append(f"{path or 'value'}: of a {_type_name(tensor)} only this rank's part is kept")
            return tensor.to_local().detach()  # type: ignore[no-any-return]
        if not tensor.is_nested:
            self.notes.append(f"{path or 'value'}: {_type_name(tensor)} is kept as a plain tensor")
            return tensor.detach().as_subclass(torch.Tensor)
        return tensor.detach()

    def _tensor_node(self, tensor: torch.Tensor) -> dict[str, Any]:
        if tensor.is_meta:
            return {"layout": "meta", "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
        if tensor.is_nested:
            return self._nested(tensor)
        if tensor.is_quantized:
            return self._quantized(tensor)
        if tensor.layout == torch.sparse_coo:
            parts = {"indices": tensor._indices(), "values": tensor._values()}
            return self._context("coo", tensor, parts, coalesced=tensor.is_coalesced())
        if tensor.layout in _COMPRESSED:
            compressed, plain = _COMPRESSED[tensor.layout]
            parts = {
                "compressed": getattr(tensor, compressed)(),
                "plain": getattr(tensor, plain)(),
                "values": tensor.values(),
            }
            return self._context(dtype_name_of_layout(tensor.layout), tensor, parts)
        return self._dense(tensor if tensor.layout == torch.strided else tensor.to_dense())

    def _context(
        self, layout: str, tensor: torch.Tensor, parts: dict[str, torch.Tensor], **plain: Any
    ) -> dict[str, Any]:
        nodes = {name: self._dense(part.detach()) for name, part in parts.items()}
        return {"layout": layout, "shape": list(tensor.shape), "parts": nodes, **plain}

    def _nested(self, tensor: torch.Tensor) -> dict[str, Any]:
        nodes = [self._dense(part.detach()) for part in tensor.unbind()]
        return {"layout": "jagged" if tensor.layout == torch.jagged else "nested", "parts": nodes}

    def _quantized(self, tensor: torch.Tensor) -> dict[str, Any]:
        dtype = dtype_name(tensor.dtype)
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            scheme = {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
            return self._context("quantized", tensor, {"values": tensor.int_repr()}, dtype=dtype, **scheme)
        scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        parts = {"values": tensor.int_repr(), "scales": scales, "zero_points": zero_points}
        return self._context("quantized_channels", tensor, parts, dtype=dtype, axis=tensor.q_per_channel_axis())

    def _dense(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Strides are kept, since they decide which kernel runs; the memory between them is not."""
        node: dict[str, Any] = {"layout": "dense", "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
        repeated = [dim for dim, size in enumerate(tensor.shape) if size > 1 and tensor.stride(dim) == 0]
        for dim in repeated:
            tensor = tensor.narrow(dim, 0, 1)
        if repeated:
            node["stored_shape"] = list(tensor.shape)
        if not tensor.is_contiguous() and _keeps_strides(tensor):
            node["stride"] = list(tensor.stride())
        return {**node, "key": self._store(tensor)}


_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def dtype_name_of_layout(layout: torch.layout) -> str:
    """``sparse_csr`` for `torch.sparse_csr`."""
    return str(layout).removeprefix("torch.")


def _keeps_strides(tensor: torch.Tensor) -> bool:
    """Whether no two elements share memory and the span is bounded."""
    span = 1
    for stride, size in sorted((tensor.stride(dim), size) for dim, size in enumerate(tensor.shape) if size > 1):
        if stride < span:
            return False
        span += stride * (size - 1)
    return span <= max(MAX_SPAN, 4 * tensor.numel())


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


class _Unpacker:
    def __init__(self, tensors: Mapping[str, torch.Tensor], types: Types, device: torch.device | None) -> None:
        self._tensors = tensors
        self._types = types
        self._device = device
        self._made: dict[str, torch.Tensor] = {}

    def unpack(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.unpack(item) for item in node]
        if not isinstance(node, dict):
            return node
        if TAG not in node:
            return {key: self.unpack(item) for key, item in node.items()}
        unpack_kind = getattr(self, f"_unpack_{node[TAG]}", None)
        if unpack_kind is None:
            raise DumpError(f"a value of kind {node[TAG]!r} cannot be unpacked; upgrade ddp-nanguard")
        try:
            return unpack_kind(node)
        except DumpError:
            raise
        except Exception as error:  # a damaged file can hold anything, and so can a builder of the user
            what = node.get("type") or f"a value of kind {node[TAG]!r}"
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            raise DumpError(
                f"{what} cannot be unpacked ({line}); see Recipe.batch_types, or copy the dump again"
            ) from error

    def _builder(self, type_name: str) -> Callable[..., Any] | None:
        return self._types.get(type_name) or self._types.get(type_name.rpartition(".")[2])

    def _items(self, node: dict[str, Any]) -> list[Any]:
        return [self.unpack(item) for item in node["items"]]

    def _pairs(self, node: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
        return ((self.unpack(key), self.unpack(item)) for key, item in node["items"])

    def _unpack_float(self, node: dict[str, Any]) -> float:
        return float(node["value"])

    def _unpack_complex(self, node: dict[str, Any]) -> complex:
        return complex(float(node["real"]), float(node["imag"]))

    def _unpack_dtype(self, node: dict[str, Any]) -> torch.dtype:
        return dtype_of(node["value"])

    def _unpack_device(self, node: dict[str, Any]) -> torch.device:
        return torch.device(node["value"])

    def _unpack_path(self, node: dict[str, Any]) -> pathlib.PurePath:
        return pathlib.Path(node["value"])

    def _unpack_range(self, node: dict[str, Any]) -> range:
        return range(*node["value"])

    def _unpack_slice(self, node: dict[str, Any]) -> slice:
        return slice(*self._items(node))

    def _unpack_tuple(self, node: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(self._items(node))

    def _unpack_set(self, node: dict[str, Any]) -> set[Any]:
        return set(self._items(node))

    def _unpack_frozenset(self, node: dict[str, Any]) -> frozenset[Any]:
        return frozenset(self._items(node))

    def _unpack_size(self, node: dict[str, Any]) -> torch.Size:
        return torch.Size(node["items"])

    def _unpack_dict(self, node: dict[str, Any]) -> dict[Any, Any]:
        return dict(self._pairs(node))

    def _unpack_ordered(self, node: dict[str, Any]) -> dict[Any, Any]:
        return collections.OrderedDict(self._pairs(node))

    def _unpack_mapping(self, node: dict[str, Any]) -> Any:
        build = self._builder(node["type"])
        items = dict(self._pairs(node))
        return build(items) if build else UnregisteredObject(node["type"], items)

    def _unpack_sequence(self, node: dict[str, Any]) -> Any:
        build = self._builder(node["type"])
        items = self._items(node)
        return build(items) if build else (tuple(items) if node["tuple"] else items)

    def _unpack_namedtuple(self, node: dict[str, Any]) -> Any:
        name, items = node["type"], self._items(node)
        if name == _PACKED_SEQUENCE:
            return PackedSequence(*items)
        build = self._builder(name) or collections.namedtuple(name.rpartition(".")[2], node["names"])
        return build(*items)

    def _unpack_object(self, node: dict[str, Any]) -> Any:
        build = self._builder(node["type"])
        fields = {name: self.unpack(item) for name, item in node["fields"].items()}
        return build(**fields) if build else UnregisteredObject(node["type"], fields)

    def _unpack_enum(self, node: dict[str, Any]) -> Any:
        build = self._builder(node["type"])
        value = self.unpack(node["value"])
        return build(value) if build else value

    def _unpack_placeholder(self, node: dict[str, Any]) -> UnregisteredObject:
        return UnregisteredObject(node["type"])

    def _unpack_objects(self, node: dict[str, Any]) -> np.ndarray[Any, Any]:
        items = self._items(node)
        array = np.empty(len(items), dtype=object)
        for index, item in enumerate(items):
            array[index] = item
        return array.reshape(node["shape"])

    def _data(self, node: dict[str, Any]) -> bytes:
        if "base64" in node:
            return base64.b64decode(node["base64"])
        return self._tensors[node["key"]].cpu().numpy().tobytes()

    def _unpack_bytes(self, node: dict[str, Any]) -> bytes | bytearray:
        data = self._data(node)
        return bytearray(data) if node["mutable"] else data

    def _unpack_array(self, node: dict[str, Any]) -> np.ndarray[Any, Any]:
        dtype = np.lib.format.descr_to_dtype(_tuples(node["dtype"]))
        # a bytearray, since arrays over bytes are read-only
        return np.frombuffer(bytearray(self._data(node)), dtype=dtype).reshape(node["shape"])

    def _unpack_scalar(self, node: dict[str, Any]) -> Any:
        return self._unpack_array(node)[()]

    # tensors

    def _unpack_same(self, node: dict[str, Any]) -> torch.Tensor:
        return self._made[node["id"]]

    def _unpack_tensor(self, node: dict[str, Any]) -> torch.Tensor:
        tensor = self._layout(node)
        if self._device is not None and not node["device"].startswith(("cpu", "meta")):
            tensor = tensor.to(self._device)
        if node.get("grad"):
            tensor.requires_grad_()
        self._made[node["id"]] = tensor
        return tensor

    def _layout(self, node: dict[str, Any]) -> torch.Tensor:
        layout, shape = node["layout"], node.get("shape", ())
        if layout == "dense":
            return self._dense(node)
        if layout == "meta":
            return torch.empty(shape, dtype=dtype_of(node["dtype"]), device="meta")
        if layout in ("nested", "jagged"):
            parts = [self._dense(part) for part in node["parts"]]
            return torch.nested.nested_tensor(parts, layout=torch.jagged if layout == "jagged" else torch.strided)
        parts_by_name = {name: self._dense(part) for name, part in node["parts"].items()}
        if layout.startswith("quantized"):
            return _quantized(node, parts_by_name)
        values = parts_by_name["values"]
        if layout == "coo":
            indices = parts_by_name["indices"]
            return torch.sparse_coo_tensor(
                indices, values, shape, is_coalesced=node["coalesced"], check_invariants=True
            )
        compressed, plain = parts_by_name["compressed"], parts_by_name["plain"]
        kind = getattr(torch, layout)
        return torch.sparse_compressed_tensor(compressed, plain, values, shape, layout=kind, check_invariants=True)

    def _dense(self, node: dict[str, Any]) -> torch.Tensor:
        stored = restored(self._tensors[node["key"]], dtype_of(node["dtype"]))
        if "stride" in node:
            strided = torch.empty_strided(stored.shape, node["stride"], dtype=stored.dtype, device=stored.device)
            stored = strided.copy_(stored)
        return stored.expand(node["shape"]) if "stored_shape" in node else stored


_PACKED_SEQUENCE = f"{PackedSequence.__module__}.{PackedSequence.__qualname__}"


def _quantized(node: dict[str, Any], parts: dict[str, torch.Tensor]) -> torch.Tensor:
    values, dtype = parts["values"], dtype_of(node["dtype"])
    if node["layout"] == "quantized":
        return torch._make_per_tensor_quantized_tensor(values, node["scale"], node["zero_point"])
    del dtype
    return torch._make_per_channel_quantized_tensor(values, parts["scales"], parts["zero_points"], node["axis"])


def _tuples(description: Any) -> Any:
    """JSON made lists of the tuples in a structured dtype's description."""
    if not isinstance(description, list):
        return description
    return [_field(field) for field in description]


def _field(field: list[Any]) -> tuple[Any, ...]:
    name, kind, *shape = field
    name = tuple(name) if isinstance(name, list) else name
    return (name, _tuples(kind), *(tuple(part) for part in shape))
