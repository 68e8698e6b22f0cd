"""Has the process groups of a script that is replayed alone stood in for; Python imports it at its start.

It imports neither torch nor this package, and is inert in a process that makes no process group: launchers, resource
trackers and workers of a loader see it too. A ``sitecustomize`` that it hides is run after it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.realpath(__file__))
_STAND_IN = "ddp_nanguard.script.meeting"
_MET = {
    "torch.distributed.distributed_c10d": (
        "init_process_group",
        "broadcast_object_list",
        "scatter_object_list",
        "recv_object_list",
    ),
    "torch.nn.parallel.distributed": ("DistributedDataParallel",),
    "torch.distributed.fsdp._fully_shard._fully_shard": ("fully_shard",),
    "torch.distributed.fsdp.fully_sharded_data_parallel": ("FullyShardedDataParallel",),
}
"""Functions that are met by those of the same name in `_STAND_IN`, and a class whose ``__init__`` is; by module."""


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules in `_MET`, once each."""

    def __init__(self) -> None:
        self._waiting = set(_MET)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that others find, with a loader that puts our functions in place of the module's."""
        if fullname not in self._waiting:
            return None
        self._waiting.discard(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _then_meet(spec.loader.exec_module)  # type: ignore[method-assign,assignment]
        return spec


def _then_meet(load: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def load_and_meet(module: ModuleType) -> None:
        load(module)
        _meet(module)

    return load_and_meet


def _meet(module: ModuleType) -> None:
    for name in _MET[module.__name__]:
        theirs = getattr(module, name, None)
        if isinstance(theirs, type):
            theirs.__init__ = _met(theirs.__init__, name)  # type: ignore[misc]
        elif theirs is not None:
            setattr(module, name, _met(theirs, name))


def _met(theirs: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def ours(*args: Any, **kwargs: Any) -> Any:
        # only now: while torch is being imported, this package cannot be
        return getattr(importlib.import_module(_STAND_IN), name)(theirs, *args, **kwargs)

    return ours


def _run_hidden() -> None:
    """Run the ``sitecustomize`` that Python would have found without this one."""
    elsewhere = [path for path in sys.path if os.path.realpath(path or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    if os.environ.get("NANGUARD_REPLAY"):
        sys.meta_path.insert(0, _Finder())
    _run_hidden()
