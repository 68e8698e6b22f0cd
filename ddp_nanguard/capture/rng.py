"""Random states of one rank, as bytes and plain numbers: taken before a micro-batch, put back before its replay.

[Note: unchanged generators]
Python's state is a tuple of 625 numbers, NumPy's a dict: building them takes 20 and 90 us, longer than all else that is
kept of a small micro-batch. Most steps draw nothing from either, so the memory of the generator is compared with that
of the last call, and the state is built anew only where it has changed.
"""

from __future__ import annotations

import _random
import contextlib
import ctypes
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ddp_nanguard.tensors.accelerator import accelerator

Generators = Mapping[str, Any]
"""Registered generators by name: `torch.Generator`, `numpy.random.Generator` or `random.Random`."""


@dataclass
class RandomState:
    """The random streams of one rank at one moment.

    Attributes:
        python: what ``random.getstate()`` returned.
        numpy: what ``numpy.random.get_state(legacy=False)`` returned: plain numbers and one integer array.
        torch: state of torch's CPU generator, uint8, on the CPU.
        device: state of the current accelerator's default generator, uint8, on the CPU; None without one.
        device_type: ``cuda``, ``xpu``, ...; None without an accelerator.
        others: states of further accelerators' default generators, uint8, on the CPU, by device such as ``cuda:1``.
        generators: state of each registered generator: a uint8 CPU tensor, or plain numbers.
    """

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch: Tensor
    device: Tensor | None = None
    device_type: str | None = None
    others: dict[str, Tensor] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)


_NO_STREAM = (None, "cpu", "meta")


def other_devices(device: torch.device, tensors: Iterable[Tensor]) -> tuple[torch.device, ...]:
    """Accelerators other than the rank's device whose random streams a step may draw from.

    Args:
        device: of the rank.
        tensors: the weights; a layer draws where its weights are.

    Returns:
        Those that hold a tensor, and the current one where this process has used it: it computes for weights that are
        kept on the CPU.
    """
    found = dict.fromkeys(tensor.device for tensor in tensors if tensor.device.type not in _NO_STREAM)
    current = _used_accelerator()
    if current is not None:
        found[current] = None
    return tuple(each for each in found if each != device)


def _used_accelerator() -> torch.device | None:
    device = accelerator()
    if device is None or not getattr(torch.get_device_module(device), "is_initialized", lambda: False)():
        return None
    return device


def capture(
    device: torch.device | None = None,
    generators: Generators | None = None,
    others: Iterable[torch.device] = (),
) -> RandomState:
    """The random states of this rank as they are now.

    Args:
        device: the rank's device; None or a CPU: no accelerator stream is taken.
        generators: further generators by name.
        others: further accelerators, see `other_devices`.

    Host sync: none beyond what torch itself needs to read a generator.
    """
    kind = None if device is None else device.type
    accelerated = kind not in _NO_STREAM
    return RandomState(
        python=_python_state(),
        numpy=_numpy_state(),
        torch=torch.get_rng_state(),
        device=_device_state(device) if device is not None and accelerated else None,
        device_type=kind if accelerated else None,
        others={str(other): _device_state(other) for other in others},
        generators={name: _generator_state(generator) for name, generator in (generators or {}).items()},
    )


_MT19937_BYTES = 625 * 4  # 624 words of key, and the position in them
_HEADER_BYTES = object.__basicsize__  # left out: it counts references
_IS_CPYTHON = sys.implementation.name == "cpython"
_last_python: tuple[bytes, float | None, tuple[Any, ...]] | None = None
_last_numpy: tuple[bytes, bytes, dict[str, Any]] | None = None


def _python_state() -> tuple[Any, ...]:
    """As ``random.getstate``, see [Note: unchanged generators]."""
    global _last_python
    memory = _python_memory()
    if memory is None:
        return random.getstate()
    if _last_python is None or _last_python[:2] != memory:
        _last_python = (*memory, random.getstate())
    return _last_python[2]


def _python_memory() -> tuple[bytes, float | None] | None:
    """All that python's own state is read from, a normal number in reserve included; None for another generator."""
    generator: Any = getattr(random.getstate, "__self__", None)
    if type(generator) is not random.Random or not _IS_CPYTHON:
        return None
    size = _random.Random.__basicsize__ - _HEADER_BYTES
    return ctypes.string_at(id(generator) + _HEADER_BYTES, size), cast(Any, generator).gauss_next


def _numpy_state() -> dict[str, Any]:
    """As ``numpy.random.get_state``, see [Note: unchanged generators]."""
    global _last_numpy
    memory = _numpy_memory()
    if memory is None:
        return dict(np.random.get_state(legacy=False))
    if _last_numpy is None or _last_numpy[:2] != memory:
        _last_numpy = (*memory, dict(np.random.get_state(legacy=False)))
    return _last_numpy[2]


