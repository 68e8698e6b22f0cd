"""The fault round: the ranks find their earliest sites together, in messages of bounded size, on the fault group."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

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
    texts = ranks.fault_group.earliest_texts(_keyed(ranks, fault, step), MAX_SITES, _SITE_BYTES)
    nonfinite_state = ranks.fault_group.earliest_texts(_in_order(ranks, fault.nonfinite_state), MAX_SITES, _NAME_BYTES)
    unchecked = ranks.fault_group.earliest_texts(_in_order(ranks, fault.unchecked), MAX_SITES, _SITE_BYTES)
    holders, affected = ranks.ranks_where(fault.holds_reduced, _is_affected(fault))
    return JobFault(
        sites=tuple(Site.from_dict(json.loads(text)) for text in texts),
        nonfinite_state=tuple(dict.fromkeys(nonfinite_state)),
        holders=tuple(holders[:MAX_RANKS_LISTED]),
        affected=tuple(affected[:MAX_RANKS_LISTED]),
        num_affected=len(affected),
        unchecked=tuple(dict.fromkeys(unchecked)),
    )


# -- without a collective ----------------------------------------------------------------------------------------------

_MAX_POSTED = 16
"""Sites, names and phrases that a rank posts; the earliest are what counts."""


@dataclass(frozen=True)
class Posted:
    """What one rank tells the others where no collective is possible, see [Note: who tells whom].

    Attributes:
        step: that it was in.
        keyed: its earliest sites with their places in the causal order of all ranks.
        nonfinite_state, holds_reduced, unchecked, is_affected: as in `RankFault` and `JobFault`.
        raised: name of the exception that its own code raised; "" where it heard of a peer's.
        cause: the reason that it has for its own first site, "" without one.
        lacks: what it did not look at, since its device waits for a peer or does not answer; "" where it has seen all.
    """

    step: int
    keyed: list[tuple[int, str]]
    nonfinite_state: list[str]
    holds_reduced: bool
    unchecked: list[str]
    is_affected: bool
    raised: str
    cause: str
    lacks: str

    @classmethod
    def of(cls, ranks: RankGroup, fault: RankFault, step: int, raised: str, cause: str, lacks: str) -> Posted:
        """What this rank has to tell."""
        return cls(
            step,
            _keyed(ranks, fault, step)[:_MAX_POSTED],
            fault.nonfinite_state[:_MAX_POSTED],
            fault.holds_reduced,
            fault.unchecked[:_MAX_POSTED],
            _is_affected(fault),
            raised,
            cause,
            lacks,
        )

    def to_text(self) -> str:
        """As JSON, for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Posted:
        """What `to_text` of this or another rank gave."""
        data = json.loads(text)
        return cls(**{**data, "keyed": [(key, site) for key, site in data["keyed"]]})


def merged(members: Sequence[int], posted: Mapping[int, Posted]) -> JobFault:
    """What ranks know together that have read from each other; the same on all of them.

    Args:
        members: global ranks, in the group's order.
        posted: by position in the group; of ranks in the same step.
    """
    keyed = sorted(pair for each in posted.values() for pair in each.keyed)
    holders = [members[index] for index, each in sorted(posted.items()) if each.holds_reduced]
    affected = [members[index] for index, each in sorted(posted.items()) if each.is_affected]
    return JobFault(
        sites=tuple(Site.from_dict(json.loads(text)) for _, text in keyed[:MAX_SITES]),
        nonfinite_state=tuple(dict.fromkeys(name for each in posted.values() for name in each.nonfinite_state)),
        holders=tuple(holders[:MAX_RANKS_LISTED]),
        affected=tuple(affected[:MAX_RANKS_LISTED]),
        num_affected=len(affected),
        unchecked=tuple(dict.fromkeys(phrase for each in posted.values() for phrase in each.unchecked)),
    )


def _keyed(ranks: RankGroup, fault: RankFault, step: int) -> list[tuple[int, str]]:
    return [(ranked.key(ranks.index, step), _site_text(ranked.site)) for ranked in fault.sites[:MAX_SITES]]


def _is_affected(fault: RankFault) -> bool:
    return any(not ranked.low_confidence for ranked in fault.sites)


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
