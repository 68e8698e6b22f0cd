"""`fingerprint`: which faults are the same one, met again in another step, on another rank or in another run."""

from __future__ import annotations

import hashlib
import json

from .types import FaultReport, Site
from .wording import KIND_WORDS, layer_text

LENGTH = 8


def fingerprint(report: FaultReport) -> str:
    """Hexadecimal text that is equal for faults of the same phase, layer, slot and kind; "" without an origin.

    Of a loss, and of code outside of the layers, also the operator and the statement count, where they are known.

    Rank, step, micro-batch and call do not count: the same fault may come on another rank and in another step.
    """
    if report.origin is None:
        return ""
    key = [*_key(report.origin), *_statement(report)]
    return hashlib.blake2b(json.dumps(key).encode(), digest_size=LENGTH // 2).hexdigest()


def fault_text(site: Site) -> str:
    """What the fingerprint stands for, in one line: ``forward · layers.2.act · output: NaN``."""
    layer = [layer_text(site.layer)] if site.layer is not None else []
    return f"{' · '.join([str(site.phase), *layer, site.slot or 'batch'])}: {KIND_WORDS[site.kind]}"


def _statement(report: FaultReport) -> list[str]:
    """Where no layer tells one fault from another: the operator and the statement, if a second look has found them."""
    operator = report.second_look.operator if report.second_look is not None else None
    if operator is None or report.origin is None or report.origin.layer:
        return []
    return [operator.name, operator.code]


def _key(site: Site) -> list[object]:
    code = site.inline_code
    between = [code.layer, code.after, code.before] if code is not None else None
    return [str(site.phase), site.layer, site.slot, site.kind, between, sorted(site.suspects)]
