"""Why a value became non-finite, as far as the report, the history and the batch tell. Nothing is run.

Each rule gives a `Reason` only where its evidence holds. The rules beside this module also look at a trace.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_nanguard.report.slot_key import SlotKey
from ddp_nanguard.report.types import FaultReport, Phase, Site
from ddp_nanguard.report.wording import KIND_WORDS, listed
from ddp_nanguard.tensors.batch import bad_rows, batch_size, batch_tensors, nonfinite
from ddp_nanguard.tensors.containers import path_text
from ddp_nanguard.tensors.dtypes import dtype_named
from ddp_nanguard.tensors.unwritten import unwritten_signs

MIN_VALUES = 4
MIN_FEW = 3
MIN_TOTAL_FEW = 1e4
MIN_FACTOR_FEW = 3.0  # in each step
"""So many times larger within so few values is growth, too."""
MIN_TOTAL = 10.0
MIN_TOTAL_OVERFLOWED = 100.0
"""Where no step was traced, but +Inf came out of finite values: most likely an overflow."""
MIN_TOTAL_UNTRACED = 1000.0
"""Where nothing says that anything overflowed, growth must speak for itself."""
MIN_FACTOR = 1.2

History = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Reason:
    """Why a value became non-finite.

    Attributes:
        kind: one of `ddp_nanguard.diagnosis.rules.REASON_KINDS`.
        sentence: one sentence, without a full stop.
        evidence: the observations that it rests on.
    """

    kind: str
    sentence: str
    evidence: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The sentence, with its kind before it."""
        return self.sentence if self.sentence.startswith(f"{self.kind}:") else f"{self.kind}: {self.sentence}"

    def to_dict(self) -> dict[str, Any]:
        """Kind, sentence and evidence as JSON-ready data."""
        return {"kind": self.kind, "sentence": self.sentence, "evidence": list(self.evidence)}


@dataclass
class ReportFacts:
    """What is known of a fault without running its step.

    Attributes:
        report: the dump's report, None where there is none.
        histories: arrays of ``history.npz`` by rank.
        optimizers: class and groups of each optimizer, as in the dump's ``state.json``.
        dtypes: dtype of each parameter by clean name, as in "float32".
        batch: of the origin's micro-batch; None where it is not needed or cannot be read.
        wrapper: how the model was wrapped, as in the dump's manifest; empty where that is not known.
        first_weights: this rank's parameters and buffers in the first step of a guard; empty in every other one.
    """

    report: FaultReport | None = None
    histories: Mapping[int, History] = field(default_factory=dict)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    batch: Any = None
    wrapper: Mapping[str, Any] = field(default_factory=dict)
    first_weights: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def origin(self) -> Site | None:
        """The site where the fault began; None without a report, or where the report names none."""
        return self.report.origin if self.report is not None else None


def reason_of(known: ReportFacts) -> Reason | None:
    """The answer of the first rule in `RULES` that has one, or None."""
    found = next((found for rule in RULES if (found := rule(known)) is not None), None)
    return with_unwritten(known, found)


def hyper_parameter(known: ReportFacts) -> Reason | None:
    """A hyper-parameter of the optimizer, such as the learning rate, is not finite."""
    origin = known.origin
    if origin is None or origin.phase is not Phase.OPTIMIZER or origin.layer is not None:
        return None
    return Reason("hyper-parameter", f"{origin.slot} is {KIND_WORDS[origin.kind]}")


def finite_in_place(known: ReportFacts) -> Reason | None:
    """The step was run again where it had failed, before the dump, and was finite."""
    again = known.report.second_look if known.report is not None else None
    if again is None or again.outcome != "finite":
        return None
    sentence = f"the same step was finite once more in place: {CHANCE}"
    return Reason("not reproduced", sentence, (f"second look: {again.text}",))


def scale_collapse(known: ReportFacts) -> Reason | None:
    """A GradScaler has halved its scale in too many steps in a row."""
    report = known.report
    if report is None or not report.cause.startswith("scale collapse"):
        return None
    return Reason("scale collapse", report.cause)


def with_unwritten(known: ReportFacts, found: Reason | None) -> Reason | None:
    """The reason, and which weights of a first step look like memory that nobody wrote, if any do."""
    origin = known.origin
    if origin is None or origin.phase not in (Phase.STATE, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD):
        return found
    said = _unwritten(known.first_weights, origin) or _said_unwritten(known)
    if not said:
        return found
    if found is None:
        return Reason("state", said)
    return replace(found, sentence=f"{found.sentence}; {said}")


