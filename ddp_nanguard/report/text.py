"""The text of `NonFiniteError`, of ``report.txt`` and of ``ddp-nanguard show``: the same rows in the same words.

It reads nothing but the plain data of a report, so that a dump can carry its own text.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from .command_text import replay_all_text, replay_text
from .messages import seen, what, where
from .types import CALLS_ONLY, WEIGHTS_WRITTEN, Evidence, FaultReport, Phase, SecondLook, Site
from .wording import KIND_WORDS, listed, plural

WIDTH = 110
LABEL_WIDTH = 10
MAX_SITES_SHOWN = 8
MAX_NAMES_SHOWN = 6

THROUGH_STEPS = "take batches from guard.steps(loader), or without a loader from guard.steps([batch])"
_WITH_LABELS = (Phase.LOSS, Phase.BACKWARD, Phase.REDUCE, Phase.LOOP)
_NO_RECIPE = "none given; replay needs --recipe module:function"
_BOLD, _RED, _DIM, _PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[2m", "\x1b[0m"


# -- the rows ----------------------------------------------------------------------------------------------------------


def replay_lacks(recipe: str | None, script: str = "", *, redact: bool, dump_weights: bool) -> str | None:
    """What the next training must be given so that its dump can be replayed; None where nothing is missing.

    Args:
        recipe: its name, None where none was given.
        script: the command of the run, "" where there is none that could be run again.
        redact: the option: whether batches are left out of dumps.
        dump_weights: the option: whether weights are in dumps.
    """
    if redact:
        return "train with redact=False"
    if not dump_weights:
        return "train with dump_weights=True"
    return 'give replay="module:function"' if recipe is None and not script else None


def fault_rows(report: FaultReport, lacks: str | None, script: str = "") -> list[tuple[str, str]]:
    """What is known of a fault, as (label, text): evidence, cause, state of the job, notes, the next command.

    Rows without a text are left out.

    Args:
        report: of the fault.
        lacks: what a replay of the dump lacks, see `replay_lacks`.
        script: the command that a replay runs, "" where it runs a recipe.
    """
    rows = [
        ("evidence", f"{_seen(report)}{_affected(report)}"),
        *_operator_rows(report),
        ("cause", _cause(report)),
        ("again", _again(report.second_look)),
        ("state", _state(report)),
        # what the dump lacks is told with the next command
        *(("note", note) for note in (_not_known_who(report), *report.notes) if note != CALLS_ONLY),
        ("next", _next_command(report, lacks, script) if report.dump_path else ""),
    ]
    return [(label, text) for label, text in rows if text]


def _again(look: SecondLook | None) -> str:
    """What came of the second look, its outcome first."""
    if look is None:
        return ""
    outcome = look.outcome.replace("_", " ")
    return look.text if look.text.startswith((outcome, "not known")) else f"{outcome}: {look.text}"


def _cause(report: FaultReport) -> str:
    """The cause as far as it is known; "" where the rows beside it say all that there is."""
    is_known = report.cause != "unknown" and report.origin is not None
    not_looked = report.second_look is not None and report.second_look.outcome == "not_done"
    if report.cause == "unknown" and report.origin is not None and not_looked:
        return "unknown: no operator was looked for, see the next row"
    return report.cause if is_known else ""


def _operator_rows(report: FaultReport) -> list[tuple[str, str]]:
    """The line of the user's code and the operator in which the value began, where a trace has told them."""
    operator = report.second_look.operator if report.second_look is not None else None
    if operator is None:
        return []
    where = f"{operator.line}: {operator.code}" if operator.line else ""
    how = " (in the backward of that line)" if operator.in_backward else ""
    whose = f" on rank {operator.rank}" if report.origin is None or report.origin.rank != operator.rank else ""
    if report.origin is not None and report.origin.phase is Phase.INPUT:
        return [("used at", where), ("by", operator.name)]  # it has not made the value
    return [("line", where), ("operator", f"{operator.name}{how}{whose}")]


def headline(report: FaultReport) -> tuple[str, str]:
    """(where, what) of the origin, one line each; of a fault without one, (step, what is known of the cause)."""
    if report.origin is None:
        return f"step {report.step}", report.cause or "non-finite values; no site could be attributed"
    return ", ".join(where(report.origin)), what(report.origin)


def _seen(report: FaultReport) -> str:
    """The counts of the origin, or, where its tensor was gone, of what the first operator left in the second look."""
    operator = report.second_look.operator if report.second_look is not None else None
    if report.origin is None or report.origin.evidence is not None or operator is None or operator.output is None:
        return _evidence(report.origin)
    return f"output of {operator.name}: {_counts(operator.output)}"


def _evidence(origin: Site | None) -> str:
    if origin is None:
        return "none"
    evidence = origin.evidence
    if origin.phase is Phase.OPTIMIZER and origin.layer is None:
        return "a number in the optimizer's parameter groups"
    if evidence is None:
        return f"seen {KIND_WORDS[origin.kind]}; the tensor is gone, so its elements were not counted"
    return _counts(evidence)


