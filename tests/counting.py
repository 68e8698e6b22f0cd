"""Counts what a training step says to other ranks and what it reads back from the device.

Two witnesses for communication: wrappers around the functions of ``torch.distributed`` (including barriers, point to
point, object and store calls), and a dispatch mode that sees the ``c10d`` operators below them, also those that C++
code such as DDP's reducer issues. Host reads are the operators that hand a value of a tensor to Python, and the tensor
methods that do so without an operator.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVES = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier"),
    *("new_group", "recv", "recv_object_list", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter"),
    *("scatter_object_list", "send", "send_object_list", "split_group"),
)
STORE_CALLS = (
    *("add", "append", "check", "compare_set", "delete_key", "get", "multi_get", "multi_set", "num_keys", "set"),
    "wait",
)
READING_METHODS = ("__array__", "cpu", "numpy", "tolist")  # item() is an operator
READING_OPERATORS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::allclose",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_dim",
    "aten::_unique2",
}


@dataclass
class Counts:
    """What happened on the counting thread.

    Attributes:
        calls: calls of ``torch.distributed`` functions by name.
        call_bytes: bytes of the tensors given to each of these calls, in order.
        store: calls of store methods by name.
        operators: ``c10d`` operators by name.
        operator_bytes: bytes of the tensors given to each operator, in order.
        host_reads: operators and methods that hand values to the host, by name.
        num_operators: all operators together, `host_reads` that are operators included.
    """

    calls: Counter[str] = field(default_factory=Counter)
    call_bytes: list[int] = field(default_factory=list)
    store: Counter[str] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)
    operator_bytes: list[int] = field(default_factory=list)
    host_reads: Counter[str] = field(default_factory=Counter)
    num_operators: int = 0

    def __sub__(self, other: Counts) -> dict[str, dict[str, int]]:
        """Differences by kind and name, zeros left out."""
        kinds = ("calls", "store", "operators", "host_reads")
        return {kind: _difference(getattr(self, kind), getattr(other, kind)) for kind in kinds}


def _difference(mine: Counter[str], other: Counter[str]) -> dict[str, int]:
    return {name: mine[name] - other[name] for name in sorted(mine | other) if mine[name] != other[name]}


class _Operators(TorchDispatchMode):
    def __init__(self, counts: Counts, is_inside: Callable[[], bool]) -> None:
        super().__init__()
        self.counts, self.is_inside = counts, is_inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        self.counts.num_operators += 1
        if name.startswith("c10d::"):
            self.counts.operators[name] += 1
            self.counts.operator_bytes.append(_bytes_of((args, kwargs)))
        elif not self.is_inside() and (name in READING_OPERATORS or _hands_to_host(name, args, kwargs or {})):
            self.counts.host_reads[name] += 1
        return func(*args, **(kwargs or {}))


def _hands_to_host(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    if name == "aten::_to_copy":
        target = kwargs.get("device")
        return target is not None and torch.device(target).type == "cpu" and args[0].device.type != "cpu"
    if name == "aten::index":  # a boolean mask: the host learns how many are true
        return any(isinstance(index, Tensor) and index.dtype is torch.bool for index in args[1])
    if name == "aten::copy_":
        is_late = (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)) and args[0].is_pinned()
        return bool(args[0].device.type == "cpu" and args[1].device.type != "cpu" and not is_late)
    return False


def _bytes_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_bytes_of(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_bytes_of(item) for item in value)
    return 0


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Counts on this thread until the block ends; calls of one counted function inside another count once."""
    counts = Counts()
    with contextlib.ExitStack() as patches:
        _patch_functions(patches, counts)
        _patch_methods(patches, dist.Store, STORE_CALLS, lambda name, args: counts.store.update([name]))
        reading = threading.local()
        _patch_methods(
            patches, torch.Tensor, READING_METHODS, lambda name, args: counts.host_reads.update([name]), reading
        )
        # `tolist` of a tensor on a device copies it first, which is one read
        patches.enter_context(_Operators(counts, lambda: getattr(reading, "busy", False)))
        yield counts


@dataclass
class Waits:
    """How often the host has waited for a stream.

    Attributes:
        count: known when the block has ended.
    """

    count: int = 0


@contextlib.contextmanager
def watching_waits() -> Iterator[Waits]:
    """Counts where the host waits for a stream of an accelerator, copies to the device included; events are no such.

    What `counting` cannot see: torch's own witness, which each call to CUDA that waits goes past.
    """
    waits = Waits()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            yield waits
    finally:
        torch.cuda.set_sync_debug_mode("default")
        waits.count = sum("called a synchronizing CUDA operation" in str(each.message) for each in told)


def _patch_functions(patches: contextlib.ExitStack, counts: Counts) -> None:
    def note(name: str, args: tuple[Any, ...]) -> None:
        counts.calls[name] += 1
        counts.call_bytes.append(_bytes_of(args))

    inside = threading.local()
    for name in COLLECTIVES:
        original = getattr(distributed_c10d, name)
        wrapper = _counted(original, name, note, inside)
        for module in (dist, distributed_c10d):
            if getattr(module, name, None) is original:
                _patch(patches, module, name, wrapper)


def _patch_methods(
    patches: contextlib.ExitStack,
    cls: Any,
    names: tuple[str, ...],
    note: Callable[[str, tuple[Any, ...]], None],
    inside: threading.local | None = None,
) -> None:
    inside = inside or threading.local()
    for name in names:
        _patch(patches, cls, name, _counted(getattr(cls, name), name, note, inside))


def _counted(
    original: Callable[..., Any], name: str, note: Callable[[str, tuple[Any, ...]], None], inside: threading.local
) -> Callable[..., Any]:
    counting_thread = threading.get_ident()

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != counting_thread or getattr(inside, "busy", False):
            return original(*args, **kwargs)
        note(name, (*args, *kwargs.values()))
        inside.busy = True
        try:
            return original(*args, **kwargs)
        finally:
            inside.busy = False

    return call


def _patch(patches: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    own = owner.__dict__.get(name)
    setattr(owner, name, value)
    patches.callback(setattr, owner, name, own) if own is not None else patches.callback(delattr, owner, name)