def _unwritten(weights: Mapping[str, Tensor], origin: Site) -> str:
    """See [Note: memory that nobody wrote]: the tensor of the origin first, then those of its layer."""
    signs = {name: sign for name, tensor in weights.items() if (sign := unwritten_signs(tensor)) is not None}
    if not signs:
        return ""
    first = min(signs, key=lambda name: (name != origin.slot, name.rpartition(".")[0] != origin.layer))
    others = [name for name in signs if name != first]
    said = f"{'it' if first == origin.slot else first} {UNWRITTEN} ({signs[first]})"
    if others:
        said += (
            f", and so do {len(others)} more of this rank's {len(weights)} parameters and buffers: {listed(others, 3)}"
        )
    return f"{said} (does an initialisation, or a checkpoint, reach them?)"


def _said_unwritten(known: ReportFacts) -> str:
    """What the job has said of it: a dump is explained without reading its weights."""
    cause = known.report.cause if known.report is not None else ""
    return next((part for part in cause.split("; ") if UNWRITTEN in part), "")


UNWRITTEN = "looks like memory that nobody wrote"
CHANCE = "it was not given the same, or is not deterministic; what was compared is told beside it"


# -- values that were bad before ---------------------------------------------------------------------------------------


def state(known: ReportFacts) -> Reason | None:
    """A parameter, buffer or optimizer state was non-finite before the step."""
    origin = known.origin
    if origin is None or origin.phase is not Phase.STATE or origin.input_kind is not None:
        return None
    return bad_state(known, [origin.slot], KIND_WORDS[origin.kind])


def bad_state(known: ReportFacts, names: list[str], kind: str, counts: tuple[str, ...] = ()) -> Reason:
    """The reason for state that was non-finite before the step.

    Args:
        known: facts of the report.
        names: the tensors that were non-finite.
        kind: of what they held, in words.
        counts: evidence on each of them.
    """
    when = "before any training" if known.report is not None and known.report.step == 0 else "before the step"
    damaged = list(known.report.nonfinite_state) if known.report is not None else []
    evidence = [*counts, *([f"damaged: {listed(damaged, 8)}"] if damaged else [])]
    return Reason("state", f"{listed(names, 5)} held {kind} {when}", tuple(evidence))


def bad_input(known: ReportFacts) -> Reason | None:
    """The batch held a non-finite value, and the fault comes from it."""
    origin = known.origin
    if origin is None or origin.phase is not Phase.INPUT:
        return None
    name = f"batch{origin.slot}"
    tensor = batch_tensors(known.batch).get(name)
    found = None if tensor is None else bad_item(name, tensor, known.batch, batch_size(known.batch))
    if found is not None:
        return found
    first = origin.evidence.first if origin.evidence is not None else None
    where = f", first at {list(first)}" if first is not None else ""
    return Reason("bad input", f"{name} holds {KIND_WORDS[origin.kind]}{where}")


def bad_item(name: str, tensor: Tensor, batch: Any, size: int | None, taken_by: str | None = None) -> Reason | None:
    """Which samples of a batch item are non-finite; None where it is finite by now.

    Args:
        name: path of the item, such as ``batch["x"]``.
        tensor: the item, dense.
        batch: the whole batch, for what else it says about the samples.
        size: number of samples, None where unknown.
        taken_by: evidence on which operator read it first.
    """
    bad = nonfinite(tensor)
    if not bool(bad.any()):
        return None  # changed in place since
    kind = "NaN" if bool(torch.isnan(tensor).any()) else "Inf"
    first = bad.nonzero()[0].tolist()
    rows = bad_rows(bad, size)
    place = f"{name}[{', '.join(map(str, first))}]" if first else name
    samples = f", sample{'s' if len(rows) > 1 else ''} {listed(rows, 5)}" if rows else ""
    evidence = [f"{int(bad.sum())} of {bad.numel()} elements, first {place}", *([taken_by] if taken_by else [])]
    return Reason("bad input", f"{name} holds {kind}{samples}", (*evidence, *_ids(batch, rows, name)))


def _ids(batch: Any, rows: list[int], name: str) -> list[str]:
    """What else the batch says about the samples: strings and integers, one per sample; at most four texts."""
    if not rows:
        return []
    found = []
    for path, values in _columns(batch, ()):
        text = f"batch{path_text(path)}"
        if text != name and len(values) > max(rows):
            found.append(f"{text} of these samples: {listed([values[row] for row in rows], 5)}")
    return found[:4]


def _columns(value: Any, path: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], list[Any]]]:
    if isinstance(value, Tensor):
        is_whole = value.dim() == 1 and not value.is_floating_point() and not value.is_complex()
        return [(path, value.tolist())] if is_whole else []
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, (str, int)) for item in value):
        return [(path, list(value))]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return [column for key, item in items for column in _columns(item, (*path, key))]


