"""Bytes of a training, taken without the guard's help: digests of weights, buffers, optimizer and random states."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn


def local_of(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


def clean(name: str) -> str:
    """The name without what the wrappers of these tests put into it."""
    return name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")


def named(pairs: Any) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in pairs:
        yield clean(name), tensor


def digest(tensor: Tensor) -> str:
    """Hash of dtype, shape and bytes of the local tensor."""
    local = local_of(tensor).cpu().contiguous()
    data = local.reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(f"{local.dtype}{tuple(local.shape)}".encode() + data, digest_size=12).hexdigest()


def digests(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, str]:
    found = {f"parameter {name}": digest(tensor) for name, tensor in named(model.named_parameters())}
    found |= {f"buffer {name}": digest(tensor) for name, tensor in named(model.named_buffers())}
    if optimizer is not None:
        names = {id(tensor): name for name, tensor in named(model.named_parameters())}
        for parameter, state in optimizer.state.items():
            found |= {f"state {names[id(parameter)]}.{key}": _digest_any(value) for key, value in state.items()}
    return found


def copies(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Local parameters and optimizer state tensors, copied, by the names they have in a dump."""
    names = {id(tensor): name for name, tensor in named(model.named_parameters())}
    found = {f"model.{name}": local_of(tensor).cpu().clone() for name, tensor in named(model.named_parameters())}
    for parameter, state in optimizer.state.items():
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        found |= {
            f"optim.0.{names[id(parameter)]}.{key}": local_of(value).cpu().clone() for key, value in tensors.items()
        }
    return found


def _digest_any(value: Any) -> str:
    return digest(value) if isinstance(value, Tensor) else repr(value)


def random_digest() -> str:
    """Hash of the random states of python, numpy and torch as they are now."""
    return digest_of_random(random.getstate(), numpy.random.get_state(legacy=False), torch.get_rng_state())


def digest_of_random(python: Any, numpy_state: Any, torch_state: Tensor) -> str:
    version, internal, gauss = python
    keys = numpy.asarray(numpy_state["state"]["key"], dtype=numpy.uint32)
    numbers = (
        numpy_state["bit_generator"],
        numpy_state["state"]["pos"],
        numpy_state["has_gauss"],
        numpy_state["gauss"],
    )
    text = repr((version, list(internal), gauss, keys.tobytes(), numbers))
    return hashlib.blake2b(text.encode() + torch_state.numpy().tobytes(), digest_size=12).hexdigest()


def seed(rank: int) -> None:
    random.seed(100 + rank)
    numpy.random.seed(200 + rank)
    torch.manual_seed(300 + rank)
