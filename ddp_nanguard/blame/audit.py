"""Reports are looked at for contradictions before anybody is told; see `report.audit`."""

from __future__ import annotations

import json

from ddp_nanguard.distributed.group import RankGroup
from ddp_nanguard.report.audit import Claim, Contradiction, contradictions, settled
from ddp_nanguard.report.types import FaultReport

from .inspect import RankFindings


def audited(ranks: RankGroup, report: FaultReport, findings: RankFindings) -> FaultReport:
    """The report, the same on every rank, without what contradicts itself or what any rank has recorded.

    Args:
        ranks: that are asked.
        report: of the fault, the same on all of them.
        findings: of this rank in training; its sites are filled in.

    Collective: one MIN all-reduce of 8 bytes, and a SUM of 8 KiB where some rank has an objection; none without peers.
    """
    own = [ranked.site for ranked in findings.sites if not ranked.low_confidence]
    found = contradictions(report, own)
    if not ranks.peers_lost:
        first = ranks.ask(lambda asked: asked.first_problem(_written(found)))
        text = None if first is None else first[first.index("[") :]
        found = [] if text is None else [Contradiction(Claim[claim], said) for claim, said in json.loads(text)]
    return settled(report, found)


def _written(found: list[Contradiction]) -> str | None:
    return json.dumps([(each.claim.name, each.text[:200]) for each in found]) if found else None
