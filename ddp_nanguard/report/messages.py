"""The texts of a fault: the first log line and the error message, the same on every rank."""

from __future__ import annotations

from .types import FaultReport, Phase, Site

_KIND_WORDS = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}


def layer_text(layer: str | None) -> str:
    """A layer's name as people see it."""
    return "(root)" if layer == "" else (layer or "the training step")


def log_line(report: FaultReport) -> str:
    """``rank 37 · step 4812 · micro-batch 3 · forward · layers.17.mlp.act (call 1): finite in, NaN out``."""
    origin = report.origin
    if origin is None:
        return f"step {report.step} · {report.cause or 'a non-finite value, origin unknown'}"
    parts = [f"rank {origin.rank}" if origin.rank is not None else "no rank", f"step {origin.step}"]
    if origin.micro_batch is not None:
        parts.append(f"micro-batch {origin.micro_batch}")
    return " · ".join([*parts, str(origin.phase), what(origin)])


def what(site: Site) -> str:
    """What was seen at an origin, without rank and step."""
    if site.suspects:
        return _suspects_text(site)
    if site.inline_code is not None:
        return _inline_code_text(site)
    kind = _KIND_WORDS[site.kind]
    match site.phase:
        case Phase.FORWARD:
            return f"{_call_text(site)}: {_input_text(site)}{kind} out" if site.slot == "output" else seen(site)
        case Phase.LOSS if site.input_kind is None:
            return f"{site.slot} is {kind}; the model's output was finite"
        case Phase.BACKWARD if site.slot == "grad":
            return f"{_call_text(site)}: finite gradient in, {kind} gradient out"
        case Phase.BACKWARD if site.input_kind is None:
            return f"gradient of {site.slot} is {kind}; the gradient of its layer's output was finite"
        case Phase.REDUCE if site.input_kind is not None:
            return f"gradient of {site.slot} is {kind} after communication; this rank's own gradient was finite"
        case Phase.REDUCE:
            return f"gradient of {site.slot} is {kind} only after communication; every rank's own gradient was finite"
        case Phase.OPTIMIZER if site.layer is not None:
            return f"{site.slot} is {kind} after the update, and was not before it"
        case _:
            return seen(site)


def _input_text(site: Site) -> str:
    if site.input_kind == "unchecked":
        return "inputs not looked at, "
    source = f" (from {site.neg_inf_from})" if site.neg_inf_from is not None else ""
    return f"{_KIND_WORDS[site.input_kind] if site.input_kind else 'finite'} in{source}, "


def seen(site: Site) -> str:
    """What was seen at any site, and nothing about what came before it."""
    kind = _KIND_WORDS[site.kind]
    match site.phase:
        case Phase.STATE if site.input_kind is None:
            return f"{site.slot} is {kind} before the step"
        case Phase.STATE:
            return f"{site.slot} is {kind} since this step began"
        case Phase.INPUT:
            return f"batch{site.slot} holds {kind}"
        case Phase.FORWARD:
            return f"{site.slot} of {_call_text(site)} is {kind}"
        case Phase.BACKWARD if site.slot == "grad":
            place = "in the code of" if site.inline_code is not None or site.suspects else "at"
            before = site.inline_code.before if site.inline_code is not None else None
            ends = f", before {layer_text(before)}" if before is not None else ""
            return f"gradient {place} {_call_text(site)}{ends} is {kind}"
        case Phase.BACKWARD | Phase.REDUCE:
            return f"gradient of {site.slot} is {kind}"
        case Phase.OPTIMIZER if site.layer is None:
            return f"hyper-parameter {site.slot} is {kind}"
        case _:
            return f"{site.slot} is {kind}"


def _suspects_text(site: Site) -> str:
    """Several layers may have done it, and nobody saw which."""
    kind, names = _KIND_WORDS[site.kind], ", ".join(layer_text(name) for name in site.suspects)
    if site.slot == "grad":
        code = "" if site.layer in site.suspects else f", or the code of {layer_text(site.layer)}"
        return f"a {kind} gradient made by {names}{code}: which of them was not seen"
    return f"gradient of {site.slot} is {kind}; it is shared by {names}: which of them made it was not seen"


def _call_text(site: Site) -> str:
    return layer_text(site.layer) + (f" (call {site.call})" if site.call is not None else "")


