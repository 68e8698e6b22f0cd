"""One rank's step, to be run any number of times, alone or with its peers; each run begins with a newly built model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ddp_nanguard.capture.window import MicroBatch
from ddp_nanguard.dump.batch_codec import unregistered_type
from ddp_nanguard.dump.read import Dump, open_dump
from ddp_nanguard.errors import DumpError
from ddp_nanguard.report.types import Phase

from . import launcher
from .outcome import Result, compare, not_replayable, recorded_alone, why_not_replayable
from .rebuild import Rebuilt, apply_settings, rebuild
from .recipe import Recipe, load_recipe
from .run_step import StepResult, run_step

Change = Callable[[Rebuilt, list[MicroBatch]], "contextlib.AbstractContextManager[Any]"]


@dataclass
class Session:
    """A rank of a dump, ready to be replayed.

    Attributes:
        dump: the dump.
        rank: the rank whose step is run.
        device: where it runs.
        recipe_name: None for the one that the dump names.
        obstacle: the outcome where no replay can give an answer; `run` must not be called then.
        alone: this process stands for the rank; otherwise every rank has a session, and all run at the same time.
        first_recipe: what `recipe` returns the first time, None where it has been used.
    """

    dump: Dump
    rank: int
    device: torch.device
    recipe_name: str | None
    obstacle: Result | None = None
    alone: bool = True
    first_recipe: Recipe | None = None

    def recipe(self) -> Recipe:
        """The user's recipe, called again each time, since a run changes the model."""
        if self.first_recipe is not None:
            recipe, self.first_recipe = self.first_recipe, None
            return recipe
        name = self.recipe_name or self.dump.manifest.recipe
        assert name is not None  # `named_recipe` has been asked before
        return load_recipe(name, self.dump.manifest.run.recipe_directory)

    def window(self, recipe: Recipe) -> list[MicroBatch]:
        """The recorded micro-batches of the rank, newly read from the dump, on the session's device."""
        return self.dump.window(self.rank, types=dict(recipe.batch_types), device=self.device)

    def run(
        self,
        step: Callable[[Any], Any] | None = None,
        around: Change | None = None,
        keep: Callable[[list[MicroBatch]], list[MicroBatch]] | None = None,
    ) -> StepResult:
        """Run the step once.

        Args:
            step: wraps the recipe's step.
            around: makes the context in which the step runs, from the rebuilt model and the window.
            keep: reduces the recorded window to a smaller one.

        Raises:
            DumpError: the recipe or the dump does not fit.

        Collective: those of the training step and of the guard, unless ``alone``.
        """
        recipe = self.recipe()
        if step is not None:
            recipe = replace(recipe, step=step(recipe.step))
        window = self.window(recipe) if keep is None else keep(self.window(recipe))
        apply_settings(self.dump)
        with self.dump.telling(self.rank, speaks=self.alone or self.rank == 0):
            rebuilt = rebuild(self.dump, self.rank, recipe, self.device, alone=self.alone)
        with contextlib.nullcontext() if around is None else around(rebuilt, window):
            return run_step(rebuilt, window, alone=self.alone)

    def plain(self) -> Result:
        """Replay the step as it ran in training and compare it with the record; the obstacle where there is one."""
        if self.obstacle is not None:
            return self.obstacle
        recipe = self.recipe()
        window = self.window(recipe)
        # The recipe is called once for both the batch types of the window and the run.
        self.first_recipe = recipe
        compiled = is_compiled(recipe.model) or not self.alone  # before it is wrapped, by a wrap that may compile it
        return compare(self.dump, self.rank, window, self.run(), self.alone, compiled)


