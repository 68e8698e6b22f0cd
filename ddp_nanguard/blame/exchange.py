"""The fault round: what each rank found becomes what all ranks know."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from ddp_nanguard.distributed.group import RankGroup
from ddp_nanguard.report.types import MAX_RANKS_LISTED, MAX_SITES, Site

from .view import RankedSite

_SITE_BYTES = 1024
_NAME_BYTES = 256


@dataclass(frozen=True)
class RankFault:
    """What one rank brings to the fault round.

    Attributes:
        sites: earliest first.
        nonfinite_state: names of parameters, buffers and optimizer state that are bad now and stay so.
        holds_reduced: whether it holds a value that began in the reduce.
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
        holders: ranks that hold a value that began in the reduce.
        affected: the first ranks that saw something bad.
        num_affected: how many did.
    """

    sites: tuple[Site, ...]
    nonfinite_state: tuple[str, ...]
    holders: tuple[int, ...]
    affected: tuple[int, ...]
    num_affected: int
    unchecked: tuple[str, ...]


def exchange_sites(ranks: RankGroup, fault: RankFault, step: int) -> JobFault:
    """Find the earliest sites over all ranks. Where peers are lost, it is this rank's fault alone.

    Collective: at most `MAX_SITES` MIN all-reduces of 8 bytes and one SUM all-reduce of the details for sites, the
    same for names and for remarks, and one all-reduce of two bytes per rank, all on the fault group. Nothing is
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
    """Keys that sort by position first, then by rank."""
    return [(order << 20 | ranks.index, text) for order, text in enumerate(texts[:MAX_SITES])]


def _site_text(site: Site) -> str:
    text = json.dumps(site.to_dict())
    if len(text.encode()) > _SITE_BYTES:
        text = json.dumps(replace(site, evidence=None, slot=site.slot[-200:]).to_dict())
    return text


def _site_from(text: str) -> Site | None:
    try:
        return Site.from_dict(json.loads(text))
    except (ValueError, KeyError):
        return None