def _counts(evidence: Evidence) -> str:
    counts = f"{evidence.num_nan} NaN, {evidence.num_inf} Inf, {evidence.num_neg_inf} -Inf of {evidence.numel}"
    first = f", first at {list(evidence.first)}" if evidence.first is not None else ""
    largest = f"; largest finite {evidence.largest_finite:.3g}" if evidence.largest_finite is not None else ""
    return f"{tuple(evidence.shape)} {evidence.dtype}: {counts}{first}{largest}"


def _affected(report: FaultReport) -> str:
    if report.holders:
        return f"; held by rank{'s' if len(report.holders) > 1 else ''} {listed(report.holders)}"
    if not report.num_ranks_affected:
        return ""
    first = report.origin.rank if report.origin is not None else None
    others = tuple(rank for rank in report.ranks_affected if rank != first)
    at_once = report.origin is not None and report.origin.phase in (Phase.STATE, Phase.LOOP, Phase.OPTIMIZER)
    at_once = at_once or len(_at_once(report)) > 1
    if first is None or not others or at_once:
        return f"; ranks affected: {listed(report.ranks_affected, total=report.num_ranks_affected)}"
    return f"; ranks affected: {first} first, then {listed(others, total=report.num_ranks_affected - 1)}"


def _at_once(report: FaultReport) -> list[int]:
    """Ranks that saw the same at the same place as the origin; nothing tells which of them was first."""
    origin = report.origin
    if origin is None or origin.rank is None:
        return []
    same = [s for s in report.sites if origin.same_place(replace(s, kind=origin.kind)) and s.rank is not None]
    return sorted({site.rank for site in same if site.rank is not None} | {origin.rank})


def _not_known_who(report: FaultReport) -> str:
    """A note where several ranks had a value at once, and no operator tells who made it."""
    ranks, look, origin = _at_once(report), report.second_look, report.origin
    is_placed = look is not None and look.operator is not None
    if len(ranks) < 2 or is_placed or origin is None or origin.phase not in (Phase.FORWARD, Phase.LOSS):
        return ""
    return (
        f"ranks {listed(ranks)} had it at once, so which was first is not known: each may have made it, or a "
        "collective in loss or model has carried it"
    )


def _state(report: FaultReport) -> str:
    ranks = f"all {report.world_size} ranks" if report.world_size > 1 else "the one rank"
    if report.single_rank_view:
        ranks = "this rank"
    if report.nonfinite_state:
        damaged = listed(report.nonfinite_state, MAX_NAMES_SHOWN)
        return f"{ranks} stopped; DAMAGED: {damaged}; do not resume from these weights"
    if report.second_look is not None and WEIGHTS_WRITTEN in report.second_look.text:
        return f"{ranks} stopped before the update, but the loop had changed weights within the step: load a checkpoint"
    before = f"weights are those of step {report.step - 1}" if report.step > 0 else "weights are the initial ones"
    return f"{ranks} stopped before the update; {before}"


def _next_command(report: FaultReport, lacks: str | None, script: str) -> str:
    """The command that helps most with this fault: a replay where one is possible, else ``show``."""
    origin, dump = report.origin, str(report.dump_path)
    lacks_labels = CALLS_ONLY in report.notes and origin is not None and origin.phase in _WITH_LABELS
    is_shared = origin is not None and (_came_to_several(origin) or bool(_not_known_who(report)))
    # no recipe runs code of the loop
    is_run = origin is not None and (origin.phase is not Phase.LOOP or bool(script)) and not lacks_labels
    if is_shared and is_run and lacks is None and report.world_size > 1:
        # communication may have brought the value, which a replay of one rank alone cannot show
        return replay_all_text(dump, script, report.world_size)
    is_update = origin is not None and origin.phase is Phase.OPTIMIZER and origin.layer is not None
    if is_update and report.nonfinite_state:
        return f"ddp-nanguard show {dump}; to replay an update, train with keep_previous=True"
    if lacks is not None:
        return f"ddp-nanguard show {dump}; to replay, {lacks}"
    if lacks_labels:
        return f"ddp-nanguard show {dump}; a replay would lack labels and the like: {THROUGH_STEPS}"
    if origin is not None and origin.phase is Phase.LOOP and not script:
        return f"ddp-nanguard show {dump}; to replay code of the loop: ddp-nanguard replay {dump} -- python train.py"
    return replay_text(dump, script)


def _came_to_several(origin: Site) -> bool:
    """Whether communication has brought the value, or a collective of the loop may have: no rank alone shows it."""
    return origin.phase is Phase.REDUCE or (origin.phase is Phase.LOOP and origin.rank is None)


# -- the error ---------------------------------------------------------------------------------------------------------


def error_text(report: FaultReport, lacks: str | None = None, script: str = "") -> str:
    """The text of `NonFiniteError`: what and where, evidence, state of the job, the next command."""
    rows = [f"  {label + ':':<{LABEL_WIDTH}}{text}" for label, text in fault_rows(report, lacks, script)]
    return "\n".join([": ".join(headline(report)), *rows])


