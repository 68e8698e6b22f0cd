"""The text of a replay's outcome, for people."""

from __future__ import annotations

from ddp_nanguard.replay.outcome import Outcome, Result
from ddp_nanguard.report.messages import what
from ddp_nanguard.report.types import Site

_HEADLINES = {
    Outcome.SAME: "same",
    Outcome.ELSEWHERE: "elsewhere",
    Outcome.NOT_REPRODUCED: "not reproduced",
    Outcome.CANNOT: "cannot",
}


def outcome_text(result: Result) -> str:
    """The outcome of one rank's replay in a few aligned lines."""
    lines = [f"replay of rank {result.rank}: {_HEADLINES[result.outcome]}: {result.reason}"]
    lines.append(_line("recorded", _site_text(result.recorded)))
    if result.outcome is not Outcome.CANNOT:
        lines.append(_line("now", _site_text(result.replayed)))
        lines += [
            _line("loss", f"{name}: {_same(same)}: {result.loss_values[name]}") for name, same in _shown_losses(result)
        ]
        lines.append(_line("slots", _slots_text(result)))
    lines += [_line("differs", text) for text in result.differs]
    lines += [_line("note", text) for text in result.notes]
    return "\n".join(lines) + "\n"


def _line(label: str, text: str) -> str:
    return f"  {label:<9} {text}"


def _same(same: bool) -> str:
    return "bit for bit the same" if same else "other bits"


def _shown_losses(result: Result) -> list[tuple[str, bool]]:
    losses = list(result.losses.items())
    return [loss for loss in losses if not loss[1]][:4] or losses[-4:]


def _slots_text(result: Result) -> str:
    if not result.num_slots and result.first_difference is None:
        return "none of the recorded minima and maxima can be compared"
    if result.first_difference is None:
        return f"all {result.num_slots} recorded minima and maxima that one rank can compare are bit for bit the same"
    upto = f", identical up to {result.last_same}" if result.last_same else ""
    return f"{result.num_same} of {result.num_slots} the same{upto}; first different: {result.first_difference}"


def _site_text(site: Site | None) -> str:
    if site is None:
        return "nothing non-finite on this rank"
    where = f"micro-batch {site.micro_batch} · " if site.micro_batch is not None else ""
    return f"{where}{site.phase} · {what(site)}"