def open_session(paths: Sequence[str], rank: int | None, recipe_name: str | None, device: str | None) -> Session:
    """Open a dump for replays of one rank, alone in this process.

    Args:
        paths: the dump's directory, or its parts on several nodes.
        rank: None for the rank where the fault began.
        recipe_name: ``module:function``; None for the one that the dump names.
        device: None for a GPU if there is one.

    Raises:
        DumpError: the dump, the rank or the recipe cannot be used.
    """
    dump = open_dump(paths)
    chosen = rank if rank is not None else origin_rank(dump)
    session = Session(dump, chosen, device_for(device), recipe_name)
    reason = why_not_replayable(dump, alone=True)
    if reason is None:
        session.first_recipe = named_recipe(dump, recipe_name)
        apply_settings(dump)
        recipe = session.first_recipe
        reason = (
            what_needs_peers(dump, recipe)
            or what_needs_optimizer(dump, recipe)
            or unregistered_batch(session.window(recipe))
        )
    if reason is not None:
        session.obstacle = not_replayable(chosen, recorded_alone(dump, chosen, alone=True), reason)
    return session


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """A context in which code that torch.compile has compiled runs eagerly."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled then, and the import costs seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def is_compiled(model: nn.Module) -> bool:
    """Whether any module of a model is compiled by torch.compile."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    )


# -- what a replay needs -----------------------------------------------------------------------------------------------


def origin_rank(dump: Dump) -> int:
    """The rank where the fault began; the first rank of the dump where the report names none."""
    origin = dump.report.origin
    return origin.rank if origin is not None and origin.rank is not None else dump.ranks[0]


def what_needs_peers(dump: Dump, recipe: Recipe) -> str | None:
    """Why one rank alone cannot run the recipe's model; None if it can."""
    if dump.world_size == 1:
        return None
    for name, module in recipe.model.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            n = dump.world_size
            return f"SyncBatchNorm {name!r} mixes all ranks: replay all {n} with torchrun --nproc-per-node {n}"
    return None


def what_needs_optimizer(dump: Dump, recipe: Recipe) -> str | None:
    """Why the update cannot be run; None if it can, or if the fault is not one of the update."""
    origin = dump.report.origin
    is_update = origin is not None and origin.phase is Phase.OPTIMIZER and origin.layer is not None
    if not is_update or recipe.optimizer is not None:
        return None
    return (
        "the update itself made the weights non-finite, and the recipe has no optimizer to run it again: "
        "give Recipe(model=..., step=..., optimizer=lambda parameters: ...)"
    )


def named_recipe(dump: Dump, given: str | None) -> Recipe:
    """Load the recipe asked for, or the one that the dump names; rank 0 prints its name before its code runs.

    Raises:
        DumpError: neither names a recipe, or it cannot be loaded.
    """
    name = given or dump.manifest.recipe
    if name is None:
        raise DumpError(
            f"{dump.path} names no recipe; give --recipe module:function (a function that returns a Recipe), or the "
            f"command of the run: ddp-nanguard replay {dump.path} -- {dump.manifest.script or 'python train.py'}"
        )
    if launcher.rank() == 0:
        print(f"recipe {name} (its code is imported now)", file=sys.stderr)
    return load_recipe(name, dump.manifest.run.recipe_directory)


def device_for(name: str | None) -> torch.device:
    """The device asked for, else the accelerator of the local rank, else the CPU.

    Raises:
        DumpError: this machine has no such device.
    """
    return _named_device(name) if name is not None else launcher.own_device()


def _named_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        if torch.empty(1, dtype=torch.uint8, device=device).is_meta:
            raise DumpError(f"--device {name} computes nothing; give a device of this machine, such as cpu")
    except (RuntimeError, AssertionError) as error:
        raise DumpError(f"--device {name}: {str(error).splitlines()[0]}; give a device of this machine") from error
    return device


def unregistered_batch(window: list[MicroBatch]) -> str | None:
    """Why a batch cannot be given to the recipe: it holds a class that no builder rebuilds. None if it can."""
    for micro_batch in window:
        name = unregistered_type(micro_batch.batch)
        if name is not None:
            remedy = f'give Recipe(batch_types={{"{name}": {name}}})'
            return f"the batch holds a {name}, which is not rebuilt by itself: {remedy}"
    return None


def replay_alone(paths: Sequence[str], rank: int | None, recipe_name: str | None, device: str | None) -> Result:
    """Run one rank's step once in this process, without peers, and compare it with the record.

    The arguments and the errors are those of `open_session`.
    """
    return open_session(paths, rank, recipe_name, device).plain()