# -- communication and the update --------------------------------------------------------------------------------------


def reduce_overflow(known: ReportFacts) -> Reason | None:
    """Every rank's gradient was finite, and their sum is too large for the dtype."""
    origin, report = known.origin, known.report
    if origin is None or report is None or origin.phase is not Phase.REDUCE or origin.input_kind is not None:
        return None
    found = largest_gradients(known.histories, origin.slot)
    total = sum(found.values())
    held = {name: torch.finfo(dtype_named(name)).max for name in _reduced_in(known, origin.slot)}
    limits = sorted((limit, name) for name, limit in held.items() if limit < total)
    # The sum is only known to overflow if every rank's gradient is known.
    if origin.kind == "-inf" or len(found) < report.world_size or not limits:
        return None
    evidence = [f"rank {rank}: largest {value:.4g}" for rank, value in sorted(found.items())[:8]]
    limit, name = limits[0]
    sentence = f"{origin.slot} overflowed in the reduce: every rank's gradient was finite, "
    sentence += f"their sum of up to {total:.4g} is more than {name} holds ({limit:.4g})"
    return Reason("overflow in the reduce", sentence, tuple(evidence))


def _reduced_in(known: ReportFacts, name: str) -> set[str]:
    """The dtypes in which a gradient may have been reduced; empty where a hook does it whose name tells none."""
    hooks = [hook for hook in known.wrapper.get("comm_hooks", []) if hook not in _PLAIN_HOOKS]
    given = {dtype for hook in hooks for words, dtype in _COMPRESSING.items() if re.search(words, hook)}
    if hooks and not given:
        return set()
    policies = [known.wrapper.get("mixed_precision"), *(u["mixed_precision"] for u in known.wrapper.get("units", []))]
    given |= {policy.get("reduce_dtype") or policy.get("param_dtype") for policy in policies if policy} - {None}
    own = known.dtypes.get(name)
    return given or ({own} if own is not None else set())


_PLAIN_HOOKS = ("allreduce_hook", "_reducer_allreduce_and_upcast_hook")
_COMPRESSING = {"(?<!b)f(p|loat)16|half": "float16", "bf(p|loat)?16": "bfloat16"}
"""Into which dtype a hook turns gradients, by its name: what it does cannot be seen."""


def largest_gradients(histories: Mapping[int, History], name: str) -> dict[int, float]:
    """Per rank, the largest absolute value of a parameter's rank-local gradient, where it is recorded and finite."""
    found = {rank: _largest_gradient(history, name) for rank, history in histories.items()}
    return {rank: value for rank, value in found.items() if value is not None and math.isfinite(value)}


def _largest_gradient(history: History, name: str) -> float | None:
    values = [
        max(abs(low), abs(high))
        for label, (low, high) in zip(history["fault.labels"].tolist(), history["fault.values"].tolist(), strict=True)
        if (key := SlotKey.from_label(label)).phase is Phase.BACKWARD and key.name == name
    ]
    return max(values, default=None)


def update_overflow(known: ReportFacts) -> Reason | None:
    """Finite gradients, non-finite weights: the optimizer's eps is 0 in the dtype of the parameter."""
    origin = known.origin
    if origin is None or origin.phase is not Phase.OPTIMIZER or origin.layer is None:
        return None
    dtype = known.dtypes.get(origin.slot) or (origin.evidence.dtype if origin.evidence is not None else None)
    eps, optimizer = _eps_of(known, origin.slot)
    if dtype is None or eps is None or eps <= 0 or not _is_zero_in(eps, dtype):
        return None
    sentence = f"eps={eps:g} is 0 in {dtype}: the update of {origin.slot} divides by zero"
    return Reason("update overflow", sentence, (f"the optimizer is {optimizer}",))


def _eps_of(known: ReportFacts, name: str) -> tuple[float | None, str]:
    for optimizer in known.optimizers:
        for group in optimizer.get("groups", []):
            if name in group.get("params", []) and isinstance(group.get("eps"), float):
                return float(group["eps"]), str(optimizer.get("class"))
    return None, ""


def _is_zero_in(value: float, dtype: str) -> bool:
    return torch.tensor(value, dtype=dtype_named(dtype), device="cpu").item() == 0.0


# -- growth ------------------------------------------------------------------------------------------------------------


