"""What counts as a right answer in `diagnosis.py`.

Every case of `tests/cases` that is data takes part, except those that turn a policy of the guard on (`NOT_COMPARED`).
What a case expects is written there, beside the public report that it restates; a question that it leaves open is not
asked. A tool is judged by its first stop, taken over the ranks.

- **noticed**: a rank raised, in the faulty step or later, while its weights were still those of before that step's
  update (or were put back, or a scaler had skipped the update). Else it is "late"; before the fault it is "early".
- **all ranks**: every rank raised in the step of the first stop. A rank that was left in a collective which its stopped
  peer never joined counts as **hang**: for a second the peer stays alive, as a process does that handles an exception;
  then gloo fails with its connection. NCCL would wait for the group's timeout.
- **rank**: it is named by number, or the culprit alone among the ranks that stopped claims to know where it began. A
  list of bad gradients is no such claim, unless that rank alone gave one. Not asked where every rank has the fault.
- **layer**: the module that the case names, or that owns the parameter which it names; the root is the model's own
  code. The tool must point at it: as the module of its message, its last frame, its trigger, or one of its culprits. A
  list of all bad parameters points only if they belong to one module.
- **operator**: the aten operator of the case, or the torch function or autograd node that stands for it (`SAME`); for a
  value that arose in a backward also the node of the forward function (`FORWARD_OF`).
- **line**: file and line of the marked statement; of a traceback, the innermost frame of the job's own code counts.
- **why**: the kind of cause, in any words (`WORDS`); ddp_nanguard must give the very kind. What is said in a late stop
  is judged all the same.
- **false alarm**: a stop in a case in which nothing may stop.
- **broke**: the tool made the job fail with another error than its own alarm.

Generous where it is open: what any of the ranks that stopped first says is enough; wrappers' prefixes in names are
forgiven; each of several culprits counts; "input[0] has nans" is an answer to why, where the input was bad.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from benchmarks.peers import Statement, Stop
from tests.cases.harness import Case
from tests.cases.not_here import GROUPS
from tests.diagnosing import marked

MODULES = tuple(
    f"tests.cases.test_{name}"
    for name in (
        *("a_lockstep", "b_precision", "c_sharding", "d_model", "e_data", "f_optimizer", "g_legitimate", "h_calls"),
        *("i_replay", "j_hooks", "k_answers"),
    )
)

NOT_COMPARED = {
    "A11 a skipped step is as if it had not been": "on_fault",
    "D07 as a warning": "on_loss",
    "D11 statistics of a skipped step": "on_fault",
    "D11 statistics of a skipped step, rank 1": "on_fault",
    "E05 as a warning": "on_loss",
    "G05 an infinite loss, as a warning": "on_loss",
    "H04 a skipped window leaves no gradients": "on_fault",
}
"""Case -> the option whose policy it is about: the peers have no such option, and the job is there without it, too."""

LEGITIMATE = ("G05 an infinite loss, by default",)
"""The value is meant by those who report it; that the guard stops all the same, unless told, is a false alarm here."""

EVERY_RANK = (
    "B01 a bad weight under a scaler",
    "B01 many overflows in a row",
    "B03 a scale under its floor",
    "B14 finite on every rank",
    "C01 a norm that nobody initialised",
    "F01 eps is zero in half precision",
    "F01 with the weights of before",
    "F02 a warm-up of no steps",
    "F04 finite gradients, a bad update",
    "K07 a power that underflows",
    "K10 a count that runs down",
    "K11 gradients that the loop normalises",
)
"""No rank began it alone."""

COLLAPSES = {"B01 many overflows in a row": 2, "B03 a scale under its floor": 3}
"""Case -> the step in which its scale has collapsed; what is expected of them stands in their own test."""

SAME = {
    "_softmax": ("softmax", "multi_head_attention_forward"),
    "add": ("__add__", "__radd__", "__iadd__"),
    "addmm": ("linear",),
    "div": ("__truediv__", "__rtruediv__", "true_divide"),
    "lift_fresh": ("__setitem__", "fill_", "copy_"),
    "mse_loss_backward": ("mse_loss",),
    "mul": ("__mul__", "__rmul__"),
    "nll_loss_forward": ("nll_loss", "cross_entropy"),
}
FORWARD_OF = {
    "D01": "log",
    "D02": "sqrt",
    "D14": "sqrt",
    "D17": "kernel",
    "H03": "sqrt",
    "J14": "sqrt",
    "K01": "linalg_eigh",
}
"""Marker of a line -> the forward function whose backward made the value there."""

WORDS = {
    "code after the backward": r"after (the )?backward",
    "bad input": r"^input.* has |bad input|batch",
    "constant": r"constant",
    "division by zero": r"divi\w+ by zero|by 0",
    "edge of domain": r"domain|log of|root of",
    "empty reduction": r"empty|nothing",
    "hyper-parameter": r"learning rate|\blr\b|hyper",
    "masked row": r"mask",
    "overflow": r"overflow",
    "scale collapse": r"scale",
    "state": r"^(?!input|output)\S+ has ",
    "update overflow": r"update",
    "where trap": r"where",
}
"""Kind of cause -> what a tool's words may be searched for."""

