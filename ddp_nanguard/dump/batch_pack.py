"""`pack`: a batch of any structure as JSON plus tensors. `batch_codec` says how values are written."""

from __future__ import annotations

import base64
import collections
import dataclasses
import enum
import itertools
import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from ddp_nanguard.tensors.dtypes import dtype_name

from .format import storable

TAG = "$"
INLINE_BYTES = 1024
"""Byte strings up to this length go into the JSON, longer ones are stored as tensors."""
MAX_VALUES = 200_000
"""Largest number of values in a batch. A structure with more is not a batch but an object that the batch refers to."""
MAX_DEPTH = 64
MAX_SPAN = 2**20
"""Elements that a strided view may span without being made contiguous."""


class Packed(NamedTuple):
    """A value as JSON and tensors.

    Attributes:
        structure: JSON-ready.
        tensors: dense, in dtypes that safetensors takes, on the device they were on; views stay views until written.
        notes: what could not be kept as it was, each with its path.
    """

    structure: Any
    tensors: dict[str, torch.Tensor]
    notes: list[str]


def pack(value: Any) -> Packed:
    """Turn a value into JSON and tensors.

    Objects are kept field by field where they have a ``__dict__``. What cannot be kept leaves a placeholder that names
    its type, and a note; no value raises.
    """
    packer = _Packer()
    structure = packer.pack(value, "", 0)
    return Packed(structure, packer.tensors, packer.notes)


class _Packer:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.notes: list[str] = []
        self._seen: dict[int, str] = {}
        self._alive: list[Any] = []  # ids are unique only while their objects live
        # Containers on the path to the current value: one that is met again contains itself.
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
        # Exact types: a subclass is kept as its base type, with a note.
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
            return self._context(dtype_name(tensor.layout), tensor, parts)
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
        """Keep a dense tensor with its strides, which decide the kernel that runs, but not the memory between them."""
        node: dict[str, Any] = {"layout": "dense", "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
        # An expanded dim is stored once.
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


def _keeps_strides(tensor: torch.Tensor) -> bool:
    """Whether no two elements share memory and the span of the strides is bounded."""
    span = 1
    for stride, size in sorted((tensor.stride(dim), size) for dim, size in enumerate(tensor.shape) if size > 1):
        if stride < span:
            return False
        span += stride * (size - 1)
    return span <= max(MAX_SPAN, 4 * tensor.numel())


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