def growth(known: ReportFacts, least: float | None = None, then: tuple[str, ...] = ()) -> Reason | None:
    """The values grew over the last steps until one overflowed.

    Args:
        known: histories of all ranks, or of some.
        least: smallest total factor that counts; default: what growth must show without a trace, see `_least_growth`.
        then: further evidence.
    """
    origin = known.origin
    if origin is None or origin.phase not in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD):
        return None
    found = {rank: series for rank, history in known.histories.items() if (series := growing(history)) is not None}
    if not found or (origin.rank is not None and origin.rank not in found):
        return None
    name, steps, values = found[origin.rank if origin.rank in found else min(found)]
    if values[-1] / values[0] < (_least_growth(origin) if least is None else least):
        return None
    factor = (values[-1] / values[0]) ** (1 / (len(values) - 1))
    sentence = f"growth: {name} grew by a factor of {factor:.2f} per step since step {steps[0]}, {_where(known, found)}"
    last = listed((f"{value:.3g} in step {step}" for step, value in list(zip(steps, values, strict=True))[-3:]))
    sentence = "; ".join([f"{sentence}: {last}", *_learning_rates(known)])
    evidence = [f"step {step}: {value:.4g}" for step, value in list(zip(steps, values, strict=True))[-6:]]
    return Reason("growth", sentence, (*evidence, *then))


def _where(known: ReportFacts, found: Mapping[int, Any]) -> str:
    if known.report is not None and len(known.histories) < known.report.world_size:
        return f"as seen on rank {listed(sorted(found), 5)}"
    return "on every rank" if len(found) == len(known.histories) else f"on rank {listed(sorted(found), 5)}"


def _least_growth(origin: Site) -> float:
    overflowed = origin.phase is Phase.FORWARD and origin.kind == "inf" and origin.input_kind is None
    return MIN_TOTAL_OVERFLOWED if overflowed else MIN_TOTAL_UNTRACED


def _learning_rates(known: ReportFacts) -> list[str]:
    """The learning rates: too large a rate is the usual cause of growth."""
    rates = [(str(o.get("class")), g["lr"]) for o in known.optimizers for g in o.get("groups", []) if "lr" in g]
    shown = [f"{name} with lr={rate:g}" for name, rate in dict.fromkeys(rates) if isinstance(rate, float)]
    return [f"trained by {listed(shown, 5)}"] if shown else []


def growing(history: History) -> tuple[str, list[int], list[float]] | None:
    """(name, steps, values) of the series with the largest growth up to the last clean step; None where none grew."""
    steps = [int(step) for step in history["steps"]]
    series = {"the largest gradient": history["gradient_max"], "the loss": np.abs(history["loss"])}
    series["the largest activation"] = np.array([_largest_activation(history, step) for step in steps])
    candidates = [(name, *_tail(steps, values.tolist())) for name, values in series.items()]
    fitting = [c for c in candidates if _grows(c[2])]
    return max(fitting, key=lambda c: c[2][-1] / c[2][0], default=None)


def _largest_activation(history: History, step: int) -> float:
    labels, values = history[f"step.{step}.labels"].tolist(), history[f"step.{step}.values"]
    keyed = zip(map(SlotKey.from_label, labels), values, strict=True)
    sizes = [float(np.abs(value).max()) for key, value in keyed if key.phase is Phase.FORWARD]
    finite = [size for size in sizes if math.isfinite(size)]
    return max(finite, default=math.nan)


def _tail(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """The longest end of a series in which every value is larger than the one before."""
    start = len(values)
    while start > 0 and math.isfinite(values[start - 1]) and values[start - 1] > 0:
        if start < len(values) and values[start - 1] >= values[start]:
            break
        start -= 1
    return steps[start:], values[start:]


def _grows(values: list[float]) -> bool:
    if len(values) < MIN_FEW:
        return False
    total = values[-1] / values[0]
    factors = [later / earlier for earlier, later in pairwise(values)]
    # one jump is one bad batch, whatever came before
    if len(values) < MIN_VALUES:
        return total >= MIN_TOTAL_FEW and min(factors) >= MIN_FACTOR_FEW
    is_steady = total / max(factors) >= MIN_FACTOR ** (len(factors) - 1)
    return is_steady and total >= MIN_TOTAL and bool(total ** (1 / len(factors)) >= MIN_FACTOR)


def changed_by_the_loop(known: ReportFacts) -> Reason | None:
    """Every gradient was finite after the backward, and code between that and the step changed it."""
    report, origin = known.report, known.origin
    if report is None or origin is None or origin.phase is not Phase.LOOP:
        return None
    return Reason("code after the backward", report.cause)


RULES: tuple[Callable[[ReportFacts], Reason | None], ...] = (
    hyper_parameter,
    finite_in_place,
    reduce_overflow,
    update_overflow,
    state,
    bad_input,
    growth,
    scale_collapse,
    changed_by_the_loop,
)
