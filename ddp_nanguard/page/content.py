"""`page_content`: all that the report page of one dump says, as plain data that templates and pictures take."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from typing import Any

from ddp_nanguard.config import GuardConfig
from ddp_nanguard.dump.read import Dump
from ddp_nanguard.errors import DumpError
from ddp_nanguard.report.messages import seen, where
from ddp_nanguard.report.text import fault_rows, headline, human_size
from ddp_nanguard.report.types import FaultReport
from ddp_nanguard.report.wording import plural, ranges_text

from .batch import batch_table
from .history_parts import Part, history_parts, ranks_part, weights_known
from .ranks import RankRow, rank_rows, ranks_shown
from .source import excerpt

COMMANDS = {
    "replay": "runs the step again",
    "show": "the same facts in the terminal; --json for programs",
    "explain": "why it happened, in one sentence with its evidence",
}


@dataclass(frozen=True)
class Option:
    """An option of the guard, as a page lists it."""

    name: str
    value: str
    is_default: bool


@dataclass(frozen=True)
class PageContent:
    """What a page says.

    Attributes:
        where, what: the two parts of the error's first line.
        kind: ``nan``, ``inf`` or ``-inf``; "" without an origin.
        facts: (label, text) rows of the error, without the next command.
        commands: (name, command, purpose).
        no_replay: why there is no command to replay; "" where there is one.
        warnings: what limits all that the page says, such as peers that did not answer.
        world_size, step: of the report.
        last_step: whose values are kept as those of the fault: after a bad update it may be the next one.
        rank: whose timeline, layers and batch are shown; None where the dump holds no rank.
        source: an `Excerpt`.
        timeline: a `Timeline`.
        weights: the largest absolute value of the weights; None where it was not read.
        by_step, by_rank: heat maps, `Grid`.
        ranks: rows of the table of ranks.
        ranks_remark: what of the ranks is not shown.
        batch: list of `BatchTable`.
        look: outcome of the second look and its text.
        sites: further sites, (where, what).
        unchecked: what was not looked at.
        versions, about: (name, text) rows.
        options: of the guard.
    """

    where: str
    what: str
    kind: str
    facts: tuple[tuple[str, str], ...]
    commands: tuple[tuple[str, str, str], ...]
    no_replay: str
    warnings: tuple[str, ...]
    world_size: int
    step: int
    last_step: int
    rank: int | None
    source: Part
    timeline: Part
    weights: float | None
    by_step: Part
    by_rank: Part
    ranks: tuple[RankRow, ...]
    ranks_remark: str
    batch: Part
    look: tuple[str, str]
    sites: tuple[tuple[str, str], ...]
    unchecked: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]
    about: tuple[tuple[str, str], ...]
    options: tuple[Option, ...]


def page_content(dump: Dump, rank: int | None = None, *, contents: bool = False) -> PageContent:
    """Gather what a page says about a dump.

    Args:
        dump: open.
        rank: whose timeline, layers and batch are shown; None for that where the fault began.
        contents: whether values of the batch are shown.

    Raises:
        DumpError: the dump has no such rank.
    """
    # it may have been copied, or lie on several nodes; and a page is read from elsewhere
    path = " ".join(shlex.quote(str(each.absolute())) for each in dump.paths)
    report = dataclasses.replace(dump.report, dump_path=path)
    place, event = headline(report)
    rank = _rank_shown(dump, rank)
    shown = ranks_shown(dump)
    weights, weights_remark = weights_known(dump)
    line, by_step, last = history_parts(dump, rank, weights_remark)
    commands, no_replay = _commands(dump, report)
    return PageContent(
        where=place,
        what=event,
        kind=report.origin.kind if report.origin is not None else "",
        facts=tuple(row for row in fault_rows(report, dump.manifest.replay_lacks) if row[0] != "next"),
        commands=commands,
        no_replay=no_replay,
        warnings=tuple(_warnings(dump)),
        world_size=report.world_size,
        step=report.step,
        last_step=last,
        rank=rank,
        source=_source(dump),
        timeline=line,
        weights=weights,
        by_step=by_step,
        by_rank=ranks_part(dump, shown),
        ranks=rank_rows(dump, shown),
        ranks_remark=_ranks_remark(dump, shown),
        batch=_batch(dump, rank, contents),
        look=_look(report),
        sites=tuple((", ".join(where(site)), seen(site)) for site in report.sites if site != report.origin),
        unchecked=_unchecked(dump, rank),
        versions=tuple(dump.manifest.versions.items()),
        about=tuple(_about(dump)),
        options=tuple(_options(dump.manifest.options)),
    )


def _rank_shown(dump: Dump, rank: int | None) -> int | None:
    """The rank that was asked for, else the first of those where the fault was seen that the dump holds."""
    if rank is not None:
        dump.evidence(rank)  # a rank that the dump has not is wrong usage
        return rank
    report = dump.report
    wanted = (report.origin_rank, *report.holders, *report.ranks_affected, *dump.ranks)
    return next((each for each in wanted if each in dump.ranks), None)


def _commands(dump: Dump, report: FaultReport) -> tuple[tuple[tuple[str, str, str], ...], str]:
    """The commands, and why the replay is not among them."""
    rows = fault_rows(report, dump.manifest.replay_lacks, dump.manifest.script)
    following = next((text for label, text in rows if label == "next"), "")
    is_replay = not following.startswith("ddp-nanguard show")
    own = {"show": f"ddp-nanguard show {report.dump_path}", "explain": f"ddp-nanguard explain {report.dump_path}"}
    found = {**({"replay": following} if is_replay else {}), **own}
    why_not = "" if is_replay else following.partition("; ")[2]
    return tuple((name, text, COMMANDS[name]) for name, text in found.items()), why_not


def _warnings(dump: Dump) -> list[str]:
    report, manifest = dump.report, dump.manifest
    found = []
    if report.single_rank_view:
        found.append("Peers did not answer: all of this is what one rank saw by itself.")
    if manifest.alone:
        found.append("Each rank wrote its part of the dump without the others.")
    if report.origin is None:
        found.append("The fault was attributed to no place, so no layer, operator or line is named.")
    if dump.missing_ranks:
        found.append(f"Nothing of these ranks is in the dump as it lies here: {ranges_text(dump.missing_ranks)}.")
    return [*found, *(f"Not written: {problem}." for problem in manifest.problems)]


def _source(dump: Dump) -> Part:
    look = dump.report.second_look
    operator = look.operator if look is not None else None
    found = excerpt(operator, dump.manifest.run.directory)
    if found is not None:
        return Part(found, found.remark)
    if operator is None:
        return Part(None, "The dump names no operator, so there are no source lines: " + _why_no_operator(dump.report))
    return Part(None, f"{operator.name} was run by a module of torch by itself: no line of your code is known for it.")


def _why_no_operator(report: FaultReport) -> str:
    outcome = report.second_look.outcome if report.second_look is not None else ""
    known = {"": "there was no second look at the step.", "not_done": "the second look was not done."}
    return known.get(outcome, "the second look was finite." if outcome == "finite" else "the second look traced none.")


def _ranks_remark(dump: Dump, shown: list[int]) -> str:
    report = dump.report
    count = f"Affected: {report.num_ranks_affected} of {plural(report.world_size, 'rank')}"
    few = "" if len(shown) == len(dump.ranks) else f"; shown: {len(shown)} of the {len(dump.ranks)} here"
    return f"{count}{few}."


def _batch(dump: Dump, rank: int | None, contents: bool) -> Part:
    if rank is None:
        return Part(None, "The dump holds no rank's files.")
    try:
        tables = [batch_table(item, contents=contents) for item in dump.window(rank)]
    except DumpError as error:
        return Part(None, f"The batch of rank {rank} cannot be read: {error}.")
    if not tables:
        return Part(None, f"The dump holds no batch of rank {rank}.")
    redacted = any(table.redacted for table in tables)
    return Part(tables, "Batches were left out of the dump (option redact=True): shapes alone." if redacted else "")


def _look(report: FaultReport) -> tuple[str, str]:
    look = report.second_look
    if look is None:
        return "none", "The step was not run a second time in place."
    outcome = look.outcome.replace("_", " ")
    return outcome, look.text.removeprefix(f"{outcome}: ")


def _unchecked(dump: Dump, rank: int | None) -> tuple[str, ...]:
    """What was not looked at: by any rank as the report has it, and by the one that is shown."""
    try:
        own = dump.evidence(rank).unchecked if rank is not None else ()
    except DumpError:
        own = ()
    return tuple(dict.fromkeys((*dump.report.unchecked, *own)))


def _about(dump: Dump) -> list[tuple[str, str]]:
    manifest = dump.manifest
    run = manifest.run
    return [
        ("dump", ", ".join(str(path.absolute()) for path in dump.paths)),
        ("written", manifest.created),
        ("size", human_size(dump.size_bytes)),
        ("ranks", f"{len(dump.ranks)} of {dump.world_size} here"),
        ("wrapper", f"{manifest.report.wrapper}{', compiled' if manifest.wrapper_description.compiled else ''}"),
        ("weights", manifest.weights_problem or "whole"),
        ("command", shlex.join(run.command) or "not recorded"),
        ("directory", run.directory or "not recorded"),
        ("recipe", manifest.recipe or "none"),
    ]


def _options(config: GuardConfig) -> list[Option]:
    default = GuardConfig()
    return [
        Option(
            spec.name,
            _value_text(getattr(config, spec.name)),
            getattr(config, spec.name) == getattr(default, spec.name),
        )
        for spec in dataclasses.fields(config)
    ]


def _value_text(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, (tuple, list, set, frozenset)) else str(value)