QUESTIONS = ("noticed", "all ranks", "rank", "layer", "operator", "line", "why")
LETTERS = dict(zip(QUESTIONS, "NARLOPW", strict=True))


@dataclass
class Expected:
    """What a case expects; None where it leaves the question open.

    Attributes:
        legitimate: nothing may stop.
        step: the faulty one.
        line: (file, number).
    """

    legitimate: bool
    step: int = 0
    rank: int | None = None
    layer: str | None = None
    operator: str | None = None
    marker: str = ""
    line: tuple[str, int] | None = None
    why: str | None = None
    in_backward: bool = False


@dataclass
class Mark:
    """How a tool did in a case.

    Attributes:
        case, tool, group: names.
        answers: question -> right or wrong; only what was asked.
        outcome: ``stopped``, ``late``, ``early``, ``silent``, ``quiet``, ``false alarm`` or ``broke``.
        hang: whether a rank was left waiting.
        broke: whether a rank ended with an error that is no alarm.
        said: by the culprit, or by the first rank that stopped.
        second_look: its outcome in ddp_nanguard; "" where there was none.
    """

    case: str
    tool: str
    group: str
    answers: dict[str, bool] = field(default_factory=dict)
    outcome: str = ""
    hang: bool = False
    broke: bool = False
    said: str = ""
    second_look: str = ""

    def letters(self) -> str:
        """A letter for a right answer, a dot for a wrong one, nothing where nothing was asked."""
        return "".join(LETTERS[question] if self.answers[question] else "·" for question in self.answers)


def corpus(wanted: list[str] | None = None) -> dict[str, tuple[str, Case]]:
    """Case -> (its module, the case); all that can be compared, or those whose name begins with a wanted word."""
    found = {name: (module, case) for module in MODULES for name, case in _table(module).items()}
    return {
        name: entry
        for name, entry in found.items()
        if name not in NOT_COMPARED and (wanted is None or name.startswith(tuple(wanted)))
    }


def _table(module: str) -> dict[str, Case]:
    return importlib.import_module(module).CASES  # type: ignore[no-any-return]


def expected_of(module_name: str, name: str, case: Case) -> Expected:
    if case.origin is None or name in LEGITIMATE:
        return Expected(True)
    origin, module = case.origin, importlib.import_module(module_name)
    operator, marker, why = case.reason or ("", "", "scale collapse" if name in COLLAPSES else "")
    place = _place(module, marker)
    return Expected(
        False,
        step=COLLAPSES.get(name, origin.get("step", 0)),
        rank=None if name in EVERY_RANK else origin["rank"],
        layer=_layer(origin),
        operator=operator.removeprefix("aten.").partition(".")[0] or None,
        marker=marker,
        line=place,
        why=why or None,
        in_backward=origin.get("phase") == "backward",
    )


def _place(module: ModuleType, marker: str) -> tuple[str, int] | None:
    return (str(inspect.getsourcefile(module)), marked(module, marker)) if marker else None


