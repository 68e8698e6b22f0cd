"""Traces the step on all ranks, for faults that no rank can reproduce alone: a layer or the reduce mixes the ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from ddp_nanguard.dump.read import Dump
from ddp_nanguard.replay.outcome import Result
from ddp_nanguard.replay.session import Session, origin_rank
from ddp_nanguard.report.types import Phase, Site

from .diagnose import Diagnosis, traced_diagnosis
from .rules.report_rules import largest_gradients
from .trace.operators import is_communication


def trace_all_ranks(session: Session, outcome: Result, render: Callable[[Diagnosis], str]) -> str:
    """Trace each rank's step and return the text of the rank where the fault began; the same text on every rank.

    Where several ranks met the value in the same layer, the report names the first of them; the traces tell which rank
    made the value and which received it.

    Args:
        session: of this rank, not alone.
        outcome: of its plain replay.
        render: makes the text of a diagnosis.

    Collective: those of the training step and of a guard, then one gather of a flag and one broadcast of the text on
    the default group; every rank must call it.
    """
    return told_by_all_ranks(session.dump, session.rank, traced_diagnosis(session, outcome), render)


def told_by_all_ranks(dump: Dump, own_rank: int, found: Diagnosis, render: Callable[[Diagnosis], str]) -> str:
    """The text of the rank where the fault began, once each rank has traced its own step.

    Args:
        dump: the dump.
        own_rank: of this process.
        found: its own diagnosis.
        render: makes the text of a diagnosis.

    Collective: one gather of a flag and one broadcast of the text on the default group; every rank must call it.
    """
    origin = dump.report.origin
    largest = _largest(dump, origin) if origin is not None and origin.phase is Phase.REDUCE else {}
    # A reduce has no rank where the fault began; the one that contributed most is traced.
    named = max(largest, key=largest.__getitem__) if largest else origin_rank(dump)
    made_it: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(made_it, _made_it(found))
    # On a rank that only received the value, its first event is a collective.
    rank = named if made_it[named] or not any(made_it) else made_it.index(True)
    texts: list[str | None] = [None]
    if own_rank == rank:
        is_named = origin is not None and origin.rank is not None  # nobody is, where the reduce made the value
        got = f"rank {named} got the value from another rank\n" if is_named and rank != named else ""
        texts = [f"\n{got}rank {rank}: {render(found)}{_reduce_text(found, largest, origin)}"]
    dist.broadcast_object_list(texts, src=rank)
    return texts[0] or ""


def _made_it(found: Diagnosis) -> bool:
    """Whether the value began in this rank's own arithmetic, not in a collective."""
    first = found.traced.first_nonfinite_op if found.traced is not None else None
    return first is not None and not is_communication(first.operator)


def _largest(dump: Dump, origin: Site) -> dict[int, float]:
    """Per rank, the largest absolute value before the reduce of the gradient that became non-finite in it."""
    return largest_gradients({rank: dump.history(rank) for rank in dump.ranks}, origin.slot)


def _reduce_text(found: Diagnosis, largest: dict[int, float], origin: Site | None) -> str:
    """The collective that met the bad value, and how large each rank's gradient was before it."""
    if not largest or origin is None:
        return ""
    trace = found.traced.trace if found.traced is not None else None
    where = (trace.bad_communication if trace is not None else None) or "no collective was seen with a bad value"
    ranks = ", ".join(f"{value:.4g} on rank {rank}" for rank, value in sorted(largest.items(), key=_by_size)[:8])
    return f"reduce: {where}; largest gradient of {origin.slot} before it: {ranks}\n"


def _by_size(pair: tuple[int, float]) -> float:
    return -pair[1]
