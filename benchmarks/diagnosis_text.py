"""The tables of `diagnosis.py`, and the document made of them."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch

from benchmarks import judging
from benchmarks.judging import LETTERS, NOT_COMPARED, QUESTIONS, Mark, corpus, group_title
from benchmarks.peers import TOOLS

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = "D19 the phase of silence"
"""The case whose fault is shown in every tool's words: all of them see it in time."""

REMARKS = {
    "G05 an infinite loss, by default": '`on_loss="warn"` makes it quiet',
}
"""Case -> what is to be said of a wrong answer of ddp_nanguard there."""

INTRO = """# Who finds what

<!-- made by benchmarks/diagnosis.py --write; do not edit -->

{num_cases} failure cases, each a public report restated in a few lines (`tests/cases`), trained on two real processes,
once with each tool: {num_faults} with a fault, {num_legitimate} in which nothing may stop.

```bash
pip install -c constraints.txt -e '.[test,bench]'
python benchmarks/diagnosis.py --write benchmarks/results/diagnosis.md
```

Machine: {machine}, gloo, one thread per rank. The run takes about six minutes.

**Read it with this in mind.** The cases were collected for this project and ddp_nanguard was developed against them;
what is asked of each is what this project wants to be told. The other tools were made for other or for smaller
questions, most of them for one process, and several do well what they are for. No figure here is about speed.
"""

NOTES = """"Noticed": a stop while the weights are still those of before the faulty step's update. "All ranks": every
rank stopped there. "Why": one sentence that names the kind of cause. A hang is a rank left in a collective because its
peer stopped alone; "broke" means that the tool, or the job because of it, failed with another error. The rules are
[below](#what-counts-as-an-answer)."""


def is_fault(mark: Mark) -> bool:
    return bool(mark.answers)


def of_tool(marks: list[Mark], tool: str) -> list[Mark]:
    return [mark for mark in marks if mark.tool == tool]


def right(marks: list[Mark], question: str) -> int:
    return sum(mark.answers.get(question, False) for mark in marks)


def asked(marks: list[Mark], question: str) -> int:
    return sum(question in mark.answers for mark in marks)


# -- tables ------------------------------------------------------------------------------------------------------------