def _layer(origin: dict[str, Any]) -> str | None:
    """As the case says, else the owner of its parameter; None where no layer is at fault."""
    if "layer" in origin or origin.get("phase") not in ("state", "backward", "reduce", "loop", "optimizer"):
        return origin.get("layer")
    slot = origin.get("slot", "").removesuffix(".exp_avg")
    return slot.rpartition(".")[0] if slot else None


# -- a tool in a case --------------------------------------------------------------------------------------------------


def judge(mark: Mark, expected: Expected, stops: list[Stop], said: dict[int, Statement]) -> Mark:
    """Fills in a mark.

    Args:
        mark: names only.
        expected: of the case.
        stops: per rank.
        said: of the ranks that raised an alarm.
    """
    mark.hang = any(stop.kind == "left" for stop in stops)
    mark.broke = any(stop.kind == "broke" for stop in stops)
    first = min((stops[rank].step for rank in said), default=None)
    told = {rank: statement for rank, statement in said.items() if stops[rank].step == first}
    mark.said = told[_spokesman(told, expected)].text if told else "; ".join(_failures(stops))
    mark.outcome = _outcome(expected, stops, told, first)
    if not expected.legitimate:
        mark.answers = _answers(mark, expected, stops, told)
    return mark


def _spokesman(told: dict[int, Statement], expected: Expected) -> int:
    return expected.rank if expected.rank in told and expected.rank is not None else min(told)


def _failures(stops: list[Stop]) -> list[str]:
    return [f"rank {rank}: {stop.error}" for rank, stop in enumerate(stops) if stop.kind == "broke"]


def _outcome(expected: Expected, stops: list[Stop], told: dict[int, Statement], first: int | None) -> str:
    if first is None:
        if any(stop.kind == "broke" for stop in stops):
            return "broke"
        return "quiet" if expected.legitimate else "silent"
    if expected.legitimate:
        return "false alarm"
    if first < expected.step:
        return "early"
    return "stopped" if all(stops[rank].unchanged for rank in told) else "late"


def _answers(mark: Mark, expected: Expected, stops: list[Stop], told: dict[int, Statement]) -> dict[str, bool]:
    """All wrong where the tool stopped before anything was wrong."""
    heard = {} if mark.outcome == "early" else told
    statements = heard.values()
    answers = {
        "noticed": mark.outcome == "stopped",
        "all ranks": mark.outcome == "stopped" and len(told) == len(stops),
        "rank": _names_rank(heard, expected),
        "layer": any(expected.layer in statement.layers for statement in statements),
        "operator": any(_is_same(name, expected) for statement in statements for name in statement.operators),
        "line": any(expected.line in statement.lines for statement in statements),
        "why": any(_says_why(statement.reason, expected, mark.tool) for statement in statements),
    }
    open_questions = {"noticed": True, "all ranks": True}
    asked = {**open_questions, **{name: getattr(expected, name) is not None for name in QUESTIONS[2:]}}
    return {question: answer for question, answer in answers.items() if asked[question]}


def _names_rank(told: dict[int, Statement], expected: Expected) -> bool:
    numbers = {statement.rank for statement in told.values()} - {None}
    if numbers:
        return numbers == {expected.rank}
    located = {rank for rank, statement in told.items() if statement.located}
    return (located or set(told)) == {expected.rank}


def _is_same(name: str, expected: Expected) -> bool:
    if expected.operator is None:
        return False
    accepted = {expected.operator, *SAME.get(expected.operator, ())}
    if expected.in_backward and expected.marker in FORWARD_OF:
        accepted.add(FORWARD_OF[expected.marker])
    return _stem(name) in {_stem(other) for other in accepted}


def _stem(name: str) -> str:
    """``aten.div.Tensor``, ``div``, ``DivBackward0`` and ``_div`` alike."""
    base = name.removeprefix("aten.").partition(".")[0]
    return re.sub(r"Backward\d*$", "", base).lower().replace("_", "")


def _says_why(reason: str, expected: Expected, tool: str) -> bool:
    if expected.why is None:
        return False
    if tool == "ddp_nanguard":
        return reason == expected.why
    return re.search(WORDS[expected.why], reason, re.IGNORECASE | re.MULTILINE) is not None


def group_of(name: str) -> str:
    return name[0]


def group_title(group: str) -> str:
    return GROUPS[group]
