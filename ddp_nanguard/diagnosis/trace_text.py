"""The texts of traces, reasons and experiments, for people."""

from __future__ import annotations

from ddp_nanguard.diagnosis.diagnose import Diagnosis
from ddp_nanguard.diagnosis.experiments import ExperimentResult
from ddp_nanguard.diagnosis.rules.report_rules import Reason
from ddp_nanguard.diagnosis.trace.events import Event, EventCategory, EventPhase, Operand
from ddp_nanguard.diagnosis.trace.source_lines import SourceLine
from ddp_nanguard.diagnosis.trace.traced_step import Traced
from ddp_nanguard.report.wording import layer_text, listed

MAX_SITES = 6
MAX_TEXT = 110
_DEEDS = {
    EventCategory.PRODUCED: "made it",
    EventCategory.CONSTANT: "wrote it",
    EventCategory.PROPAGATED: "took it in",
}


def diagnosis_text(found: Diagnosis) -> str:
    """The trace (or why there is none), an empty line, and the reason."""
    trace = trace_text(found.traced) if found.traced is not None else f"no trace: {found.obstacle}\n"
    return f"{trace}\n{reason_text(found.reason)}"


def finding_text(result: ExperimentResult) -> str:
    """The result of an experiment in one line."""
    return f"{result.name}: {result.text}\n"


def trace_text(traced: Traced) -> str:
    """The operator that made the value, and the way of the value to the fault, in a block of aligned lines."""
    event = traced.first_nonfinite_op
    if event is None:
        what = traced.target or "every operator's outputs were finite"
        return f"trace of {traced.num_operators} operators: {what}\n" + _sources(traced)
    lines = [f"trace of {traced.num_operators} operators: {traced.target}; it began here:", ""]
    lines += _source(event)
    lines += [_line("operator", _operator(event)), _line("where", _where(event))]
    lines += [_line("in" if index == 0 else "", _operand(o)) for index, o in enumerate(event.inputs)]
    if event.output is not None:
        lines.append(_line("out", _operand(event.output) + _rows(event, traced.batch_size)))
    lines += _path(traced)
    return "\n".join(lines) + "\n" + _sources(traced)


def reason_text(reason: Reason) -> str:
    """The reason in one line, and its evidence in aligned lines below."""
    lines = [f"reason: {reason.text}"]
    lines += [_line("evidence" if index == 0 else "", text) for index, text in enumerate(reason.evidence)]
    return "\n".join(lines) + "\n"


def explanation_text(found: Diagnosis) -> str:
    """The sentence, the evidence, and whether the step was run for it."""
    text = f"{found.reason.sentence}\n"
    text += "".join(_line("evidence" if n == 0 else "", e) + "\n" for n, e in enumerate(found.reason.evidence))
    if found.obstacle:
        return text + _line("based on", f"the report and the history alone: {found.obstacle}") + "\n"
    if found.outcome is not None:
        based_on = f"a trace of rank {found.outcome.rank}'s step; its replay: {found.outcome.reason}"
        text += _line("based on", based_on) + "\n"
    return text


def _line(label: str, text: str) -> str:
    return f"  {label:<9} {text}".rstrip()


def _source(event: Event) -> list[str]:
    """The line of source with the part that ran underlined, and its callers."""
    lines = event.lines or event.forward_lines
    if not lines:
        return ["    (no line of the user's code: a module of torch ran it by itself)", ""]
    first = lines[0]
    shown = [f"    {first.place()} in {first.function}" + _role(event), f"      {_cut(first.text)}"]
    start = first.text.find(first.expression) if first.expression else -1
    # Not where the text is cut: the marks would reach beyond it.
    if start >= 0 and len(first.expression) < len(first.text) and start + len(first.expression) <= MAX_TEXT:
        shown.append("      " + " " * start + "^" * len(first.expression))
    shown += [f"    called at {line.place()} in {line.function}: {_cut(line.text, 60)}" for line in lines[1:3]]
    return [*shown, ""]


