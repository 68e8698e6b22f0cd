"""The fault round: the ranks find their earliest sites together, in messages of bounded size, on the fault group."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from ddp_nanguard.distributed.group import RankGroup
from ddp_nanguard.report.types import MAX_RANKS_LISTED, MAX_SITES, Site

from .view import RankedSite

# Every text crosses ranks in a buffer of fixed size, so that no rank has to tell its peers a length first
_SITE_BYTES = 1024
_NAME_BYTES = 256


@dataclass(frozen=True)
class RankFault:
    """What one rank brings to the fault round.

    Attributes:
        sites: of this rank, earliest first; the first `MAX_SITES` take part.
        nonfinite_state: names of parameters, buffers and optimizer state that are bad now and stay so.
        holds_reduced: whether it holds a value that became non-finite in the gradient communication.
        unchecked: what it did not look at, in words.
    """

    sites: list[RankedSite]
    nonfinite_state: list[str]
    holds_reduced: bool
    unchecked: list[str]


@dataclass(frozen=True)
class JobFault:
    """What all ranks know after the fault round; the fields are those of `RankFault` over all ranks.

    Attributes:
        sites: the earliest over all ranks, at most `MAX_SITES`.
        nonfinite_state: names, each once.
        holders: the first ranks that hold a value that became non-finite in the gradient communication.
        affected: the first ranks that saw something bad with full confidence.
        num_affected: the number of all such ranks.
        unchecked: phrases, each once.
    """

    sites: tuple[Site, ...]
    nonfinite_state: tuple[str, ...]
    holders: tuple[int, ...]
    affected: tuple[int, ...]
    num_affected: int
    unchecked: tuple[str, ...]


def exchange_sites(ranks: RankGroup, fault: RankFault, step: int) -> JobFault:
    """Find the earliest sites over all ranks. Where peers are lost, the result is this rank's fault alone.

    Args:
        ranks: whose fault group carries the round.
        fault: of this rank.
        step: in which the fault was noticed; sites of the step before come first.

    Collective: at most `MAX_SITES` MIN all-reduces of 8 bytes and one SUM all-reduce of the details for sites, the same
    for names and for what was not checked, and one all-reduce of two bytes per rank, all on the fault group. Nothing is
    gathered.
    """
    return ranks.ask(lambda asked: _exchanged(asked, fault, step))


def _exchanged(ranks: RankGroup, fault: RankFault, step: int) -> JobFault:
    keyed = [(ranked.key(ranks.index, step), _site_text(ranked.site)) for ranked in fault.sites[:MAX_SITES]]
    sites = [_site_from(text) for text in ranks.fault_group.earliest_texts(keyed, MAX_SITES, _SITE_BYTES)]
    nonfinite_state = ranks.fault_group.earliest_texts(_in_order(ranks, fault.nonfinite_state), MAX_SITES, _NAME_BYTES)
    unchecked = ranks.fault_group.earliest_texts(_in_order(ranks, fault.unchecked), MAX_SITES, _SITE_BYTES)
    holders, affected = ranks.ranks_where(fault.holds_reduced, any(not ranked.low_confidence for ranked in fault.sites))
    return JobFault(
        sites=tuple(site for site in sites if site is not None),
        nonfinite_state=tuple(dict.fromkeys(nonfinite_state)),
        holders=tuple(holders[:MAX_RANKS_LISTED]),
        affected=tuple(affected[:MAX_RANKS_LISTED]),
        num_affected=len(affected),
        unchecked=tuple(dict.fromkeys(unchecked)),
    )


def _in_order(ranks: RankGroup, texts: list[str]) -> list[tuple[int, str]]:
    """Each text with a key that sorts by its position first, then by rank: every rank's first text comes early."""
    return [(order << 20 | ranks.index, text) for order, text in enumerate(texts[:MAX_SITES])]


def _site_text(site: Site) -> str:
    # text beyond the buffer would be cut and no JSON any more, so what matters least is left out instead
    text = json.dumps(site.to_dict())
    if len(text.encode()) > _SITE_BYTES:
        text = json.dumps(replace(site, evidence=None, slot=site.slot[-200:]).to_dict())
    return text


def _site_from(text: str) -> Site | None:
    try:
        return Site.from_dict(json.loads(text))
    except (ValueError, KeyError):
        return None
