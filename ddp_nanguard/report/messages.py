"""One line about one site, and the first log line of a fault."""

from __future__ import annotations

from .types import FaultReport, InlineCode, Phase, Site
from .wording import KIND_WORDS, layer_text


def log_line(report: FaultReport) -> str:
    """The first log line of a fault, which names its origin.

    Such as ``rank 37 · step 4812 · micro-batch 3 · forward · layers.17.mlp.act (call 1): finite in, NaN out``.
    """
    origin = report.origin
    if origin is None:
        return f"step {report.step} · {report.cause or 'a non-finite value, origin unknown'}"
    return " · ".join([*where(origin), what(origin)])


def looked_line(report: FaultReport) -> str:
    """The log line after a second look: the origin that it names, operator and line, and what came of it.

    Such as ``rank 37 · step 4812 · ... NaN out · aten.div.Tensor at model.py:12 in f · second look: same``.
    """
    look = report.second_look
    assert look is not None
    found = [log_line(report)]
    if look.operator is not None:
        found.append(f"{look.operator.name} at {look.operator.line}" if look.operator.line else look.operator.name)
    return " · ".join([*found, f"second look: {look.text}"])


def where(site: Site) -> list[str]:
    """Rank, step, micro-batch and phase of a site, one phrase each; the micro-batch only where it has one."""
    unknown = "a rank not known here" if site.input_kind is not None else "no single rank"
    nobody = "several ranks" if site.phase is Phase.LOOP else unknown
    found = [f"rank {site.rank}" if site.rank is not None else nobody, f"step {site.step}"]
    found += [f"micro-batch {site.micro_batch}"] if site.micro_batch is not None else []
    return [*found, str(site.phase)]


def what(site: Site) -> str:
    """What happened at an origin, and what was finite before it; without rank and step, which `where` tells."""
    if site.phase is Phase.LOOP:
        return _changed_text(site)
    if site.suspects:
        return _suspects_text(site)
    if site.inline_code is not None:
        return _inline_code_text(site)
    kind = KIND_WORDS[site.kind]
    match site.phase:
        case Phase.FORWARD:
            return f"{_call_text(site)}: {_input_text(site)}{kind} out" if site.slot == "output" else seen(site)
        case Phase.LOSS if site.input_kind is None:
            return f"{site.slot} is {kind}; the model's output was finite"
        case Phase.LOSS if site.input_kind == "-inf":
            return f"{site.slot} is {kind}; the model's output held -Inf"
        case Phase.BACKWARD if site.slot == "grad":
            return f"{_call_text(site)}: finite gradient in, {kind} gradient out"
        case Phase.BACKWARD if site.input_kind is None:
            return f"gradient of {site.slot} is {kind}; the gradient of its layer's output was finite"
        case Phase.REDUCE if site.input_kind is not None:
            return (
                f"gradient of {site.slot} is {kind} after communication; this rank's own gradient was finite: it came "
                "in by the reduce, from another rank or made there"
            )
        case Phase.REDUCE:
            return f"gradient of {site.slot} is {kind} only after communication; every rank's own gradient was finite"
        case Phase.OPTIMIZER if site.layer is not None:
            return f"{site.slot} is {kind} after the update, and was not before it"
        case _:
            return seen(site)


def _changed_text(site: Site) -> str:
    """The text for gradients that code of the loop has changed: of several no one is told to be the first."""
    kind, whose = KIND_WORDS[site.kind], "on every rank" if site.input_kind is None else "on this rank"
    subject = f"gradients of {_all_of(site.suspects)} are" if site.suspects else f"gradient of {site.slot} is"
    return f"{subject} {kind}; finite after the backward {whose}, changed by code before the step"


def _all_of(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _input_text(site: Site) -> str:
    if site.input_kind == "unchecked":
        return "inputs not looked at, "
    source = f" (from {site.neg_inf_from})" if site.neg_inf_from is not None else ""
    return f"{KIND_WORDS[site.input_kind] if site.input_kind else 'finite'} in{source}, "


def seen(site: Site) -> str:
    """What was seen at any site. It tells nothing of what came before: only the origin's inputs were finite."""
    kind = KIND_WORDS[site.kind]
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
            relation = "in the code of" if site.inline_code is not None or site.suspects else "at"
            before = site.inline_code.before if site.inline_code is not None else None
            ends = f", after {layer_text(before)} in the forward," if before is not None else ""
            return f"gradient {relation} {_call_text(site)}{ends} is {kind}"
        case Phase.BACKWARD | Phase.REDUCE | Phase.LOOP:
            return f"gradient of {site.slot} is {kind}"
        case Phase.OPTIMIZER if site.layer is None:
            return f"hyper-parameter {site.slot} is {kind}"
        case _:
            return f"{site.slot} is {kind}"


def _suspects_text(site: Site) -> str:
    """The text for an origin with several suspects: any of them may have made the value, no probe saw which."""
    kind, names = KIND_WORDS[site.kind], ", ".join(layer_text(name) for name in site.suspects)
    if site.slot == "grad":
        code = "" if site.layer in site.suspects else f", or the code of {layer_text(site.layer)}"
        return f"a {kind} gradient made by {names}{code}: which of them was not seen"
    return f"gradient of {site.slot} is {kind}; it is shared by {names}: which of them made it was not seen"


def _call_text(site: Site) -> str:
    return layer_text(site.layer) + (f" (call {site.call})" if site.call is not None else "")


def _inline_code_text(site: Site) -> str:
    assert site.inline_code is not None
    span, kind = site.inline_code, KIND_WORDS[site.kind]
    if span.layer is None and span.after is None and span.before == "" and site.phase is Phase.BACKWARD:
        return f"code of the training step after the model: its backward gives a {kind} gradient"
    code = f"code of {layer_text(span.layer)}" if span.layer is not None else "code of the training step"
    if site.phase is Phase.BACKWARD:
        return f"{_in_backward(code, span)}: a {kind} gradient that no watched layer made"
    ends = _ends(span, "after", "before")
    return " ".join([code, " and ".join(ends)]).rstrip() + f": a {kind} value that no watched layer made"


def _in_backward(code: str, span: InlineCode) -> str:
    """The code by what stands around it in the forward: in backward, what comes after a layer stands before it."""
    before, after = (None if name == span.layer else name for name in (span.before, span.after))
    if before is not None and after is not None:
        place = f" between {layer_text(before)} and {layer_text(after)}"
    else:
        place = "".join(f" {word}" for word in _ends(span, "before", "after"))
    return f"{code}{place} (in the backward)"


def _ends(span: InlineCode, after: str, before: str) -> list[str]:
    found = ((after, span.after), (before, span.before))
    return [f"{word} {layer_text(name)}" for word, name in found if name is not None and name != span.layer]
