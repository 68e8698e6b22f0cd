"""State as one piece of JSON: its tensors, which are few and small, lie in it as base64."""

from __future__ import annotations

import base64
from typing import Any

import torch

from ddp_nanguard.tensors.dtypes import dtype_name

from .batch_codec import pack, unpack
from .format import dtype_of, host_blocks, restored
from .rank_records import InlineTensor, PlainState


def packed_state(value: Any) -> PlainState:
    """A value of any kind; what cannot be kept leaves a placeholder and a note."""
    packed = pack(value)
    tensors = {name: _inline(tensor) for name, tensor in packed.tensors.items()}
    return PlainState(packed.structure, tensors, tuple(packed.notes))


def unpacked_state(stored: PlainState) -> Any:
    """The inverse of `packed_state`; raises whatever a damaged structure makes `unpack` raise."""
    return unpack(stored.structure, {name: _outline(each) for name, each in stored.tensors.items()})


def _inline(tensor: torch.Tensor) -> InlineTensor:
    data = b"".join(host_blocks(tensor))
    return InlineTensor(dtype_name(tensor.dtype), tuple(tensor.shape), base64.b64encode(data).decode())


def _outline(stored: InlineTensor) -> torch.Tensor:
    data = torch.tensor(list(base64.b64decode(stored.base64)), dtype=torch.uint8, device="cpu")
    return restored(data, dtype_of(stored.dtype)).reshape(stored.shape)
