"""Replay of a dump: of one rank alone, or of all ranks under torchrun.

Usage: ``torchrun --nproc-per-node N -m ddp_nanguard.replay.run DUMP [DUMP ...] [--recipe module:function]``
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddp_nanguard.dump.pack import unbuilt_type
from ddp_nanguard.dump.read import Dump, open_dump
from ddp_nanguard.errors import DumpError
from ddp_nanguard.window import MicroBatch

from .outcome import EXIT_CODES, Outcome, Result, cannot, compare, first_own_site, why_not
from .rebuild import apply_settings, rebuild
from .recipe import Recipe, load_recipe
from .rerun import rerun

WRONG_USAGE = 2


def replay_alone(paths: Sequence[str], rank: int | None, recipe_name: str | None, device: str | None) -> Result:
    """One rank's step in this process, without peers.

    Args:
        paths: of the dump, or of its parts on several nodes.
        rank: default: the rank where the fault began.
        recipe_name: ``module:function``; default: the one that the dump names.
        device: default: a GPU if there is one.

    Raises:
        DumpError: the dump, the rank or the recipe cannot be used.
    """
    dump = open_dump(paths)
    chosen = rank if rank is not None else culprit(dump)
    recorded = first_own_site(dump, chosen, alone=True)
    reason = why_not(dump, alone=True)
    if reason is not None:
        return cannot(chosen, recorded, reason)
    recipe = _recipe(dump, recipe_name)
    where = _device(device)
    apply_settings(dump)
    needs_peers = _what_needs_peers(dump, recipe)
    if needs_peers is not None:
        return cannot(chosen, recorded, needs_peers)
    window = dump.window(chosen, types=dict(recipe.batch_types), device=where)
    unbuilt = _unbuilt(window)
    if unbuilt is not None:
        return cannot(chosen, recorded, unbuilt)
    rebuilt = rebuild(dump, chosen, recipe, where, alone=True)
    return compare(dump, chosen, window, rerun(rebuilt, window, alone=True), alone=True)


def culprit(dump: Dump) -> int:
    """The rank where the fault began; the first rank where nobody began it."""
    origin = dump.report.origin
    return origin.rank if origin is not None and origin.rank is not None else dump.ranks[0]


def _what_needs_peers(dump: Dump, recipe: Recipe) -> str | None:
    if dump.world_size == 1:
        return None
    for name, module in recipe.model.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            n = dump.world_size
            return f"SyncBatchNorm {name!r} mixes all ranks: replay all {n} with torchrun --nproc-per-node {n}"
    return None


def _recipe(dump: Dump, given: str | None) -> Recipe:
    name = given or dump.manifest["recipe"]
    if name is None:
        raise DumpError(
            f"{dump.path} names no recipe; give --recipe module:function (a function that returns a Recipe)"
        )
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"recipe {name} (its code is imported now)", file=sys.stderr)
    return load_recipe(name, dump.manifest["run"].get("recipe_directory"))


def _device(name: str | None) -> torch.device:
    if name is not None:
        return _named_device(name)
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def _named_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise DumpError(f"--device {name}: {str(error).splitlines()[0]}; give a device of this machine") from error
    return device


def _unbuilt(window: list[MicroBatch]) -> str | None:
    """Why a batch cannot be handed to the recipe: the first class in it that nobody rebuilds."""
    for micro_batch in window:
        name = unbuilt_type(micro_batch.batch)
        if name is not None:
            remedy = f'give Recipe(batch_types={{"{name}": {name}}})'
            return f"the batch holds a {name}, which is not rebuilt by itself: {remedy}"
    return None


# -- under torchrun --------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Every rank runs its own step; rank 0 prints the outcome as one JSON line. Returns the exit code of all."""
    options = _parser().parse_args(arguments)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    try:
        dump = open_dump(options.dump, verify=rank == 0)
        if dump.world_size != world_size:
            raise DumpError(
                f"{dump.path} is of {dump.world_size} ranks, {world_size} were started; "
                f"use torchrun --nproc-per-node {dump.world_size}, or ddp-nanguard replay for one rank alone"
            )
        return _replay_all(dump, rank, options)
    except DumpError as error:
        print(f"ddp-nanguard: {error}", file=sys.stderr)
        return WRONG_USAGE


def _replay_all(dump: Dump, rank: int, options: argparse.Namespace) -> int:
    device = _device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    reason = why_not(dump, alone=False)
    if reason is not None:
        result = cannot(rank, first_own_site(dump, rank, alone=False), reason)
    else:
        recipe = _recipe(dump, options.recipe)
        apply_settings(dump)
        window = dump.window(rank, types=dict(recipe.batch_types), device=device)
        rebuilt = rebuild(dump, rank, recipe, device, alone=False)
        result = compare(dump, rank, window, rerun(rebuilt, window, alone=False), alone=False)
    return _report_all(result, rank)


def _report_all(result: Result, rank: int) -> int:
    """Collective: one all_gather_object of the results; after the step, on the default group."""
    results: list[dict[str, object] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result.to_dict())
    outcomes = [Outcome(str(each["outcome"])) for each in results if each is not None]
    worst = max(outcomes, key=lambda outcome: EXIT_CODES[outcome])
    if rank == 0:
        print(json.dumps({"outcome": str(worst), "ranks": results}), flush=True)
    return EXIT_CODES[worst]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="replay.py", description="Replays a dump on as many ranks as it was written by."
    )
    parser.add_argument("dump", nargs="+", metavar="DUMP", help="a dump, or its parts on several nodes")
    parser.add_argument("--recipe", metavar="MODULE:FUNCTION", help="default: the one that the dump names")
    parser.add_argument("--device", help="default: the GPU of the local rank if there is one")
    return parser


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # with DDP alive the interpreter's own shutdown can hang or abort and lose the code


if __name__ == "__main__":
    _end(main())
