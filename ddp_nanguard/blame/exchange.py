"""The fault round: the earliest sites over all ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from ddp_nanguard.report.types import Site

from . import RankedSite

_SITE_BYTES = 1024


@dataclass(frozen=True)
class RankFault:
    """What one rank brings to the fault round."""

    sites: list[RankedSite]
    nonfinite_state: list[str]
    holds_reduced: bool
    unchecked: list[str]


@dataclass(frozen=True)
class JobFault:
    """What all ranks know after the fault round."""

    sites: tuple[Site, ...]
    nonfinite_state: tuple[str, ...]
    holders: tuple[int, ...]
    affected: tuple[int, ...]
    num_affected: int
    unchecked: tuple[str, ...]


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
