"""From the slots of one rank to its sites in causal order: what a fault is attributed to.

[Note: causal order]
Sites are ordered by micro-batch, then by phase, then by execution order, then by rank; the earliest one is the origin.
A site is *masked by its parent*, hence no origin, if an enclosing module's output is finite in that call. What is
non-finite in the same way in clean steps too is *known non-finite*, and -inf alone is what masks are made of: a site of
either kind has *low confidence* and comes after all others.

Read `view` (what blame is read from), then `forward`, `backward` and `state`; `inspect` collects the input, `exchange`
compares ranks, `report` and `triage` draw the conclusions.
"""

from __future__ import annotations

from .backward import backward_sites
from .forward import forward_sites, input_sites, known_nonfinite, loss_sites
from .state import late_sites, state_sites
from .view import BlameInput, NonFiniteState, NonFiniteTensor, RankedSite

__frame_role__ = "probe"  # see `hooks.frames`

__all__ = [
    "BlameInput",
    "NonFiniteState",
    "NonFiniteTensor",
    "RankedSite",
    "known_nonfinite",
    "local_sites",
]


def local_sites(blame_input: BlameInput) -> list[RankedSite]:
    """The sites of this rank in causal order, earliest first; empty where it saw nothing bad. No communication."""
    found = [
        *state_sites(blame_input),
        *input_sites(blame_input),
        *forward_sites(blame_input),
        *loss_sites(blame_input),
        *backward_sites(blame_input),
    ]
    found += late_sites(blame_input)
    return sorted(found, key=lambda ranked: ranked.key(0, blame_input.step))
