"""Replays a dump on all its ranks: every process of torchrun runs the step of its own rank."""

from __future__ import annotations

import argparse
import json
import sys

import torch
import torch.distributed as dist

from ddp_nanguard.diagnosis.all_ranks import trace_all_ranks
from ddp_nanguard.diagnosis.trace_text import diagnosis_text
from ddp_nanguard.dump.read import Dump, open_dump
from ddp_nanguard.errors import DumpError
from ddp_nanguard.replay import launcher
from ddp_nanguard.replay.outcome import EXIT_CODES, Outcome, Result, first_own_site, not_replayable, why_not_replayable
from ddp_nanguard.replay.session import Session, device_for, named_recipe


def replay_all_ranks(options: argparse.Namespace) -> int:
    """Run this rank's own step; rank 0 prints the outcomes as one JSON line.

    Returns:
        The exit code of the worst outcome, the same on all ranks.

    Raises:
        DumpError: the dump cannot be used, or is of another number of ranks.

    Collective: those of the training step and of a guard, then one gather of the results on the default group; every
    rank of the recorded world must call it.
    """
    rank, world_size = launcher.rank(), launcher.world_size()
    # One rank checks the checksums: each rank would read the whole dump.
    dump = open_dump(options.dump, verify=rank == 0)
    if dump.world_size != world_size:
        raise DumpError(
            f"{dump.path} is of {dump.world_size} ranks, {world_size} were started; "
            f"use torchrun --nproc-per-node {dump.world_size}, or no torchrun for one rank alone"
        )
    return _replay_all(dump, rank, options)


def _replay_all(dump: Dump, rank: int, options: argparse.Namespace) -> int:
    device = device_for(options.device)
    if device.index is not None and device.type != "cpu":
        # a device's own backend communicates on the current device
        torch.accelerator.set_device_index(device.index)
    if not dist.is_initialized():
        dist.init_process_group(launcher.backend_for(device, options.device is not None))
    reason = why_not_replayable(dump, alone=False)
    session = Session(dump, rank, device, options.recipe, alone=False)
    if reason is not None:
        session.obstacle = not_replayable(rank, first_own_site(dump, rank, alone=False), reason)
    else:
        session.first_recipe = named_recipe(dump, options.recipe)
    result = session.plain()
    code = _report_all(result, rank)
    if options.trace and reason is None:
        _trace_all(session, result)
    return code


def _trace_all(session: Session, result: Result) -> None:
    """Trace every rank's own step and print the text on rank 0.

    An error is printed and ends the trace on this rank, and by a timeout or a lost connection on its peers; the outcome
    has been printed by then.
    """
    try:
        text = trace_all_ranks(session, result, diagnosis_text)
    except Exception as error:  # of the user's code, or a peer's end
        print(f"ddp-nanguard: no trace of rank {session.rank}: {type(error).__name__}: {error}", file=sys.stderr)
        return
    if session.rank == 0:
        print(text, end="", flush=True)


def _report_all(result: Result, rank: int) -> int:
    """Print the outcomes of all ranks on rank 0 and return the worst one's exit code.

    Collective: one all_gather_object of the results, after the step, on the default group.
    """
    results: list[dict[str, object] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result.to_dict())
    outcomes = [Outcome(str(each["outcome"])) for each in results if each is not None]
    worst = max(outcomes, key=lambda outcome: EXIT_CODES[outcome])
    if rank == 0:
        print(json.dumps({"outcome": str(worst), "ranks": results}), flush=True)
    return EXIT_CODES[worst]
