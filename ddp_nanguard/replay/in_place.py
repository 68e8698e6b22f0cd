"""The step of a fault once more in the process that had it, beside the live model: option ``rerun``.

[Note: a model of its own]
Each rank runs its step alone, as ``ddp-nanguard replay --rank`` does, on a model that the recipe builds and the live
weights fill. The live model's hooks, gradients and communication have no part in it, so no rank can leave another
waiting, and there is nothing to put back.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_nanguard.capture import rng
from ddp_nanguard.capture.window import MicroBatch
from ddp_nanguard.context import GuardContext
from ddp_nanguard.distributed.group import fault_group_of
from ddp_nanguard.dump.manifest import settings
from ddp_nanguard.dump.request import DumpRequest
from ddp_nanguard.errors import DumpError
from ddp_nanguard.tensors.containers import copy_containers

from .in_memory_dump import InMemoryDump
from .outcome import Result, compare
from .rebuild import apply_settings, rebuild, require_matching_parameters
from .recipe import Recipe, load_recipe
from .run_step import StepResult, run_step
from .session import is_compiled, what_needs_peers


class InPlaceReplay:
    """One rank's step, ready to run again.

    Memory: one whole model on the device while it runs, whatever the wrapper; see also `InMemoryDump`.

    Raises:
        DumpError: it cannot run, and why.

    Collective: none.
    """

    def __init__(self, context: GuardContext, request: DumpRequest, window: list[MicroBatch]) -> None:
        assert context.recipe is not None
        self.rank = request.rank
        self.device = context.device
        self.group = fault_group_of((context.ranks.rank,)) if context.ranks.connected else None
        _require_clean_window(window)
        self._before = settings()
        self.held = InMemoryDump(context, request)
        self.recipe = load_recipe(context.recipe, context.recipe_directory, loaded=True)
        _require_own_model(self.recipe, context)
        require_matching_parameters(self.held, self.recipe.model)
        _require_no_peers(self.held, self.recipe)
        self.window = [_copied(micro_batch, context) for micro_batch in window]

    def run(self) -> Result:
        """The step once more, and how it compares. Collective: none; what the step itself says to others is refused."""
        with self._undisturbed():
            again = self._run()
        return compare(self.held, self.rank, self.window, again, alone=True)

    def _run(self) -> StepResult:
        recipe = replace(self.recipe, optimizer=None)
        rebuilt = rebuild(self.held, self.rank, recipe, self.device, alone=True, group=self.group)
        self.held.forget_weights()
        try:
            with _Alone():  # type: ignore[no-untyped-call]  # torch's own
                return run_step(rebuilt, self.window, alone=True)
        finally:
            rebuilt.wrapper.free()

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        try:
            with rng.kept(self.device, self.recipe.generators), torch.enable_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            if settings() != self._before:
                apply_settings(self.held)


def _require_clean_window(window: list[MicroBatch]) -> None:
    if not window:
        raise DumpError("no micro-batch of the step is at hand")
    modified = [path for micro_batch in window for path in micro_batch.modified]
    if modified:
        raise DumpError(f"the step changed batch{modified[0]} in place: train with copy_batch=True")


def _require_own_model(recipe: Recipe, context: GuardContext) -> None:
    """A step on the live model would leave gradients and buffers in it."""
    live = {id(module) for module in context.wrapper.model.modules()}
    memory = {_address(context.wrapper.local(tensor)) for tensor in _tensors_of(context.wrapper.model)} - {0}
    shared = any(id(module) in live for module in recipe.model.modules())
    if shared or any(_address(tensor) in memory for tensor in _tensors_of(recipe.model)):
        raise DumpError("the recipe hands out modules or tensors of the model in training; let it build new ones")


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _require_no_peers(held: InMemoryDump, recipe: Recipe) -> None:
    needed = what_needs_peers(held, recipe)
    if needed is not None:
        raise DumpError(needed)
    if is_compiled(recipe.model) or held.manifest.wrapper_description.compiled:
        raise DumpError("the model is compiled, and compiling another one may take longer than peers wait")


def _copied(micro_batch: MicroBatch, context: GuardContext) -> MicroBatch:
    """With a batch that the step may change: the dump needs the first one as it is."""
    on_host = context.config.hold_batches == "host" and context.device.type != "cpu"

    def detached(tensor: Tensor) -> Tensor:
        return tensor.detach().to(context.device) if on_host and tensor.is_pinned() else tensor.detach()

    return replace(micro_batch, batch=copy.deepcopy(copy_containers(micro_batch.batch, detached)))


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Refuses communication with other ranks: they may have failed, and nobody would answer."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith(("c10d::", "_c10d_functional")) and _num_members([*args, *(kwargs or {}).values()]) != 1:
            raise DumpError(f"the step communicates by itself ({name.partition('.')[0]}), which takes all ranks")
        return func(*args, **(kwargs or {}))


def _num_members(args: list[Any]) -> int | None:
    """Size of the process group among an operator's arguments, None where there is none."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return int(dist.ProcessGroup.unbox(value).size())
        if isinstance(value, str):
            with contextlib.suppress(ValueError, RuntimeError, KeyError):
                return int(torch._C._distributed_c10d._resolve_process_group(cast(Any, value)).size())
    return None
