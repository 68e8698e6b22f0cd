"""`unpack`: rebuilds a batch from JSON plus tensors; a class without a builder becomes an `UnregisteredObject`."""

from __future__ import annotations

import base64
import collections
import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from ddp_nanguard.errors import DumpError

from .batch_pack import MAX_SPAN, TAG
from .format import dtype_of, restored

Types = Mapping[str, Callable[..., Any]]
"""Builders of batch classes by name, ``module.Class`` or ``Class``."""


@dataclasses.dataclass(frozen=True)
class UnregisteredObject:
    """Stands for an object whose class has no builder; its fields are attributes and items.

    Attributes:
        type_name: ``module.Class`` of the original.
        fields: its fields or items; None where nothing of it could be kept.
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
    """The type name of the first `UnregisteredObject` in a value, None where there is none.

    Args:
        value: a value, or nested mappings, lists and tuples.
        depth: how many levels are searched.
    """
    if isinstance(value, UnregisteredObject):
        return value.type_name
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    found = (unregistered_type(item, depth - 1) for item in items) if depth else ()
    return next((name for name in found if name is not None), None)


def unpack(
    structure: Any,
    tensors: Mapping[str, torch.Tensor],
    types: Types | None = None,
    device: torch.device | None = None,
    name: str = "value",
) -> Any:
    """The inverse of `pack`.

    Args:
        structure: of `Packed`.
        tensors: of `Packed`, or read from a file, on the CPU.
        types: builders of batch classes. A mapping or sequence class is called with a dict or list of its items, any
            other with its fields as keywords. Without a builder the value is an `UnregisteredObject`.
        device: where tensors go that were on an accelerator; None leaves them where they are.
        name: of the value, for errors.

    Raises:
        DumpError: the structure is malformed, or a builder refuses its fields.
    """
    return _Unpacker(tensors, types or {}, device, name).unpack(structure)


class UnpackError(DumpError):
    """A value that cannot be unpacked; the message has the path to it."""


class _Unpacker:
    def __init__(
        self, tensors: Mapping[str, torch.Tensor], types: Types, device: torch.device | None, name: str
    ) -> None:
        self._name = name
        self._tensors = tensors
        self._types = types
        self._device = device
        # Tensors that occur several times are one object again.
        self._made: dict[str, torch.Tensor] = {}
        self._path: list[Any] = []

    def unpack(self, node: Any) -> Any:
        if isinstance(node, list):
            return [item for _, item in self._each(enumerate(node))]
        if not isinstance(node, dict):
            return node
        if TAG not in node:
            return dict(self._each(node.items()))
        unpack_kind = getattr(self, f"_unpack_{node[TAG]}", None)
        if unpack_kind is None:
            raise self._error(f"a value of kind {_short(node[TAG])} cannot be unpacked; upgrade ddp-nanguard")
        try:
            return unpack_kind(node)
        except UnpackError:
            raise
        except DumpError as error:
            raise self._error(str(error)) from None
        except Exception as error:  # a damaged file can hold anything, and so can a builder of the user
            line = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            remedy = "see Recipe.batch_types, or copy the dump again"
            raise self._error(f"{_name_of(node)} cannot be unpacked ({line}); {remedy}") from error

    def _each(self, items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """The unpacked items of a container. After an error ``_path`` keeps its keys, for the message."""
        for key, item in items:
            self._path.append(key)
            yield key, self.unpack(item)
            self._path.pop()

    def _error(self, text: str) -> UnpackError:
        where = "".join(f"[{_short(key)}]" for key in self._path)
        return UnpackError(f"{self._name}{where}: {text}")

    def _builder(self, type_name: str) -> Callable[..., Any] | None:
        return self._types.get(type_name) or self._types.get(type_name.rpartition(".")[2])

    def _items(self, node: dict[str, Any]) -> list[Any]:
        return [item for _, item in self._each(enumerate(node["items"]))]

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
        fields = dict(self._each(node["fields"].items()))
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
            kind = torch.jagged if layout == "jagged" else torch.strided
            return torch.nested.nested_tensor(parts, layout=kind, dtype=parts[0].dtype, device=parts[0].device)
        parts_by_name = {name: self._dense(part) for name, part in node["parts"].items()}
        if layout.startswith("quantized"):
            return _quantized(node, parts_by_name)
        # The indices of sparse tensors are checked: a forged file must not make torch read outside its memory.
        values = parts_by_name["values"]
        if layout == "coo":
            indices = parts_by_name["indices"]
            checked = {"is_coalesced": node["coalesced"], "check_invariants": True}
            return torch.sparse_coo_tensor(indices, values, shape, device=values.device, **checked)
        compressed, plain = parts_by_name["compressed"], parts_by_name["plain"]
        kind = getattr(torch, layout)
        return torch.sparse_compressed_tensor(
            compressed, plain, values, shape, layout=kind, device=values.device, check_invariants=True
        )

    def _dense(self, node: dict[str, Any]) -> torch.Tensor:
        stored = restored(self._tensors[node["key"]], dtype_of(node["dtype"]))
        if "stride" in node:
            _check_span(stored.shape, node["stride"])
            strided = torch.empty_strided(stored.shape, node["stride"], dtype=stored.dtype, device=stored.device)
            stored = strided.copy_(stored)
        return stored.expand(node["shape"]) if "stored_shape" in node else stored


def _short(value: Any) -> str:
    return repr(value)[:60]


def _name_of(node: dict[str, Any]) -> str:
    name = node.get("type")
    return name if isinstance(name, str) and name.isprintable() else f"a value of kind {_short(node[TAG])}"


_PACKED_SEQUENCE = f"{PackedSequence.__module__}.{PackedSequence.__qualname__}"


def _quantized(node: dict[str, Any], parts: dict[str, torch.Tensor]) -> torch.Tensor:
    values, dtype = parts["values"], dtype_of(node["dtype"])
    if node["layout"] == "quantized":
        return torch._make_per_tensor_quantized_tensor(values, node["scale"], node["zero_point"])
    del dtype
    return torch._make_per_channel_quantized_tensor(values, parts["scales"], parts["zero_points"], node["axis"])


def _check_span(shape: tuple[int, ...], stride: list[int]) -> None:
    """Refuse strides that span more memory than `pack` keeps: the memory between elements is allocated again."""
    span = 1 + sum(step * (size - 1) for size, step in zip(shape, stride, strict=True))
    if not 0 < span <= max(MAX_SPAN, 4 * math.prod(shape)) or min(stride, default=0) < 0:
        raise DumpError(f"stride {_short(stride)} does not fit shape {tuple(shape)}; copy the dump again")


def _tuples(description: Any) -> Any:
    """A structured dtype's description with tuples where JSON has made lists of them."""
    if not isinstance(description, list):
        return description
    return [_field(field) for field in description]


def _field(field: list[Any]) -> tuple[Any, ...]:
    name, kind, *shape = field
    name = tuple(name) if isinstance(name, list) else name
    return (name, _tuples(kind), *(tuple(part) for part in shape))
