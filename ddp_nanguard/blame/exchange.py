"""The fault round: the ranks find their earliest sites together, in messages of bounded size, on the fault group."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from ddp_nanguard.distributed.group import RankGroup
from ddp_nanguard.report.types import MAX_RANKS_LISTED, MAX_SITES, InlineCode, Site

from .view import RankedSite

# Every text crosses ranks in a buffer of fixed size, so that no rank has to tell its peers a length first
_SITE_BYTES = 1024
_MAX_NAME = (256, 96, 32, 11)
"""Characters of each name in a site that does not fit, the first that does; what is left out is in the middle."""
_NAME_BYTES = 256
_MAX_SUSPECTS = 4


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
    texts = ranks.fault_group.earliest_texts(keyed, MAX_SITES, _SITE_BYTES)
    nonfinite_state = ranks.fault_group.earliest_texts(_in_order(ranks, fault.nonfinite_state), MAX_SITES, _NAME_BYTES)
    unchecked = ranks.fault_group.earliest_texts(_in_order(ranks, fault.unchecked), MAX_SITES, _SITE_BYTES)
    holders, affected = ranks.ranks_where(fault.holds_reduced, any(not ranked.low_confidence for ranked in fault.sites))
    return JobFault(
        sites=tuple(Site.from_dict(json.loads(text)) for text in texts),
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
    """The site as JSON of at most `_SITE_BYTES`: text beyond the buffer would be cut, and be no JSON any more.

    What matters least goes first. The site itself never does: the next one would be taken for the origin.
    """
    shorter = [_shortened(site, max_name) for max_name in _MAX_NAME]
    bare = replace(shorter[-1], suspects=(), inline_code=None)
    texts = (json.dumps(each.to_dict()) for each in (site, replace(site, evidence=None), *shorter, bare))
    return next(text for text in texts if len(text) <= _SITE_BYTES)


def _shortened(site: Site, max_name: int) -> Site:
    def short(name: str) -> str:
        half = (max_name - 3) // 2
        return name if len(name) <= max_name else f"{name[:half]}...{name[-half:]}"

    def short_or_none(name: str | None) -> str | None:
        return None if name is None else short(name)

    code = site.inline_code
    if code is not None:
        code = InlineCode(short_or_none(code.layer), short_or_none(code.after), short_or_none(code.before))
    shown = [short(name) for name in site.suspects[:_MAX_SUSPECTS]]
    more = len(site.suspects) - len(shown)
    return replace(
        site,
        evidence=None,
        layer=short_or_none(site.layer),
        slot=short(site.slot),
        inline_code=code,
        neg_inf_from=short_or_none(site.neg_inf_from),
        suspects=(*shown, f"{more} more") if more else tuple(shown),
    )
