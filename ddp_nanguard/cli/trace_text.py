"""What a person reads of a trace and of a reason."""

from __future__ import annotations

from ddp_nanguard.diagnosis.diagnose import Diagnosis
from ddp_nanguard.diagnosis.experiments import ExperimentResult
from ddp_nanguard.diagnosis.rules.report_rules import Reason
from ddp_nanguard.diagnosis.trace.events import Event, Operand
from ddp_nanguard.diagnosis.trace.source_lines import SourceLine
from ddp_nanguard.diagnosis.trace.traced_step import Traced
from ddp_nanguard.report.wording import layer_text, listed

MAX_SITES = 6
MAX_TEXT = 110


def diagnosis_text(found: Diagnosis) -> str:
    """The trace, then the reason."""
    trace = trace_text(found.traced) if found.traced is not None else f"no trace: {found.obstacle}\n"
    return f"{trace}\n{reason_text(found.reason)}"


def finding_text(finding: ExperimentResult) -> str:
    """What an experiment gave."""
    return f"{finding.name}: {finding.text}\n"


def trace_text(traced: Traced) -> str:
    """The birth and the way of its value in a block of aligned lines."""
    first_nonfinite_op = traced.first_nonfinite_op
    if first_nonfinite_op is None:
        what = traced.target or "every operator's outputs were finite"
        return f"trace of {traced.num_operators} operators: {what}\n" + _sources(traced)
    lines = [f"trace of {traced.num_operators} operators: {traced.target}; it began here:", ""]
    lines += _source(first_nonfinite_op)
    lines += [_line("operator", _operator(first_nonfinite_op)), _line("where", _where(first_nonfinite_op))]
    lines += [_line("in" if index == 0 else "", _operand(o)) for index, o in enumerate(first_nonfinite_op.inputs)]
    if first_nonfinite_op.output is not None:
        lines.append(_line("out", _operand(first_nonfinite_op.output) + _rows(first_nonfinite_op, traced.batch_size)))
    lines += _path(traced)
    return "\n".join(lines) + "\n" + _sources(traced)


def reason_text(reason: Reason) -> str:
    """One sentence and the evidence."""
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


def _source(first_nonfinite_op: Event) -> list[str]:
    """The line of source, its callers, and the part that ran underlined."""
    lines = first_nonfinite_op.lines or first_nonfinite_op.forward_lines
    if not lines:
        return ["    (no line of the user's code: a module of torch ran it by itself)", ""]
    first = lines[0]
    shown = [f"    {first.place()} in {first.function}" + _role(first_nonfinite_op), f"      {_cut(first.text)}"]
    start = first.text.find(first.expression) if first.expression else -1
    if start >= 0 and len(first.expression) < len(first.text) and start + len(first.expression) <= MAX_TEXT:
        shown.append("      " + " " * start + "^" * len(first.expression))
    shown += [f"    called at {line.place()} in {line.function}: {_cut(line.text, 60)}" for line in lines[1:3]]
    return [*shown, ""]


def _role(first_nonfinite_op: Event) -> str:
    if first_nonfinite_op.phase != "backward":
        return " (run again by activation checkpointing)" if first_nonfinite_op.phase == "recomputation" else ""
    return " (its backward)" if first_nonfinite_op.lines else " (the forward line; the value was born in its backward)"


def _operator(first_nonfinite_op: Event) -> str:
    made = (
        f", backward of {first_nonfinite_op.forward_operator}"
        if first_nonfinite_op.forward_operator and first_nonfinite_op.phase == "backward"
        else ""
    )
    node = f" ({first_nonfinite_op.node})" if first_nonfinite_op.node else ""
    what = {"birth": "made it", "constant": "wrote it", "spread": "took it in"}[first_nonfinite_op.category]
    outside = ", ".join(name or "a value made outside the step" for name in first_nonfinite_op.outside)
    numbers = f" with {', '.join(first_nonfinite_op.numbers)}" if first_nonfinite_op.numbers else ""
    return f"{first_nonfinite_op.operator}{numbers}{made}{node} {what}" + (f" from {outside}" if outside else "")


def _where(first_nonfinite_op: Event) -> str:
    layer = "the training step" if first_nonfinite_op.layer is None else layer_text(first_nonfinite_op.layer)
    call = f" (call {first_nonfinite_op.call})" if first_nonfinite_op.call is not None else ""
    batch = (
        f" of micro-batch {first_nonfinite_op.micro_batch}"
        if first_nonfinite_op.micro_batch is not None and first_nonfinite_op.phase != "update"
        else ""
    )
    return f"{layer}{call}, {'forward' if first_nonfinite_op.phase == 'step code' else first_nonfinite_op.phase}{batch}"


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


def _rows(first_nonfinite_op: Event, size: int | None) -> str:
    if first_nonfinite_op.num_rows is None:
        return ""
    shown = listed(first_nonfinite_op.rows, total=first_nonfinite_op.num_rows)
    return (
        f"; rows {shown} of {size} in the batch"
        if first_nonfinite_op.num_rows < (size or 0)
        else "; all rows of the batch"
    )


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
    return f"{layer}{place}" + (" (backward)" if event.phase == "backward" else "")


def _cut(text: str, length: int = MAX_TEXT) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _sources(traced: Traced) -> str:
    return "".join(_line("note", note) + "\n" for note in traced.notes)
