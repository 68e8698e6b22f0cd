"""The report of a fault as plain data, with its causal order and its JSON form.

Nothing here knows of processes, devices or files.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

# The size of a report does not grow with the job: what goes beyond these is counted, not listed
MAX_SITES = 64
MAX_RANKS_LISTED = 64


class Phase(enum.StrEnum):
    """Where in a step a value was seen, in causal order.

    ``state`` is bad before the step, ``reduce`` is finite on every rank and bad only after communication, ``loop`` is a
    gradient that was finite after the backward on every rank and that code of the loop changed before the update,
    ``optimizer`` is bad only after the update (or a hyper-parameter is).
    """

    STATE = "state"
    INPUT = "input"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    REDUCE = "reduce"
    LOOP = "loop"
    OPTIMIZER = "optimizer"

    @property
    def causal_rank(self) -> int:
        """Position in the causal order, from 0 for ``state`` to 7 for ``optimizer``."""
        return list(Phase).index(self)


WATCHABLE = tuple(phase for phase in Phase if phase is not Phase.LOOP)
"""Phases that the option ``watch`` knows, and that faults can be planted in; ``loop`` is told from two of them."""
PHASES = tuple(str(phase) for phase in WATCHABLE)
"""Their names, as options and commands take them."""

KINDS = ("nan", "inf", "-inf")
"""Kinds of non-finite values, worst first."""
RAISED = "on its own"
"""Ends the cause of a fault that was noticed since code of the job raised on a rank."""
WEIGHTS_WRITTEN = "the weights were updated already, within the step"
"""Why no second look was possible, and what the weights are not."""
CALLS_ONLY = (
    "the batches did not come through guard.steps, so the dump holds what the model was called with, and no more"
)
"""A note where a replay may meet other labels than training did."""
INFINITE_KINDS = ("inf", "-inf")


# -- what a field may hold beyond its type; the reader of a dump checks it --------------------------------------------

MAX_WORLD_SIZE = 2**20
"""Bounds the numbers in a dump: far more ranks than any job has, and few enough to be counted one by one."""
MAX_INTEGER = 2**63 - 1
"""Bounds the numbers in a dump: steps and sizes are 64-bit integers in torch."""


class Rule(NamedTuple):
    """A condition on a value, written beside the type of its field: ``Annotated[int, Rule(...)]``.

    The reader of JSON files checks it (`ddp_nanguard.dump.typed_json`), so that no second list of fields is needed.

    Attributes:
        holds: tells whether a value of the right type is valid.
        valid: what is valid, in words that can follow "valid is".
    """

    holds: Callable[[Any], bool]
    valid: str


def _from_to(first: int, last: int, what: str) -> Rule:
    return Rule(lambda value: first <= value <= last, f"{what} from {first} to {last}")


def _one_of(*values: str) -> Rule:
    return Rule(lambda value: value in values, " or ".join(map(repr, values)))


Natural = Annotated[int, _from_to(0, MAX_INTEGER, "a whole number")]
Rank = Annotated[int, _from_to(0, MAX_WORLD_SIZE - 1, "a rank")]
WorldSize = Annotated[int, _from_to(1, MAX_WORLD_SIZE, "a number of ranks")]
Kind = Annotated[str, _one_of(*KINDS)]
Shape = Annotated[
    tuple[Natural, ...],
    Rule(lambda shape: math.prod(shape) <= MAX_INTEGER, f"a shape of at most {MAX_INTEGER} elements"),
]


@dataclass(frozen=True)
class InlineCode:
    """Code between modules that made a value which no module made.

    Attributes:
        layer: the module whose own code it is; None for the training step.
        after: the last layer before it that was seen clean; None where that is the beginning, or not known.
        before: the layer at which the value was first seen; None where that is the end of the code, or not known.
    """

    layer: str | None
    after: str | None
    before: str | None


@dataclass(frozen=True)
class Evidence:
    """Counts and range of one tensor, taken by a rescan on the fault path.

    Attributes:
        shape: of the tensor, or of this rank's part of it.
        dtype: such as ``bfloat16``.
        num_nan, num_inf, num_neg_inf: number of elements of each kind.
        numel: number of all elements.
        largest_finite: the largest finite absolute value; None where no element is finite.
        first: index of the first element that is not finite; None where the tensor is not dense.
    """

    shape: Shape
    dtype: str
    num_nan: Natural
    num_inf: Natural
    num_neg_inf: Natural
    numel: Natural
    largest_finite: float | None
    first: tuple[Natural, ...] | None = None


@dataclass(frozen=True)
class Site:
    """Where one value was seen non-finite.

    Attributes:
        rank: global rank; None for ``reduce``, where the value began on no single rank, and for ``loop``, where several
            ranks had it at once.
        step: number of the optimizer step.
        micro_batch: index in the window; None for state, reduce, loop and optimizer.
        phase: see `Phase`.
        layer: module name as in the unwrapped model, "" for the root; None for input, loss and hyper-parameters.
        call: call number of the module in the micro-batch, from 1; None outside forward and backward.
        slot: ``output``, ``input``, ``grad``, a batch path, a loss, parameter, buffer or state name, ``g0.lr``.
        kind: ``nan``, ``inf`` or ``-inf``, the worst that is there.
        inline_code: set where code between modules made the value; else None.
        evidence: counts from a rescan; None where the tensor had been freed.
        input_kind: worst kind among what the value was made from (inputs of the call, gradient of the layer's output,
            the model's output for a loss); None where that was finite, ``unchecked`` where no probe looked at it.
        neg_inf_from: where a -inf that went into the call came from, in words; None where none did.
        suspects: layers any of which may have made the value, where no probe saw which; for ``loop`` the gradients that
            were seen bad together, the first few of them; else empty.
        order: execution order within phase and micro-batch; only for sorting.
    """

    rank: Rank | None
    step: Natural
    micro_batch: Natural | None
    phase: Phase
    layer: str | None
    call: Natural | None
    slot: str
    kind: Kind
    inline_code: InlineCode | None = None
    evidence: Evidence | None = None
    input_kind: Annotated[str, _one_of(*KINDS, "unchecked")] | None = None
    neg_inf_from: str | None = None
    suspects: tuple[str, ...] = ()
    order: int = field(default=0, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """The site as JSON-ready data, without ``order``."""
        return {
            "rank": self.rank,
            "step": self.step,
            "micro_batch": self.micro_batch,
            "phase": str(self.phase),
            "layer": self.layer,
            "call": self.call,
            "slot": self.slot,
            "kind": self.kind,
            "inline_code": dataclasses.asdict(self.inline_code) if self.inline_code else None,
            "evidence": json_safe(dataclasses.asdict(self.evidence)) if self.evidence else None,
            "input_kind": self.input_kind,
            "neg_inf_from": self.neg_inf_from,
            "suspects": list(self.suspects),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Site:
        """A site from what `to_dict` returned, of this process or another one; ``order`` is 0.

        Raises:
            KeyError, TypeError, ValueError: the data is of another form.
        """
        fields = {k: v for k, v in data.items() if k not in {"phase", "inline_code", "evidence", "suspects"}}
        inline_code = data.get("inline_code")
        return cls(
            **fields,
            phase=Phase(data["phase"]),
            inline_code=InlineCode(**inline_code) if inline_code else None,
            evidence=_evidence_from(data.get("evidence")),
            suspects=tuple(data.get("suspects", ())),
        )

    def same_place(self, other: Site) -> bool:
        """Whether both have the same phase, layer, call, slot, micro-batch and kind; rank and step may differ.

        In compiled code it is not known which call it was, and then the call does not count.
        """
        mine = (self.phase, self.layer, self.slot, self.micro_batch, self.kind)
        # None stands for an unknown call number, so it is equal to every number
        same_call = self.call == other.call or None in (self.call, other.call)
        return same_call and mine == (other.phase, other.layer, other.slot, other.micro_batch, other.kind)


@dataclass(frozen=True)
class FirstOperator:
    """The operator in which the value began, as the trace of the second look saw it.

    Attributes:
        rank: on which it ran.
        name: of the overload, as in ``aten.div.Tensor``.
        line: ``file:line in function`` of the user's code; None where a module of torch ran it by itself.
        code: the statement, joined into one line; "" without a line.
        in_backward: whether it ran in the backward, and the line is that of the forward.
        output: what it left; None where it was not described.
    """

    rank: Rank
    name: str
    line: str | None = None
    code: str = ""
    in_backward: bool = False
    output: Evidence | None = None

    def to_dict(self) -> dict[str, Any]:
        """The operator as JSON-ready data."""
        data: dict[str, Any] = json_safe(dataclasses.asdict(self))
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> FirstOperator:
        """An operator from what `to_dict` returned, of this process or another one.

        Raises:
            KeyError, TypeError: the data is of another form.
        """
        return cls(**{**data, "output": _evidence_from(data["output"])})


LOOK_OUTCOMES = ("same", "elsewhere", "finite", "not_done")


@dataclass(frozen=True)
class SecondLook:
    """What came of running the step of a fault once more in place (option ``look_again``); the same on every rank.

    Attributes:
        outcome: ``same``: the fault and the same bits; ``elsewhere``: the fault, but other bits or another place;
            ``finite``: it did not come again; ``not_done``: the step was not run, or not to its end.
        text: the outcome in one sentence.
        operator: where the value began; None where no trace told.
    """

    outcome: Annotated[str, _one_of(*LOOK_OUTCOMES)]
    text: str
    operator: FirstOperator | None = None

    def to_dict(self) -> dict[str, Any]:
        """The outcome as JSON-ready data, as a manifest holds it."""
        operator = self.operator.to_dict() if self.operator is not None else None
        return {"outcome": self.outcome, "text": self.text, "operator": operator}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SecondLook:
        """An outcome from what `to_dict` returned, of this process or another one.

        Raises:
            KeyError, TypeError: the data is of another form.
        """
        operator = data["operator"]
        return cls(data["outcome"], data["text"], FirstOperator.from_dict(operator) if operator else None)


@dataclass(frozen=True)
class FaultReport:
    """Everything that is known about one fault, as plain data; the same on every rank.

    `to_dict`, ``ddp-nanguard show --json`` and ``manifest.json`` agree on it; the latter two add the version of their
    form.

    Attributes:
        step: of the fault; for a bad update the step of that update.
        world_size: number of ranks that step together.
        wrapper: ``plain``, ``ddp``, ``fsdp1`` or ``fsdp2``.
        origin: the earliest site that counts; None where the fault could not be attributed to any.
        sites: the earliest sites over all ranks, at most `MAX_SITES`, the origin first.
        holders: ranks that hold a value that became non-finite in the reduce, at most `MAX_RANKS_LISTED`.
        num_ranks_affected, ranks_affected: number of ranks that saw something bad, and the first of them.
        cause: what is known of the cause, in one sentence.
        nonfinite_state: names of parameters, buffers and optimizer state that stay non-finite; empty when none does.
        unchecked: what was not looked at, one phrase each.
        single_rank_view: whether peers did not answer, so that all of this is what one rank saw.
        notes: further notes, such as "replicas disagree".
        second_look: what came of running the step once more in place; None where that was not tried.
        dump_path: directory of the dump; None where none was written.
    """

    step: Natural
    world_size: WorldSize
    wrapper: str
    origin: Site | None
    sites: tuple[Site, ...] = ()
    holders: tuple[Rank, ...] = ()
    num_ranks_affected: Natural = 0
    ranks_affected: tuple[Rank, ...] = ()
    cause: str = ""
    nonfinite_state: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    single_rank_view: bool = False
    notes: tuple[str, ...] = ()
    dump_path: str | None = None
    second_look: SecondLook | None = None

    @property
    def origin_rank(self) -> int | None:
        """The rank where it began; None where that is no single one, or not known."""
        return None if self.origin is None else self.origin.rank

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data; non-finite numbers are the strings "nan", "inf" and "-inf"."""
        origin = self.origin
        return {
            "step": self.step,
            "world_size": self.world_size,
            "wrapper": self.wrapper,
            "origin": origin.to_dict() if origin else None,
            "inline_code": dataclasses.asdict(origin.inline_code) if origin and origin.inline_code else None,
            "holders": list(self.holders),
            "sites": [site.to_dict() for site in self.sites],
            "ranks_affected": {"count": self.num_ranks_affected, "first": list(self.ranks_affected)},
            "cause": self.cause,
            "nonfinite_state": list(self.nonfinite_state),
            "unchecked": list(self.unchecked),
            "single_rank_view": self.single_rank_view,
            "notes": list(self.notes),
            "second_look": self.second_look.to_dict() if self.second_look else None,
            "dump_path": self.dump_path,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> FaultReport:
        """A report from what `to_dict` returned, of this process or another one; further keys are ignored.

        Raises:
            KeyError, TypeError, ValueError: the data is of another form.
        """
        return cls(
            step=data["step"],
            world_size=data["world_size"],
            wrapper=data["wrapper"],
            origin=Site.from_dict(data["origin"]) if data["origin"] else None,
            sites=tuple(Site.from_dict(site) for site in data["sites"]),
            holders=tuple(data["holders"]),
            num_ranks_affected=data["ranks_affected"]["count"],
            ranks_affected=tuple(data["ranks_affected"]["first"]),
            cause=data["cause"],
            nonfinite_state=tuple(data["nonfinite_state"]),
            unchecked=tuple(data["unchecked"]),
            single_rank_view=data.get("single_rank_view", False),
            notes=tuple(data["notes"]),
            dump_path=data["dump_path"],
            second_look=SecondLook.from_dict(data["second_look"]) if data.get("second_look") else None,
        )


def json_safe(value: Any) -> Any:
    """A copy of a value with non-finite floats as strings, since strict JSON has no NaN and no infinity.

    Args:
        value: any nesting of dicts, lists and tuples; tuples become lists.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    return value


def _evidence_from(data: dict[str, Any] | None) -> Evidence | None:
    if not data:
        return None
    # JSON has no tuples, and a frozen site must stay hashable
    first = tuple(data["first"]) if data.get("first") is not None else None
    largest = _unsafe_float(data["largest_finite"])
    return Evidence(**{**data, "shape": tuple(data["shape"]), "first": first, "largest_finite": largest})


def _unsafe_float(value: float | str | None) -> float | None:
    return float(value) if isinstance(value, str) else value
