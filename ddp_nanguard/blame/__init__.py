"""From the slots of one rank to its sites, in causal order: whom a fault is put down to.

[Note: causal order]
Per micro-batch, by phase, then by execution order, then by rank. A site is *contained*, hence no origin, if an
enclosing module's output is finite in that call. What is non-finite in the same way in clean steps too is *habitual*,
and -inf alone is what masks are made of: neither comes before any other site.

Read `view` (what blame is read from), then `forward`, `backward`, `state` and `compiled`.
"""

from __future__ import annotations

from .backward import backward_sites
from .compiled import TracedSighting, resolved
from .forward import forward_sites, habits, input_sites, loss_sites
from .state import late_sites, state_sites
from .view import Damage, Finding, Habit, LossNote, RankedSite, StepView

__all__ = [
    "Damage",
    "Finding",
    "Habit",
    "LossNote",
    "RankedSite",
    "StepView",
    "TracedSighting",
    "habits",
    "local_sites",
    "resolved",
]


def local_sites(view: StepView) -> list[RankedSite]:
    """The sites of this rank, earliest first."""
    found = [*state_sites(view), *input_sites(view), *forward_sites(view), *loss_sites(view), *backward_sites(view)]
    found += late_sites(view)
    return sorted(found, key=lambda ranked: ranked.key(0, view.step))