def grid(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table whose columns are aligned in plain text, too."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [head, *rows]]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table(marks: list[Mark]) -> str:
    """A row per tool: how often each question was answered rightly, of how many."""
    one = of_tool(marks, marks[0].tool) if marks else []
    num_quiet = sum(not is_fault(mark) for mark in one)
    head = ["tool", "cases"]
    head += [f"{question} /{asked(one, question)}" for question in QUESTIONS]
    head += [f"false alarms /{num_quiet}", "hangs", "broke"]
    return grid(head, [_row(marks, tool, len(head)) for tool in TOOLS])


def _row(marks: list[Mark], tool: str, width: int) -> list[str]:
    mine = of_tool(marks, tool)
    if not mine:
        there = TOOLS[tool]().version() is not None
        return [tool, "not run" if there else "not installed", *[""] * (width - 2)]
    counts = [len(mine), *(right(mine, question) for question in QUESTIONS)]
    counts += [sum(mark.outcome == "false alarm" for mark in mine)]
    counts += [sum(mark.hang for mark in mine), sum(mark.broke for mark in mine)]
    return [tool, *map(str, counts)]


def group_table(marks: list[Mark]) -> str:
    """A row per group: of its faults, those noticed; of its questions, those answered; and its false alarms."""
    tools = [tool for tool in TOOLS if of_tool(marks, tool)]
    rows = []
    for group in sorted({mark.group for mark in marks}):
        mine = [mark for mark in marks if mark.group == group]
        one = of_tool(mine, tools[0])
        num_questions = sum(len(mark.answers) for mark in one)
        counts = f"{sum(map(is_fault, one))} · {num_questions} · {sum(not is_fault(mark) for mark in one)}"
        rows.append([f"{group} {group_title(group)}", counts, *(_group_cell(of_tool(mine, tool)) for tool in tools)])
    return grid(["group", "faults · questions · quiet", *(TOOLS[tool]().short for tool in tools)], rows)


def _group_cell(marks: list[Mark]) -> str:
    answers = sum(sum(mark.answers.values()) for mark in marks)
    return f"{right(marks, 'noticed')} · {answers} · {sum(mark.outcome == 'false alarm' for mark in marks)}"


def case_table(marks: list[Mark], group: str) -> str:
    tools = [tool for tool in TOOLS if of_tool(marks, tool)]
    names = list(dict.fromkeys(mark.case for mark in marks if mark.group == group))
    found = {(mark.case, mark.tool): mark for mark in marks}
    sources = {name: case.source for name, (_, case) in corpus().items()}
    rows = []
    for name in names:
        label, _, title = name.partition(" ")
        letters = "".join(LETTERS[question] for question in found[name, tools[0]].answers) or "quiet"
        cells = [_case_cell(found[name, tool]) for tool in tools]
        rows.append([f"[{label}]({sources[name]}) {title}", f"`{letters}`" if letters != "quiet" else letters, *cells])
    return grid(["case", "asked", *(TOOLS[tool]().short for tool in tools)], rows)


def _case_cell(mark: Mark) -> str:
    words = [f"`{mark.letters()}`"] if any(mark.answers.values()) else []
    if mark.outcome == "false alarm":
        words.append("**alarm**")
    elif mark.outcome not in ("stopped", "broke"):
        words.append(mark.outcome)
    words += ["hang"] * mark.hang + ["broke"] * mark.broke
    return " ".join(words)


# -- the document ------------------------------------------------------------------------------------------------------


def document(marks: list[Mark]) -> str:
    """All of it, in Markdown."""
    guard = of_tool(marks, "ddp_nanguard") or of_tool(marks, marks[0].tool)
    num_faults = sum(map(is_fault, guard))
    intro = INTRO.format(
        num_cases=len(guard),
        num_faults=num_faults,
        num_legitimate=len(guard) - num_faults,
        machine=machine(),
    )
    groups = sorted({mark.group for mark in marks})
    parts = [
        intro,
        f"## All cases\n\n{table(marks)}\n\n{NOTES}",
        f"## The tools\n\n{_tools()}",
        "## By group\n\nFaults noticed in time, right answers to all questions of the group, and false alarms; the "
        f"second column says of how many.\n\n{group_table(marks)}",
        *([f"## One fault in each tool's words\n\n{sample(marks)}"] if _sampled(marks) else []),
        f"## Where ddp_nanguard's answer is missing, late or doubtful\n\n{doubts(marks)}",
        f"## What counts as an answer\n\n{rules()}",
        f"## Case by case\n\n{_legend()}",
        *(f"### {group}. {group_title(group)}\n\n{case_table(marks, group)}" for group in groups),
        f"## Not compared\n\n{_not_compared()}",
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def machine() -> str:
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        model = found[1].strip() if found else model
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{os.cpu_count()} cores of {model}, {versions}"


def _tools() -> str:
    lines = []
    for name, make in TOOLS.items():
        tool = make()
        lines.append(f"- **{name}** ({tool.version() or 'not installed'}): {tool.about}.")
    return "\n".join(lines)


def _sampled(marks: list[Mark]) -> list[Mark]:
    return [mark for mark in marks if mark.case == SAMPLE]


def sample(marks: list[Mark]) -> str:
    module, case = corpus()[SAMPLE]
    line = judging.expected_of(module, SAMPLE, case).line
    assert line is not None
    code = Path(line[0]).read_text().splitlines()[line[1] - 1].partition("#")[0].strip()
    head = f"[{SAMPLE}]({case.source}): on rank 1, in step 1, `{code}` divides 0 by 0 ({shown(line[0])}:{line[1]})."
    told = [f"**{m.tool}**{_how(m)}\n\n```text\n{_cut(m.said)}\n```" for m in _sampled(marks)]
    return "\n\n".join([head, *told])


def _how(mark: Mark) -> str:
    return " (and the other rank hangs)" if mark.hang else ""


def _cut(text: str, most: int = 34) -> str:
    lines = [line[:150].rstrip() for line in shown(text).splitlines()]
    return "\n".join(lines if len(lines) <= most else [*lines[:most], "..."])


def shown(text: str) -> str:
    """Without the directories of this run."""
    return re.sub(r"/\S*/(?=step-\d)", "nan_dumps/", text.replace(f"{ROOT}/", ""))


def doubts(marks: list[Mark]) -> str:
    found = {mark.case: _doubts(mark) for mark in of_tool(marks, "ddp_nanguard")}
    lines = [f"- {case}: {'; '.join(what)}." for case, what in found.items() if what]
    text = "Late stops, wrong answers, false alarms, and second looks that were not done or did not meet the same."
    return f"{text}\n\n" + "\n".join(lines or ["- none"])


def _doubts(mark: Mark) -> list[str]:
    found = [mark.outcome] if mark.outcome not in ("stopped", "quiet") else []
    wrong = [question for question, is_right in mark.answers.items() if not is_right]
    found += [f"no or a wrong answer to: {question}" for question in wrong if question not in ("noticed", "all ranks")]
    if mark.outcome != "false alarm" and mark.second_look not in ("", "same"):
        found.append(f"the second look: {mark.second_look.replace('_', ' ')}")
    return [*found, REMARKS[mark.case]] if found and mark.case in REMARKS else found


def rules() -> str:
    """From the module that judges."""
    text = (judging.__doc__ or "").partition("\n")[2].strip()
    tables = [f"- `{name}`: {', '.join(f'`{other}`' for other in others)}" for name, others in judging.SAME.items()]
    text = text.replace(" (`NOT_COMPARED`)", " ([below](#not-compared))").replace(" (`SAME`)", " (list below)")
    text = text.replace(" (`FORWARD_OF`)", "").replace(" (`WORDS`)", "")
    return f"{text}\n\nOperators that count as the same, besides autograd nodes of that name:\n\n" + "\n".join(tables)


def _legend() -> str:
    letters = ", ".join(f"`{letter}` {question}" for question, letter in LETTERS.items())
    return (
        f"{letters}; `·` wrong or not said. The column `asked` lists the questions that a case has an answer to. "
        "silent: no stop at all; late: after the update; early: before the fault; hang: the other rank was left "
        "waiting."
    )


def _not_compared() -> str:
    lines = [f"- {name} (`{option}`)" for name, option in NOT_COMPARED.items()]
    text = "Cases that turn a policy of the guard on, which the others do not have; the same jobs take part without it."
    more = "Cases that are no data but tests of their own (the guard's files, hooks, options) have nothing to compare."
    return f"{text} {more}\n\n" + "\n".join(lines)