def _inline_code_text(site: Site) -> str:
    assert site.inline_code is not None
    place, kind = site.inline_code, _KIND_WORDS[site.kind]
    code = f"code of {layer_text(place.layer)}" if place.layer is not None else "code of the training step"
    start, end = ("its end", "its start") if site.phase is Phase.BACKWARD else ("its start", "its end")
    after = start if place.after is None or place.after == place.layer else layer_text(place.after)
    before = end if place.before is None or place.before == place.layer else layer_text(place.before)
    ends = "" if place.after is None and place.before is None else f", between {after} and {before}"
    thing = "gradient" if site.phase is Phase.BACKWARD else "value"
    return f"{code}{ends}: a {kind} {thing} that no watched layer made"


def error_text(report: FaultReport, can_replay: bool = True) -> str:
    """The text of `NonFiniteError`: what and where, evidence, state of the job, the next command."""
    origin = report.origin
    lines = [_headline(report)]
    lines.append(f"  evidence: {_evidence_text(origin)}{_affected_text(report)}")
    if report.cause and report.cause != "unknown":
        lines.append(f"  cause:    {report.cause}")
    lines.append(f"  state:    {_state_text(report)}")
    if report.rerun is not None:
        lines.append(f"  rerun:    {report.rerun.text}")
    lines += [f"  note:     {note}" for note in report.notes]
    if report.dump_path:
        lines.append(f"  next:     {_next_text(report, can_replay)}")
    return "\n".join(lines)


def _next_text(report: FaultReport, can_replay: bool) -> str:
    """The command that helps most with this fault; a replay only where one is possible."""
    origin, dump = report.origin, report.dump_path
    if origin is not None and origin.phase is Phase.REDUCE and can_replay and report.world_size > 1:
        return f"torchrun --nproc-per-node {report.world_size} -m ddp_nanguard.replay.run {dump} --trace"
    is_lost = (
        origin is not None and origin.phase is Phase.OPTIMIZER and origin.layer is not None and report.nonfinite_state
    )
    if is_lost:
        return f"ddp-nanguard show {dump}; to replay an update, train with keep_previous=True"
    if not can_replay:
        return f'ddp-nanguard show {dump}; to replay, give replay="module:function"'
    return f"ddp-nanguard replay {dump} --trace"


def _headline(report: FaultReport) -> str:
    origin = report.origin
    if origin is None:
        return f"step {report.step}: {report.cause or 'a non-finite value; no site could be attributed'}"
    who = f"rank {origin.rank}" if origin.rank is not None else "no rank"
    where = f", micro-batch {origin.micro_batch}" if origin.micro_batch is not None else ""
    return f"{who}, step {origin.step}{where}, {origin.phase}: {what(origin)}"


def _evidence_text(origin: Site | None) -> str:
    if origin is None:
        return "none"
    evidence = origin.evidence
    if origin.phase is Phase.OPTIMIZER and origin.layer is None:
        return "a number in the optimizer's parameter groups"
    if evidence is None:
        return "seen in the tensor's minimum and maximum; it has been freed since"
    counts = f"{evidence.num_nan} NaN, {evidence.num_inf} Inf, {evidence.num_neg_inf} -Inf of {evidence.numel}"
    first = f", first at {list(evidence.first)}" if evidence.first is not None else ""
    largest = f"; largest finite {evidence.largest_finite:.3g}" if evidence.largest_finite is not None else ""
    return f"{tuple(evidence.shape)} {evidence.dtype}: {counts}{first}{largest}"


def _affected_text(report: FaultReport) -> str:
    if report.holders:
        return f"; held by ranks {_ranks(report.holders, len(report.holders))}"
    if not report.num_ranks_affected:
        return ""
    first = report.origin.rank if report.origin is not None else None
    others = tuple(rank for rank in report.ranks_affected if rank != first)
    at_once = report.origin is not None and report.origin.phase in (Phase.STATE, Phase.OPTIMIZER)
    if first is None or not others or at_once:
        return f"; ranks affected: {_ranks(report.ranks_affected, report.num_ranks_affected)}"
    return f"; ranks affected: {first} first, then {_ranks(others, report.num_ranks_affected - 1)}"


def _ranks(ranks: tuple[int, ...], count: int) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"{shown}, ..." if count > 8 else shown


def _state_text(report: FaultReport) -> str:
    ranks = f"all {report.world_size} ranks" if report.world_size > 1 else "the one rank"
    if report.single_rank_view:
        ranks = "this rank"
    if report.nonfinite_state:
        names = ", ".join(report.nonfinite_state[:4]) + (
            f" and {len(report.nonfinite_state) - 4} more" if len(report.nonfinite_state) > 4 else ""
        )
        return f"{ranks} stopped; DAMAGED: {names}"
    before = f"weights are those of step {report.step - 1}" if report.step > 0 else "weights are the initial ones"
    return f"{ranks} stopped before the update; {before}"