def _role(event: Event) -> str:
    if event.phase is not EventPhase.BACKWARD:
        return " (run again by activation checkpointing)" if event.phase is EventPhase.RECOMPUTATION else ""
    return " (its backward)" if event.lines else " (the forward line; the value arose in its backward)"


def _operator(event: Event) -> str:
    # where code of the user's ran, as in a custom function, it is the backward of that, whatever its forward made last
    made = (
        f", backward of {event.forward_operator}"
        if event.forward_operator and event.phase is EventPhase.BACKWARD and not event.lines
        else ""
    )
    node = f" ({event.node})" if event.node else ""
    what = _DEEDS[event.category]
    outside = ", ".join(name or "a value made outside the step" for name in event.outside)
    numbers = f" with {', '.join(event.numbers)}" if event.numbers else ""
    return f"{event.operator}{numbers}{made}{node} {what}" + (f" from {outside}" if outside else "")


def _where(event: Event) -> str:
    if event.phase is EventPhase.LOOP:
        return "the loop, between backward and step"
    layer = "the training step" if event.layer is None else layer_text(event.layer)
    call = f" (call {event.call})" if event.call is not None else ""
    batch = (
        f" of micro-batch {event.micro_batch}"
        if event.micro_batch is not None and event.phase is not EventPhase.UPDATE
        else ""
    )
    return f"{layer}{call}, {'forward' if event.phase is EventPhase.STEP_CODE else event.phase}{batch}"


def _operand(operand: Operand) -> str:
    shape = "scalar" if operand.shape == () else f"({', '.join(map(str, operand.shape))})"
    counts = ((operand.num_nan, "NaN"), (operand.num_inf, "+Inf"), (operand.num_neg_inf, "-Inf"))
    bad = ", ".join(f"{count} {word}" for count, word in counts if count)
    finite = _range(operand)
    state = f"{bad} of {operand.numel}" + (f", the rest {finite}" if finite else "") if bad else finite or "empty"
    return f"{shape} {operand.dtype}: {state}" + (f", {operand.name}" if operand.name else "")


def _range(operand: Operand) -> str:
    if operand.minimum is None or operand.maximum is None:
        return ""
    if operand.minimum == operand.maximum:
        return f"{operand.minimum:.4g}"
    return f"{operand.minimum:.4g} .. {operand.maximum:.4g}"


def _rows(event: Event, size: int | None) -> str:
    if event.num_rows is None:
        return ""
    shown = listed(event.rows, total=event.num_rows)
    return f"; index {shown} in the batch of {size}" if event.num_rows < (size or 0) else "; all rows of the batch"


def _path(traced: Traced) -> list[str]:
    sites: list[tuple[str, list[str]]] = []
    for event in traced.path[1:]:
        place = _site(event)
        if not sites or sites[-1][0] != place:
            sites.append((place, []))
        sites[-1][1].append(event.base)
    shown = sites if len(sites) <= MAX_SITES else [*sites[: MAX_SITES - 1], sites[-1]]
    lines = []
    for index, (place, operators) in enumerate(shown):
        if len(sites) > MAX_SITES and index == MAX_SITES - 1:
            lines.append(_line("", f"... {len(sites) - MAX_SITES} more"))
        lines.append(_line("then" if index == 0 else "", f"{place}: {_joined(operators)}"))
    return [*lines, _line("to", traced.target)]


def _joined(operators: list[str]) -> str:
    return listed(dict.fromkeys(operators), 5)


def _site(event: Event) -> str:
    layer = f"{layer_text(event.layer)} · " if event.layer is not None else ""
    line: SourceLine | None = event.line
    place = line.place() if line is not None else "torch's own code"
    return f"{layer}{place}" + (" (backward)" if event.phase is EventPhase.BACKWARD else "")


def _cut(text: str, length: int = MAX_TEXT) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _sources(traced: Traced) -> str:
    return "".join(_line("note", note) + "\n" for note in traced.notes)
