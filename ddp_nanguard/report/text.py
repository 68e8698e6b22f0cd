"""`report_text`: what a person reads first, as ``report.txt`` and from ``ddp-nanguard show``.

Knows the plain data of a fault only, so that a dump can carry its own report.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .messages import layer_text, seen, what
from .types import Evidence, FaultReport, Site

WIDTH = 110
LABEL_WIDTH = 10
MAX_SITES_SHOWN = 8
MAX_NAMES_SHOWN = 6

_BOLD, _RED, _DIM, _PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[2m", "\x1b[0m"


def report_text(report: FaultReport, manifest: Mapping[str, Any] | None = None, *, color: bool = False) -> str:
    """A fault on one screen: what and where, evidence, damage, ranks, what is in the dump, the next command.

    Args:
        report: of the fault.
        manifest: of the dump, for what it holds; None says nothing of it.
        color: whether terminal colours are wanted.
    """
    lines = [*_headline(report), ""]
    lines += _row("evidence", _evidence(report.origin))
    lines += _row("cause", report.cause if report.cause != "unknown" else "")
    lines += _row("state", _state(report))
    lines += _row("rerun", report.rerun.text if report.rerun is not None else "")
    lines += _row("ranks", _ranks(report))
    for site in _other_sites(report):
        lines += _row("also seen", site)
    lines += _row("unchecked", _names(report.unchecked, "; "))
    for note in report.notes:
        lines += _row("note", note)
    if manifest is not None:
        lines += ["", *_about_dump(report, manifest)]
    lines += ["", _unwrapped("next", _next(report))]
    text = "\n".join(lines).rstrip() + "\n"
    return _colored(text) if color else text


def human_size(size_bytes: float) -> str:
    """``412 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" or size_bytes >= 10 else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"


def _row(label: str, text: str) -> list[str]:
    """``label`` and the text beside it, wrapped; nothing for an empty text."""
    if not text:
        return []
    return textwrap.wrap(
        text,
        WIDTH,
        break_long_words=False,  # a path or a name stays in one piece, to be copied
        break_on_hyphens=False,
        initial_indent=f"  {label:<{LABEL_WIDTH}}",
        subsequent_indent=" " * (LABEL_WIDTH + 2),
    )


def _unwrapped(label: str, text: str) -> str:
    """For what people copy."""
    return f"  {label:<{LABEL_WIDTH}}{text}"


def _headline(report: FaultReport) -> list[str]:
    origin = report.origin
    if origin is None:
        return [f"step {report.step}: non-finite values; no site could be attributed"]
    who = f"rank {origin.rank}" if origin.rank is not None else "no single rank"
    where = [who, f"step {origin.step}"]
    where += [f"micro-batch {origin.micro_batch}"] if origin.micro_batch is not None else []
    return [f"{', '.join([*where, str(origin.phase)])}", f"  {what(origin)}"]


def _evidence(origin: Site | None) -> str:
    if origin is None:
        return "none"
    if origin.evidence is None:
        return "minimum and maximum of the tensor; it was gone before it could be counted"
    return _counts(origin.evidence)


def _counts(evidence: Evidence) -> str:
    kinds = {"NaN": evidence.num_nan, "+Inf": evidence.num_inf, "-Inf": evidence.num_neg_inf}
    found = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    share = f"{found or 'nothing'} among {evidence.numel} elements, shape {tuple(evidence.shape)}, {evidence.dtype}"
    return share + (
        f"; largest finite {evidence.largest_finite:.3g}" if evidence.largest_finite is not None else "; none is finite"
    )


def _state(report: FaultReport) -> str:
    ranks = f"all {report.world_size} ranks" if report.world_size > 1 else "the one rank"
    if report.nonfinite_state:
        return f"DAMAGED: {_names(report.nonfinite_state)}; do not resume from these weights"
    if report.step == 0:
        return f"undamaged: {ranks} stopped before the first update"
    return f"undamaged: {ranks} stopped before the update, weights are those of step {report.step - 1}"