def _numpy_memory() -> tuple[bytes, bytes] | None:
    """All that numpy's own state is read from; None where the generator is another one than by default.

    The key and position of the generator, and the object around it, which holds a normal number in reserve and which
    generator it is.
    """
    around = np.random.mtrand._rand
    generator = around._bit_generator
    if type(generator) is not np.random.MT19937 or not _IS_CPYTHON:
        return None
    inside = ctypes.string_at(id(around) + _HEADER_BYTES, type(around).__basicsize__ - _HEADER_BYTES)
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES), inside


def restore(state: RandomState, generators: Generators | None = None, device: torch.device | None = None) -> list[str]:
    """Put random states back, as many streams as possible.

    Args:
        state: what `capture` returned, here or in another process.
        generators: the generators to write into, under the names that they were registered with.
        device: of this rank now; its stream is restored if it is of the recorded type.

    Returns:
        The streams that could not be restored, each as ``name: reason``; empty when all were.
    """
    # one function per stream, so that a stream that cannot be restored does not keep the others from it
    streams: dict[str, Callable[[], None]] = {
        "python": lambda: random.setstate(_as_tuples(state.python)),
        "numpy": lambda: np.random.set_state(state.numpy),
        "torch": lambda: torch.set_rng_state(_cpu_bytes(state.torch)),
    }
    for name, saved in state.others.items():
        streams[name] = lambda name=name, saved=saved: _restore_other(name, saved)  # type: ignore[misc]
    if state.device is not None:  # after the others, of which one may be this rank's own device by now
        streams[state.device_type or "device"] = lambda: _restore_device(state, device)
    for name, saved in state.generators.items():
        # defaults bind the loop's variables now, not when the function runs
        streams[f"generator {name}"] = lambda name=name, saved=saved: _restore_generator(  # type: ignore[misc]
            (generators or {}).get(name), saved
        )
    return [f"{name}: {reason}" for name, stream in streams.items() if (reason := _failure_of(stream))]


@contextlib.contextmanager
def kept(
    device: torch.device | None = None,
    generators: Generators | None = None,
    others: Iterable[torch.device] = (),
) -> Iterator[None]:
    """Put the random states back at the end of this context to what they were at its beginning.

    Args:
        device: of the rank; None or a CPU: no accelerator stream is kept.
        generators: further generators by name.
        others: further accelerators.
    """
    before = capture(device, generators, others)
    try:
        yield
    finally:
        restore(before, generators, device)


def _failure_of(stream: Callable[[], None]) -> str | None:
    try:
        stream()
    except Exception as error:  # every generator kind raises its own types; the caller reports them all
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None


def _device_state(device: torch.device) -> torch.Tensor:
    module = torch.get_device_module(device)
    # MPS has one device, and its function takes no argument
    state = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    return _cpu_bytes(state)


def _restore_device(state: RandomState, device: torch.device | None) -> None:
    if device is None or device.type != state.device_type:
        present = "no accelerator" if device is None else f"device {device}"
        raise ValueError(f"recorded on {state.device_type}, replayed on {present}")
    assert state.device is not None
    _set_device_state(device, state.device)


def _restore_other(name: str, saved: Tensor) -> None:
    device = torch.device(name)
    here = accelerator()
    if here is None or here.type != device.type or (device.index or 0) >= torch.accelerator.device_count():
        raise ValueError(f"recorded on {name}, which this machine does not have")
    _set_device_state(device, saved)


def _set_device_state(device: torch.device, saved: Tensor) -> None:
    module = torch.get_device_module(device)
    arguments = () if device.type == "mps" else (device,)
    module.set_rng_state(_cpu_bytes(saved), *arguments)


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return _cpu_bytes(generator.get_state())
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return dict(generator.get_state(legacy=False))
    if isinstance(generator, random.Random):
        return generator.getstate()
    raise ValueError(
        f"a generator of type {type(generator).__name__} cannot be recorded; "
        "give a torch.Generator, numpy.random.Generator or random.Random"
    )


def _restore_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(_cpu_bytes(state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(_as_tuples(state))
    else:
        raise ValueError("no generator of this name is registered")


def _as_tuples(state: Any) -> tuple[Any, ...]:
    """A state of ``random`` as the tuple of tuples that ``random.setstate`` insists on; JSON made lists of them."""
    version, key, gauss = state
    return version, tuple(key), gauss


def _cpu_bytes(state: torch.Tensor) -> torch.Tensor:
    """A generator's state as uint8 on the CPU: generators refuse every other tensor."""
    return state.to(device="cpu", dtype=torch.uint8)