# -- the report --------------------------------------------------------------------------------------------------------


class Holdings(Protocol):
    """What a text tells of a dump: a part of the fields of `ddp_nanguard.dump.records.Manifest`."""

    @property
    def created(self) -> str:
        """Time at which the dump was written, ISO 8601."""

    @property
    def recipe(self) -> str | None:
        """The recipe as ``module:function``; None where none was given."""

    @property
    def script(self) -> str:
        """The command that a replay runs, "" where it runs a recipe."""

    @property
    def replay_lacks(self) -> str | None:
        """What a replay would need; see the function of this name."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Version texts by name: ``torch``, ``numpy``, ``python``."""

    @property
    def ranks_present(self) -> Sequence[int]:
        """Global ranks whose files are in the dump."""

    @property
    def alone(self) -> bool:
        """Whether each rank wrote its own files without its peers, which did not answer."""

    @property
    def weights_problem(self) -> str | None:
        """Why the weights are incomplete, in words; None where they are whole."""

    @property
    def problems(self) -> Iterable[str]:
        """What could not be written, one phrase each; empty where all was."""

    @property
    def size_bytes(self) -> int:
        """Size of all files of the dump together."""


def report_text(report: FaultReport, manifest: Holdings | None = None, *, color: bool = False) -> str:
    """A fault on one screen: what the error tells, what else was seen, and what is in the dump.

    Args:
        report: of the fault.
        manifest: of the dump; None leaves out what the dump holds.
        color: whether terminal colours are wanted.
    """
    where_text, what_text = headline(report)
    # the next command comes last and alone, so that a person finds it without reading the rest
    lacks, script = (None, "") if manifest is None else (manifest.replay_lacks, manifest.script)
    *rows, last = fault_rows(report, lacks, script) or [("", "")]
    if last[0] != "next":
        rows, last = [*rows, last], ("", "")
    lines = [where_text, f"  {what_text}", ""]
    for label, text in rows:
        lines += _row(label, text)
    for site in _other_sites(report):
        lines += _row("also seen", site)
    lines += _row("unchecked", listed(report.unchecked, MAX_NAMES_SHOWN, separator="; "))
    if manifest is not None:
        lines += ["", *_about_dump(report, manifest)]
    lines += ["", _unwrapped(*last)] if last[0] else []
    text = "\n".join(lines).rstrip() + "\n"
    return _colored(text) if color else text


def human_size(size_bytes: float) -> str:
    """A size as text, such as ``412 MiB``; units up to GiB, powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" or size_bytes >= 10 else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"


def _row(label: str, text: str) -> list[str]:
    """Lines with the label on the left and the wrapped text beside it; none for an empty text."""
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
    """One line with the label on the left, never wrapped: for commands and paths that are to be copied."""
    return f"  {label:<{LABEL_WIDTH}}{text}"


def _other_sites(report: FaultReport) -> Iterator[str]:
    others = [site for site in report.sites if site != report.origin]
    for site in others[:MAX_SITES_SHOWN]:
        yield f"{', '.join(where(site))}: {seen(site)}"
    if len(others) > MAX_SITES_SHOWN:
        yield f"{len(others) - MAX_SITES_SHOWN} more sites: ddp-nanguard show --json"


def _about_dump(report: FaultReport, manifest: Holdings) -> list[str]:
    size = human_size(manifest.size_bytes)
    present = manifest.ranks_present
    lines = [_unwrapped("dump", str(report.dump_path))]
    lines += _row("holds", f"{_ranks_text(present, report.world_size)}; {_weights(manifest)}; {size}")
    lines += _row("written", manifest.created)
    lines += _row("run", f"{report.wrapper} on {plural(report.world_size, 'rank')}; {_versions(manifest)}")
    lines += _row("recipe", manifest.recipe or ("the script" if manifest.script else _NO_RECIPE))
    for problem in manifest.problems:
        lines += _row("problem", problem)
    return lines


def _ranks_text(ranks: Sequence[int], world_size: int) -> str:
    return (
        f"all of {plural(world_size, 'rank')}"
        if len(ranks) == world_size
        else f"{len(ranks)} of {plural(world_size, 'rank')}"
    )


def _weights(manifest: Holdings) -> str:
    if manifest.alone:
        return "each rank wrote its own weights, without its peers"
    problem = manifest.weights_problem
    return "the whole weights" if problem is None else f"weights incomplete: {problem}"


def _versions(manifest: Holdings) -> str:
    versions = manifest.versions
    return ", ".join(f"{name} {versions[name]}" for name in ("torch", "numpy", "python") if name in versions)


def _colored(text: str) -> str:
    first, second, *rest = text.split("\n")
    lines = [f"{_BOLD}{first}{_PLAIN}", f"{_RED}{_BOLD}{second}{_PLAIN}"]
    for line in rest:
        label, content = line[: LABEL_WIDTH + 2], line[LABEL_WIDTH + 2 :]
        lines.append(f"{_DIM}{label}{_PLAIN}{content}" if label.strip() else line)
    return "\n".join(lines)