def _ranks(report: FaultReport) -> str:
    if report.world_size == 1:
        return ""
    seen = _few(report.ranks_affected, report.num_ranks_affected)
    text = f"seen on {report.num_ranks_affected} of {report.world_size}" + (f": {seen}" if seen else "")
    return text + (
        f"; born in communication, held by {_few(report.holders, len(report.holders))}" if report.holders else ""
    )


def _few(ranks: Iterable[int], count: int) -> str:
    shown = list(ranks)[:12]
    return ", ".join(map(str, shown)) + (", ..." if count > len(shown) else "")


def _names(names: Iterable[str], separator: str = ", ") -> str:
    listed = list(names)
    more = len(listed) - MAX_NAMES_SHOWN
    return separator.join(listed[:MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _other_sites(report: FaultReport) -> Iterator[str]:
    others = [site for site in report.sites if site != report.origin]
    for site in others[:MAX_SITES_SHOWN]:
        micro_batch = "" if site.micro_batch is None else f", micro-batch {site.micro_batch}"
        who = "no single rank" if site.rank is None else f"rank {site.rank}"
        yield f"{who}{micro_batch}, {site.phase}: {seen(site)}"
    if len(others) > MAX_SITES_SHOWN:
        yield f"{len(others) - MAX_SITES_SHOWN} more sites: ddp-nanguard show --json"


def _about_dump(report: FaultReport, manifest: Mapping[str, Any]) -> list[str]:
    size = human_size(manifest.get("size_bytes", 0))
    present = manifest.get("ranks_present", [])
    lines = [_unwrapped("dump", str(report.dump_path))]
    lines += _row("holds", f"{_present(present, report.world_size)}; {_weights(manifest)}; {size}")
    lines += _row("written", manifest.get("created", ""))
    lines += _row("run", f"{report.wrapper} on {_num_ranks(report.world_size)}; {_versions(manifest)}")
    lines += _row("recipe", manifest.get("recipe") or "none given; replay needs --recipe module:function")
    for problem in manifest.get("problems", []):
        lines += _row("problem", problem)
    return lines


def _num_ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def _present(ranks: list[int], world_size: int) -> str:
    return (
        f"all of {_num_ranks(world_size)}" if len(ranks) == world_size else f"{len(ranks)} of {_num_ranks(world_size)}"
    )


def _weights(manifest: Mapping[str, Any]) -> str:
    weights = manifest.get("weights", {})
    if manifest.get("alone"):
        return "each rank wrote its own weights, without its peers"
    return "the whole weights" if weights.get("complete") else f"weights incomplete: {weights.get('problem')}"


def _versions(manifest: Mapping[str, Any]) -> str:
    versions = manifest.get("versions", {})
    return ", ".join(f"{name} {versions[name]}" for name in ("torch", "numpy", "python") if name in versions)


def _next(report: FaultReport) -> str:
    if report.dump_path is None:
        return "no dump was written, so there is nothing to replay; set dump_dir to a directory that can be written"
    if report.origin is not None and report.origin.rank is None and report.world_size > 1:
        # born in communication: one rank alone cannot show it
        return f"torchrun --nproc-per-node {report.world_size} -m ddp_nanguard.replay.run {report.dump_path} --trace"
    return f"ddp-nanguard replay {report.dump_path}"


def _colored(text: str) -> str:
    first, second, *rest = text.split("\n")
    lines = [f"{_BOLD}{first}{_PLAIN}", f"{_RED}{_BOLD}{second}{_PLAIN}"]
    for line in rest:
        label, content = line[: LABEL_WIDTH + 2], line[LABEL_WIDTH + 2 :]
        lines.append(f"{_DIM}{label}{_PLAIN}{content}" if label.strip() else line)
    return "\n".join(lines)


__all__ = ["human_size", "layer_text", "report_text"]
